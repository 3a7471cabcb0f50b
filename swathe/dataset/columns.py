"""Which columns of a data set mean what: the user's mapping, the names that are there, and their types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from swathe.dataset.files import InputFile
from swathe.errors import ConfigError, PlanError
from swathe.spec import Content

_CONTENTS: Final[tuple[tuple[str, Content], ...]] = (
    ("input_ids", "input_ids"),
    ("messages", "messages"),
    ("conversations", "messages"),
    ("text", "text"),
)
"""Columns that are looked for, first found wins, and what they hold."""
_UNREAD: Final[Mapping[Content, tuple[str, ...]]] = {
    "input_ids": ("labels", "attention_mask", "assistant_masks", "completion_mask"),
    "messages": ("tools", "system", "chat_template_kwargs"),
    "text": (),
}
"""Columns that other tools read with these contents, and this one does not."""
_OURS: Final = ("input_ids", "loss_mask", "id", "messages", "text")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The user's names of the columns that are read."""

    content: Content
    data: str
    mask: str | None = None
    id: str | None = None
    unread: tuple[str, ...] = ()
    """Columns that are there, mean something to other tools, and are not read."""

    @property
    def warnings(self) -> list[str]:
        """What the operator should know about columns that are not read, in one line."""
        if not self.unread:
            return []
        columns = f"not read: {', '.join(self.unread)}"
        if self.content == "messages":
            return [f"{columns}; the chat template sees the messages alone"]
        supervised = "" if self.mask else " and supervised"
        return [
            (
                f"{columns}; every token of a row, padding too, is computed{supervised}; cut padding off, and give a mask "
                "of 0 and 1 as loss_mask (or --columns loss_mask=NAME)"
            )
        ]

    @property
    def names(self) -> list[str]:
        """All columns to be read."""
        return [name for name in (self.data, self.mask, self.id) if name is not None]


def check_mapping(columns: Mapping[str, str]) -> None:
    """Raise ConfigError for a mapping (our name -> the user's) that makes no sense."""
    for ours in columns:
        if ours not in _OURS:
            msg = f"columns: {ours} is no column of ours; map one of {', '.join(_OURS)} to yours"
            raise ConfigError(msg)
    contents = [ours for ours in columns if ours in ("input_ids", "messages", "text")]
    if len(contents) > 1:
        msg = f"columns: {' and '.join(contents)} are both mapped; a data set is read from one of them"
        raise ConfigError(msg)


def choose_columns(
    files: Sequence[tuple[InputFile, Sequence[str]]], given: Mapping[str, str], *, note: str = ""
) -> Columns:
    """The columns that are read, out of the names that each file has; the first file decides what the data set holds.

    A mask or an id may stand in any file. A mask must then stand in all of them: rows without one would be supervised
    throughout, unasked. ``note`` follows a file's name in errors. Raises PlanError naming the file that lacks a column.
    """
    (first, names), *_ = files
    chosen = _choose(names, given, f"{first.location}{note}")
    mask, row_id = given.get("loss_mask", "loss_mask"), given.get("id", "id")
    having = {name: [file for file, there in files if name in there] for name in (mask, row_id)}
    if having[mask] and chosen.content == "input_ids":
        chosen = replace(chosen, mask=mask)
    if having[row_id]:
        chosen = replace(chosen, id=row_id)
    for column in (chosen.data, chosen.mask, given.get("id")):
        for file, there in files:
            if column is not None and column not in there:
                has = having.get(column, [first])[0]
                hint = f"{has.name} has it"
                raise PlanError(_missing(f"{file.location}{note}", column, there, hint))
    others = set(names) - set(chosen.names)
    return replace(chosen, unread=tuple(n for n in _UNREAD[chosen.content] if n in others))


def _choose(names: Sequence[str], given: Mapping[str, str], where: str) -> Columns:
    for ours, theirs in given.items():
        if theirs not in names:
            raise PlanError(_missing(where, theirs, names, f"{ours} is mapped to it"))
    mapped = [(theirs, ours) for ours, theirs in given.items() if ours in dict(_CONTENTS)]
    found = [(name, content) for name, content in _CONTENTS if name in names]
    if not mapped and not found:
        wanted = "input_ids, messages, conversations or text"
        raise PlanError(_missing(where, wanted, names, "map yours with --columns"))
    data, content = (mapped or found)[0]
    return Columns(content=dict(_CONTENTS)[content], data=data)


def _missing(where: str, column: str, names: Sequence[str], hint: str) -> str:
    return f"{where}: no column {column} ({hint}); it has {', '.join(names) or 'no columns'}"


def check_types(file: InputFile, schema: Any, columns: Columns) -> None:
    """Refuse columns of a type that can never hold what is wanted; a null column only rejects its rows."""
    for name in columns.names:
        if schema.names.count(name) > 1:
            msg = f"{file.location}: has {schema.names.count(name)} columns {name}; rename all but one"
            raise PlanError(msg)
    _check_type(file, columns.data, columns.content, schema.field(columns.data).type)
    if columns.mask is not None:
        _check_type(file, columns.mask, "loss_mask", schema.field(columns.mask).type)


def _check_type(file: InputFile, column: str, wanted: str, kind: Any) -> None:
    types = pa.types
    if wanted in ("input_ids", "loss_mask"):
        item = kind.value_type if _is_ragged(kind) else None
        numeric = item is not None and (
            types.is_integer(item) or types.is_floating(item) or types.is_null(item)
        )
        boolean = item is not None and wanted == "loss_mask" and types.is_boolean(item)
        fits, says = numeric or boolean, "lists of integers"
    elif wanted == "messages":
        fits, says = _is_ragged(kind) or types.is_struct(kind), "lists of messages"
    else:
        fits, says = _is_text(kind), "strings"
    if not fits and not types.is_null(kind):
        msg = (
            f"{file.location}: column {column} is {kind}, {says} wanted; map another with --columns"
        )
        raise PlanError(msg)


def _is_ragged(kind: Any) -> bool:
    types = pa.types
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return bool(
        views or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    )


def _is_text(kind: Any) -> bool:
    types = pa.types
    if types.is_dictionary(kind):  # as pandas writes categories
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
