"""A sample that breaks the device's context ends processes, and costs itself alone; on a GPU it is truly broken."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import RedisServer

from producer.plan import PlanOptions, plan
from swathe.queue import connect
from swathe.records import RunWatcher
from swathe.store.local import LocalStore
from swathe.submission import submit

ROOT = Path(__file__).parents[2]
CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
}  # fmt: skip
BAD, ROWS = 17, 40
DEVICE = "0" if torch.cuda.is_available() else "cpu"


@pytest.mark.timeout(400)
def test_a_device_side_assert_ends_processes_and_quarantines_its_sample(
    tmp_path: Path, new_server: RedisServer
) -> None:
    rng = random.Random(3)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with (tmp_path / "rows.jsonl").open("w") as file:
        for row in range(ROWS):
            ids = [rng.randrange(90) for _ in range(rng.randrange(4, 40))]
            ids += [90] * 3 if row == BAD else []
            file.write(json.dumps({"input_ids": ids}) + "\n")
    store = LocalStore(tmp_path / "run")
    spec = plan(
        store,
        PlanOptions(
            dataset=str(tmp_path / "rows.jsonl"), model=f"random:{tmp_path / 'config.json'}",
            layers=(0,), final=True, range_tokens=96,
        ),
    ).spec  # fmt: skip
    watcher = RunWatcher(store, spec)
    client = connect(new_server.url)
    submit(client, store, watcher.read())
    client.close()
    paths = [
        str(ROOT / "tests" / "support" / "broken_device"),
        str(ROOT),
        os.environ.get("PYTHONPATH", ""),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "worker.cli", "--devices", DEVICE, "--exit-when-idle", "5"],
        env=os.environ | {
            "PYTHONPATH": ":".join(paths), "REDIS_URL": new_server.url, "SWATHE_STORE_ROOTS": str(tmp_path),
            "SWATHE_METRICS_ADDRESS": "off",
        },
        capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    state = watcher.read()
    assert not state.failed, said[-4000:]
    assert not state.missing, said[-4000:]
    quarantined = [one for record in state.records.values() for one in record.quarantined]
    assert [one.row for one in quarantined] == [BAD]
    assert state.stored_samples == ROWS - 1
    assert "context is broken" in said
    assert "worker died, starting another" in said
