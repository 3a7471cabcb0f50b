"""Hands this node's metrics to the fleet's exporter by way of Redis: a node then needs no way in, only one out."""

import threading
from collections.abc import Callable
from typing import Final

from redis import Redis

from swathe import log
from swathe.errors import QueueError
from swathe.queue import hand_over_metrics, new_author

_EVERY_S: Final = 3.0
"""Well below Prometheus' scrape interval, since the age of a page blurs rates by as much."""

logger = log.get("relay")


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
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._loop, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hand nothing over any more."""
        self._closed.set()
        self._thread.join(5)

    def _loop(self) -> None:
        author, count = new_author(), 0
        while not self._closed.is_set():
            try:
                alone = hand_over_metrics(
                    self._connection, self._node, self._render(), author=author
                )
                count += 1
                # The first page may follow one of the process before this.
                if not alone and count > 1:
                    self._say(
                        "another node has this node's name: give each a SWATHE_NODE of its own"
                    )
            except QueueError as error:
                self._say("metrics wait for Redis", error=str(error))
            except Exception:
                logger.exception("metrics cannot be handed over")
            self._closed.wait(self._every_s)

    def _say(self, event: str, **facts: str) -> None:
        """Once; what goes on for hours must not fill the log."""
        if event not in self._said:
            self._said.add(event)
            logger.warning(event, node=self._node, **facts)
