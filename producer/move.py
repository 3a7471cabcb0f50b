"""``swathe move``: a run into another store, also one that goes on.

1. *Announce*: ``moving.json`` in the destination. Until the end of step 3, whoever opens it is led back to the source.
2. *Copy* everything, each range as ``producer.carry`` does; again what is new, until little is.
3. *Leave*: ``moved.json`` is created in the source. From this moment on the run is at the destination, for everybody.
4. *Clear*: what was recorded in the source in the last moment is carried over, then the source is emptied but for
   ``moved.json``, which goes on leading the way.

Nothing is deleted before step 4, and every step may be repeated: after any kind of end the same command goes on. The
markers, and what others do in between, stand in ``swathe.location``.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from producer.carry import carry_known, carry_object, carry_range, carry_ranges
from producer.display import size_text
from swathe import log, names
from swathe.clock import utc_now
from swathe.errors import (
    ConfigError,
    FormatError,
    IntegrityError,
    NoSpaceError,
    ObjectMissingError,
    RunMismatchError,
)
from swathe.location import open_home, read_arrival, read_departure
from swathe.manifest import seal
from swathe.records import RunState, RunWatcher, open_run, read_record
from swathe.spec import Arrival, Departure, RangeId, RangeRecord, RunId, RunSpec, to_json
from swathe.store import Store, open_store

_FEW: Final = 16
"""So many new ranges may be left to step 4: they are invisible for the moment that their copies take."""
_MOST_PASSES: Final = 8
"""A run that grows faster than it is copied is moved all the same."""
_SINGLES: Final = (
    names.PROVENANCE,
    names.REJECTED,
    names.FINAL_NORM,
    names.ROWS,
    names.MANIFEST,
)
_FOLDERS: Final = (names.STATES, names.CANARIES, names.TOKENS)

Progress = Callable[[int, int], None]

logger = log.get("move")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What a call did; ``ranges`` and bytes are those that it copied itself."""

    run_id: RunId
    source: str
    dest: Store
    ranges: int
    size_bytes: int
    seconds: float


def move(run: str, dest_url: str, *, progress: Progress | None = None) -> MoveReport:
    """Move a run, or go on where an earlier call of the same ended.

    Raises ConfigError or RunMismatchError when the destination is taken, NoSpaceError when it is too small,
    IntegrityError when ranges are damaged; then the run is still where it was.
    """
    started_s = time.monotonic()
    start, dest = open_store(run), open_store(dest_url)
    departure = read_departure(start)
    if departure is not None and open_store(departure.url).url == dest.url:
        source, spec, copied = start, open_run(dest)[1], _Copied()
    else:
        source, spec = open_run(start)
        _require_apart(source, dest)
        arrival = _announce(source, dest, spec)
        copied = _Copying(source, dest, spec, progress or (lambda _done, _all: None)).run()
        _leave(source, dest, arrival)
    home = open_home(dest)
    _clear(source, home, spec)
    return MoveReport(
        run_id=spec.run_id,
        source=source.url,
        dest=home,
        ranges=copied.ranges,
        size_bytes=copied.size_bytes,
        seconds=time.monotonic() - started_s,
    )


# -- 1. announce


def _require_apart(source: Store, dest: Store) -> None:
    one, other = f"{source.url}/", f"{dest.url}/"
    if one.startswith(other) or other.startswith(one):
        msg = f"{source.url} cannot be moved to {dest.url}: one lies in the other, or they are the same"
        raise ConfigError(msg)


def _announce(source: Store, dest: Store, spec: RunSpec) -> Arrival:
    """Claim the destination, or take up an earlier claim of the same move."""
    arrival = read_arrival(dest)
    if arrival is None:
        _require_free(dest, spec)
        arrival = Arrival(
            run_id=spec.run_id,
            move_id=secrets.token_hex(8),
            source=source.url,
            started_at=utc_now(),
        )
        if not dest.create(names.MOVING, to_json(arrival, indent=1)):
            return _announce(source, dest, spec)
    if (arrival.run_id, arrival.source) != (spec.run_id, source.url):
        msg = (
            f"{dest.url}: run {arrival.run_id} is on its way here from {arrival.source}; end that with swathe move "
            f"{arrival.source} {dest.url}, or use another destination"
        )
        raise RunMismatchError(msg)
    for folder in _FOLDERS:
        # Of an earlier call: nobody else writes here before the run is here. Other runs may lie in the same place.
        dest.collect(older_than_s=0, prefix=folder)
    # Left there when the run went from there to here; from now on moving.json leads the way.
    dest.delete(names.MOVED)
    return arrival


def _require_free(dest: Store, spec: RunSpec) -> None:
    departure = read_departure(dest)
    if departure is not None and departure.run_id == spec.run_id:
        return  # it was here before; late writers may have left something
    taken = departure is not None or dest.stat(names.RUN) is not None
    if taken or any(True for folder in _FOLDERS for _ in dest.list(folder)):
        msg = f"{dest.url}: there is a run (or what is left of one) already; it is left as it is; use another place"
        raise RunMismatchError(msg)


# -- 2. copy


@dataclass(slots=True)
class _Copied:
    ranges: int = 0
    size_bytes: int = 0


class _Copying:
    """Makes the destination equal to the source, as far as the source has come."""

    def __init__(self, source: Store, dest: Store, spec: RunSpec, progress: Progress) -> None:
        self._source = source
        self._dest = dest
        self._spec = spec
        self._progress = progress
        self._here = RunWatcher(source, spec)
        self._there: dict[RangeId, RangeRecord] = {}
        self._copied = _Copied()

    def run(self) -> _Copied:
        """Copy everything; the destination is a run afterwards, but for its marker."""
        before = RunWatcher(self._dest, self._spec).read()
        self._there = dict(before.records)
        for range_id in before.invalid:
            self._dest.delete(names.record(range_id))
        self._require_space(self._read())
        self._tokens()
        for _ in range(_MOST_PASSES):
            if len(self._pass()) <= _FEW:
                break
        self._mirror()
        self._dest.write(names.RUN, [self._source.read(names.RUN)])
        return self._copied

    def _read(self) -> RunState:
        state = self._here.read()
        if self._here.store is not self._source:
            msg = f"{self._source.url}: the run was moved to {self._here.store.url} by somebody else meanwhile"
            raise RunMismatchError(msg)
        if state.invalid:
            self._refuse(dict.fromkeys(sorted(state.invalid), "its record is unreadable"))
        return state

    def _require_space(self, state: RunState) -> None:
        free, missing = self._dest.free_bytes(), self._missing(state)
        needed = sum(record.size_bytes for record in missing)
        needed += sum(file.size_bytes for file in self._spec.token_files)
        if free is not None and needed > free:
            msg = (
                f"{self._dest.url}: {size_text(needed)} are to be copied, {size_text(free)} are free; make room; the "
                f"run stays at {self._source.url}"
            )
            raise NoSpaceError(msg)

    def _tokens(self) -> None:
        sizes = _sizes(self._dest, names.TOKENS)
        for file in self._spec.token_files:
            if sizes.get(file.name) != file.size_bytes:
                carry_known(self._source, self._dest, file.name, file.size_bytes, file.xxh3)
        _carry_small(self._source, self._dest, names.TOKEN_ROWS)

    def _pass(self) -> list[RangeRecord]:
        """Copy what is not there yet; returns what that was."""
        state = self._read()
        todo = self._missing(state)
        kept = state.records.keys() - {record.range_id for record in todo}
        for range_id in self._there.keys() - kept:
            # Withdrawn in the source since, or not whole here.
            self._dest.delete(names.record(range_id))
            del self._there[range_id]
        done = len(state.records) - len(todo)

        def count(record: RangeRecord) -> None:
            nonlocal done
            self._there[record.range_id] = record
            self._copied.ranges += 1
            self._copied.size_bytes += record.size_bytes
            done += 1
            self._progress(done, len(state.records))

        self._progress(done, len(state.records))
        if damaged := carry_ranges(self._source, self._dest, todo, count):
            self._refuse(damaged)
        return todo

    def _missing(self, state: RunState) -> list[RangeRecord]:
        sizes = _sizes(self._dest, names.STATES)
        return [
            record
            for range_id, record in state.records.items()
            if self._there.get(range_id) != record or not _is_whole(record, sizes)
        ]

    def _refuse(self, damaged: dict[RangeId, str]) -> None:
        first = min(damaged)
        msg = (
            f"{self._source.url}: {len(damaged)} ranges are damaged, first range {first}: {damaged[first]}; the run "
            "stays here; have them done again with swathe verify --repair, then move again: what was copied stays"
        )
        raise IntegrityError(msg, key=names.record(first))

    def _mirror(self) -> None:
        """Everything that is small and may change."""
        here, there = _small_keys(self._source), _small_keys(self._dest)
        for key in there - here:
            self._dest.delete(key)
        for key in sorted(here):
            _carry_small(self._source, self._dest, key)


# -- 3. leave


def _leave(source: Store, dest: Store, arrival: Arrival) -> None:
    departure = Departure(
        run_id=arrival.run_id, move_id=arrival.move_id, url=dest.url, moved_at=utc_now()
    )
    if not source.create(names.MOVED, to_json(departure, indent=1)):
        first = read_departure(source)
        if first is None or first.move_id != arrival.move_id:
            where = "elsewhere" if first is None else f"to {first.url}"
            msg = f"{source.url}: the run was moved {where} by somebody else meanwhile; {dest.url} holds a useless copy"
            raise RunMismatchError(msg)


# -- 4. clear


def _clear(source: Store, home: Store, spec: RunSpec) -> None:
    """Empty a source that the run has left."""
    home.delete(names.MOVING)
    state = RunWatcher(home, spec).read()
    sizes = _sizes(home, names.STATES)
    for range_id in _recorded(source):
        known = state.records.get(range_id)
        if known is None or not _is_whole(known, sizes):
            _carry_late(source, home, spec, range_id)
    for key in (*_late_keys(source), names.FINAL_NORM):
        # One that is gone meanwhile: its writer saw the marker, and wrote it again over there.
        with contextlib.suppress(ObjectMissingError):
            home.create(key, source.read(key))
    state = RunWatcher(home, spec).read()
    if state.complete and not state.sealed:
        seal(home, state)
    # First, so that without moved.json there is no run here, and not half of one.
    source.delete(names.RUN)
    for folder in _FOLDERS:
        for key in [item.key for item in source.list(folder) if names.is_of_run(item.key)]:
            source.delete(key)
    for key in (*_SINGLES, names.MOVING):
        source.delete(key)
    for folder in _FOLDERS:
        source.collect(older_than_s=0, prefix=folder)
        if (path := source.local_path(folder)) is not None:
            with contextlib.suppress(OSError):  # not empty, or not there
                path.rmdir()


def _carry_late(source: Store, home: Store, spec: RunSpec, range_id: RangeId) -> None:
    """A range that was recorded in the source while the run left. What cannot be had is done again over there."""
    try:
        carry_range(source, home, read_record(source, spec, range_id))
    except (FormatError, RunMismatchError, IntegrityError, ObjectMissingError) as error:
        logger.warning("left behind, to be computed again", range_id=range_id, reason=str(error))


# -- what lies where


def _recorded(store: Store) -> list[RangeId]:
    found = (names.record_range(item.key) for item in store.list(names.STATES))
    return sorted(range_id for range_id in found if range_id is not None)


def _sizes(store: Store, prefix: str) -> dict[str, int]:
    return {item.key: item.size_bytes for item in store.list(prefix)}


def _is_whole(record: RangeRecord, sizes: dict[str, int]) -> bool:
    return record.shard is None or sizes.get(record.shard) == record.size_bytes


def _late_keys(store: Store) -> Iterator[str]:
    """Markers of ranges set aside, and canaries."""
    for item in [*store.list(names.STATES), *store.list(names.CANARIES)]:
        if names.failed_range(item.key) is not None or item.key.startswith(names.CANARIES):
            yield item.key


def _small_keys(store: Store) -> set[str]:
    return {*_late_keys(store), *(key for key in _SINGLES if store.stat(key) is not None)}


def _carry_small(source: Store, dest: Store, key: str) -> None:
    """An object that no record describes; one that is gone meanwhile is none."""
    if (info := source.stat(key)) is not None:
        with contextlib.suppress(ObjectMissingError):
            carry_object(source, dest, key, info.size_bytes)
