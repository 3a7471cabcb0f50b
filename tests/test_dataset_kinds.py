"""Columns as people have them: every width of number, every kind of id, any Unicode, schemas that differ by file."""

import dataclasses
import datetime as dt
import io
import json
import uuid
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producer.plan import PlanOptions, plan
from swathe import names
from swathe.dataset import Limits, open_dataset, read_samples
from swathe.errors import PlanError
from swathe.samples import Encoded
from swathe.store.memory import MemoryStore

LIMITS = Limits(vocab_rows=100)
WIDTHS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "dtype": "bfloat16",
}


def read(location, **options):
    """({row: (id, ids of the sample)}, {row: (id, reason)})."""
    steps = list(read_samples(open_dataset(location), LIMITS, **options))
    samples = {
        int(row): (
            step.block.ids[i].as_py(),
            step.block.input_ids[step.block.offsets[i] : step.block.offsets[i + 1]].tolist(),
        )
        for step in steps
        for i, row in enumerate(step.block.row)
    }
    return samples, {bad.row: (bad.id, bad.reason) for step in steps for bad in step.rejected}


def write(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def code_points(values):
    """An encoder that needs no tokenizer."""
    return [
        Encoded(input_ids=np.array([len(v)], np.int32), loss_mask=np.ones(1, np.uint8))
        for v in values
    ]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("saved", [False, True])
def test_ids_of_every_width_are_read_and_those_out_of_range_rejected(tmp_path, width, saved):
    limits = np.iinfo(width)
    extremes = sorted({int(limits.min), int(limits.max), 100} - {0})
    column = pa.array(
        [[0, 99], *([5, value] for value in extremes), [7]], pa.list_(pa.type_for_alias(width))
    )
    if saved:
        datasets = pytest.importorskip("datasets")
        datasets.Dataset(pa.table({"input_ids": column})).save_to_disk(str(tmp_path / "d"))
        path = tmp_path / "d"
    else:
        path = write(tmp_path / "d.parquet", input_ids=column)
    samples, rejected = read(path)
    last = len(extremes) + 1
    assert samples == {0: (0, [0, 99]), last: (last, [7])}
    assert rejected == {
        row: (row, f"input id {value} at position 1 is out of range: the model has 100 rows")
        for row, value in enumerate(extremes, start=1)
    }


@pytest.mark.parametrize(
    "kind",
    [pa.list_view(pa.int32()), pa.large_list_view(pa.uint16()), pa.list_(pa.float16())],
)
def test_lists_of_newer_kinds_are_read(tmp_path, kind):
    column = pa.array([[7, 8], None, [], [9]], kind)
    samples, rejected = read(write(tmp_path / "d.parquet", input_ids=column))
    assert samples == {0: (0, [7, 8]), 3: (3, [9])}
    assert rejected == {1: (1, "input_ids is null"), 2: (2, "empty")}


@pytest.mark.parametrize("kind", [pa.string_view(), pa.large_string(), "dictionary"])
def test_texts_and_ids_of_every_kind_of_string_are_read(tmp_path, kind):
    values = ["ab", None, "abc", "ab"]
    column = (
        pa.array(values).dictionary_encode() if kind == "dictionary" else pa.array(values, kind)
    )
    samples, rejected = read(
        write(tmp_path / "d.parquet", text=column, id=column), encode=code_points
    )
    assert samples == {0: ("ab", [2]), 2: ("abc", [3]), 3: ("ab", [2])}
    assert rejected == {1: ("1", "text is null")}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (pa.array([b"ab", b"c\xff\x00", None]), ["ab", "c\\xff\x00", "2"]),
        (
            pa.array([uuid.UUID(int=1).bytes, uuid.UUID(int=2).bytes, None], pa.uuid()),
            [str(uuid.UUID(int=1)), str(uuid.UUID(int=2)), "2"],
        ),
        (pa.array([dt.date(2026, 1, 2), None, None]), ["2026-01-02", "1", "2"]),
        (pa.array([Decimal("1.50"), Decimal("2.00"), None]), ["1.50", "2.00", "2"]),
        (pa.array([True, None, False]), ["true", "1", "false"]),
        (pa.array([7, None, 9], pa.uint8()), [7, 1, 9]),
        (pa.array([2**64 - 1, 3, None], pa.uint64()), ["18446744073709551615", "3", "2"]),
        (pa.array([[1, 2], None, []]), ["[1, 2]", "1", "[]"]),
        (pa.array([{"a": 1}, {"a": None}, None]), ['{"a": 1}', '{"a": null}', "2"]),
        (pa.nulls(3), [0, 1, 2]),
    ],
)  # fmt: skip
def test_ids_of_every_column_type_have_a_defined_form(tmp_path, given, expected):
    path = write(tmp_path / "d.parquet", input_ids=[[1]] * 3, id=given)
    assert [read(path)[0][row][0] for row in range(3)] == expected


def test_a_folder_whose_files_have_other_schemas_is_read_by_its_columns(tmp_path):
    d = tmp_path / "d"
    write(d / "0.parquet", input_ids=pa.array([[1, 2]], pa.list_(pa.int64())), id=[5], extra=["x"])
    write(
        d / "1.parquet", more=[1.5], id=["s"], input_ids=pa.array([[3]], pa.large_list(pa.uint16()))
    )
    write(d / "2.parquet", input_ids=pa.array([[4, 5]], pa.list_(pa.int8(), 2)))
    write(d / "3.parquet", id=pa.array([b"b"]), input_ids=pa.array([[6.0]], pa.list_(pa.float32())))
    write(
        d / "4.parquet", id=pa.array([], pa.int32()), input_ids=pa.array([], pa.list_(pa.int32()))
    )
    samples, rejected = read(d)
    assert samples == {0: (5, [1, 2]), 1: ("s", [3]), 2: (2, [4, 5]), 3: ("b", [6])}
    assert not rejected


def test_messages_whose_fields_differ_by_file_are_read(tmp_path):
    d = tmp_path / "d"
    write(d / "0.parquet", messages=[[{"role": "user", "content": "q"}]])
    parts = [[{"content": [{"type": "text", "text": "q"}], "role": "user", "name": None}]]
    write(d / "1.parquet", messages=parts, id=["a"])
    write(d / "2.parquet", messages=pa.nulls(1), id=["b"])
    seen = []

    def encode(values):
        seen.extend(values)
        return code_points(values)

    samples, rejected = read(d, encode=encode)
    del parts[0][0]["name"]
    assert seen == [[{"role": "user", "content": "q"}], *parts]
    assert samples == {0: (0, [1]), 1: ("a", [1])}
    assert rejected == {2: ("b", "messages is null")}


CALLS = [
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"function": {"name": n, "arguments": arguments}}]},
    ]
    for n, arguments in (("weather", {"city": "Oslo"}), ("add", {"a": [1, 2]}), ("now", {}))
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_arguments_of_one_tool_do_not_come_with_those_of_all_others(tmp_path, kind):
    path = tmp_path / f"d.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in CALLS))
    elif kind == "parquet":
        write(path, messages=CALLS)
    else:
        pytest.importorskip("datasets").Dataset(pa.table({"messages": CALLS})).save_to_disk(
            str(path)
        )
    seen = []
    read(path, encode=lambda values: seen.extend(values) or code_points(["a"] * len(values)))
    assert seen == CALLS


def test_messages_that_are_maps_are_read(tmp_path):
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    rows = [[[("role", "user"), ("content", "q")], [("role", "assistant"), ("content", None)]]]
    write(tmp_path / "d.parquet", messages=pa.array(rows, kind))
    seen = []
    read(tmp_path / "d.parquet", encode=lambda v: seen.extend(v) or code_points(["a"]))
    assert seen == [[{"role": "user", "content": "q"}, {"role": "assistant"}]]


def test_float16_ids_are_judged_by_the_whole_vocabulary(tmp_path):
    ids = pa.array([[50240.0], [50272.0]], pa.list_(pa.float16()))
    path = write(tmp_path / "d.parquet", input_ids=ids)
    for vocab_rows, kept in ((50_250, [0]), (50_273, [0, 1]), (128_256, [0, 1])):
        (step,) = read_samples(open_dataset(path), Limits(vocab_rows=vocab_rows))
        assert step.block.row.tolist() == kept


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    table = pa.table([pa.array([[1]]), pa.array([[2]])], names=["input_ids", "input_ids"])
    pq.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(PlanError, match="has 2 columns input_ids"):
        read(tmp_path / "d.parquet")


ODD = [
    "a\x00b",
    "\ufeffbom",
    "line\u2028para\u2029\x85next",
    "e\u0301 \u202eright to left",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\ufffe\uffff\U0010ffff",
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_odd_unicode_comes_through_a_plan_unchanged(tmp_path, kind):
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    rows = [
        *({"input_ids": [1], "id": odd} for odd in ODD),
        {"input_ids": [], "id": "bad\x00\u2028"},
    ]
    path = tmp_path / f"d.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    else:
        ids, tokens = [row["id"] for row in rows], [row["input_ids"] for row in rows]
        write(path, input_ids=pa.array(tokens, pa.list_(pa.uint16())), id=ids)
    store = MemoryStore()
    plan(
        store, PlanOptions(dataset=str(path), model=f"random:{tmp_path / 'tiny.json'}", final=True)
    )
    table = pq.read_table(io.BytesIO(store.read(names.TOKEN_ROWS)))
    assert table.column("id").to_pylist() == ODD
    lines = store.read(names.REJECTED).decode().split("\n")
    assert json.loads(lines[0]) == {"row": 6, "id": "bad\x00\u2028", "reason": "empty"}
    assert lines[1:] == [""]


def test_lone_surrogates_in_ids_and_reasons_come_through_a_plan(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    rows = [{"input_ids": [1], "id": "\ud800x"}, {"input_ids": ["\udfff"], "id": "\udc00"}]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = PlanOptions(dataset=str(path), model=f"random:{tmp_path / 'tiny.json'}", final=True)
    store = MemoryStore()
    plan(store, dataclasses.replace(options))
    table = pq.read_table(io.BytesIO(store.read(names.TOKEN_ROWS)))
    assert table.column("id").to_pylist() == ["\\ud800x"]
    assert json.loads(store.read(names.REJECTED))["id"] == "\\udc00"


def test_a_mask_that_only_some_files_have_is_refused(tmp_path):
    write(tmp_path / "0.parquet", input_ids=[[1, 2]])
    write(tmp_path / "1.parquet", input_ids=[[1, 2]], loss_mask=[[0, 1]])
    with pytest.raises(PlanError, match=r"0\.parquet: no column loss_mask \(1\.parquet has it\)"):
        open_dataset(tmp_path)


def test_json_masks_and_ids_that_begin_late_are_not_passed_over(tmp_path):
    rows = [{"input_ids": [1, 2]}] * 150
    rows += [{"input_ids": [1, 2], "loss_mask": [0, 1]}, {"input_ids": [3], "id": "late"}]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples, rejected = read(path)
    assert rejected == {150: ("150", "has a loss_mask, which the file's first rows lack")}
    assert samples[151] == ("late", [3])
