"""The state of a run, read from its store alone: which ranges are committed, set aside or open.

A listing of ``states/`` tells which records exist; only records not seen before are read, so watching a run of
30,000 ranges costs one listing and the few new records each time.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swathe import names
from swathe.canaries import read_canaries, suspects
from swathe.errors import FormatError, NewerFormatError, ObjectMissingError, RunMismatchError
from swathe.location import at_home, open_home, read_departure
from swathe.spec import CanaryRecord, FailedMarker, RangeId, RangeRecord, RunSpec, from_json
from swathe.store import Store, open_store

_READERS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A snapshot. ``missing`` are ranges that have neither a record nor a failure marker."""

    spec: RunSpec
    records: dict[RangeId, RangeRecord]
    failed: frozenset[RangeId]
    invalid: frozenset[RangeId]
    """Ranges whose record is unreadable or of another run: they must be withdrawn and done again."""
    sealed: bool
    canaries: dict[str, CanaryRecord]
    """By key."""
    suspect: dict[RangeId, CanaryRecord]
    """Committed ranges that a failed canary casts doubt on."""

    @property
    def missing(self) -> list[RangeId]:
        """Open ranges, in order."""
        done = self.records.keys() | self.failed
        return [RangeId(i) for i in self.spec.range_ids if i not in done]

    @property
    def stored_samples(self) -> int:
        """Samples in committed shards."""
        return sum(record.samples for record in self.records.values())

    @property
    def stored_tokens(self) -> int:
        """Tokens in committed shards."""
        return sum(record.tokens for record in self.records.values())

    @property
    def stored_bytes(self) -> int:
        """Bytes of committed shards."""
        return sum(record.size_bytes for record in self.records.values())

    @property
    def quarantined_samples(self) -> int:
        """Samples that committed ranges could not compute."""
        return sum(len(record.quarantined) for record in self.records.values())

    @property
    def too_many_quarantined(self) -> bool:
        """Whether more samples failed than a complete run may hold."""
        allowed = self.spec.policies.max_quarantined_ratio * self.spec.totals.rows
        return self.quarantined_samples > allowed

    @property
    def accounted(self) -> bool:
        """The accounting equation: stored + rejected + quarantined = rows of the data set."""
        known = self.stored_samples + self.spec.totals.rejected + self.quarantined_samples
        return known == self.spec.totals.rows

    @property
    def complete(self) -> bool:
        """Whether every range is committed and every row accounted for."""
        return (
            len(self.records) == self.spec.totals.ranges
            and self.accounted
            and not self.too_many_quarantined
            and not self.suspect
        )


class RunWatcher:
    """Reads a run's state again and again, each record once; ``store`` is where the run was at the last reading."""

    def __init__(self, store: Store, spec: RunSpec) -> None:
        self.store = store
        self._spec = spec
        self._records: dict[RangeId, tuple[float, RangeRecord]] = {}
        self._canaries: dict[str, CanaryRecord] = {}

    def read(self) -> RunState:
        """A fresh snapshot, from where the run is now.

        Raises StoreError when the store cannot be listed, NewerFormatError when a newer swathe wrote a record.
        """
        return at_home(self.store, self._read)

    def _read(self, store: Store) -> RunState:
        self.store = store
        listed: dict[RangeId, float] = {}
        failed: set[RangeId] = set()
        for item in self.store.list(names.STATES):
            if (range_id := names.record_range(item.key)) is not None:
                listed[range_id] = item.modified_s
            elif (range_id := names.failed_range(item.key)) is not None:
                failed.add(range_id)
        # A repaired range has a new record under the same name: the time tells.
        for range_id in [i for i, (at, _) in self._records.items() if listed.get(i) != at]:
            del self._records[range_id]
        new = [range_id for range_id in listed if range_id not in self._records]
        invalid = frozenset(self._read_new(new, listed))
        records = {range_id: self._records[range_id][1] for range_id in sorted(self._records)}
        self._canaries = read_canaries(self.store, self._spec, self._canaries)
        return RunState(
            spec=self._spec,
            records=records,
            failed=frozenset(failed - records.keys()),
            invalid=invalid,
            sealed=self.store.stat(names.MANIFEST) is not None,
            canaries=dict(self._canaries),
            suspect=suspects(records.values(), self._canaries.values()),
        )

    def _read_new(self, new: list[RangeId], times: dict[RangeId, float]) -> Iterable[RangeId]:
        for range_id, record in zip(new, self._read_all(new), strict=True):
            if isinstance(record, RangeRecord):
                self._records[range_id] = (times[range_id], record)
            elif isinstance(record, FormatError | RunMismatchError):
                yield range_id

    def _read_all(self, range_ids: list[RangeId]) -> list[RangeRecord | Exception]:
        if self.store.local_path("") is not None or len(range_ids) < _READERS:
            # Small local files are read faster than threads can be handed them.
            return [self._try_read(range_id) for range_id in range_ids]
        with ThreadPoolExecutor(_READERS, "records") as pool:
            return list(pool.map(self._try_read, range_ids))

    def _try_read(self, range_id: RangeId) -> RangeRecord | Exception:
        try:
            return read_record(self.store, self._spec, range_id)
        except NewerFormatError:
            raise  # whoever takes it for damaged would withdraw good work
        except (FormatError, RunMismatchError, ObjectMissingError) as error:
            return error


def open_run(run: str | Path | Store) -> tuple[Store, RunSpec]:
    """A run's store, where it is now, and its spec.

    Raises as ``read_run`` does, and RunMismatchError when another run is where this one was moved to.
    """
    start = open_store(run) if isinstance(run, str | Path) else run
    home, spec = at_home(open_home(start), lambda store: (store, read_run(store)))
    if home is not start:
        departure = read_departure(start)
        if departure is not None and departure.run_id != spec.run_id:
            msg = (
                f"{start.url}: run {departure.run_id} was moved to {home.url}, which holds run {spec.run_id} now; give "
                "the URL of the run that you mean"
            )
            raise RunMismatchError(msg)
    return home, spec


def read_run(store: Store) -> RunSpec:
    """The run's spec.

    Raises ObjectMissingError when there is no run, FormatError when run.json is damaged or too new.
    """
    try:
        data = store.read(names.RUN)
    except ObjectMissingError as error:
        msg = f"{store.url}: no run here (run.json is missing); make one with: swathe plan"
        raise ObjectMissingError(msg) from error
    return from_json(RunSpec, data, origin=f"{store.url}/{names.RUN}")


def read_record(store: Store, spec: RunSpec, range_id: RangeId) -> RangeRecord:
    """One range's record.

    Raises ObjectMissingError when the range is not committed, FormatError for a damaged record and
    RunMismatchError for one that another run left under the same name.
    """
    key = names.record(range_id)
    record = from_json(RangeRecord, store.read(key), origin=f"{store.url}/{key}")
    if record.run_id != spec.run_id or record.range_id != range_id:
        msg = f"{store.url}/{key}: record of run {record.run_id} range {record.range_id}, not of this run"
        raise RunMismatchError(msg)
    return record


def read_failed(store: Store, range_id: RangeId) -> FailedMarker:
    """Why a range was set aside. Raises ObjectMissingError when it was not."""
    key = names.failed(range_id)
    return from_json(FailedMarker, store.read(key), origin=f"{store.url}/{key}")
