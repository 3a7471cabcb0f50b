"""Every row of a data set ends as a sample or as one rejection, in every format, and neighbours are right."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swathe.dataset import Limits, open_dataset, read_samples
from swathe.errors import ConfigError, PlanError
from swathe.samples import Encoded, join_blocks, join_ids

LIMITS = Limits(vocab_rows=100, max_length=6)


def read(dataset, limits=LIMITS, **options):
    """(samples by row: (id, input_ids, loss_mask), rejections by row: (id, reason))."""
    steps = list(read_samples(dataset, limits, **options))
    rejected = [r for step in steps for r in step.rejected]
    block = join_blocks([step.block for step in steps if len(step.block)])
    ids = block.ids.to_pylist()
    samples = {
        int(row): (
            ids[i],
            block.input_ids[block.offsets[i] : block.offsets[i + 1]].tolist(),
            block.loss_mask[block.offsets[i] : block.offsets[i + 1]].tolist(),
        )
        for i, row in enumerate(block.row)
    }
    assert len(samples) == len(block)
    assert sum(step.rows for step in steps) == len(samples) + len(rejected)
    assert not samples.keys() & {r.row for r in rejected}
    assert samples.keys() | {r.row for r in rejected} == set(range(len(samples) + len(rejected)))
    assert [s.fraction for s in steps] == sorted(s.fraction for s in steps)
    assert 0.9 < steps[-1].fraction <= 1.0
    return samples, {r.row: (r.id, r.reason) for r in rejected}


def write_jsonl(path, rows):
    path.write_bytes(
        b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows)
    )
    return path


def write_parquet(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


BAD_ROWS = [
    ({"input_ids": [], "loss_mask": [], "id": 3}, "empty"),
    ({"input_ids": None, "loss_mask": [1], "id": 3}, "input_ids is null"),
    ({"input_ids": [1, 2], "loss_mask": [1], "id": 3}, "loss_mask has 1 entries for 2 input_ids"),
    ({"input_ids": [1, 2], "loss_mask": None, "id": 3}, "loss_mask is null"),
    ({"input_ids": [1, 2], "loss_mask": [1, 2], "id": 3}, "loss_mask holds 2, neither 0 nor 1"),
    ({"input_ids": [1, None], "loss_mask": [1, 1], "id": 3}, "input_ids holds null"),
    ({"input_ids": [1, 2], "loss_mask": [None, 1], "id": 3}, "loss_mask holds null"),
    ({"input_ids": [1, 2.5], "loss_mask": [1, 1], "id": 3}, "input_ids holds 2.5, no integer"),
    ({"input_ids": [5, 100], "loss_mask": [1, 1], "id": 3}, "input id 100 at position 1 is out of"),
    ({"input_ids": [-1, 5], "loss_mask": [1, 1], "id": 3}, "input id -1 at position 0 is out of"),
    ({"input_ids": [1] * 7, "loss_mask": [1] * 7, "id": 3}, "too long (7 tokens, 6 allowed)"),
    (
        {"input_ids": [1, 2], "loss_mask": [0, 0], "id": 3},
        "too few supervised tokens (0, 1 wanted)",
    ),
]
GOOD = [
    {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1], "id": 1},
    {"input_ids": [4.0, 99.0], "loss_mask": [1, 0], "id": 1},
]
JSON_ONLY = [
    (b"{not json", "not JSON"),
    (b'{"input_ids": [1, 2], "text": "\xff"}', "not UTF-8"),
    (b"[1, 2]", "no JSON object"),
    (b"[" * 100_000, "nested too deep"),
    ({"input_ids": ["a"], "loss_mask": [1]}, "input_ids is no flat list of numbers"),
    ({"input_ids": [[1], [2, 3]], "loss_mask": [1]}, "input_ids is no flat list of numbers"),
    ({"input_ids": [True], "loss_mask": [1]}, "input_ids is no flat list of numbers"),
    ({"input_ids": [5, True], "loss_mask": [1, 1]}, "input_ids is no flat list of numbers"),
    ({"input_ids": "12", "loss_mask": [1]}, "input_ids is no list"),
    ({"input_ids": [2**70], "loss_mask": [1]}, "input_ids holds a number out of range"),
    ({"input_ids": [2**63], "loss_mask": [1]}, "out of range"),
    ({"loss_mask": [1]}, "input_ids is null"),
    ({"input_ids": [1]}, "loss_mask is null"),
    (b'{"input_ids": [NaN], "loss_mask": [1]}', "input_ids holds nan, no integer"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS + JSON_ONLY)
def test_a_bad_json_row_is_listed_once_and_its_neighbours_are_right(tmp_path, bad, reason):
    path = write_jsonl(tmp_path / "d.jsonl", [GOOD[0], bad, GOOD[1]])
    samples, rejected = read(open_dataset(path))
    assert samples == {0: (1, [7, 8, 9], [0, 1, 1]), 2: (1, [4, 99], [1, 0])}
    assert list(rejected) == [1]
    assert reason in rejected[1][1]


@pytest.mark.parametrize(("bad", "reason"), BAD_ROWS)
def test_a_bad_parquet_row_is_listed_once_and_its_neighbours_are_right(tmp_path, bad, reason):
    rows = [GOOD[0], bad, GOOD[1]]
    columns = {name: [row[name] for row in rows] for name in GOOD[0]}
    columns["input_ids"] = pa.array(
        [r and [None if v is None else float(v) for v in r] for r in columns["input_ids"]],
        pa.list_(pa.float64()),
    )
    path = write_parquet(tmp_path / "d.parquet", columns)
    samples, rejected = read(open_dataset(path))
    assert samples == {0: (1, [7, 8, 9], [0, 1, 1]), 2: (1, [4, 99], [1, 0])}
    assert rejected.keys() == {1}
    assert rejected[1][0] == 3
    assert reason in rejected[1][1]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int8()), pa.list_(pa.uint16()), pa.list_(pa.int64()), pa.large_list(pa.int32()),
        pa.list_(pa.uint64()), pa.list_(pa.int32(), 3), pa.list_(pa.float32()),
    ],
)  # fmt: skip
def test_ids_of_every_number_type_are_read(tmp_path, kind):
    table = {"input_ids": pa.array([[7, 8, 9], None, [4, 5, 99]], kind)}
    samples, rejected = read(open_dataset(write_parquet(tmp_path / "d.parquet", table)))
    assert samples == {0: (0, [7, 8, 9], [1, 1, 1]), 2: (2, [4, 5, 99], [1, 1, 1])}
    assert rejected == {1: (1, "input_ids is null")}


def test_masks_of_booleans_and_floats_are_read(tmp_path):
    for number, kind in enumerate([pa.bool_(), pa.float32(), pa.int64()]):
        mask = pa.array([[0, 1], [1, 1]], pa.list_(pa.int8())).cast(pa.list_(kind))
        path = write_parquet(
            tmp_path / f"{number}.parquet", {"input_ids": [[1, 2], [3, 4]], "loss_mask": mask}
        )
        assert read(open_dataset(path))[0] == {0: (0, [1, 2], [0, 1]), 1: (1, [3, 4], [1, 1])}


def test_blank_lines_are_no_rows_and_line_ends_may_be_anything(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"input_ids": [1]}\r\n\n  \n{"input_ids": [2], "t": "a\xe2\x80\xa8b"}\n\n{"input_ids": [3]}'
    )
    samples, rejected = read(open_dataset(path))
    assert [ids for _, ids, _ in samples.values()] == [[1], [2], [3]]
    assert list(samples) == [0, 1, 2]
    assert not rejected


def test_over_long_rows_are_cut_when_asked_for_and_judged_after_that(tmp_path):
    rows = [
        {"input_ids": [1] * 9, "loss_mask": [0] * 8 + [1]},
        {"input_ids": list(range(9)), "loss_mask": [1] * 9},
        {"input_ids": [5, 6], "loss_mask": [1, 1]},
    ]
    limits = Limits(vocab_rows=100, max_length=4, overlong="truncate")
    samples, rejected = read(open_dataset(write_jsonl(tmp_path / "d.jsonl", rows)), limits)
    assert samples == {1: (1, [0, 1, 2, 3], [1] * 4), 2: (2, [5, 6], [1, 1])}
    assert rejected == {0: (0, "too few supervised tokens (0, 1 wanted)")}


def test_too_few_supervised_tokens_are_rejected_by_the_policy(tmp_path):
    rows = [{"input_ids": [1, 2, 3], "loss_mask": m} for m in ([0, 1, 1], [0, 0, 1], [0, 0, 0])]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    assert list(read(open_dataset(path), Limits(vocab_rows=9, min_supervised=2))[0]) == [0]
    assert list(read(open_dataset(path), Limits(vocab_rows=9, min_supervised=0))[0]) == [0, 1, 2]


def test_too_small_a_share_of_supervised_tokens_is_rejected_after_the_cut(tmp_path):
    masks = [[1] * 7 + [0] * 93, [1] * 6 + [0] * 94, [0] * 100 + [1] * 9, [1], [0]]
    rows = [{"input_ids": [1] * len(m), "loss_mask": m} for m in masks]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    limits = Limits(vocab_rows=9, min_supervised_ratio=0.07, max_length=100, overlong="truncate")
    samples, rejected = read(open_dataset(path), limits)
    assert list(samples) == [0, 3]  # 0.07 of 100 tokens are 7, not 7.000000000000001
    assert [reason for _, reason in rejected.values()] == [
        "too few supervised tokens (6, 7 wanted)",
        "too few supervised tokens (0, 7 wanted)",
        "too few supervised tokens (0, 1 wanted)",
    ]
    every = Limits(vocab_rows=9, min_supervised_ratio=1.0)
    assert list(read(open_dataset(path), every)[0]) == [3]


def test_short_rows_are_rejected_by_the_policy(tmp_path):
    rows = [{"input_ids": [1] * n} for n in (3, 2, 1, 0)]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    samples, rejected = read(open_dataset(path), Limits(vocab_rows=9, min_length=3))
    assert list(samples) == [0]
    assert [reason for _, reason in rejected.values()] == [
        "too short (2 tokens, 3 wanted)", "too short (1 tokens, 3 wanted)", "empty",
    ]  # fmt: skip


def test_a_folder_of_parquet_is_read_in_sorted_order_across_row_groups(tmp_path):
    expected = []
    for name, first in (("b/1.parquet", 50), ("a/9.parquet", 0), ("a/8.parquet", 20)):
        rows = [[first + i] * (1 + i % 3) for i in range(20)]
        write_parquet(tmp_path / "d" / name, {"input_ids": rows}, row_group_size=7)
    (tmp_path / "d" / "_SUCCESS.parquet").write_text("")
    for first in (20, 0, 50):
        expected += [[first + i] * (1 + i % 3) for i in range(20)]
    dataset = open_dataset(tmp_path / "d")
    assert [f.name for f in dataset.files] == ["a/8.parquet", "a/9.parquet", "b/1.parquet"]
    samples, _ = read(dataset)
    assert [samples[i][1] for i in range(60)] == expected
    assert [samples[i][0] for i in range(60)] == list(range(60))


def test_a_subfolder_that_is_a_link_is_read_and_one_that_leads_back_up_is_not(tmp_path):
    write_jsonl(tmp_path / "0.jsonl", [GOOD[0]])
    for name in ("d", "other"):
        (tmp_path / name).mkdir()
    write_jsonl(tmp_path / "other" / "b.jsonl", [GOOD[1]])
    (tmp_path / "d" / "a.jsonl").symlink_to(tmp_path / "0.jsonl")
    (tmp_path / "d" / "more").symlink_to(tmp_path / "other")
    (tmp_path / "d" / "again").symlink_to(tmp_path / "d")
    dataset = open_dataset(tmp_path / "d")
    assert [file.name for file in dataset.files] == ["a.jsonl", "more/b.jsonl"]


def test_a_null_typed_file_rejects_its_rows_only(tmp_path):
    write_parquet(tmp_path / "d" / "0.parquet", {"input_ids": [[1], [2]], "id": ["a", "b"]})
    write_parquet(tmp_path / "d" / "1.parquet", {"input_ids": pa.nulls(2), "id": pa.nulls(2)})
    write_parquet(tmp_path / "d" / "2.parquet", {"input_ids": [[3]], "id": ["c"]})
    samples, rejected = read(open_dataset(tmp_path / "d"))
    assert samples == {0: ("a", [1], [1]), 1: ("b", [2], [1]), 4: ("c", [3], [1])}
    assert rejected == {2: (2, "input_ids is null"), 3: (3, "input_ids is null")}


def test_a_column_that_one_file_lacks_is_named_with_the_file(tmp_path):
    write_parquet(tmp_path / "d" / "0.parquet", {"input_ids": [[1]], "loss_mask": [[1]]})
    write_parquet(tmp_path / "d" / "7.parquet", {"input_ids": [[1]], "other": [1]})
    with pytest.raises(
        PlanError, match=r"7\.parquet: no column loss_mask .* it has input_ids, other"
    ):
        open_dataset(tmp_path / "d")


def test_ids_come_from_the_files_that_have_them(tmp_path):
    write_parquet(tmp_path / "d" / "0.parquet", {"input_ids": [[1]]})
    write_parquet(tmp_path / "d" / "1.parquet", {"input_ids": [[2]], "id": [70]})
    samples, _ = read(open_dataset(tmp_path / "d"))
    assert [samples[row][0] for row in (0, 1)] == [0, 70]


def test_a_column_of_the_wrong_type_is_refused_before_reading(tmp_path):
    path = write_parquet(tmp_path / "d.parquet", {"input_ids": ["1 2"]})
    with pytest.raises(PlanError, match="column input_ids is string, lists of integers wanted"):
        open_dataset(path)
    path = write_parquet(tmp_path / "t.parquet", {"text": [1]})
    with pytest.raises(PlanError, match="column text is int64, strings wanted"):
        open_dataset(path)


def test_one_huge_row_group_is_read_in_small_batches(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1200, 20_000)
    values = rng.integers(0, 50, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    column = pa.LargeListArray.from_arrays(offsets, values)
    path = write_parquet(tmp_path / "d.parquet", {"input_ids": column}, row_group_size=20_000)
    steps = list(read_samples(open_dataset(path), Limits(vocab_rows=50)))
    assert max(step.rows for step in steps) < 10_000
    np.testing.assert_array_equal(np.concatenate([s.block.input_ids for s in steps]), values)


def test_ids_stay_integers_of_the_same_value_when_a_null_made_their_column_float(tmp_path):
    column = pa.array([2**52 + 1.0, None, float("nan"), -4.0])
    path = write_parquet(tmp_path / "d.parquet", {"input_ids": [[1]] * 4, "id": column})
    samples, _ = read(open_dataset(path))
    assert [samples[i][0] for i in range(4)] == [2**52 + 1, 1, 2, -4]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([5, None, 5], [5, 1, 5]),
        (["a", None, "a"], ["a", "1", "a"]),
        ([1, "a", 2], ["1", "a", "2"]),
        ([0.5, 2.0, None], ["0.5", "2", "2"]),
        ([2**63, 1, 2], ["9223372036854775808", "1", "2"]),
        ([{"k": 1}, True, [2]], ['{"k": 1}', "true", "[2]"]),
        (["\ud800", "ü", "z"], ["\\ud800", "ü", "z"]),
    ],
)
def test_ids_of_any_kind_have_a_defined_form(tmp_path, given, expected):
    rows = [{"input_ids": [1], "id": value} for value in given]
    samples, _ = read(open_dataset(write_jsonl(tmp_path / "d.jsonl", rows)))
    assert [samples[i][0] for i in range(3)] == expected


def test_ids_that_are_strings_in_a_later_file_make_all_of_them_text():
    assert join_ids([pa.array([1, 2]), pa.array(["x"])]).to_pylist() == ["1", "2", "x"]


def test_text_that_is_not_utf8_hurts_only_its_row(tmp_path):
    raw = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    ids = pa.array([b"a", b"b\xff", b"c"], pa.binary()).view(pa.string())
    path = write_parquet(tmp_path / "d.parquet", {"text": raw, "id": ids})

    def encode(values):
        return [
            Encoded(input_ids=np.array([len(v)], np.int32), loss_mask=np.ones(1, np.uint8))
            for v in values
        ]

    samples, rejected = read(open_dataset(path), encode=encode)
    assert samples == {0: ("a", [4], [1]), 2: ("c", [4], [1])}
    assert rejected == {1: ("b\\xff", "text is not UTF-8")}


def test_encoded_rows_keep_their_reasons_and_places(tmp_path):
    rows = [{"messages": [1]}, {"messages": None}, {"messages": [2, 2]}, {"messages": [3]}]
    path = write_jsonl(tmp_path / "d.jsonl", rows)

    def encode(values):
        return [
            "no good"
            if len(v) == 2
            else Encoded(input_ids=np.array(v, np.int32), loss_mask=np.ones(1, np.uint8))
            for v in values
        ]

    samples, rejected = read(open_dataset(path), encode=encode)
    assert samples == {0: (0, [1], [1]), 3: (3, [3], [1])}
    assert rejected == {1: (1, "messages is null"), 2: (2, "no good")}


def test_columns_are_mapped_from_the_users_names(tmp_path):
    rows = [{"toks": [1, 2], "m": [0, 1], "uuid": "x", "text": "unused"}]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    dataset = open_dataset(path, {"input_ids": "toks", "loss_mask": "m", "id": "uuid"})
    assert read(dataset)[0] == {0: ("x", [1, 2], [0, 1])}
    with pytest.raises(PlanError, match=r"no column tokens \(input_ids is mapped to it\); it has"):
        open_dataset(path, {"input_ids": "tokens"})
    with pytest.raises(ConfigError, match="tokens is no column of ours"):
        open_dataset(path, {"tokens": "toks"})
    with pytest.raises(ConfigError, match="input_ids and text are both mapped"):
        open_dataset(path, {"input_ids": "toks", "text": "text"})


@pytest.mark.parametrize(
    ("keys", "content", "data"),
    [
        (["text", "input_ids", "messages"], "input_ids", "input_ids"),
        (["text", "conversations"], "messages", "conversations"),
        (["conversations", "messages"], "messages", "messages"),
        (["text"], "text", "text"),
    ],
)
def test_the_content_is_found_by_its_columns(tmp_path, keys, content, data):
    columns = open_dataset(write_jsonl(tmp_path / "d.jsonl", [dict.fromkeys(keys)])).columns
    assert (columns.content, columns.data) == (content, data)


def test_a_limit_takes_the_first_rows_in_every_format(tmp_path):
    rows = [[i] for i in range(50)]
    parquet = write_parquet(tmp_path / "d.parquet", {"input_ids": rows}, row_group_size=7)
    jsonl = write_jsonl(tmp_path / "d.jsonl", [{"input_ids": r} for r in rows])
    for path in (parquet, jsonl):
        assert list(read(open_dataset(path), max_rows=11)[0]) == list(range(11))
        assert list(read(open_dataset(path), max_rows=99)[0]) == list(range(50))


def test_a_saved_folder_of_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {
        "input_ids": [[1, 2], [3], [], [4, 5, 6]],
        "id": ["a", "b", "c", "d"],
        "x": [1, 2, 3, 4],
    }
    made = datasets.Dataset.from_dict(rows)
    made.save_to_disk(str(tmp_path / "d"), num_shards=2)
    samples, rejected = read(open_dataset(tmp_path / "d"))
    assert samples == {
        0: ("a", [1, 2], [1, 1]), 1: ("b", [3], [1]), 3: ("d", [4, 5, 6], [1, 1, 1]),
    }  # fmt: skip
    assert rejected == {2: ("c", "empty")}
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "dict"))
    with pytest.raises(PlanError, match="holds the splits train"):
        open_dataset(tmp_path / "dict")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none.jsonl", "no such file or folder; check the path"),
        ("gs://bucket/d", "give a path, an s3:// URL or a hub id"),
        ("d.csv", ".csv is not read"),
        ("empty", "nothing there that ends in .jsonl, .jsonl.gz, .jsonl.zst, .parquet"),
        ("bad.parquet", "unreadable"),
        ("empty.jsonl", "no rows"),
    ],
)
def test_what_is_no_data_set_is_one_clear_line(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.csv").write_text("a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_text("PAR1")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(PlanError) as caught:
        open_dataset(name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="max_length 0"):
        Limits(vocab_rows=1, max_length=0)
    with pytest.raises(ConfigError, match="min_length 0"):
        Limits(vocab_rows=1, min_length=0)
    with pytest.raises(ConfigError, match="min_length 9 is more than max_length 8"):
        Limits(vocab_rows=1, min_length=9, max_length=8)
    for ratio in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="min_supervised_ratio"):
            Limits(vocab_rows=1, min_supervised_ratio=ratio)


def test_a_thousand_random_rows_are_judged_like_a_plain_loop_judges_them(tmp_path):
    rng = np.random.default_rng(7)
    rows = []
    for _ in range(1000):
        n = int(rng.integers(0, 9))
        ids = rng.integers(-1, 104, n).clip(0 if rng.random() < 0.7 else -1, 103)
        ids = ids if rng.random() < 0.5 else ids % 100
        mask = rng.integers(0, 2, n + int(rng.random() < 0.1))
        rows.append(
            None
            if rng.random() < 0.05
            else ([int(i) for i in ids], None if rng.random() < 0.05 else [int(m) for m in mask])
        )
    columns = {"input_ids": [r and r[0] for r in rows], "loss_mask": [r and r[1] for r in rows]}
    expected = {
        i: (i, *row)
        for i, row in enumerate(rows)
        if row
        and row[1] is not None
        and 0 < len(row[0]) <= 6
        and len(row[0]) == len(row[1])
        and all(0 <= v < 100 for v in row[0])
        and sum(row[1]) >= 1
    }
    path = write_parquet(tmp_path / "d.parquet", columns, row_group_size=90)
    samples, rejected = read(open_dataset(path))
    assert samples == expected
    assert len(rejected) == 1000 - len(expected)
    lines = [{"input_ids": a, "loss_mask": b} for a, b in zip(*columns.values(), strict=True)]
    assert read(open_dataset(write_jsonl(tmp_path / "d.jsonl", lines))) == (samples, rejected)
