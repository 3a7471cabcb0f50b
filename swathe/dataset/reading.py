"""The rows of a data set as blocks of samples: one step for each batch read, tokenized or encoded on the way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from swathe.dataset.checks import Limits, RawRows, Values, judge
from swathe.dataset.ids import ids_of_column, ids_of_rows, ids_of_values
from swathe.dataset.jsonl import JsonRow, read_objects
from swathe.dataset.source import Dataset
from swathe.dataset.tables import Flat, Undecodable, flatten, read_batches, to_values
from swathe.errors import PlanError
from swathe.samples import Encoder, Int64, Rejected, SampleBlock, offsets_of

_JSON_BATCH_ROWS: Final = 2_048
_JSON_BATCH_BYTES: Final = 16_000_000
_NOTHING: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStep:
    """One batch: its samples and its rejected rows, together ``rows``; ``fraction`` of the data set is read."""

    block: SampleBlock
    rejected: list[Rejected]
    rows: int
    fraction: float


def read_samples(
    dataset: Dataset, limits: Limits, *, encode: Encoder | None = None, max_rows: int | None = None
) -> Iterator[SampleStep]:
    """Read the data set once, in order, at most its first ``max_rows`` rows.

    ``encode`` turns messages or texts into tokens; tokenized data sets need none. Raises PlanError for a file that
    cannot be read; a bad row never raises.
    """
    if dataset.columns.content != "input_ids" and encode is None:
        msg = f"data set {dataset.location}: {dataset.columns.content} need a tokenizer"
        raise PlanError(msg)
    batches = _json_raw if dataset.format == "jsonl" else _table_raw
    for raw, fraction in batches(dataset, encode, max_rows):
        block, rejected = judge(raw, limits)
        rows = len(raw.row)
        wanted = (int(raw.row[-1]) + 1) / max_rows if max_rows else 0.0
        done = min(max(fraction, wanted), 1.0)
        yield SampleStep(block=block, rejected=rejected, rows=rows, fraction=done)


def _table_raw(
    dataset: Dataset, encode: Encoder | None, max_rows: int | None
) -> Iterator[tuple[RawRows, float]]:
    first = 0
    for whole, fraction in read_batches(dataset):
        batch = whole if max_rows is None else whole.slice(0, max_rows - first)
        if batch.num_rows == 0:
            if max_rows is not None and first >= max_rows:
                return
            continue
        row = np.arange(first, first + batch.num_rows, dtype=np.int64)
        first += batch.num_rows
        columns = dataset.columns
        has_id = columns.id is not None and columns.id in batch.schema.names
        ids = ids_of_column(batch.column(columns.id), row) if has_id else ids_of_rows(row)
        data = batch.column(columns.data)
        if encode is not None and columns.content != "input_ids":
            yield _encoded(row, ids, to_values(data), columns.data, encode), fraction
        else:
            mask = None if columns.mask is None else flatten(batch.column(columns.mask))
            yield _flat(row, ids, flatten(data), mask), fraction


def _flat(row: Int64, ids: pa.Array, data: Flat, mask: Flat | None) -> RawRows:
    raw = RawRows(
        row=row,
        ids=ids,
        values=data.values,
        offsets=data.offsets,
        mask=None if mask is None else mask.values,
        mask_offsets=data.offsets if mask is None else mask.offsets,
    )
    raw.reject(data.null_rows, "input_ids is null")
    raw.reject(data.rows_with_null_items, "input_ids holds null")
    if mask is not None:
        raw.reject(mask.null_rows, "loss_mask is null")
        raw.reject(mask.rows_with_null_items, "loss_mask holds null")
    return raw


def _encoded(
    row: Int64, ids: pa.Array, values: Sequence[Any], column: str, encode: Encoder
) -> RawRows:
    """Rows of messages or texts; those without a value are not shown to the encoder."""
    reasons: dict[int, str] = {}
    for place, value in enumerate(values):
        if value is None:
            reasons[place] = f"{column} is null"
        elif isinstance(value, Undecodable):
            reasons[place] = f"{column} is not UTF-8"
    places = [place for place in range(len(values)) if place not in reasons]
    samples = encode([values[place] for place in places])
    parts: list[Values] = [_NOTHING] * len(values)
    masks: list[Values] = [_NOTHING] * len(values)
    for place, sample in zip(places, samples, strict=True):
        if isinstance(sample, str):
            reasons[place] = sample
        else:
            parts[place], masks[place] = sample.input_ids, sample.loss_mask
    return _joined(row, ids, parts, masks, reasons)


def _joined(
    row: Int64,
    ids: pa.Array,
    parts: list[Values],
    masks: list[Values] | None,
    reasons: dict[int, str],
) -> RawRows:
    offsets = offsets_of(np.array([len(part) for part in parts], np.int64))
    return RawRows(
        row=row,
        ids=ids,
        values=np.concatenate(parts),
        offsets=offsets,
        mask=None if masks is None else np.concatenate(masks),
        mask_offsets=offsets if masks is None else offsets_of(np.array([len(m) for m in masks])),
        reasons=reasons,
    )


def _json_raw(
    dataset: Dataset, encode: Encoder | None, max_rows: int | None
) -> Iterator[tuple[RawRows, float]]:
    first, size_bytes = 0, 0
    pending: list[dict[str, Any] | str] = []
    for value, fraction in _json_rows(dataset):
        if max_rows is not None and first + len(pending) >= max_rows:
            break
        pending.append(value.row)
        size_bytes += value.size_bytes
        if len(pending) >= _JSON_BATCH_ROWS or size_bytes >= _JSON_BATCH_BYTES:
            yield _json_batch(dataset, first, pending, encode), fraction
            first, pending, size_bytes = first + len(pending), [], 0
    if pending:
        yield _json_batch(dataset, first, pending, encode), 1.0


def _json_rows(dataset: Dataset) -> Iterator[tuple[JsonRow, float]]:
    """All files' rows, with the fraction of the data set that is read."""
    total = sum(file.size_bytes for file in dataset.files) or 1
    done = 0
    for file in dataset.files:
        for value in read_objects(file):
            yield value, (done + value.fraction * file.size_bytes) / total
        done += file.size_bytes


def _json_batch(
    dataset: Dataset, first: int, rows: list[dict[str, Any] | str], encode: Encoder | None
) -> RawRows:
    columns = dataset.columns
    row = np.arange(first, first + len(rows), dtype=np.int64)
    objects: list[dict[str, Any]] = [value if isinstance(value, dict) else {} for value in rows]
    # Ids that begin after the first rows are ids all the same.
    ids = ids_of_values([value.get(columns.id or "id") for value in objects], row)
    broken = {place: value for place, value in enumerate(rows) if isinstance(value, str)}
    data = [value.get(columns.data) for value in objects]
    if encode is not None and columns.content != "input_ids":
        raw = _encoded(row, ids, data, columns.data, encode)
    else:
        raw = _json_tokens(row, ids, data, objects, columns.mask)
    raw.reasons.update(broken)
    return raw


def _json_tokens(
    row: Int64, ids: pa.Array, data: list[Any], objects: list[dict[str, Any]], mask: str | None
) -> RawRows:
    reasons: dict[int, str] = {}
    parts: list[Values] = []
    masks: list[Values] = []
    for place, value in enumerate(data):
        items = _numbers(value, "input_ids")
        if isinstance(items, str):
            reasons[place], items = items, _NOTHING
        parts.append(items)
        if mask is None:
            if "loss_mask" in objects[place]:
                reasons.setdefault(place, "has a loss_mask, which the file's first rows lack")
            continue
        flags = _numbers(objects[place].get(mask), "loss_mask", booleans=True)
        if isinstance(flags, str):
            reasons.setdefault(place, flags)
            flags = _NOTHING
        masks.append(flags)
    return _joined(row, ids, parts, None if mask is None else masks, reasons)


def _numbers(value: Any, name: str, *, booleans: bool = False) -> Values | str:
    """A JSON list of numbers as an array, or why it is none."""
    if not isinstance(value, list):
        return f"{name} is {'null' if value is None else 'no list'}"
    if not value:
        return _NOTHING
    try:
        array = np.array(value)
    except (ValueError, OverflowError):
        array = np.array(None)  # lists of unequal lengths, or numbers that no machine type holds
    # numpy makes integers of booleans among integers.
    numeric = array.ndim == 1 and array.dtype.kind in "iuf" and bool not in set(map(type, value))
    if numeric or (booleans and array.ndim == 1 and array.dtype.kind in "iufb"):
        return array
    if None in value:
        return f"{name} holds null"
    if all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
        return f"{name} holds a number out of range"
    return f"{name} is no flat list of numbers"
