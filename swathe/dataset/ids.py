"""Ids of rows: integers stay integers of the same value, strings stay strings, a missing one is the row's number.

A block's ids are an Arrow array, int64 or string. Kinds that differ inside a data set all become text at the end
(``samples.join_ids``), because a column of a table has one type. A null among strings is the row's number as text.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from swathe.samples import INT_IDS, TEXT_IDS, Int64

_LOW: Final = -(2**63)
_HIGH: Final = 2**63


def ids_of_rows(row: Int64) -> pa.Array:
    """The ids of rows that have none."""
    return pa.array(row, INT_IDS)


def ids_of_column(column: pa.Array, row: Int64) -> pa.Array:
    """The ids of a column of any type."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind, types = column.type, pa.types
    if types.is_null(kind):
        return ids_of_rows(row)
    if types.is_integer(kind):
        return _integer_ids(column, row)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return _text_ids(column, row)
    if types.is_floating(kind):
        return _float_ids(column, row)
    return ids_of_values(column.to_pylist(), row)


def _integer_ids(column: pa.Array, row: Int64) -> pa.Array:
    try:
        return pc.fill_null(column.cast(INT_IDS), ids_of_rows(row))
    except pa.ArrowInvalid:  # uint64 beyond int64
        return pc.fill_null(column.cast(TEXT_IDS), ids_of_rows(row).cast(TEXT_IDS))


def _float_ids(column: pa.Array, row: Int64) -> pa.Array:
    # One null row turns the integers of a whole file into floats on the way through pandas.
    values = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    missing = column.is_null().to_numpy(zero_copy_only=False) | np.isnan(values)
    values = np.where(missing, 0.0, values)
    if bool((np.abs(values) < _HIGH).all() and (values == np.floor(values)).all()):
        return pa.array(np.where(missing, row, values.astype(np.int64)), INT_IDS)
    return ids_of_values(column.to_pylist(), row)


def _text_ids(column: pa.Array, row: Int64) -> pa.Array:
    column = column.cast(TEXT_IDS)
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:  # parquet does not check that its strings are UTF-8
        raw = column.view(pa.binary()).to_pylist()
        text = [None if value is None else value.decode(errors="backslashreplace") for value in raw]
        column = pa.array(text, TEXT_IDS)
    return pc.fill_null(column, ids_of_rows(row).cast(TEXT_IDS)) if column.null_count else column


def ids_of_values(values: Sequence[Any], row: Int64) -> pa.Array:
    """The ids of Python values; None (or NaN) is a missing one."""
    plain = [_plain(value, int(number)) for value, number in zip(values, row, strict=True)]
    if all(isinstance(value, int) for value in plain):
        return pa.array(plain, INT_IDS)
    return pa.array([str(value) for value in plain], TEXT_IDS)


def _plain(value: Any, row: int) -> int | str:
    """An id as an int64 or a text that is UTF-8."""
    if value is None or value != value:  # noqa: PLR0124 - NaN, whatever its type
        return row
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value if _LOW <= value < _HIGH else str(value)
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    is_json = isinstance(value, bool | list | dict)
    text = json.dumps(value, ensure_ascii=False, default=str) if is_json else str(value)
    return text.encode(errors="backslashreplace").decode()
