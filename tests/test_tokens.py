"""Planned tokens come back range by range exactly as they were written, and damage is named."""

import dataclasses
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swathe import names
from swathe.errors import FormatError, IntegrityError
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
from swathe.tokens import TokenReader, TokenWriter, read_range


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


def test_cut_missing_and_exchanged_files_are_named():
    store = MemoryStore()
    spec = write_two_files(store)
    first, second = (f.name for f in spec.token_files)
    data = store.read(first)
    store.write(first, [data[:-1]])
    with pytest.raises(IntegrityError, match=r"tokens/00000\.safetensors") as caught:
        read_range(store, spec, RangeId(0))
    assert caught.value.key == first
    store.write(first, [store.read(second)])
    exchanged = dataclasses.replace(spec.token_files[0], size_bytes=spec.token_files[1].size_bytes)
    with pytest.raises(IntegrityError, match="not those of the plan"):
        read_range(store, spec_of((exchanged, spec.token_files[1])), RangeId(0))
    store.delete(first)
    with pytest.raises(IntegrityError, match="not there"):
        read_range(store, spec, RangeId(0))


def test_offsets_that_do_not_ascend_are_refused():
    store = MemoryStore()
    spec = write_two_files(store)
    first = spec.token_files[0].name
    data = store.read(first).replace(
        np.array([0, 3, 7, 12, 18]).tobytes(), np.array([0, 7, 3, 12, 18]).tobytes()
    )
    store.write(first, [data])
    with pytest.raises(IntegrityError, match="ascend"):
        read_range(store, spec, RangeId(0))
