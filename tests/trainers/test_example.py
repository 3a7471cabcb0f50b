"""The drafter example runs from a run's folder to figures and a plot."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.dom import minidom

import torch
from safetensors.torch import save_file

from tests.support.runs import Recipe, make_run


def test_the_drafter_example_trains_compares_and_plots(tmp_path: Path) -> None:
    recipe = Recipe(samples=60, hidden=64, rejected=(), longest=60)
    make_run(tmp_path / "run", recipe)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    torch.manual_seed(0)
    embedding = {"model.embed_tokens.weight": torch.randn(97, 64).bfloat16()}
    save_file(embedding, checkpoint / "model.safetensors")
    command = [sys.executable, "examples/train_drafter.py", tmp_path / "run"]
    command += ["--checkpoint", checkpoint, "--epochs", "2", "--vocab", "50"]
    command += ["--json", tmp_path / "figures.json", "--plot", tmp_path / "plot.svg"]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert list(figures["acceptance"]) == [
        "bigram",
        "aligned",
        "one layer off",
        "one position off",
    ]
    for losses in figures["loss"].values():
        assert losses[-1] < losses[0]
    minidom.parse(str(tmp_path / "plot.svg"))  # noqa: S318 - our own file
