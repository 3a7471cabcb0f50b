"""The worker's pulse: renews leases, shows the worker, reaps for the fleet, and watches the computation.

One thread on a Redis client of its own, so that neither a slow store nor a busy device delays it. It stops when the
computation hangs: a worker without progress must not keep its ranges.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from redis import Redis

from swathe import log, names
from swathe.errors import QueueError
from swathe.queue import Leases, queue_names, redis_errors
from worker.loop.contract import Hooks, WorkerOptions
from worker.loop.flights import Flights
from worker.loop.pipeline import Pipeline

EXIT_HUNG = 70
"""Exit status of a worker that its own watchdog ended."""

Beat = Callable[[Redis, dict[str, Any]], None]
"""Writes the worker's own keys: client, and what it says about itself."""


class Keeper:
    """Runs until ``close``. Never raises: what Redis does not take now, it takes at the next beat."""

    def __init__(
        self,
        connection: Redis,
        worker: str,
        flights: Flights,
        pipeline: Pipeline,
        options: WorkerOptions,
        hooks: Hooks,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._flights = flights
        self._pipeline = pipeline
        self._options = options
        self._hooks = hooks
        self._log: Any = log.get("keeper")
        self._books: dict[str, Leases] = {}
        self._queues: list[str] = []
        self._queues_at_s = float("-inf")
        self._beat_at_s = float("-inf")
        self._away = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="keeper", daemon=True)
        self.beat: Beat = lambda _connection, _about: None
        self.stop_claiming: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def close(self) -> None:
        """Stop; the leases that are left run out."""
        self._closed.set()
        self._thread.join(timeout=5)

    def book(self, queue: str) -> Leases:
        """The worker's leases on a queue, on the keeper's own client."""
        if queue not in self._books:
            self._books[queue] = Leases(
                self._connection, queue, self._worker, lease_s=self._options.lease_s
            )
        return self._books[queue]

    def _loop(self) -> None:
        while not self._closed.wait(self._options.tick_s):
            try:
                self._watch()
                self._tick()
            except QueueError as error:
                if not self._away:
                    self._log.warning("redis away, leases cannot be renewed", error=str(error))
                self._away = True
            except Exception:  # noqa: BLE001
                self._log.exception("heartbeat failed; trying again")
            else:
                if self._away:
                    self._log.info("redis is back")
                self._away = False

    def _tick(self) -> None:
        now_s = time.monotonic()
        # After an outage renew at once: others start to reap one lease after Redis is back.
        due = self._away or now_s - self._beat_at_s >= self._options.heartbeat_s
        if due:
            self._renew()
        if now_s - self._queues_at_s >= self._options.lease_s:
            self._queues = queue_names(self._connection)
            self._queues_at_s = now_s
        for queue in self._queues:
            back = self.book(queue).reap().job_ids
            if back:
                self._log.warning(
                    "leases ran out, ranges are back at the front of the queue",
                    queue=queue, ranges=len(back), first=back[0],
                )  # fmt: skip
        if due:
            self._show()  # last: a full server refuses it, and takes all before
            self._beat_at_s = now_s

    def _renew(self) -> None:
        flights = self._flights.snapshot()
        for queue in {flight.book.queue for flight in flights}:
            held = [
                (flight.lease, flight.stage) for flight in flights if flight.book.queue == queue
            ]
            gone = self.book(queue).renew(held)
            # A settlement in progress has ended its lease itself; only then is a missing one no news.
            for flight in self._flights.lose(gone):
                self._log.warning(
                    "lease lost, the range runs elsewhere",
                    job=flight.lease.job_id,
                    place=flight.place,
                )

    def _show(self) -> None:
        current = next((f for f in self._flights.snapshot() if f.place == "computing"), None)
        about = {
            "range": current.lease.job_id if current else None,
            "in_flight": len(self._flights),
            "done": self._pipeline.done,
            **self._hooks.about(),
        }
        with redis_errors(f"heartbeat of worker {self._worker}"):
            self.beat(self._connection, about)

    def _watch(self) -> None:
        """End the process when a computation with all it needs does not move."""
        limit_s, now_s = self._options.watchdog_s, time.monotonic()
        hung = [
            flight
            for flight in self._flights.snapshot()
            if flight.place == "computing" and now_s - flight.since_s > limit_s
        ]
        if (
            not hung
            or now_s - self._pipeline.progress_s <= limit_s
            or self._hooks.waits_for_buffer()
        ):
            return
        self._log.critical(
            "no progress; this worker hands back what it can and ends, its supervisor starts another",
            job=hung[0].lease.job_id, seconds=round(now_s - hung[0].since_s),
        )  # fmt: skip
        self._give_up()

    def _give_up(self) -> None:
        """Hand back all but the range in hand, whose lease runs out and counts a death, and end at once."""
        self.stop_claiming()
        # They stay in the table: an emptied one would have room for new claims in these last milliseconds.
        others = [f for f in self._flights.snapshot() if f.place not in ("computing", "settling")]
        try:
            for queue in {flight.book.queue for flight in others}:
                leases = [flight.lease for flight in others if flight.book.queue == queue]
                self.book(queue).hand_back(leases, "worker")
        except QueueError as error:
            self._log.warning("hand-back failed, the leases run out instead", error=str(error))
        self._closed.set()
        os._exit(EXIT_HUNG)


def worker_ttl_s(options: WorkerOptions) -> int:
    """How long a worker is shown after its last heartbeat."""
    return max(16, round(3 * options.heartbeat_s))


def about_key(worker: str) -> str:
    """Where the worker's JSON about itself stands."""
    return names.worker_key(worker)
