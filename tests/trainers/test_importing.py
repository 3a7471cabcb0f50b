"""Folders of speculators become runs that hold the same, and what is wrong in them is found on the way in."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from producer.verify import verify
from swathe import HiddenStates, names
from swathe.adapters import SpecForge, Speculators
from swathe.adapters.norm import read_final_norm
from swathe.adapters.speculators import quantize_fp8
from swathe.errors import ConfigError, IntegrityError, PlanError, RunMismatchError
from swathe.export import ExportOptions, export
from swathe.importing import ImportOptions, import_speculators
from swathe.importing.normed import to_float
from swathe.manifest import read_manifest
from swathe.records import read_run
from swathe.store.local import LocalStore
from tests.support.runs import Recipe, make_run

RECIPE = Recipe(samples=60, rejected=())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_run(tmp_path / "source", RECIPE)
    export(tmp_path / "source", tmp_path / "hs", ExportOptions(format="speculators"))
    return tmp_path / "hs"


@pytest.fixture
def options(folder: Path) -> ImportOptions:
    source = LocalStore(folder.parent / "source")
    return ImportOptions(
        model=read_run(source).model,
        layer_ids=(2, 4, 6),
        final_norm=folder.parent / "source" / names.FINAL_NORM,
        range_tokens=200,
    )


def hs(folder: Path, row: int) -> Path:
    return folder / "hidden_states" / f"hs_{row}.safetensors"


def test_there_and_back_again(folder: Path, options: ImportOptions, tmp_path: Path) -> None:
    seen = []
    store = LocalStore(tmp_path / "run")
    report = import_speculators(folder, store, options, progress=seen.append)
    assert (report.rows, report.stored, report.rejected, report.quarantined) == (60, 60, 0, 0)
    assert report.norm_checked
    assert [p.ranges_done for p in seen] == list(range(seen[-1].ranges))
    theirs, ours = HiddenStates(tmp_path / "source"), HiddenStates(tmp_path / "run")
    assert ours.layers == theirs.layers
    for index in range(60):
        for name in ("row", "input_ids", "loss_mask", "hidden_states"):
            a, b = ours[index][name], theirs[index][name]
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b
    assert torch.equal(
        SpecForge(tmp_path / "run")[3]["target"], SpecForge(tmp_path / "source")[3]["target"]
    )
    export(tmp_path / "run", tmp_path / "again", ExportOptions(format="speculators"))
    for row in range(60):
        assert hs(tmp_path / "again", row).read_bytes() == hs(folder, row).read_bytes()


def test_float8_folders_keep_their_bytes(
    tmp_path: Path, folder: Path, options: ImportOptions
) -> None:
    fp8 = ExportOptions(format="speculators", fp8=True)
    export(tmp_path / "source", tmp_path / "hs8", fp8)
    import_speculators(tmp_path / "hs8", LocalStore(tmp_path / "run"), options)
    raw = HiddenStates(tmp_path / "run", dequantize=False)[7]
    file = load_file(hs(tmp_path / "hs8", 7))
    assert torch.equal(
        raw["hidden_states"].view(torch.uint8), file["hidden_states"].view(torch.uint8)
    )
    scales = file["hidden_states_scales"][:, 0].expand(-1, 4)
    assert torch.equal(raw["hidden_states_scales"], scales)
    theirs = file["hidden_states"].float() * file["hidden_states_scales"]
    ours = HiddenStates(tmp_path / "run")[7]["hidden_states"]
    assert torch.equal(ours, theirs.to(torch.bfloat16))
    assert folder.exists()
    assert verify(LocalStore(tmp_path / "run"), full=True).ok, "scales that are no powers of two"
    export(tmp_path / "run", tmp_path / "again", fp8)
    assert hs(tmp_path / "again", 7).read_bytes() == hs(tmp_path / "hs8", 7).read_bytes()


def harm(folder: Path) -> dict[int, str]:
    """Kinds of bad files, and what is said of each."""
    hs(folder, 3).unlink()
    hs(folder, 9).write_bytes(hs(folder, 9).read_bytes()[:-20])
    hs(folder, 11).write_bytes(b"no safetensors")
    file = load_file(hs(folder, 20))
    save_file(file | {"token_ids": file["token_ids"].flip(0) + 1}, hs(folder, 20))
    file = load_file(hs(folder, 31))
    save_file(file | {"hidden_states": file["hidden_states"][:, :3].contiguous()}, hs(folder, 31))
    file = load_file(hs(folder, 40))
    save_file(file | {"hidden_states": file["hidden_states"].float()}, hs(folder, 40))
    file = load_file(hs(folder, 41))
    codes, scales = quantize_fp8(file["hidden_states"])
    scales = scales.bfloat16()
    save_file(file | {"hidden_states": codes, "hidden_states_scales": scales}, hs(folder, 41))
    return {
        3: "no hidden states file",
        9: "cut short",
        11: "cannot be read",
        20: "token ids",
        31: "shape",
        40: "float32",
        41: "one float32 scale",
    }


def test_bad_files_are_rejected_with_their_reasons(
    folder: Path, options: ImportOptions, tmp_path: Path
) -> None:
    expected = harm(folder)
    report = import_speculators(folder, LocalStore(tmp_path / "run"), options)
    assert (report.stored, report.rejected) == (53, 7)
    lines = (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()
    found = {line["row"]: line["reason"] for line in map(json.loads, lines)}
    assert found.keys() == expected.keys()
    assert [row for row, words in expected.items() if words not in found[row]] == []
    kept = [row for row in range(60) if row not in expected]
    assert HiddenStates(tmp_path / "run").rows.tolist() == kept


def test_a_mask_of_weights_is_no_mask(folder: Path, options: ImportOptions, tmp_path: Path) -> None:
    (path,) = folder.glob("data-*.arrow")
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    masks = table["loss_mask"].to_pylist()
    masks[5][-1] = 2
    table = table.set_column(1, "loss_mask", pa.array(masks))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    assert import_speculators(folder, LocalStore(tmp_path / "run"), options).rejected == 1
    assert "loss_mask holds 2" in (tmp_path / "run" / "rejected.jsonl").read_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_sample_with_a_nan_is_quarantined(tmp_path: Path, dtype: str) -> None:
    recipe = Recipe(samples=1200, rejected=(), hidden=2, range_tokens=4000)
    make_run(tmp_path / "source", recipe)
    export(tmp_path / "source", tmp_path / "hs", ExportOptions(format="speculators", dtype=dtype))
    file = load_file(hs(tmp_path / "hs", 50))
    file["hidden_states"][1, 2, 0] = float("nan")
    save_file(file, hs(tmp_path / "hs", 50))
    model = read_run(LocalStore(tmp_path / "source")).model
    store = LocalStore(tmp_path / "run")
    report = import_speculators(
        tmp_path / "hs", store, ImportOptions(model=model, layer_ids=(2, 4, 6))
    )
    assert (report.stored, report.quarantined, report.norm_checked) == (1199, 1, False)
    assert 50 not in HiddenStates(tmp_path / "run").rows
    assert read_manifest(store).accounts.quarantined == 1


def test_every_float8_code_is_what_torch_takes_it_for() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    found = torch.from_numpy(to_float(codes[finite].numpy(), "float8_e4m3fn"))
    assert torch.equal(found, codes[finite].view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("when", ["at once", "float8", "later"])
def test_states_after_the_norm_are_recognised_and_refused(
    folder: Path, options: ImportOptions, tmp_path: Path, when: str
) -> None:
    source = LocalStore(tmp_path / "source")
    norm = read_final_norm(source, read_run(source))
    for row in range(60):
        file = load_file(hs(folder, row))
        file["hidden_states"][:, -1] = norm(file["hidden_states"][:, -1])
        if when == "float8":
            names_of = ("hidden_states", "hidden_states_scales")
            file |= dict(zip(names_of, quantize_fp8(file["hidden_states"]), strict=True))
        save_file(file, hs(folder, row))
    store = LocalStore(tmp_path / "run")
    if when == "later":
        report = import_speculators(folder, store, replace(options, final_norm=None))
        assert not report.norm_checked
    with pytest.raises(IntegrityError, match="AFTER the model's final norm"):
        import_speculators(folder, store, options)
    if when != "later":
        with pytest.raises(Exception, match="not sealed"):
            HiddenStates(tmp_path / "run")


def test_a_norm_that_an_earlier_call_had_is_used_by_the_next(
    folder: Path, options: ImportOptions, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "run")
    assert import_speculators(folder, store, options).norm_checked
    assert import_speculators(folder, store, replace(options, final_norm=None)).norm_checked


def test_an_interrupted_import_goes_on(
    folder: Path, options: ImportOptions, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "run")

    class StopError(Exception):
        pass

    def stop(progress) -> None:
        if progress.ranges_done == 3:
            raise StopError

    with pytest.raises(StopError):
        import_speculators(folder, store, options, progress=stop)
    records = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("states/*.json")}
    assert len(records) == 3
    import_speculators(folder, store, options)
    assert {path: path.stat().st_mtime_ns for path in records} == records
    assert len(Speculators(tmp_path / "run")) == 60
    other = replace(options, layer_ids=(1, 4, 6))
    with pytest.raises(RunMismatchError, match="another run"):
        import_speculators(folder, store, other)


def test_impossible_imports_are_refused(
    folder: Path, options: ImportOptions, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "run")
    for ids in ((0, 4, 6), (2, 4, 8), (2, 2, 4), ()):
        with pytest.raises(ConfigError, match="layer ids"):
            import_speculators(folder, store, replace(options, layer_ids=ids))
    with pytest.raises(PlanError, match="none of its 60 rows"):
        import_speculators(folder, store, replace(options, layer_ids=(2, 4)))
    with pytest.raises(PlanError, match="no folder of speculators"):
        import_speculators(tmp_path, store, options)
    assert not (tmp_path / "run" / "run.json").exists()
