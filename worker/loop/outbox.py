"""Settlements on their way to Redis: each is tried until Redis has answered, while the model stays loaded.

One thread, in order. A settlement may be repeated after an unknown outcome: it carries the token of its execution, and
Redis ignores a token it no longer knows.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from swathe import log
from swathe.errors import QueueError

Settlement = Callable[[], None]

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class Outbox:
    """Runs settlements in order on a thread of its own; ``put`` never blocks."""

    def __init__(self) -> None:
        self._log: Any = log.get("outbox")
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Settlement, Callable[[], object]]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="outbox", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def put(self, settlement: Settlement, dropped: Callable[[], object] = lambda: None) -> None:
        """Deliver this as soon as Redis answers; ``dropped`` is called instead where a fault of ours prevents that."""
        with self._changed:
            self._waiting.append((settlement, dropped))
            self._changed.notify_all()

    def close(self, timeout_s: float) -> int:
        """Deliver what is left within the bound; returns how many settlements were not delivered."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)
            self._closed = True
            self._changed.notify_all()
            return len(self._waiting)

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting)

    def _loop(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                settlement, dropped = self._waiting[0]
            try:
                settlement()
            except QueueError as error:
                if pause_s == _FIRST_PAUSE_S:
                    self._log.warning(
                        "redis away, settlements wait", error=str(error), waiting=len(self)
                    )
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
                continue
            except Exception:  # noqa: BLE001
                # A fault of ours must not stop the acknowledgements of other ranges: this one's lease expires.
                self._log.exception(
                    "settlement failed; the range's lease will expire and it runs again"
                )
                dropped()
            pause_s = _FIRST_PAUSE_S
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()
