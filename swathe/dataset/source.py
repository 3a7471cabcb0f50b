"""Finding a data set: which format, which files in which order, which columns mean what.

Everything that can be refused without reading rows is refused here: an unknown format, a column that one of many
files lacks, a column of a type that can never hold what is wanted.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from swathe.dataset.jsonl import read_objects
from swathe.errors import ConfigError, PlanError
from swathe.spec import Content

_CONTENTS: Final[tuple[tuple[str, Content], ...]] = (
    ("input_ids", "input_ids"),
    ("messages", "messages"),
    ("conversations", "messages"),
    ("text", "text"),
)
"""Columns that are looked for, first found wins, and what they hold."""
_OURS: Final = ("input_ids", "loss_mask", "id", "messages", "text")
_SNIFFED_ROWS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file of the data set; ``name`` is relative to the data set's folder."""

    name: str
    path: Path
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The user's names of the columns that are read."""

    content: Content
    data: str
    mask: str | None = None
    id: str | None = None

    @property
    def names(self) -> list[str]:
        """All columns to be read."""
        return [name for name in (self.data, self.mask, self.id) if name is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A data set whose files and columns are known; its rows are not read yet."""

    location: str
    format: Literal["jsonl", "parquet", "arrow"]
    files: tuple[InputFile, ...]
    columns: Columns
    given_columns: dict[str, str] = field(default_factory=dict)


def open_dataset(location: str | Path, columns: Mapping[str, str] | None = None) -> Dataset:
    """Find a data set and check the columns of all its files.

    ``columns`` maps our names (input_ids, loss_mask, id, messages, text) to the user's. Raises PlanError when there
    is no data set or a column is missing, ConfigError for a mapping that makes no sense.
    """
    given = _check_mapping(columns or {})
    root = Path(location).expanduser().absolute()
    kind, paths = _find(root, str(location))
    base = root if root.is_dir() else root.parent
    files = tuple(_input_file(path, base) for path in paths)
    if kind == "jsonl":
        keys, where = _sniff(files[0]), f"{files[0].path} (its first {_SNIFFED_ROWS} rows)"
        chosen = _choose(keys, given, where)
    else:
        chosen = _choose_from_schemas(kind, files, given)
    return Dataset(
        location=str(root), format=kind, files=files, columns=chosen, given_columns=dict(given)
    )


def _check_mapping(columns: Mapping[str, str]) -> Mapping[str, str]:
    for ours in columns:
        if ours not in _OURS:
            msg = f"columns: {ours} is no column of ours; map one of {', '.join(_OURS)} to yours"
            raise ConfigError(msg)
    contents = [ours for ours in columns if ours in ("input_ids", "messages", "text")]
    if len(contents) > 1:
        msg = f"columns: {' and '.join(contents)} are both mapped; a data set is read from one of them"
        raise ConfigError(msg)
    return columns


def _find(root: Path, location: str) -> tuple[Literal["jsonl", "parquet", "arrow"], Sequence[Path]]:
    if root.is_file() and root.suffix == ".jsonl":
        return "jsonl", [root]
    if root.is_file() and root.suffix == ".parquet":
        return "parquet", [root]
    if root.is_file():
        msg = f"data set {location}: {root.suffix or 'no suffix'} is not read; use .jsonl, .parquet or a saved folder"
        raise PlanError(msg)
    if not root.is_dir():
        hint = "copy it to a local folder" if "://" in location else "check the path"
        msg = f"data set {location}: no such file or folder; {hint}"
        raise PlanError(msg)
    if (root / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in root.glob("*/state.json"))
        msg = f"data set {location}: holds the splits {', '.join(splits)}; choose one: {location}/{(splits or ['train'])[0]}"
        raise PlanError(msg)
    if (root / "state.json").is_file():
        return "arrow", _saved_files(root)
    parts = [path.relative_to(root) for path in root.rglob("*.parquet") if path.is_file()]
    shown = [part for part in parts if not any(name.startswith((".", "_")) for name in part.parts)]
    if not shown:
        msg = f"data set {location}: a folder without .parquet files and no datasets.save_to_disk folder"
        raise PlanError(msg)
    return "parquet", [root / part for part in sorted(shown, key=lambda part: part.as_posix())]


def _saved_files(root: Path) -> list[Path]:
    """The files of a ``datasets.save_to_disk`` folder, in its own order."""
    try:
        state: dict[str, Any] = json.loads((root / "state.json").read_bytes())
        paths = [root / entry["filename"] for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{root}/state.json: unreadable ({error}); save the data set again"
        raise PlanError(msg) from error
    if state.get("_indices_data_files"):
        msg = f"{root}: saved with an indices mapping; call flatten_indices() and save it again"
        raise PlanError(msg)
    for path in paths:
        if not path.is_file():
            msg = f"{path}: listed in state.json but not there; copy the whole folder"
            raise PlanError(msg)
    if not paths:
        msg = f"{root}: state.json lists no data files; the data set is empty"
        raise PlanError(msg)
    return paths


def _input_file(path: Path, base: Path) -> InputFile:
    info = path.stat()
    return InputFile(
        name=path.relative_to(base).as_posix(),
        path=path,
        size_bytes=info.st_size,
        mtime_ns=info.st_mtime_ns,
    )


def _sniff(file: InputFile) -> list[str]:
    """Keys of the first rows, in order of appearance."""
    keys: dict[str, None] = {}
    rows = 0
    try:
        for value in islice(read_objects(file.path), _SNIFFED_ROWS):
            rows += 1
            keys.update(dict.fromkeys(value.row) if isinstance(value.row, dict) else {})
    except OSError as error:
        raise unreadable(file.path, error) from error
    if rows == 0:
        msg = f"{file.path}: no rows; nothing to plan"
        raise PlanError(msg)
    return list(keys)


def _choose(names: Sequence[str], given: Mapping[str, str], where: str) -> Columns:
    """Which columns are read, out of those that are there. Raises PlanError when one is missing."""
    for ours, theirs in given.items():
        if theirs not in names:
            raise PlanError(_missing(where, theirs, names, f"{ours} is mapped to it"))
    mapped = [(theirs, ours) for ours, theirs in given.items() if ours in dict(_CONTENTS)]
    found = [(name, content) for name, content in _CONTENTS if name in names]
    if not mapped and not found:
        wanted = "input_ids, messages, conversations or text"
        raise PlanError(_missing(where, wanted, names, "map yours with --columns"))
    data, content = (mapped or found)[0]
    mask = given.get("loss_mask", "loss_mask")
    return Columns(
        content=dict(_CONTENTS)[content],
        data=data,
        mask=mask if content == "input_ids" and mask in names else None,
        id=given.get("id") or ("id" if "id" in names else None),
    )


def _missing(where: str, column: str, names: Sequence[str], hint: str) -> str:
    return f"{where}: no column {column} ({hint}); it has {', '.join(names) or 'no columns'}"


def _choose_from_schemas(
    kind: str, files: Sequence[InputFile], given: Mapping[str, str]
) -> Columns:
    chosen: Columns | None = None
    has_id = False
    for file in files:
        schema = read_schema(kind, file.path)
        chosen = chosen or _choose(schema.names, given, str(file.path))
        required = [chosen.data, chosen.mask, given.get("id")]
        for column in required:
            if column is not None and column not in schema.names:
                hint = f"{files[0].name} has it"
                raise PlanError(_missing(str(file.path), column, schema.names, hint))
        _check_type(file, chosen.data, chosen.content, schema.field(chosen.data).type)
        if chosen.mask is not None:
            _check_type(file, chosen.mask, "loss_mask", schema.field(chosen.mask).type)
        has_id = has_id or "id" in schema.names
    if chosen is None:
        msg = "data set without files"
        raise PlanError(msg)
    if chosen.id is None and has_id:  # the first file lacks ids that a later one has
        return Columns(content=chosen.content, data=chosen.data, mask=chosen.mask, id="id")
    return chosen


def read_schema(kind: str, path: Path) -> Any:
    """The Arrow schema of a file. Raises PlanError naming the file when it cannot be read."""
    try:
        if kind == "parquet":
            return pq.read_schema(path)
        with pa.OSFile(str(path)) as source:
            return pa.ipc.open_stream(source).schema
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> PlanError:
    """The error for a file that cannot be read."""
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return PlanError(f"{path}: unreadable ({first_line}); nothing was planned; replace the file")


def _check_type(file: InputFile, column: str, wanted: str, kind: Any) -> None:
    """Refuse a column whose type can never hold what is wanted; a null column only rejects its rows."""
    types = pa.types
    ragged = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if wanted in ("input_ids", "loss_mask"):
        item = kind.value_type if ragged else None
        numeric = item is not None and (
            types.is_integer(item) or types.is_floating(item) or types.is_null(item)
        )
        boolean = item is not None and wanted == "loss_mask" and types.is_boolean(item)
        fits, says = numeric or boolean, "lists of integers"
    elif wanted == "messages":
        fits, says = ragged or types.is_struct(kind), "lists of messages"
    else:
        fits, says = types.is_string(kind) or types.is_large_string(kind), "strings"
    if not fits and not types.is_null(kind):
        msg = f"{file.path}: column {column} is {kind}, {says} wanted; map another with --columns"
        raise PlanError(msg)
