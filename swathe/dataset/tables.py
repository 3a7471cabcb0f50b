"""Parquet files and Arrow streams as record batches of a few megabytes, and their columns as flat arrays."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from swathe.dataset.checks import Values
from swathe.dataset.files import InputFile, unreadable
from swathe.dataset.source import Dataset
from swathe.samples import Int64

_BATCH_BYTES: Final = 32_000_000
_MAX_BATCH_ROWS: Final = 16_384
_BUFFER_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A ragged column: values [T], offsets [n + 1] from 0, and the places of rows with nulls."""

    values: Values
    offsets: Int64
    null_rows: Int64
    rows_with_null_items: Int64


def read_batches(dataset: Dataset) -> Iterator[tuple[pa.RecordBatch, float]]:
    """All rows' wanted columns in order, with the fraction of the data set's bytes that is read.

    Raises PlanError naming the file that cannot be read.
    """
    total = sum(file.size_bytes for file in dataset.files) or 1
    done = 0
    for file in dataset.files:
        reader = _parquet_batches if dataset.format == "parquet" else _stream_batches
        try:
            for batch, fraction in reader(file, dataset.columns.names):
                yield batch, (done + fraction * file.size_bytes) / total
        except (pa.ArrowException, OSError) as error:
            raise unreadable(file, error) from error
        done += file.size_bytes


def _parquet_batches(file: InputFile, columns: list[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    with file.open(whole=False) as stored:
        metadata = pq.read_metadata(stored)
    # Buffered streams and small batches: a row group of gigabytes is decoded page by page, never held whole.
    with (
        file.open(edges=_chunk_starts(metadata)) as stored,
        pq.ParquetFile(
            stored, metadata=metadata, pre_buffer=False, buffer_size=_BUFFER_BYTES
        ) as source,
    ):
        names = [name for name in columns if name in source.schema_arrow.names]
        total, rows = max(metadata.num_rows, 1), 0
        for batch in source.iter_batches(batch_size=_batch_rows(metadata, names), columns=names):
            rows += batch.num_rows
            yield batch, rows / total


def _chunk_starts(metadata: Any) -> list[int]:
    """Where the columns of each row group begin in the file."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    return [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]


def _batch_rows(metadata: Any, names: list[str]) -> int:
    """Rows whose decoded columns are about 32 MB, by the densest row group."""
    dense = 1.0
    for group in (metadata.row_group(i) for i in range(metadata.num_row_groups)):
        size_bytes = 0
        for chunk in (group.column(i) for i in range(group.num_columns)):
            if chunk.path_in_schema.partition(".")[0] in names:
                # A dictionary or run lengths make the encoded size small: count eight bytes a value at least.
                size_bytes += max(chunk.total_uncompressed_size, 8 * chunk.num_values)
        dense = max(dense, size_bytes / max(group.num_rows, 1))
    return max(1, min(_MAX_BATCH_ROWS, int(_BATCH_BYTES / dense)))


def _stream_batches(file: InputFile, columns: list[str]) -> Iterator[tuple[pa.RecordBatch, float]]:
    with file.open() as source:
        names = pa.ipc.open_stream(source).schema.names
        source.seek(0)
        fields = [names.index(name) for name in columns if name in names]
        options = pa.ipc.IpcReadOptions(included_fields=fields)
        for batch in pa.ipc.open_stream(source, options=options):
            yield batch, source.tell() / max(file.size_bytes, 1)


def flatten(column: pa.Array) -> Flat:
    """A column of lists of numbers without a Python object a row. Null items become 0, their rows are named."""
    nothing = np.empty(0, np.int64)
    if pa.types.is_null(column.type):
        zeros = np.zeros(len(column) + 1, np.int64)
        return Flat(
            values=nothing,
            offsets=zeros,
            null_rows=np.arange(len(column)),
            rows_with_null_items=nothing,
        )
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        column = column.cast(pa.large_list(column.type.value_type))
    offsets = column.offsets.to_numpy().astype(np.int64)
    items = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    offsets -= offsets[0]
    bad_items = nothing
    if items.null_count:
        if pa.types.is_null(items.type):
            items = items.cast(pa.int64())
        positions = np.flatnonzero(items.is_null().to_numpy(zero_copy_only=False))
        bad_items = np.unique(np.searchsorted(offsets, positions, side="right") - 1)
        items = pc.fill_null(items, False if pa.types.is_boolean(items.type) else 0)
    null_rows = nothing
    if column.null_count:
        null_rows = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
    values = items.to_numpy(zero_copy_only=False)
    return Flat(values=values, offsets=offsets, null_rows=null_rows, rows_with_null_items=bad_items)


def to_values(column: pa.Array) -> list[Any]:
    """A column as Python values; a row whose text is not UTF-8 becomes an Undecodable.

    Fields that are null are left out, however deep: a column's structs all have the fields of all rows, so the arguments of
    one tool's call come with those of every other tool as null, and a template would write them.
    """
    try:
        values: list[Any] = _without_null_fields(column.to_pylist(maps_as_pydicts="lossy"))
    except UnicodeDecodeError:
        return [_one_value(column, place) for place in range(len(column))]
    return values


class Undecodable:
    """Stands for a value whose bytes are no text."""


def _one_value(column: pa.Array, place: int) -> Any:
    try:
        return _without_null_fields(column[place].as_py(maps_as_pydicts="lossy"))
    except UnicodeDecodeError:
        return Undecodable()


def _without_null_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_null_fields(v) for k, v in value.items() if v is not None}
    return [_without_null_fields(item) for item in value] if isinstance(value, list) else value
