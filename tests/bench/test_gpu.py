"""The GPU benchmark in small, on the CPU: its JSON keeps the schema, and what the product stored is right."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from bench import gpu
from bench.result import Result, command_words, ratios, table
from bench.shapes import LONGEST, SHAPES, SHORTEST, chat_lengths
from swathe import HiddenStates
from worker.model.hidden_states import load_model


@pytest.fixture(scope="module")
def benched(tmp_path_factory):
    """The folder that a run of both engine rows left, and the JSON that it wrote."""
    folder = tmp_path_factory.mktemp("bench")
    out = folder / "gpu.json"
    small = ["--samples", "24", "--longest", "96", "--range-tokens", "512", "--seconds", "0.5"]
    bounds = ["--cold", "no", "--first-seconds", "60", "--disk-seconds", "60"]
    where = ["--device", "cpu", "--keep", str(folder / "kept"), "--out", str(out)]
    rows = ["--models", "tiny", "--rows", "engine_discard,engine_disk"]
    assert gpu.main([*rows, *small, *bounds, *where]) == 0
    return folder / "kept", Result.model_validate_json(out.read_text())


def test_each_row_measured_something(benched):
    _, result = benched
    names = [(row.name, row.phase) for row in result.rows]
    assert names[:2] == [("engine_discard", "steady"), ("engine_disk", "first")]
    for row in result.rows:
        assert row.samples_s > 0
        assert row.tokens_s > row.samples_s
        assert not row.padding_ratio  # None where the run ended before the worker's first report
    assert result.rows[1].written_bytes_s > 0
    assert "engine_disk" in table(result)


def test_a_result_keeps_its_command_and_no_place_of_this_machine():
    given = [
        "--rows",
        "engine_disk",
        "--out",
        "/somewhere/gpu.json",
        "--cache=/kernels",
        "--seconds",
        "4",
    ]
    assert command_words("bench.gpu", given) == "python -m bench.gpu --rows engine_disk --seconds 4"


def test_stored_values_are_those_of_single_runs(benched):
    kept, _ = benched
    (run,) = kept.glob("run-*")
    shape = SHAPES["tiny"]
    model = load_model(
        f"random:{kept / 'tiny.json'}",
        layers=shape.layers,
        dtype="float32",
        device=torch.device("cpu"),
        kernels="reference",
    )
    stored = HiddenStates(run, unsealed=True)
    assert len(stored) == 24
    for index in (0, 11, 23):
        sample = stored[index]
        wanted = model.reference(sample["input_ids"].numpy().astype(np.int32))
        error = (sample["hidden_states"] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert float(error.max()) < 1e-4


def test_kernels_made_wrong_on_purpose_are_caught(benched):
    found = benched[1].exactness["tiny"]
    assert found["packed"]["passed"]
    assert found["perturbed"]["canary_of_right_kernels"]


def test_committed_results_keep_the_schema():
    for path in (Path(gpu.__file__).parent / "results").glob("gpu-*.json"):
        result = Result.model_validate_json(path.read_text())
        assert result.rows or result.exactness
        broken = json.loads(path.read_text()) | {"unknown": 1}
        with pytest.raises(ValidationError):
            Result.model_validate(broken)
        ratios(result.rows)


def test_the_length_mix_is_the_one_that_is_told():
    lengths = chat_lengths(50_000)
    assert lengths.min() == SHORTEST
    assert lengths.max() == LONGEST
    assert 320 < lengths.mean() < 350
