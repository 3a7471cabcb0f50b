"""A tiny real model, a small data set with two bad rows, and a run of them as a user makes it."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from swathe import HiddenStates

LAYERS = [0, 2, "final"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 rows, of which row 7 is empty and row 11 holds an id that the model does not know."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    with path.open("w") as file:
        for row in range(400):
            ids = [rng.randrange(512) for _ in range(rng.randrange(5, 300))]
            ids = {7: [], 11: [1, 2, 512]}.get(row, ids)
            file.write(json.dumps({"id": f"chat-{row}", "input_ids": ids}) + "\n")
    return path


class Command:
    """The command line with a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SWATHE_STATE_DIR": str(folder / "state")}
        self.environment.pop("REDIS_URL", None)

    def popen(self, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "producer.cli", *map(str, arguments)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # A shell starts background jobs with SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    def __call__(self, *arguments: str | Path, code: int = 0) -> str:
        """Standard output; with an exit code other than 0, standard error."""
        process = self.popen(*arguments)
        out, err = process.communicate(timeout=240)
        assert process.returncode == code, f"exit {process.returncode}\n{out}\n{err}"
        return err if code else out


@pytest.fixture
def swathe(tmp_path: Path) -> Command:
    return Command(tmp_path)


def run_arguments(dataset: Path, model: Path, out: Path | str) -> list[str | Path]:
    return [
        *("run", dataset, "--model", model, "--layers", "0,2", "--final", "--out", out),
        *("--range-tokens", "512", "--dtype", "fp32", "--devices", "cpu"),
    ]


def assert_states_are_right(
    out: Path | str, dataset: Path, model: Path, *, limit: int = 400
) -> None:
    """Every sample once, in the user's order, equal to a forward pass of the full model alone."""
    rows = [json.loads(line) for line in dataset.read_text().splitlines()]
    ds = HiddenStates(out)
    kept = [row for row in range(limit) if row not in (7, 11)]
    assert [ds[i]["row"] for i in range(len(ds))] == kept
    assert ds.layers == LAYERS
    reference = transformers.AutoModel.from_pretrained(model).eval()
    before_norm: list[torch.Tensor] = []
    reference.norm.register_forward_pre_hook(lambda _module, args: before_norm.append(args[0]))
    for index in range(0, len(ds), 13):
        sample = ds[index]
        ids = rows[sample["row"]]["input_ids"]
        assert sample["id"] == f"chat-{sample['row']}"
        assert sample["input_ids"].tolist() == ids
        with torch.inference_mode():
            hidden = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
        expected = torch.stack([hidden[1][0], hidden[3][0], before_norm[-1][0]], dim=1)
        error = (sample["hidden_states"] - expected).norm(dim=2) / expected.norm(dim=2)
        assert error.max() < 1e-4


def status(swathe: Command, out: Path | str) -> dict:
    return json.loads(swathe("status", out, "--json"))


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, dataset: Path, model: Path
) -> tuple[Path, str]:
    """A complete run and what the command printed."""
    folder = tmp_path_factory.mktemp("finished")
    out = folder / "run"
    return out, Command(folder)(*run_arguments(dataset, model, out))
