"""A data set whose files and columns are known.

Everything that can be refused without reading rows is refused here: an unknown format, a column that one of many
files lacks, a column of a type that can never hold what is wanted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from swathe.dataset.choice import Format
from swathe.dataset.columns import Columns, check_mapping, check_types, choose_columns
from swathe.dataset.files import InputFile, for_each, unreadable
from swathe.dataset.finding import Found, find
from swathe.dataset.jsonl import first_keys
from swathe.errors import PlanError

_SNIFFED_ROWS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Where the rows stand and what they are made of; they are not read yet."""

    location: str
    format: Format
    files: tuple[InputFile, ...]
    columns: Columns
    given_columns: dict[str, str] = field(default_factory=dict)


def open_dataset(
    location: str | Path, columns: Mapping[str, str] | None = None, *, split: str | None = None
) -> Dataset:
    """Find a data set and check the columns of all its files.

    ``columns`` maps our names (input_ids, loss_mask, id, messages, text) to the user's; ``split`` is SPLIT or
    SUBSET/SPLIT of a data set that has several. Raises PlanError when there
    is no data set or a column is missing, ConfigError for a mapping that makes no sense.
    """
    given = dict(columns or {})
    check_mapping(given)
    found = find(str(location), split)
    choose = _from_keys if found.format == "jsonl" else _from_schemas
    return Dataset(
        location=found.location,
        format=found.format,
        files=found.files,
        columns=choose(found, given),
        given_columns=given,
    )


def _from_keys(found: Found, given: Mapping[str, str]) -> Columns:
    keys = for_each(found.files, lambda file: first_keys(file, _SNIFFED_ROWS))
    filled = [(file, names) for file, names in keys if names is not None]
    if not filled:
        msg = f"{found.location}: no rows; nothing to plan"
        raise PlanError(msg)
    return choose_columns(filled, given, note=f" (its first {_SNIFFED_ROWS} rows)")


def _from_schemas(found: Found, given: Mapping[str, str]) -> Columns:
    schemas = for_each(found.files, lambda file: _schema(found.format, file))
    columns = choose_columns([(file, schema.names) for file, schema in schemas], given)
    for file, schema in schemas:
        check_types(file, schema, columns)
    return columns


def _schema(kind: Format, file: InputFile) -> Any:
    try:
        with file.open(whole=False) as source:
            if kind == "parquet":
                return pq.read_schema(source)
            return pa.ipc.open_stream(source).schema
    except (pa.ArrowException, OSError) as error:
        raise unreadable(file, error) from error
