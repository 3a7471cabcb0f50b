"""A store's object as a file: any reads give its bytes, and no byte is asked for twice without need."""

import io
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swathe.dataset.files import InputFile
from swathe.dataset.remote import BLOCK_BYTES, ReadAhead, RemoteFile
from swathe.dataset.tables import _parquet_batches
from swathe.errors import StoreError
from swathe.store.memory import MemoryStore


class Counting(MemoryStore):
    def __init__(self):
        super().__init__()
        self.asked = []

    def read_range(self, key, offset, size_bytes):
        self.asked.append((offset, size_bytes))
        return super().read_range(key, offset, size_bytes)


def store_of(data):
    store = Counting()
    store.write("k", [data])
    return store


@pytest.mark.parametrize("kind", [RemoteFile, ReadAhead])
def test_reads_at_random_places_give_what_a_file_in_memory_gives(kind):
    data = random.Random(1).randbytes(5 * BLOCK_BYTES // 2 + 17)
    plain, rng = io.BytesIO(data), random.Random(2)
    with kind(store_of(data), "k", len(data)) as file:
        for _ in range(60):
            whence = rng.choice([io.SEEK_SET, io.SEEK_END])
            offset = rng.randrange(len(data)) * (1 if whence == io.SEEK_SET else -1)
            assert file.seek(offset, whence) == plain.seek(offset, whence)
            size = rng.choice([0, 1, 1000, BLOCK_BYTES, 2 * BLOCK_BYTES])
            assert file.read(size) == plain.read(size)
            assert file.tell() == plain.tell()
        file.seek(0)
        assert file.read() == data


def test_a_sequential_read_asks_for_every_byte_once_and_runs_ahead():
    data = random.Random(1).randbytes(20 * BLOCK_BYTES + 5)
    store = store_of(data)
    with ReadAhead(store, "k", len(data)) as file:
        first = file.read(10)
        assert file._blocks.keys() == {0, 1, 2, 3}
        parts = [first]
        while part := file.read(300_001):
            parts.append(part)
            assert len(file._blocks) <= 4
    assert b"".join(parts) == data
    assert sorted(store.asked) == [
        (at, min(BLOCK_BYTES, len(data) - at)) for at in range(0, len(data), BLOCK_BYTES)
    ]


def test_the_columns_of_a_parquet_file_are_read_side_by_side_and_each_byte_once():
    rng = np.random.default_rng(0)
    table = pa.table({f"c{i}": rng.random(1_500_000) for i in range(10)})
    table = table.append_column("few", pa.array(rng.integers(0, 9, 1_500_000)))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=800_000, use_dictionary=["few"])
    data = sink.getvalue().to_pybytes()
    store = store_of(data)
    file = InputFile.of(store, store.stat("k"))
    batches = [batch for batch, _ in _parquet_batches(file, table.column_names)]
    assert pa.Table.from_batches(batches).equals(table)
    footer = 2 * 65_536
    assert sum(size for _, size in store.asked) <= len(data) + footer


def test_a_file_that_became_shorter_is_an_error():
    store = store_of(b"x" * 100)
    with RemoteFile(store, "k", 200) as file, pytest.raises(StoreError, match="ends at byte 100"):
        file.read()
