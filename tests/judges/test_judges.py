"""The trainers' own packages find our exports right; set SWATHE_JUDGES to a folder for their environments to run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1800)
def test_speculators_specforge_and_modelopt_load_what_we_export() -> None:
    folder = os.environ.get("SWATHE_JUDGES")
    if not folder:
        pytest.skip("downloads three trainers; run: make judges")
    done = subprocess.run(
        [sys.executable, "tests/judges/run.py", "--environments", Path(folder)],
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
