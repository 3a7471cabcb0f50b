"""Exports: files as the trainers name them, equal to the adapters, resumable, refused before harm is done."""

import fcntl
import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swathe import HiddenStates, names
from swathe.adapters import ModelOpt, SpecForge, Speculators
from swathe.errors import ConfigError, IntegrityError, NoSpaceError
from swathe.export import ExportOptions, export, speculators_set
from swathe.manifest import seal
from swathe.records import read_run
from swathe.spec import RangeId
from swathe.tokens import TokenReader
from tests.support.runs import Recipe, ids_of, length_of, make_run, mask_of, write_range

RECIPE = Recipe()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, RECIPE)
    return folder


def same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if torch.is_tensor(value):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name].float(), value.float())
        else:
            assert found[name] == value


@pytest.mark.parametrize("fp8", [False, True])
def test_speculators(run: Path, tmp_path: Path, fp8: bool) -> None:  # noqa: FBT001
    report = export(run, tmp_path, ExportOptions(format="speculators", fp8=fp8))
    adapter = Speculators(run, fp8=fp8)
    assert report.samples == len(adapter) == len(list(tmp_path.glob("hidden_states/*")))
    for index in range(len(adapter)):
        file = load_file(tmp_path / "hidden_states" / f"hs_{index}.safetensors")
        same(file, adapter.file(index))
    assert not list(tmp_path.rglob("*.lock")) + list(tmp_path.rglob("*.part"))


def test_the_arrow_set_and_the_token_counts(run: Path, tmp_path: Path, monkeypatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(speculators_set, "PART_TOKENS", 300)
    export(run, tmp_path, ExportOptions(format="speculators"))
    assert len(list(tmp_path.glob("data-*.arrow"))) > 2
    rows = datasets.load_from_disk(str(tmp_path))
    expected = HiddenStates(run).rows.tolist()
    assert rows["row"][:].tolist() == expected
    counts: Counter[int] = Counter()
    for place, row in enumerate(expected):
        ids, mask = ids_of(row, RECIPE), mask_of(row, RECIPE)
        item = rows[place]
        assert item["input_ids"].dtype == torch.int64
        assert item["input_ids"].tolist() == ids.tolist()
        assert item["loss_mask"].tolist() == mask.tolist()
        assert item["seq_len"] == len(ids)
        counts.update(ids[mask.astype(bool)].tolist())
    assert torch.load(tmp_path / "token_freq.pt", weights_only=True) == dict(counts)


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "domino", "dspark"])
def test_specforge(run: Path, tmp_path: Path, algorithm: str) -> None:
    report = export(run, tmp_path, ExportOptions(format="specforge", algorithm=algorithm))
    adapter = SpecForge(run, algorithm=algorithm)
    assert report.samples + report.left_out == len(HiddenStates(run))
    assert (report.left_out > 0) == (algorithm != "eagle3")
    for index in range(len(adapter)):
        path = tmp_path / "rows_0-2000" / f"data_{index}.ckpt"
        same(torch.load(path, weights_only=True), adapter.file(index))


def test_modelopt(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path, ExportOptions(format="modelopt"))
    adapter = ModelOpt(run)
    for index in range(len(adapter)):
        path = tmp_path / "rows_0-2000" / f"data_{index}.pt"
        same(torch.load(path, weights_only=True), adapter.file(index))


def test_a_file_holds_its_sample_and_not_the_shard_behind_it(run: Path, tmp_path: Path) -> None:
    """torch.save writes whole storages; views of a mapped shard would make every file as big as the shard."""
    for name in ("specforge", "modelopt"):
        export(run, tmp_path / name, ExportOptions(format=name, dtype="bfloat16"))
        for path in (tmp_path / name).glob("rows_*/*"):
            length = len(torch.load(path, weights_only=True)["input_ids"])
            assert path.stat().st_size < length * (4 * 16 * 2 + 16) + 4096


def test_cut_and_cast_samples(run: Path, tmp_path: Path) -> None:
    options = ExportOptions(format="speculators", layers=(5,), dtype="float32", max_length=9)
    export(run, tmp_path, options)
    adapter = Speculators(run, layers=[5], dtype="float32", max_length=9)
    for index, row in enumerate(HiddenStates(run).rows.tolist()):
        file = load_file(tmp_path / "hidden_states" / f"hs_{index}.safetensors")
        assert file["token_ids"].tolist() == ids_of(row, RECIPE)[:9].tolist()
        same(file, adapter.file(index))
    expected: Counter[int] = Counter()
    for row in HiddenStates(run).rows.tolist():
        expected.update(ids_of(row, RECIPE)[:9][mask_of(row, RECIPE)[:9].astype(bool)].tolist())
    assert torch.load(tmp_path / "token_freq.pt", weights_only=True) == dict(expected)


def test_an_interrupted_export_goes_on_where_it_stopped(run: Path, tmp_path: Path) -> None:
    options = ExportOptions(format="speculators", workers=2)

    class StopError(Exception):
        pass

    def stop(progress) -> None:
        if progress.done == 11:
            raise StopError

    with pytest.raises(StopError):
        export(run, tmp_path, options, progress=stop)
    marker = tmp_path / "swathe-export.json"
    assert json.loads(marker.read_text())["complete"] is False
    files = sorted(tmp_path.glob("hidden_states/*"))
    assert 11 <= len(files) < 39
    short = files[3]
    short.write_bytes(short.read_bytes()[:50])
    times = {path: path.stat().st_mtime_ns for path in files if path != short}
    seen = []
    report = export(run, tmp_path, options, progress=seen.append)
    assert report.found == len(files) - 1
    assert [p.done for p in seen] == list(range(report.found + 1, 40))
    assert seen[-1].total == report.samples == 39
    assert {path: path.stat().st_mtime_ns for path in times} == times
    assert json.loads(marker.read_text())["complete"] is True
    same(load_file(short), Speculators(run).file(int(short.stem[3:])))
    again = export(run, tmp_path, options)
    assert (again.found, again.written_bytes) == (39, 0)


def test_ranges_that_were_done_again_are_exported_again(tmp_path: Path) -> None:
    def empty(row: int) -> torch.Tensor:
        return torch.zeros(length_of(row, RECIPE), len(RECIPE.layers), RECIPE.hidden)

    store = make_run(tmp_path / "run", replace(RECIPE, states=empty))
    options, dest = ExportOptions(format="modelopt", layers=(1,)), tmp_path / "export"
    export(store.url, dest, options)
    store.delete(names.MANIFEST)
    store.delete(names.record(RangeId(1)))
    spec = read_run(store)
    members = TokenReader(store, spec).read_range(RangeId(1)).rows.tolist()
    write_range(store, spec, RangeId(1), members, RECIPE)
    seal(store)
    report = export(store.url, dest, options)
    assert report.found == report.samples - len(members)
    adapter = ModelOpt(store.url, layers=(1,))
    for index, row in enumerate(adapter.dataset.rows):
        file = torch.load(next(dest.glob(f"rows_*/data_{index}.pt")), weights_only=True)
        same(file, adapter.file(index))
        assert file["aux_hidden_states"].any() == (row in members)


def test_a_folder_that_holds_something_else_is_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        export(run, tmp_path, ExportOptions(format="modelopt"))
    dest = tmp_path / "export"
    export(run, dest, ExportOptions(format="modelopt"))
    with pytest.raises(ConfigError, match="another export"):
        export(run, dest, ExportOptions(format="modelopt", layers=(1, 3, 5)))
    with pytest.raises(ConfigError, match="another export"):
        export(run, dest, ExportOptions(format="speculators"))
    descriptor = os.open(dest, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process"):
        export(run, dest, ExportOptions(format="modelopt"))
    os.close(descriptor)


def test_what_cannot_work_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch
) -> None:
    dest = tmp_path / "export"
    for options, words in (
        (ExportOptions(format="eagle"), "speculators, specforge"),
        (ExportOptions(format="modelopt", fp8=True), "float8"),
        (ExportOptions(format="specforge", workers=0), "workers"),
        (ExportOptions(format="specforge", layers=(1, 2, 3)), "layers 2 are not stored"),
        (ExportOptions(format="specforge", algorithm="dflash", max_length=1), "no stored sample"),
    ):
        with pytest.raises(ConfigError, match=words):
            export(run, dest, options)
    with pytest.raises(ConfigError, match="local folder"):
        export(run, "s3://bucket/export", ExportOptions(format="modelopt"))
    assert not dest.exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(NoSpaceError, match="nothing was written"):
        export(run, dest, ExportOptions(format="modelopt"))
    assert [path.name for path in dest.iterdir()] == ["swathe-export.json"]


def test_damaged_input_stops_the_export_and_names_the_shard(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    victim = min((tmp_path / "run").glob("states/*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-10])
    with pytest.raises(IntegrityError, match=victim.name):
        export(tmp_path / "run", tmp_path / "export", ExportOptions(format="modelopt"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ExportOptions(format="speculators"),
            ["| 0 | 1 | 2 | 2 |", "BEFORE the final norm |", "--target-layer-ids 2 4 6"],
        ),
        (ExportOptions(format="speculators", fp8=True), ["hidden_states_scales", "fp8"]),
        (
            ExportOptions(format="specforge"),
            ["| 0 | 1 | 2 | 1 |", "AFTER the final norm |", "ids 1 3 5", "aux_hidden_state"],
        ),
        (
            ExportOptions(format="specforge", algorithm="domino"),
            ["| 2 | 5 | 6 | 5 |", "more are stored and left out", "no two supervised"],
        ),
        (ExportOptions(format="modelopt"), ["hidden_states_prenorm", "AFTER the norm"]),
    ],
)
def test_the_readme_says_which_layer_each_slot_is(
    run: Path, tmp_path: Path, options: ExportOptions, words: list[str]
) -> None:
    export(run, tmp_path, options)
    text = (tmp_path / "README.md").read_text()
    assert [word for word in words if word not in text] == []
    assert "{" not in text.replace("hs_{i}", "").replace("data_{i}", "")
    assert ("random" in text) is False


def test_a_run_of_random_weights_is_exported_on_request_and_marked(tmp_path: Path) -> None:
    make_run(tmp_path / "run", replace(RECIPE, random_weights=True))
    options = ExportOptions(format="modelopt", allow_random=True)
    export(tmp_path / "run", tmp_path / "export", options)
    assert "Train nothing" in (tmp_path / "export" / "README.md").read_text()
