"""What a worker's device is doing or waiting for, asked ten times a second: shares of the clock that add up to one.

Timing every wait where it happens would miss the one that matters most, a wait that has not ended yet.
"""

import time
from collections.abc import Callable
from typing import Final

from swathe.stages import STATES, State
from worker.loop.flights import UNSTARTED, Flights
from worker.loop.pipeline import Pipeline

_LONGEST_STEP_S: Final = 5.0
"""A longer gap between two looks is one in which the process did not run; it is nobody's time."""


class Activity:
    """Seconds by state. One thread looks; any thread may read ``seconds``."""

    def __init__(
        self,
        flights: Flights,
        pipeline: Pipeline,
        *,
        max_flights: int,
        loading: Callable[[], bool],
        blocked: Callable[[], bool],
        full: Callable[[], bool],
    ) -> None:
        self._flights = flights
        self._pipeline = pipeline
        self._max_flights = max_flights
        self._loading = loading
        self._blocked = blocked
        self._full = full
        self._looked_s = time.monotonic()
        self._seconds = dict.fromkeys(STATES, 0.0)
        self.state: State = "queue_empty"

    @property
    def seconds(self) -> dict[str, float]:
        """Totals since the worker started."""
        return {state: self._seconds[state] for state in STATES}

    def look(self) -> None:
        """Count the time since the last look for the state of now."""
        now_s = time.monotonic()
        step_s, self._looked_s = now_s - self._looked_s, now_s
        self.state = self._now()
        self._seconds[self.state] += min(step_s, _LONGEST_STEP_S)

    def _now(self) -> State:
        flights = self._flights.snapshot()
        places = [flight.place for flight in flights]
        if "computing" in places:
            if self._loading():
                return "load"
            return self._store_limit() if self._blocked() else "compute"
        if self._pipeline.backoff_s > 0:
            return "space" if self._pipeline.out_of_space else "store_away"
        if any(place in UNSTARTED for place in places):
            return "input"
        # With every slot taken by ranges on their way to the store, nothing can be claimed.
        return self._store_limit() if len(places) >= self._max_flights else "queue_empty"

    def _store_limit(self) -> State:
        return "space" if self._full() else "write"
