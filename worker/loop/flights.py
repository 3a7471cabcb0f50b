"""The ranges that a worker holds right now, and where each one is."""

import threading
import time
from collections.abc import Collection
from typing import Literal

from swathe.queue import Lease, Leases, Stage
from swathe.spec import RangeJob

Place = Literal["claimed", "reading", "ready", "computing", "storing", "settling"]
UNSTARTED: frozenset[Place] = frozenset({"claimed", "reading", "ready"})
"""Places before the device: nothing is lost when such a range is handed back."""

_STAGES: dict[Place, Stage] = {"computing": "compute", "storing": "store", "settling": "store"}


class Flight:
    """One claimed range on its way through the worker. ``load`` is what the next stage needs, and no longer."""

    __slots__ = (
        "book", "care", "claimed_s", "failures", "history", "job", "lease", "load", "place", "since_s",
    )  # fmt: skip

    def __init__(self, lease: Lease, job: RangeJob, book: Leases) -> None:
        self.lease = lease
        self.job = job
        self.book = book
        self.load: object = None
        self.care: Literal["", "alone", "apart"] = ""
        self.failures, self.history = lease.failures, lease.history
        self.place: Place = "claimed"
        self.claimed_s = self.since_s = time.monotonic()

    @property
    def stage(self) -> Stage:
        """The place as the fleet sees it."""
        return _STAGES.get(self.place, "read")


class Flights:
    """Thread-safe table of flights, in the order they were claimed. One that left it is nobody's business any more."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._by_execution: dict[str, Flight] = {}

    def add(self, flight: Flight) -> None:
        """A range was claimed."""
        with self._changed:
            self._by_execution[flight.lease.execution_id] = flight

    def advance(self, flight: Flight, place: Place) -> bool:
        """Move on; False when the range was withdrawn or lost meanwhile, and must be dropped without a word."""
        with self._changed:
            if flight.lease.execution_id not in self._by_execution:
                flight.load = None
                return False
            flight.place = place
            flight.since_s = time.monotonic()
            return True

    def remove(self, flight: Flight) -> bool:
        """The range is settled; False when it was gone already."""
        with self._changed:
            found = self._by_execution.pop(flight.lease.execution_id, None)
            self._changed.notify_all()
            return found is not None

    def withdraw(self, places: Collection[Place] | None = None) -> list[Flight]:
        """Take all flights at these places (default: all) out of the table, in claim order."""
        with self._changed:
            taken = [
                flight
                for flight in self._by_execution.values()
                if places is None or flight.place in places
            ]
            for flight in taken:
                del self._by_execution[flight.lease.execution_id]
            self._changed.notify_all()
            return taken

    def lose(self, execution_ids: Collection[str]) -> list[Flight]:
        """Leases were taken away. What is being stored goes on: a record is exclusive, and it may be the first."""
        with self._changed:
            lost = [
                flight
                for execution_id in execution_ids
                if (flight := self._by_execution.get(execution_id)) is not None
                and flight.place not in ("storing", "settling")
            ]
            for flight in lost:
                del self._by_execution[flight.lease.execution_id]
            self._changed.notify_all()
            return lost

    def snapshot(self) -> list[Flight]:
        """All flights, in claim order."""
        with self._changed:
            return list(self._by_execution.values())

    def wait_for_room(self, limit: int, timeout_s: float) -> bool:
        """Wait until fewer than ``limit`` ranges are held."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._by_execution) < limit, timeout_s)

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is held."""
        return self.wait_for_room(1, timeout_s)

    def __len__(self) -> int:
        with self._changed:
            return len(self._by_execution)
