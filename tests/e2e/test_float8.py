"""A float8 run as a user makes it, beside the same run in the checkpoint's dtype."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from swathe import HiddenStates, codec
from swathe.reader.float8 import dequantize, rounding
from tests.e2e.conftest import Command, run_arguments, status
from tests.support.runs import view_of
from worker.check import check_run
from worker.engine.quantize import quantize
from worker.engine.soundness import magnitudes

CPU = torch.device("cpu")
ROWS = 100
"""Of the data set's 400, the first, of which two are rejected: the ranges are those of the other run, but for the last."""


@pytest.fixture(scope="module")
def float8(tmp_path_factory: pytest.TempPathFactory, dataset: Path, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("float8")
    swathe = Command(folder)
    swathe.environment["SWATHE_CANARY_EVERY"] = "5"
    arguments = run_arguments(dataset, model, folder / "run")
    text = swathe(*arguments, "--dtype", "fp8", "--limit", str(ROWS))
    assert "stored as float8_e4m3fn, computed in float32" in text
    assert "beyond float8" in text
    return folder / "run"


def test_it_is_complete_sound_and_as_large_as_planned(swathe: Command, float8: Path) -> None:
    found = status(swathe, float8)
    assert (found["complete"], found["sealed"], found["stored"]) == (True, True, ROWS - 2)
    assert json.loads(swathe("verify", float8, "--full", "--json"))["damaged"] == {}
    spec = HiddenStates(float8).spec
    assert (spec.compute_dtype, spec.stored_dtype) == ("float32", "float8_e4m3fn")
    assert found["bytes"]["planned"] == spec.state_bytes
    assert spec.bytes_per_token == 3 * (128 + 4)
    assert 1 < found["bytes"]["stored"] / spec.state_bytes < 1.2, "states, and headers"
    taken = [json.loads(path.read_text()) for path in float8.glob("canaries/*.json")]
    assert len(taken) > 2
    assert all(one["stored_as_computed"] and one["passed"] for one in taken)
    assert max(max(one["errors"].values()) for one in taken) < 1e-4, "as fine as in float32"


def test_every_value_is_that_of_the_other_run_within_half_a_step(
    float8: Path, finished: tuple[Path, str]
) -> None:
    ours, wide = HiddenStates(float8), HiddenStates(finished[0])
    assert ours.rows.tolist() == wide.rows[: ROWS - 2].tolist()
    for index in range(0, len(ours), 7):
        raw, sample, expected = ours.as_stored(index), ours[index], wide[index]["hidden_states"]
        assert torch.equal(sample["input_ids"], wide[index]["input_ids"])
        codes, scales = raw["hidden_states"], raw["hidden_states_scales"]
        assert torch.equal(sample["hidden_states"], dequantize(codes, scales, torch.float32))
        off = (sample["hidden_states"] - expected).abs()
        assert (off <= rounding(codes, scales) * 1.001 + 1e-5).all()
        assert (off <= torch.maximum(expected.abs() / 16, scales[..., None] / 1024) + 1e-5).all()
        error = off.norm(dim=2) / expected.norm(dim=2)
        assert (error > 0.005).all(), "nothing was rounded"


def test_the_reader_printed_in_the_docs_reads_float8_too(float8: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", Path("docs/format.md").read_text(), re.DOTALL)
    scope: dict = {"RUN": str(float8)}
    exec(compile(code, "docs/format.md", "exec"), scope)  # noqa: S102
    ours = HiddenStates(float8)
    for index in (0, 50, len(ours) - 1):
        theirs = scope["read"](index)["hidden_states"]
        assert torch.equal(theirs.to(torch.float32), ours[index]["hidden_states"])


def test_an_error_that_rounding_could_hide_is_found_by_the_check(
    float8: Path, finished: tuple[Path, str], model: Path, tmp_path: Path
) -> None:
    """All values of a layer 5 % too large before they were rounded: of each, float8 may take off more."""
    good = check_run(str(float8), model, samples=3, device=CPU)
    assert good.ok
    assert all(0.01 < layer.median < 0.06 for layer in good.layers)
    assert all(layer.unexplained < 1e-5 for layer in good.layers)
    wrong = Path(shutil.copytree(float8, tmp_path / "run"))
    for record in wrong.glob("states/*.json"):
        ours, wide = (
            run / json.loads((run / "states" / record.name).read_text())["shard"]
            for run in (wrong, finished[0])
        )
        with safe_open(ours, "np") as shard:
            metadata = shard.metadata()
        tensors = load_file(ours)
        states = load_file(wide)["hidden_states"][: len(tensors["input_ids"])]
        states *= torch.tensor([1, 1.05, 1])[:, None]
        codes, scales = quantize(states, magnitudes(states))
        tensors |= {"hidden_states": codes, "hidden_states_scales": scales}
        views = {name: view_of(tensor) for name, tensor in tensors.items()}
        ours.write_bytes(b"".join(codec.encode(views, metadata)))
    bad = check_run(str(wrong), model, samples=3, device=CPU)
    assert not bad.ok
    assert [layer.unexplained > 0.01 for layer in bad.layers] == [False, True, False]


def test_export_to_speculators(swathe: Command, float8: Path, tmp_path: Path) -> None:
    swathe("export", float8, tmp_path / "hs", "--format", "speculators", "--fp8")
    ours = HiddenStates(float8)
    for index in (0, 50):
        file = load_file(tmp_path / "hs" / "hidden_states" / f"hs_{index}.safetensors")
        theirs = file["hidden_states"].float() * file["hidden_states_scales"]
        found, common = ours[index]["hidden_states"], file["hidden_states_scales"]
        assert torch.equal(torch.frexp(common).mantissa, torch.full_like(common, 0.5))
        assert ((theirs - found).abs() <= common * 2.0**-10).all()
        normal = found.abs() >= common * 2.0**-6
        assert torch.equal(theirs[normal], found[normal])
        assert normal.float().mean() > 0.9
