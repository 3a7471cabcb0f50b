"""Hands this node's metrics to the fleet's exporter by way of Redis: a node then needs no way in, only one out."""

import threading
from collections.abc import Callable
from typing import Any, Final

from redis import Redis

from swathe import log
from swathe.errors import QueueError
from swathe.queue import hand_over_metrics

_EVERY_S: Final = 3.0
"""Well below Prometheus' scrape interval, since the age of a page blurs rates by as much."""


class Relay:
    """Until closed, renders and hands over every few seconds; while Redis is away, it waits for it."""

    def __init__(
        self,
        connection: Redis,
        node: str,
        render: Callable[[], bytes],
        *,
        every_s: float = _EVERY_S,
    ) -> None:
        self._connection = connection
        self._node = node
        self._render = render
        self._every_s = every_s
        self._closed = threading.Event()
        self._log: Any = log.get("relay")
        self._thread = threading.Thread(target=self._loop, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hand nothing over any more."""
        self._closed.set()
        self._thread.join(5)

    def _loop(self) -> None:
        away = False
        while not self._closed.is_set():
            try:
                hand_over_metrics(self._connection, self._node, self._render())
                away = False
            except QueueError as error:
                if not away:
                    self._log.warning("metrics wait for Redis", error=str(error))
                away = True
            self._closed.wait(self._every_s)
