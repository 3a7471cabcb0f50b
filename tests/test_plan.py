"""A plan: deterministic, complete, ordered, cut by budget, and nothing half-written when it cannot be made."""

import dataclasses
import functools
import io
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producer import plan as plan_module
from producer.arrange import Arranger, computed_tokens, cut_ranges
from producer.plan import PlanOptions, plan
from producer.report import plan_lines
from producer.tally import Tally, count_reasons
from swathe import names
from swathe.dataset import open_dataset
from swathe.errors import ConfigError, PlanError, RunMismatchError
from swathe.records import read_run
from swathe.samples import Rejected, SampleBlock, offsets_of
from swathe.spec import Batching, RangeRecord, fingerprint, to_json
from swathe.store import open_store
from swathe.store.memory import MemoryStore
from swathe.tokens import TokenReader, TokenWriter

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def no_architecture_packs(monkeypatch):
    monkeypatch.setattr("swathe.architectures.PACKS", frozenset())


@pytest.fixture
def made(tmp_path):
    """A data set of 500 rows, every 50th bad, and options for it."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, 100, rng.integers(1, 60)).tolist() for _ in range(500)]
    for bad in range(0, 500, 50):
        rows[bad] = [] if bad % 100 else None
    ids = [f"id{i}" for i in range(500)]
    pq.write_table(pa.table({"input_ids": rows, "id": ids}), tmp_path / "d.parquet")
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    options = PlanOptions(
        dataset=str(tmp_path / "d.parquet"),
        model=f"random:{tmp_path / 'tiny.json'}",
        layers=(0, 2),
        final=True,
        range_tokens=300,
    )
    return rows, options


def contents(store):
    return {info.key: store.read(info.key) for info in store.list("")}


def without_run_id(data):
    value = json.loads(data)
    assert len(value.pop("run_id")) == 16
    return value


def planned(store):
    """Samples of the plan by row, ranges in order, read back through the worker's reader."""
    spec = read_run(store)
    reader = TokenReader(store, spec)
    ranges = [reader.read_range(i) for i in spec.range_ids]
    samples = {}
    for tokens in ranges:
        for i, row in enumerate(tokens.rows.tolist()):
            assert row not in samples
            samples[row] = tokens.input_ids[tokens.offsets[i] : tokens.offsets[i + 1]].tolist()
    return samples, ranges


def test_every_row_is_once_in_tokens_or_once_in_rejected(made):
    rows, options = made
    store = MemoryStore()
    report = plan(store, options)
    samples, ranges = planned(store)
    rejected = [json.loads(line) for line in store.read(names.REJECTED).splitlines()]
    assert samples == {i: row for i, row in enumerate(rows) if row}
    assert [r["row"] for r in rejected] == list(range(0, 500, 50))
    assert rejected[1] == {"row": 50, "id": "id50", "reason": "empty"}
    totals = report.spec.totals
    assert (totals.rows, totals.samples, totals.rejected) == (500, 490, 10)
    assert totals.tokens == sum(len(row) for row in rows if row)
    assert totals.ranges == len(ranges) == report.ranges
    assert totals.longest == 59
    assert report.rejected == {"input_ids is null": 5, "empty": 5}
    assert sum(n for _, _, n in report.length_histogram) == 490
    assert report.length_histogram[0][:2] == (1, 1)
    assert report.length_histogram[-1][:2] == (32, 63)
    table = pq.read_table(io.BytesIO(store.read(names.TOKEN_ROWS))).to_pylist()
    order = [row for tokens in ranges for row in tokens.rows.tolist()]
    assert [entry["row"] for entry in table] == order
    assert all(entry["id"] == f"id{entry['row']}" for entry in table)
    assert all(entry["length"] == len(rows[entry["row"]]) for entry in table)


def test_padded_ranges_keep_their_budget_with_padding_and_are_filled(made):
    _, options = made
    store = MemoryStore()
    report = plan(store, options)
    assert (report.spec.batching.form, report.spec.batching.order) == ("padded", "length")
    _, ranges = planned(store)
    lengths = [np.diff(tokens.offsets) for tokens in ranges]
    assert all(len(part) * part.max() <= 300 for part in lengths)
    for part, after in itertools.pairwise(lengths):
        assert (len(part) + 1) * after[0] > 300, "the next sample would have fitted"
    computed = sum(len(part) * part.max() for part in lengths)
    assert report.padding_ratio == pytest.approx(computed / report.tokens - 1)
    assert 0 < report.padding_ratio < 0.2


def test_packed_ranges_keep_the_users_order(made, monkeypatch):
    rows, options = made
    monkeypatch.setattr(plan_module.Arranger.__module__ + ".WINDOW_TOKENS", 1000)
    monkeypatch.setattr("swathe.architectures.PACKS", frozenset({"llama"}))
    store = MemoryStore()
    report = plan(store, options)
    assert (report.spec.batching.form, report.spec.batching.order) == ("packed", "user")
    assert report.padding_ratio == 0.0
    _, ranges = planned(store)
    assert [row for t in ranges for row in t.rows.tolist()] == [i for i, r in enumerate(rows) if r]
    totals = [int(t.offsets[-1]) for t in ranges]
    first = [int(np.diff(t.offsets)[0]) for t in ranges]
    assert max(totals) <= 300
    assert all(a + b > 300 for a, b in zip(totals, first[1:], strict=False))


def test_the_same_inputs_give_the_same_bytes_but_for_run_id(made):
    _, options = made
    one, two = MemoryStore(), MemoryStore()
    first, second = plan(one, options).spec, plan(two, options).spec
    assert first.run_id != second.run_id
    assert first.fingerprint == second.fingerprint == fingerprint(first)
    a, b = contents(one), contents(two)
    assert without_run_id(a.pop(names.RUN)) == without_run_id(b.pop(names.RUN))
    a.pop(names.PROVENANCE)
    b.pop(names.PROVENANCE)
    assert a == b


def test_run_json_says_what_the_run_is(made, tmp_path):
    _, options = made
    store = open_store(tmp_path / "run")
    report = plan(store, options, argv=["swathe", "plan"])
    spec = read_run(store)
    assert spec == report.spec
    assert [(s.slot, s.layer) for s in spec.layers] == [(0, 0), (1, 2), (2, "final")]
    assert (
        spec.layers[2].meaning == "output of the last decoder block, before the model's final norm"
    )
    assert (spec.compute_dtype, spec.stored_dtype) == ("bfloat16", "bfloat16")
    assert spec.policies.max_length == 64
    assert spec.model.random_weights
    assert spec.dataset.files[0].name == "d.parquet"
    assert spec.state_bytes == report.state_bytes == spec.totals.tokens * (48 + 5) + 490 * 16
    assert report.fits
    found = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert found["argv"] == ["swathe", "plan"]
    assert found["inputs"]["d.parquet"]["size_bytes"] == spec.dataset.files[0].size_bytes
    assert found["versions"]["pyarrow"] == pa.__version__


def test_float8_is_computed_in_the_checkpoints_dtype_and_costs_half(made):
    _, options = made
    store = MemoryStore()
    report = plan(store, dataclasses.replace(options, dtype="fp8"))
    spec = read_run(store)
    assert (spec.compute_dtype, spec.stored_dtype) == ("bfloat16", "float8_e4m3fn")
    assert spec.bytes_per_token == 3 * (8 + 4)
    assert report.state_bytes == spec.totals.tokens * (3 * (8 + 4) + 5) + 490 * 16
    assert "stored as float8_e4m3fn, computed in bfloat16" in "\n".join(plan_lines(report))
    with pytest.raises(RunMismatchError, match="dtype: float8_e4m3fn in the run, bfloat16 asked"):
        plan(store, options)
    assert plan(store, dataclasses.replace(options, dtype="fp8")).reused


def test_planning_again_takes_up_the_run_without_reading_rows(made, monkeypatch):
    _, options = made
    store = MemoryStore()
    first = plan(store, options)
    before = contents(store)
    monkeypatch.setattr(plan_module, "read_samples", None)
    again = plan(store, options)
    assert again.reused
    assert not first.reused
    assert dataclasses.replace(again, reused=False, seconds=first.seconds) == first
    assert contents(store) == before


def test_a_data_set_that_was_only_touched_or_moved_is_the_same(made, tmp_path):
    _, options = made
    store = MemoryStore()
    plan(store, options)
    os.utime(options.dataset, ns=(1, 1))
    assert plan(store, options).reused
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "d.parquet").rename(tmp_path / "elsewhere" / "d.parquet")
    moved = dataclasses.replace(options, dataset=str(tmp_path / "elsewhere" / "d.parquet"))
    assert plan(store, moved).reused


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers": (1,)}, r"layers: \[0, 2, 'final'\] in the run, \[1, 'final'\] asked for"),
        ({"dtype": "fp32"}, "dtype: bfloat16 in the run, float32 asked for"),
        ({"limit": 7}, "limit: None in the run, 7 asked for"),
        ({"max_length": 20}, "max_length: 64 in the run, 20 asked for"),
        ({"range_tokens": 10}, "range_tokens: 300 in the run, 10 asked for"),
        ({"min_supervised": 2}, "min_supervised: 1 in the run, 2 asked for"),
        ({"min_supervised_ratio": 0.5}, r"min_supervised_ratio: 0\.0 in the run, 0\.5 asked for"),
        ({"min_length": 2}, "min_length: 1 in the run, 2 asked for"),
    ],
)
def test_other_options_are_refused_and_the_run_is_kept(made, change, says):
    _, options = made
    store = MemoryStore()
    plan(store, options)
    before = contents(store)
    with pytest.raises(RunMismatchError, match=says):
        plan(store, dataclasses.replace(options, **change))
    assert contents(store) == before


def test_changed_data_and_another_model_are_refused(made, tmp_path):
    _, options = made
    store = MemoryStore()
    plan(store, options)
    data = bytearray((tmp_path / "d.parquet").read_bytes())
    data[40] ^= 1
    (tmp_path / "d.parquet").write_bytes(data)
    with pytest.raises(RunMismatchError, match="other content than in the run"):
        plan(store, options)
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG | {"rope_theta": 7}))
    with pytest.raises(RunMismatchError, match="another identity"):
        plan(store, options)


def test_a_newer_version_that_packs_goes_on_with_a_padded_run(made, monkeypatch):
    _, options = made
    store = MemoryStore()
    plan(store, options)
    monkeypatch.setattr("swathe.architectures.PACKS", frozenset({"llama"}))
    assert plan(store, options).reused


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"layers": (9,)}, PlanError, "layer 9: the model has layers 0 to 3"),
        ({"layers": (-1,)}, PlanError, "layer -1"),
        ({"layers": (0, 3)}, PlanError, "layer 3 and final are the same tensor"),
        ({"layers": (1, 1)}, PlanError, "layer 1 is asked for twice"),
        ({"layers": (), "final": False}, ConfigError, "no layers"),
        ({"dtype": "int8"}, ConfigError, "dtype int8"),
        ({"range_tokens": 0}, ConfigError, "range_tokens 0"),
        ({"limit": 0}, ConfigError, "limit 0"),
        ({"columns": {"input_ids": "nope"}}, PlanError, "no column nope"),
        ({"max_length": 0}, ConfigError, "max_length 0"),
        ({"limit": 1}, PlanError, r"none of its 1 rows can be used \(most: input_ids is null\)"),
    ],
)
def test_what_cannot_be_planned_leaves_nothing(made, tmp_path, change, error, says):
    _, options = made
    store = open_store(tmp_path / "run")
    with pytest.raises(error, match=says) as caught:
        plan(store, dataclasses.replace(options, **change))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_unreadable_file_in_the_middle_leaves_nothing(made, tmp_path, monkeypatch):
    rows, options = made
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(3):
        table = pa.table({"input_ids": rows[i * 100 + 1 : i * 100 + 40]})
        pq.write_table(table, folder / f"{i}.parquet", compression="none")
    data = bytearray((folder / "2.parquet").read_bytes())
    data[4:200] = b"\xff" * 196
    (folder / "2.parquet").write_bytes(data)
    monkeypatch.setattr("producer.arrange.WINDOW_TOKENS", 100)
    small = functools.partial(TokenWriter, file_tokens=50)
    monkeypatch.setattr(plan_module, "TokenWriter", small)
    store = open_store(tmp_path / "run")
    written, write = [], store.write
    monkeypatch.setattr(store, "write", lambda key, data: written.append(key) or write(key, data))
    with pytest.raises(PlanError, match=r"2\.parquet: unreadable"):
        plan(store, dataclasses.replace(options, dataset=str(folder)))
    assert len(written) > 10
    assert not (tmp_path / "run").exists()


def test_a_file_that_changes_while_it_is_read_is_noticed(made, tmp_path):
    _, options = made
    store = open_store(tmp_path / "run")
    with pytest.raises(PlanError, match="changed while it was read"):
        plan(store, options, progress=lambda _: os.utime(options.dataset, ns=(5, 5)))
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_fit_is_refused_unless_allowed(made, tmp_path, monkeypatch):
    _, options = made
    store = open_store(tmp_path / "run")
    monkeypatch.setattr(type(store), "free_bytes", lambda _: 1_000)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("kept")
    with pytest.raises(PlanError, match=r"0\.0 GB are free"):
        plan(store, options)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]
    report = plan(store, dataclasses.replace(options, allow_low_space=True))
    assert not report.fits
    assert any("WARNING" in line for line in plan_lines(report))


def test_of_a_run_that_is_partly_stored_only_the_rest_must_fit(made, tmp_path, monkeypatch):
    _, options = made
    store = open_store(tmp_path / "run")
    spec = plan(store, options).spec
    record = RangeRecord(
        run_id=spec.run_id, range_id=0, shard=None, size_bytes=0, xxh3="", samples=spec.totals.samples,
        tokens=spec.totals.tokens - 100, worker="w", device="cpu", finished_at="",
    )  # fmt: skip
    store.create(names.record(0), to_json(record))
    monkeypatch.setattr(type(store), "free_bytes", lambda _: 100 * (48 + 5))
    report = plan(store, options)
    assert (report.reused, report.bytes_to_come, report.fits) == (True, 100 * (48 + 5), True)
    monkeypatch.setattr(type(store), "free_bytes", lambda _: 100 * (48 + 5) - 1)
    assert not plan(store, options).fits


def test_an_interrupted_plan_of_other_options_leaves_no_files_behind(made):
    _, options = made
    store = MemoryStore()
    store.write("tokens/00000.safetensors", [b"old"])
    store.write("tokens/00007.safetensors", [b"old"])
    plan(store, options)
    assert sorted(info.key for info in store.list(names.TOKENS)) == [
        "tokens/00000.safetensors", "tokens/rows.parquet",
    ]  # fmt: skip
    planned(store)


@pytest.mark.parametrize("where", [".", "runs/one"])
def test_a_run_inside_of_its_data_sets_folder_is_no_part_of_it(made, tmp_path, where):
    _, options = made
    folder = tmp_path / "data"
    folder.mkdir()
    Path(options.dataset).rename(folder / "d.parquet")
    options = dataclasses.replace(options, dataset=str(folder))
    first = plan(open_store(folder / where), options)
    assert [file.name for file in first.spec.dataset.files] == ["d.parquet"]
    assert plan(open_store(folder / where), options).reused
    assert plan(MemoryStore(), options).spec.fingerprint == first.spec.fingerprint


def test_masks_and_tools_that_are_not_read_are_said(made, tmp_path):
    _, options = made
    assert plan(MemoryStore(), options).warnings == ()
    columns = {"input_ids": [[1, 2]], "labels": [[-100, 2]], "attention_mask": [[1, 1]]}
    pq.write_table(pa.table(columns), tmp_path / "labels.parquet")
    options = dataclasses.replace(options, dataset=str(tmp_path / "labels.parquet"))
    (said,) = plan(store := MemoryStore(), options).warnings
    assert said.startswith("not read: labels, attention_mask; every token of a row, padding too")
    assert "computed and supervised" in said
    assert plan(store, options).warnings == (said,)  # of the run that is there, too
    pq.write_table(pa.table(columns | {"loss_mask": [[0, 1]]}), tmp_path / "labels.parquet")
    (said,) = plan(MemoryStore(), options).warnings
    assert "computed; cut" in said
    talk = [{"role": "user", "content": "q"}]
    rows = tmp_path / "tools.jsonl"
    rows.write_text(json.dumps({"messages": talk, "tools": [], "system": "s"}) + "\n")
    (said,) = open_dataset(rows).columns.warnings
    assert said == "not read: tools, system; the chat template sees the messages alone"


def test_a_users_data_set_in_a_folder_called_tokens_survives_a_plan_beside_it(made, tmp_path):
    _, options = made
    mine = tmp_path / "tokens" / "part-0.parquet"
    mine.parent.mkdir()
    Path(options.dataset).rename(mine)
    options = dataclasses.replace(options, dataset=str(mine.parent))
    with pytest.raises(PlanError, match="none of its 1 rows"):
        plan(open_store(tmp_path), dataclasses.replace(options, limit=1))
    assert mine.exists()
    plan(open_store(tmp_path), options)
    assert mine.exists()
    planned(open_store(tmp_path))


def test_two_plans_at_once_make_one_run(made, monkeypatch):
    _, options = made
    store, other = MemoryStore(), MemoryStore()
    winner = plan(other, options).spec
    create = store.create

    def lost(key, data):
        create(key, other.read(names.RUN))
        return create(key, data)

    monkeypatch.setattr(store, "create", lost)
    report = plan(store, options)
    assert report.reused
    assert report.spec == winner
    planned(store)


def test_the_loser_of_two_plans_of_other_inputs_says_that_it_hurt_the_winner(made, monkeypatch):
    _, options = made
    store, other = MemoryStore(), MemoryStore()
    winner = plan(other, dataclasses.replace(options, limit=400)).spec
    create = store.create

    def lost(key, data):
        create(key, other.read(names.RUN))
        return create(key, data)

    monkeypatch.setattr(store, "create", lost)
    with pytest.raises(RunMismatchError, match=r"tokens/00000\.safetensors: not the tokens that"):
        plan(store, options)
    for file in winner.token_files:  # the winner wrote after us
        store.write(file.name, [other.read(file.name)])
    monkeypatch.setattr(plan_module, "TokenWriter", lambda _: TokenWriter(MemoryStore()))
    store.delete(names.RUN)
    with pytest.raises(RunMismatchError, match="another plan was made here meanwhile"):
        plan(store, options)


def test_progress_is_told(made):
    _, options = made
    told = []
    plan(MemoryStore(), dataclasses.replace(options, limit=60), progress=told.append)
    assert (told[-1].rows, told[-1].samples, told[-1].rejected) == (60, 58, 2)
    assert told[-1].fraction == 1.0
    hashed = [one.fraction for one in told if one.step == "hashing"]
    assert (hashed[0] > 0, hashed[-1]) == (True, 1.0)
    assert [one.step for one in told] == sorted(one.step for one in told)


def test_ranges_are_cut_like_a_plain_loop_cuts_them():
    rng = np.random.default_rng(3)
    for form in ("packed", "padded"):
        for budget in (1, 7, 40, 1000):
            lengths = rng.integers(1, 50, 300)
            expected, start, count, total, longest = [0], 0, 0, 0, 0
            for i, n in enumerate(lengths.tolist()):
                cost = total + n if form == "packed" else max(longest, n) * (count + 1)
                if count and cost > budget:
                    expected.append(i)
                    start, count, total, longest = i, 0, 0, 0
                count, total, longest = count + 1, total + n, max(longest, n)
            assert start >= 0
            assert cut_ranges(lengths, budget, form).tolist() == expected
    assert cut_ranges(np.array([], np.int64), 5, "padded").tolist() == []
    assert computed_tokens(np.array([2, 3, 4]), np.array([0, 2]), "padded") == 10
    assert computed_tokens(np.array([2, 3, 4]), np.array([0, 2]), "packed") == 9


@pytest.mark.parametrize(("form", "order"), [("packed", "user"), ("padded", "length")])
def test_the_plan_does_not_depend_on_how_rows_come_in_blocks(form, order, monkeypatch):
    monkeypatch.setattr("producer.arrange.WINDOW_TOKENS", 2_000)
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 90, 1000)
    offsets = offsets_of(lengths)
    whole = SampleBlock(
        row=np.arange(1000),
        ids=pa.array(np.arange(1000)),
        input_ids=np.arange(offsets[-1], dtype=np.int32),
        loss_mask=np.ones(offsets[-1], np.uint8),
        offsets=offsets,
    )
    batching = Batching(form=form, order=order, window_rows=64, range_tokens=400)
    plans = []
    for step in (1, 17, 64, 1000):
        arranger, found = Arranger(batching), []
        for first in range(0, 1000, step):
            found += list(arranger.add(whole.slice(first, min(1000, first + step))))
        found += list(arranger.finish())
        ranges = [
            block.row[a:b].tolist()
            for block, starts in found
            for a, b in zip(starts, [*starts[1:], len(block)], strict=True)
        ]
        plans.append(ranges)
    assert plans[0] == plans[1] == plans[2] == plans[3]
    assert sorted(row for part in plans[0] for row in part) == list(range(1000))
    if order == "user":
        starts = cut_ranges(lengths, 400, form)
        assert [part[0] for part in plans[0]] == starts.tolist()


def test_reasons_are_counted_without_their_numbers():
    reasons = ["input id 5 at position 1 is bad", "input id 7 at position 3 is bad", "empty"]
    rejected = [Rejected(row=i, id=i, reason=r) for i, r in enumerate(reasons)]
    assert count_reasons(rejected) == {"input id N at position N is bad": 2, "empty": 1}


def test_the_histogram_has_a_bin_for_each_doubling():
    tally = Tally()
    tally.add_planned(np.array([1, 4, 7, 8, 2**20]), 0)
    bins = tally.summary()["length_histogram"]
    assert bins[:4] == [[1, 1, 1], [2, 3, 0], [4, 7, 2], [8, 15, 1]]
    assert bins[-1] == [2**20, 2**21 - 1, 1]
