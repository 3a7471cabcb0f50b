"""A finished run: readers agree, damage of every kind is found, and exactly the damaged ranges are redone."""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.utils.data import DataLoader

from swathe import HiddenStates, codec
from swathe.errors import IncompleteRunError, IntegrityError
from swathe.manifest import seal
from swathe.spec import CanaryRecord, RangeId, to_json
from swathe.store import open_store
from tests.e2e.conftest import Command, assert_states_are_right, run_arguments, status
from worker.check import check_run


@pytest.fixture
def copy(finished: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def shards(run: Path) -> list[Path]:
    return sorted(run.glob("states/*.safetensors"))


def test_the_reader_printed_in_the_docs_agrees_with_ours(finished: tuple[Path, str]) -> None:
    text = Path("docs/format.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope: dict = {"RUN": str(finished[0])}
    exec(compile(code, "docs/format.md", "exec"), scope)  # noqa: S102
    ours = HiddenStates(finished[0])
    assert scope["layers"] == ours.layers
    for index in (0, 1, 200, len(ours) - 1):
        theirs, sample = scope["read"](index), ours[index]
        assert (theirs["row"], theirs["id"]) == (sample["row"], sample["id"])
        for name in ("input_ids", "loss_mask", "hidden_states"):
            assert torch.equal(theirs[name].to(sample[name].dtype), sample[name])


def test_the_data_set_works_in_worker_processes_and_its_errors_cross_them(copy: Path) -> None:
    ds = HiddenStates(copy)
    loader = DataLoader(ds, batch_size=None, num_workers=2, shuffle=False)
    assert [sample["row"] for sample in loader] == [ds[i]["row"] for i in range(len(ds))]
    again = pickle.loads(pickle.dumps(ds))  # noqa: S301
    assert torch.equal(again[5]["hidden_states"], ds[5]["hidden_states"])
    victim = shards(copy)[0]
    victim.unlink()
    fresh = HiddenStates(copy)
    with pytest.raises(IntegrityError, match=victim.name):
        list(DataLoader(fresh, batch_size=None, num_workers=1))
    with pytest.raises(IndexError):
        ds[len(ds)]


def test_an_unsealed_run_opens_only_when_asked(copy: Path) -> None:
    whole = HiddenStates(copy)
    (copy / "manifest.json").unlink()
    record = min(copy.glob("states/*.json"))
    lost = json.loads(record.read_text())["samples"]
    record.unlink()
    with pytest.raises(IncompleteRunError, match="not sealed"):
        HiddenStates(copy)
    part = HiddenStates(copy, unsealed=True)
    assert len(part) == len(whole) - lost
    rows = {whole[i]["row"]: i for i in range(len(whole))}
    for index in range(0, len(part), 29):
        sample = part[index]
        assert torch.equal(sample["hidden_states"], whole[rows[sample["row"]]]["hidden_states"])


def damage(run: Path) -> dict[int, str]:
    """Four kinds of damage to four ranges, and what verification should say of each."""
    zeroed, cut, flipped, gone = shards(run)[3:7]
    data = bytearray(zeroed.read_bytes())
    data[-4000:] = bytes(4000)
    zeroed.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    gone.unlink()
    return {
        int(zeroed.name[:6]): "hash",
        int(cut.name[:6]): "bytes",
        int(flipped.name[:6]): "hash",
        int(gone.name[:6]): "missing",
    }


def test_four_kinds_of_damage_are_found_and_exactly_these_ranges_redone(
    swathe: Command, dataset: Path, model: Path, copy: Path
) -> None:
    expected = damage(copy)
    found = json.loads(swathe_fails(swathe, copy, "verify", "--full", "--json"))
    assert {int(key): value for key, value in found["damaged"].items()}.keys() == expected.keys()
    for range_id, word in expected.items():
        assert word in found["damaged"][str(range_id)]

    untouched = {
        path: path.stat().st_mtime_ns
        for path in copy.glob("states/*")
        if int(path.name[:6]) not in expected
    }
    swathe_fails(swathe, copy, "verify", "--full", "--repair", "--json")
    assert not (copy / "manifest.json").exists()
    assert status(swathe, copy)["ranges"]["open"] == 4
    swathe(*run_arguments(dataset, model, copy))
    assert {path: path.stat().st_mtime_ns for path in untouched} == untouched
    assert json.loads(swathe("verify", copy, "--full", "--json"))["damaged"] == {}
    assert_states_are_right(copy, dataset, model)


def test_a_failed_canary_blocks_the_seal_until_the_doubtful_ranges_are_done_again(
    swathe: Command, dataset: Path, model: Path, copy: Path
) -> None:
    (copy / "manifest.json").unlink()
    record = json.loads((copy / "states/000002.json").read_text())
    canary = CanaryRecord(
        run_id=record["run_id"],
        range_id=RangeId(2),
        row=0,
        tokens=1,
        errors={"0": 0.5},
        bounds={"0": 1e-4},
        passed=False,
        worker=record["worker"],
        device="cpu",
        taken_at=record["finished_at"],
    )
    shutil.rmtree(copy / "canaries", ignore_errors=True)  # a good one would bound the doubt
    (copy / "canaries").mkdir()
    (copy / "canaries/000002.json").write_bytes(to_json(canary))
    state = status(swathe, copy)
    assert not state["complete"]
    assert state["ranges"]["suspect"] == state["ranges"]["total"]
    with pytest.raises(IncompleteRunError, match="suspect"):
        seal(open_store(copy))

    swathe_fails(swathe, copy, "verify", "--repair")
    assert status(swathe, copy)["ranges"]["open"] == state["ranges"]["total"]
    swathe.environment["SWATHE_CANARY_EVERY"] = "10"
    swathe(*run_arguments(dataset, model, copy))
    assert_states_are_right(copy, dataset, model)
    taken = [json.loads(path.read_text()) for path in copy.glob("canaries/*.json")]
    assert len(taken) > 3
    assert all(one["passed"] and max(one["errors"].values()) < 1e-4 for one in taken)


def test_the_final_check_tells_states_of_another_layer(
    finished: tuple[Path, str], model: Path, copy: Path
) -> None:
    good = check_run(str(finished[0]), model, samples=3, device=torch.device("cpu"))
    assert good.ok
    for path in shards(copy):
        with safe_open(path, "np") as shard:
            tensors = {name: codec.view(shard.get_tensor(name)) for name in shard.keys()}  # noqa: SIM118
            states, metadata = shard.get_tensor("hidden_states")[:, [1, 0, 2]], shard.metadata()
        path.write_bytes(
            b"".join(codec.encode({**tensors, "hidden_states": codec.view(states)}, metadata))
        )
    bad = check_run(str(copy), model, samples=3, device=torch.device("cpu"))
    assert not bad.ok
    assert [layer.median > 0.1 for layer in bad.layers] == [True, True, False]


def test_quick_verification_needs_no_bytes_of_the_states(swathe: Command, copy: Path) -> None:
    expected = damage(copy)
    found = json.loads(swathe_fails(swathe, copy, "verify", "--json"))
    quick = {key for key, word in expected.items() if word != "hash"}
    assert {int(key) for key in found["damaged"]} == quick


def swathe_fails(swathe: Command, run: Path, command: str, *options: str) -> str:
    process = swathe.popen(command, run, *options)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out + err
    return out
