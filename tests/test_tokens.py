"""Planned tokens come back range by range exactly as they were written, and damage is named."""

import dataclasses
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swathe import names
from swathe.errors import FormatError, RunMismatchError
from swathe.samples import SampleBlock, offsets_of
from swathe.spec import (
    Batching,
    DatasetSpec,
    LayerSlot,
    ModelSpec,
    Policies,
    RangeId,
    RunId,
    RunSpec,
    Totals,
)
from swathe.store.memory import MemoryStore
from swathe.tokens import TokenReader, TokenWriter, check_files, read_range


def block_of(lengths, first_row=0, ids=None):
    offsets = offsets_of(lengths)
    rows = np.arange(first_row, first_row + len(lengths))
    return SampleBlock(
        row=rows,
        ids=pa.array(rows if ids is None else ids),
        input_ids=(np.arange(offsets[-1]) + 1000 * first_row).astype(np.int32),
        loss_mask=(np.arange(offsets[-1]) % 2).astype(np.uint8),
        offsets=offsets,
    )


def spec_of(files):
    samples, tokens = sum(f.samples for f in files), sum(f.tokens for f in files)
    return RunSpec(
        run_id=RunId("r"),
        fingerprint="f",
        dataset=DatasetSpec(location="d", format="parquet", content="input_ids"),
        model=ModelSpec(
            source="m",
            model_type="llama",
            hidden_size=8,
            num_layers=2,
            vocab_rows=10,
            checkpoint_dtype="float32",
            config_sha256="c",
        ),
        layers=(LayerSlot(slot=0, layer=0, meaning="block 0"),),
        compute_dtype="float32",
        stored_dtype="float32",
        batching=Batching(form="padded", order="user", window_rows=1, range_tokens=10),
        policies=Policies(),
        totals=Totals(
            rows=samples,
            samples=samples,
            tokens=tokens,
            rejected=0,
            ranges=sum(f.ranges for f in files),
            longest=1,
        ),
        token_files=files,
    )


def write_two_files(store):
    writer = TokenWriter(store, file_tokens=20)
    writer.add(block_of([3, 4, 5, 6]), np.array([0, 2, 3]))
    writer.add(block_of([7, 8], first_row=4, ids=["x", "y"]), np.array([0, 1]))
    return spec_of(writer.close())


def test_every_range_comes_back_with_offsets_from_zero():
    store = MemoryStore()
    spec = write_two_files(store)
    assert [(f.first_range, f.ranges, f.samples, f.tokens) for f in spec.token_files] == [
        (0, 4, 5, 25), (4, 1, 1, 8),
    ]  # fmt: skip
    reader = TokenReader(store, spec)
    tokens = [reader.read_range(i) for i in spec.range_ids]
    assert [t.rows.tolist() for t in tokens] == [[0, 1], [2], [3], [4], [5]]
    assert [t.offsets.tolist() for t in tokens] == [[0, 3, 7], [0, 5], [0, 6], [0, 7], [0, 8]]
    assert tokens[1].input_ids.tolist() == [7, 8, 9, 10, 11]
    assert tokens[1].loss_mask.tolist() == [1, 0, 1, 0, 1]
    assert tokens[4].input_ids.tolist() == list(range(4007, 4015))
    assert tokens[4].input_ids.dtype == np.int32
    assert tokens[4].loss_mask.dtype == np.uint8
    np.testing.assert_array_equal(read_range(store, spec, RangeId(0)).input_ids, np.arange(7))


def test_rows_parquet_lists_row_id_and_length_and_makes_mixed_ids_text():
    store = MemoryStore()
    write_two_files(store)
    table = pq.read_table(io.BytesIO(store.read(names.TOKEN_ROWS)))
    assert table.to_pydict() == {
        "row": [0, 1, 2, 3, 4, 5],
        "id": ["0", "1", "2", "3", "x", "y"],
        "length": [3, 4, 5, 6, 7, 8],
    }


def test_a_range_larger_than_a_file_gets_a_file_of_its_own():
    store = MemoryStore()
    writer = TokenWriter(store, file_tokens=5)
    writer.add(block_of([2, 30, 2]), np.array([0, 1, 2]))
    spec = spec_of(writer.close())
    assert sum(f.ranges for f in spec.token_files) == 3
    assert [len(read_range(store, spec, i).input_ids) for i in spec.range_ids] == [2, 30, 2]


def test_a_range_outside_the_plan_is_refused():
    store = MemoryStore()
    with pytest.raises(FormatError, match="range 5 is not in the plan"):
        read_range(store, write_two_files(store), RangeId(5))


@pytest.mark.parametrize("harm", ["cut", "another plan's", "one bit", "removed"])
def test_a_file_that_is_not_the_planned_one_is_named_and_no_range_is_blamed(harm):
    store = MemoryStore()
    spec = write_two_files(store)
    first = spec.token_files[0]
    data = store.read(first.name)
    if harm == "cut":
        store.write(first.name, [data[:-1]])
    elif harm == "another plan's":
        writer = TokenWriter(store, file_tokens=20)
        block = block_of([3, 4, 5, 6])
        other = dataclasses.replace(block, input_ids=block.input_ids + np.int32(1))
        writer.add(other, np.array([0, 2, 3]))
        writer.add(block_of([7, 8], first_row=4, ids=["x", "y"]), np.array([0, 1]))
        other = writer.close()[0]
        assert (other.name, other.size_bytes) == (first.name, first.size_bytes)
    elif harm == "one bit":
        store.write(first.name, [data[:-1] + bytes([data[-1] ^ 1])])
    else:
        store.delete(first.name)
    says = {"cut": "bytes, [0-9]+ planned", "removed": "not there"}.get(harm, "another hash")
    reader = TokenReader(store, spec)
    with pytest.raises(RunMismatchError, match=rf"tokens/00000\.safetensors: .*{says}"):
        reader.read_range(RangeId(0))
    with pytest.raises(RunMismatchError):
        check_files(store, spec)
    assert len(reader.read_range(RangeId(4)).rows) == 1, "ranges of other files are as they were"
    store.write(first.name, [data])
    assert len(reader.read_range(RangeId(0)).rows) == 2
    check_files(store, spec)


def test_a_file_is_read_once_for_all_of_its_ranges_by_all_threads():
    class Counting(MemoryStore):
        reads = 0

        def read(self, key):
            self.reads += 1
            return super().read(key)

    store = Counting()
    spec = write_two_files(store)
    reader = TokenReader(store, spec)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(reader.read_range, list(spec.range_ids) * 20))
    assert [t.range_id for t in found] == list(spec.range_ids) * 20
    assert store.reads == 2


def test_no_more_than_a_few_files_are_held():
    store = MemoryStore()
    writer = TokenWriter(store, file_tokens=1)
    writer.add(block_of([2] * 12), np.arange(12))
    spec = spec_of(writer.close())
    assert len(spec.token_files) == 12
    reader = TokenReader(store, spec)
    for range_id in [*spec.range_ids, *reversed(spec.range_ids)]:
        assert reader.read_range(range_id).rows.tolist() == [range_id]
        assert len(reader._held) <= 4
