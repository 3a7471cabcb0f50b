"""Ranges that are computed wait for room in their store; nothing is handed back, nothing is computed again."""

import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from swathe import log
from swathe.errors import NoSpaceError
from worker.extraction.store_watch import StoreWatch
from worker.telemetry.totals import Telemetry

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 10.0

_Value = TypeVar("_Value")


class Room:
    """Repeats what a full store refused. Safe to call from several threads."""

    def __init__(self, telemetry: Telemetry, watch: StoreWatch) -> None:
        self._telemetry = telemetry
        self._watch = watch
        self._waiting = 0
        self._lock = threading.Lock()
        self._log: Any = log.get("store")
        telemetry.set("paused_for_space", 0)

    @property
    def waiting(self) -> bool:
        """Whether a range waits for room now."""
        return self._waiting > 0

    def wait_for(self, step: Callable[[], _Value]) -> _Value:
        """Do a step that writes; again, as long as it raises NoSpaceError."""
        try:
            return step()
        except NoSpaceError as error:
            self._count(1, str(error))
        try:
            pause_s = _FIRST_PAUSE_S
            while True:
                time.sleep(pause_s)
                self._watch.moved()  # a full store is not one that hangs
                try:
                    return step()
                except NoSpaceError:
                    pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        finally:
            self._count(-1)

    def _count(self, change: int, why: str = "") -> None:
        with self._lock:
            before, self._waiting = self._waiting, self._waiting + change
            self._telemetry.set("paused_for_space", float(self._waiting > 0))
        if not before:
            self._log.warning(
                "paused for space: what is computed waits, and is stored as soon as there is room",
                reason=why,
            )
        elif not self._waiting:
            self._log.info("there is room again; the worker goes on")
