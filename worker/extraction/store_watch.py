"""Whether the store gets on: operations that do not move are told of, never broken off.

A network file system that is away blocks whoever touches it for as long as it likes. The worker waits, its leases are
renewed all the while, and what it computed is kept; but somebody must be told.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from swathe import log
from worker.telemetry.totals import Telemetry

_NOTICED_S: Final = 1.0


class StoreWatch:
    """Knows since when each thread waits for the store."""

    def __init__(self, telemetry: Telemetry, *, limit_s: float) -> None:
        """After ``limit_s`` without a move the operator is told."""
        self._telemetry = telemetry
        self._limit_s = limit_s
        self._moved_s: dict[int, float] = {}
        self._said = False
        self._log: Any = log.get("store")

    @contextmanager
    def operation(self) -> Iterator[None]:
        """What is done here, on this thread, is work of the store's."""
        thread = threading.get_ident()
        self._moved_s[thread] = time.monotonic()
        try:
            yield
        finally:
            del self._moved_s[thread]

    def moved(self) -> None:
        """Say that the operation of this thread got on."""
        if (thread := threading.get_ident()) in self._moved_s:
            self._moved_s[thread] = time.monotonic()

    @property
    def stalled_s(self) -> float:
        """Since when the operation that waits longest has not moved."""
        now_s = time.monotonic()
        waits_s = max((now_s - moved_s for moved_s in list(self._moved_s.values())), default=0.0)
        return waits_s if waits_s >= _NOTICED_S else 0.0

    def look(self) -> None:
        """Say what is to be said; called now and then, touches no store."""
        stalled_s = self.stalled_s
        self._telemetry.set("store_stalled_s", stalled_s)
        if stalled_s >= self._limit_s and not self._said:
            self._said = True
            self._log.warning(
                "the store does not move; the worker waits and keeps its ranges. Look at mount, network or bucket",
                seconds=round(stalled_s),
            )
        elif self._said and stalled_s == 0.0:
            self._said = False
            self._log.info("the store moves again")
