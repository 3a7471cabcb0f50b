"""From what a user calls a data set to its format and its files, in the order in which they are read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from swathe.dataset.files import InputFile
from swathe.dataset.jsonl import COMPRESSIONS
from swathe.errors import ObjectMissingError, PlanError
from swathe.store import Store, open_store

Format = Literal["jsonl", "parquet", "arrow"]

_SUFFIXES: Final[dict[str, Format]] = {
    ".jsonl": "jsonl",
    **dict.fromkeys((f".jsonl{end}" for end in COMPRESSIONS), "jsonl"),
    ".parquet": "parquet",
}
_READ: Final = ", ".join(_SUFFIXES)
_DICT: Final = "dataset_dict.json"
_STATE: Final = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A data set's files, not opened yet; ``location`` is what run.json calls it."""

    location: str
    format: Format
    files: tuple[InputFile, ...]


def find(location: str) -> Found:
    """Find a data set.

    Raises PlanError when there is none, or more than one; ConfigError and StoreError as a bucket's store does.
    """
    if location.startswith("s3://"):
        return _in_bucket(location.rstrip("/"))
    path = Path(location).expanduser().absolute()
    if path.is_file():
        return _single(open_store(path.parent), path.name, str(path))
    if not path.is_dir():
        hint = "give a path or an s3:// URL" if "://" in location else "check the path"
        msg = f"data set {location}: no such file or folder; {hint}"
        raise PlanError(msg)
    return _folder(open_store(path), str(path))


def _in_bucket(location: str) -> Found:
    parent, _, name = location.rpartition("/")
    if _format_of(name) is not None:
        store = open_store(parent)
        if store.stat(name) is not None:
            return _single(store, name, location)
    return _folder(open_store(location), location)


def _single(store: Store, name: str, location: str) -> Found:
    kind, info = _format_of(name), store.stat(name)
    if kind is None or info is None:
        suffix = Path(name).suffix or "no suffix"
        msg = f"data set {location}: {suffix} is not read; use {_READ}, a folder of one of them or a saved folder"
        raise PlanError(msg)
    return Found(location=location, format=kind, files=(InputFile.of(store, info),))


def _format_of(name: str) -> Format | None:
    return next((kind for end, kind in _SUFFIXES.items() if name.endswith(end)), None)


def _folder(store: Store, location: str) -> Found:
    if store.stat(_DICT) is not None:
        raise PlanError(_choose_split(store, location))
    if store.stat(_STATE) is not None:
        return Found(location=location, format="arrow", files=tuple(_saved_files(store)))
    found: dict[Format, list[InputFile]] = {}
    for info in store.list(""):
        kind = _format_of(info.key)
        if kind is not None and not _is_hidden(info.key):
            found.setdefault(kind, []).append(InputFile.of(store, info))
    if not found:
        msg = f"data set {location}: nothing there that ends in {_READ}, and no datasets.save_to_disk folder"
        raise PlanError(msg)
    if len(found) > 1:
        counts = " and ".join(f"{len(files)} {kind}" for kind, files in sorted(found.items()))
        msg = f"data set {location}: holds {counts} files; which are meant? put one kind into a folder of its own"
        raise PlanError(msg)
    ((kind, files),) = found.items()
    return Found(
        location=location, format=kind, files=tuple(sorted(files, key=lambda file: file.name))
    )


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _choose_split(store: Store, location: str) -> str:
    keys = [info.key for info in store.list("")]
    splits = sorted(key.removesuffix(f"/{_STATE}") for key in keys if key.endswith(f"/{_STATE}"))
    shown = ", ".join(splits)
    return f"data set {location}: holds the splits {shown}; choose one: {location}/{(splits or ['train'])[0]}"


def _saved_files(store: Store) -> Iterator[InputFile]:
    """The files of a ``datasets.save_to_disk`` folder, in its own order."""
    where = f"{store.url}/{_STATE}"
    try:
        state: dict[str, Any] = json.loads(store.read(_STATE))
        names = [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, ObjectMissingError) as error:
        msg = f"{where}: unreadable ({error}); save the data set again"
        raise PlanError(msg) from error
    if state.get("_indices_data_files"):
        msg = (
            f"{store.url}: saved with an indices mapping; call flatten_indices() and save it again"
        )
        raise PlanError(msg)
    if not names:
        msg = f"{store.url}: state.json lists no data files; the data set is empty"
        raise PlanError(msg)
    for name in names:
        info = store.stat(name)
        if info is None:
            msg = f"{store.url}/{name}: listed in state.json but not there; copy the whole folder"
            raise PlanError(msg)
        yield InputFile.of(store, info)
