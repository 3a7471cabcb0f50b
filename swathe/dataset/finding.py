"""From what a user calls a data set to its format and its files, in the order in which they are read."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from swathe import names
from swathe.dataset.choice import CARD, READ, Format, choose, format_of
from swathe.dataset.files import InputFile
from swathe.dataset.hub import HubId, fetch
from swathe.errors import ObjectMissingError, PlanError
from swathe.store import Store, open_store

_DICT: Final = "dataset_dict.json"
_STATE: Final = "state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A data set's files, not opened yet; ``location`` is what run.json calls it."""

    location: str
    format: Format
    files: tuple[InputFile, ...]


def find(location: str, split: str | None = None) -> Found:
    """Find a data set, or one split of it.

    Raises PlanError when there is none, or more than one; ConfigError and StoreError as a bucket's store does.
    """
    if location.startswith("s3://"):
        return _in_bucket(location.rstrip("/"), split)
    path = Path(location).expanduser().absolute()
    if path.is_file():
        return _single(open_store(path.parent), path.name, str(path), split)
    if path.is_dir():
        return _folder(open_store(path), str(path), split)
    hub_id = HubId.parse(location)
    if hub_id is not None and format_of(location) is None:
        folder, pinned = fetch(hub_id, split)
        return _folder(open_store(folder), pinned, split, ask=True)
    hint = "give a path, an s3:// URL or a hub id" if "://" in location else "check the path"
    msg = f"data set {location}: no such file or folder; {hint}"
    raise PlanError(msg)


def _in_bucket(location: str, split: str | None) -> Found:
    parent, _, name = location.rpartition("/")
    if format_of(name) is not None:
        store = open_store(parent)
        if store.stat(name) is not None:
            return _single(store, name, location, split)
    return _folder(open_store(location), location, split)


def _single(store: Store, name: str, location: str, split: str | None) -> Found:
    kind, info = format_of(name), store.stat(name)
    if kind is None or info is None:
        suffix = Path(name).suffix or "no suffix"
        msg = f"data set {location}: {suffix} is not read; use {READ}, a folder of one of them or a saved folder"
        raise PlanError(msg)
    _refuse_split(location, split)
    return Found(location=location, format=kind, files=(InputFile.of(store, info),))


def _refuse_split(location: str, split: str | None) -> None:
    if split is not None:
        msg = f"data set {location}: is one whole without splits; leave --split {split} out"
        raise PlanError(msg)


def _folder(store: Store, location: str, split: str | None, *, ask: bool = False) -> Found:
    if store.stat(_DICT) is not None:
        return _saved_split(store, location, split)
    if store.stat(_STATE) is not None:
        _refuse_split(location, split)
        return _saved(store, location)
    found = {info.key: InputFile.of(store, info) for info in store.list("")}
    card = ""
    if CARD in found and (split is not None or ask):
        card = store.read(CARD).decode(errors="replace")
    others = found.keys() - _tables_of_runs(found)
    chosen = choose(others, location=location, split=split, card=card, ask=ask)
    files = tuple(found[name] for name in chosen.names)
    return Found(location=location, format=chosen.format, files=files)


def _tables_of_runs(keys: Iterable[str]) -> set[str]:
    """What runs inside of a data set's folder have of the kinds that are read: users write a run beside its data."""
    roots = [key.removesuffix(names.RUN) for key in keys if f"/{key}".endswith(f"/{names.RUN}")]
    return {
        root + name for root in roots for name in (names.REJECTED, names.ROWS, names.TOKEN_ROWS)
    }


def _saved_split(store: Store, location: str, split: str | None) -> Found:
    keys = [info.key for info in store.list("")]
    splits = sorted(key.removesuffix(f"/{_STATE}") for key in keys if key.endswith(f"/{_STATE}"))
    if split not in splits:
        msg = f"data set {location}: holds the splits {', '.join(splits)}; choose one with --split"
        raise PlanError(msg)
    return _saved(open_store(f"{store.url}/{split}"), f"{location}/{split}")


def _saved(store: Store, location: str) -> Found:
    return Found(location=location, format="arrow", files=tuple(_saved_files(store)))


def _saved_files(store: Store) -> Iterator[InputFile]:
    """The files of a ``datasets.save_to_disk`` folder, in its own order."""
    where = f"{store.url}/{_STATE}"
    try:
        state: dict[str, Any] = json.loads(store.read(_STATE))
        filenames = [str(entry["filename"]) for entry in state["_data_files"]]
    except (ValueError, KeyError, TypeError, ObjectMissingError) as error:
        msg = f"{where}: unreadable ({error}); save the data set again"
        raise PlanError(msg) from error
    if state.get("_indices_data_files"):
        msg = (
            f"{store.url}: saved with an indices mapping; call flatten_indices() and save it again"
        )
        raise PlanError(msg)
    if not filenames:
        msg = f"{store.url}: state.json lists no data files; the data set is empty"
        raise PlanError(msg)
    for name in filenames:
        info = store.stat(name)
        if info is None:
            msg = f"{store.url}/{name}: listed in state.json but not there; copy the whole folder"
            raise PlanError(msg)
        yield InputFile.of(store, info)
