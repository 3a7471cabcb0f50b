"""JSON lines compressed or not, one file or many: the same rows, streamed, and damage named with its place."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swathe.dataset import Limits, open_dataset, read_samples
from swathe.errors import PlanError

LIMITS = Limits(vocab_rows=1000)
SUFFIXES = [".jsonl", ".jsonl.gz", ".jsonl.zst"]


def lines_of(values):
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def packed(suffix, text):
    """Text as a file of that suffix holds it."""
    if suffix.endswith(".gz"):
        return gzip.compress(text, compresslevel=1)
    if suffix.endswith(".zst"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(text)
        return sink.getvalue().to_pybytes()
    return text


def rows_of(dataset, **options):
    steps = list(read_samples(dataset, LIMITS, **options))
    assert not [bad for step in steps for bad in step.rejected]
    return [
        step.block.input_ids[step.block.offsets[i] : step.block.offsets[i + 1]].tolist()
        for step in steps
        for i in range(len(step.block))
    ]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_are_the_same_however_they_are_compressed(tmp_path, suffix):
    rows = [[i % 1000, 7] for i in range(5000)]
    text = lines_of({"input_ids": row, "text": "ü\u2028x"} for row in rows)
    path = tmp_path / f"d{suffix}"
    path.write_bytes(packed(suffix, text))
    dataset = open_dataset(path)
    assert dataset.format == "jsonl"
    assert rows_of(dataset) == rows
    assert rows_of(dataset, max_rows=11) == rows[:11]


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_file_of_several_compressed_pieces_is_read_to_its_end(tmp_path, suffix):
    pieces = [lines_of({"input_ids": [i]} for i in range(first, first + 9)) for first in (0, 9)]
    path = tmp_path / f"d{suffix}"
    path.write_bytes(b"".join(packed(suffix, piece) for piece in pieces))
    assert rows_of(open_dataset(path)) == [[i] for i in range(18)]


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_compressed_file_is_inflated_as_it_is_read(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 1000, 600_000).tolist()
    text = lines_of({"input_ids": noise[i : i + 100]} for i in range(0, 600_000, 100))
    path = tmp_path / f"d{suffix}"
    path.write_bytes(packed(suffix, text * 4))
    steps = read_samples(open_dataset(path), LIMITS)
    assert next(steps).fraction < 0.5


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_torn_file_is_an_error_that_names_the_file_and_the_place(tmp_path, suffix):
    noise = np.random.default_rng(0).integers(0, 1000, 600_000).tolist()
    text = lines_of({"input_ids": noise[i : i + 100]} for i in range(0, 600_000, 100))
    data = packed(suffix, text)
    path = tmp_path / f"d{suffix}"
    path.write_bytes(data[: len(data) * 3 // 4])
    dataset = open_dataset(path)
    with pytest.raises(PlanError, match=rf"d\{suffix}: unreadable after line [0-9]{{4}} \(Trunc"):
        rows_of(dataset)
    path.write_bytes(data[:20] + b"\xff" * 40 + data[60:])
    with pytest.raises(PlanError, match=rf"d\{suffix}: unreadable"):
        rows_of(open_dataset(path))


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_file_that_only_bears_the_name_is_an_error(tmp_path, suffix):
    path = tmp_path / f"d{suffix}"
    path.write_bytes(lines_of([{"input_ids": [1]}]))
    with pytest.raises(PlanError, match="unreadable from its first line on") as caught:
        open_dataset(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_read_in_sorted_order_whatever_compresses_each_file(tmp_path):
    places = {"b.jsonl": 20, "a/x.jsonl.zst": 0, "a/y.jsonl.gz": 10, ".hidden.jsonl": 90}
    (tmp_path / "d" / "a").mkdir(parents=True)
    for name, first in places.items():
        text = lines_of({"input_ids": [first + i]} for i in range(10))
        (tmp_path / "d" / name).write_bytes(packed(name, text))
    (tmp_path / "d" / "0.jsonl").write_text("\n")
    dataset = open_dataset(tmp_path / "d")
    assert [file.name for file in dataset.files][:2] == ["0.jsonl", "a/x.jsonl.zst"]
    assert rows_of(dataset) == [[i] for i in range(30)]
    steps = list(read_samples(dataset, LIMITS))
    assert steps[-1].fraction == 1.0


def test_a_file_of_a_folder_that_lacks_the_column_is_named(tmp_path):
    (tmp_path / "0.jsonl").write_bytes(lines_of([{"input_ids": [1]}]))
    (tmp_path / "1.jsonl").write_bytes(lines_of([{"tokens": [1]}]))
    with pytest.raises(PlanError, match=r"1\.jsonl \(its first 100 rows\): no column input_ids"):
        open_dataset(tmp_path)


def test_a_folder_of_two_kinds_is_refused(tmp_path):
    (tmp_path / "0.jsonl").write_bytes(lines_of([{"input_ids": [1]}]))
    pq.write_table(pa.table({"input_ids": [[1]]}), tmp_path / "1.parquet")
    with pytest.raises(PlanError, match="holds jsonl and parquet files"):
        open_dataset(tmp_path)
