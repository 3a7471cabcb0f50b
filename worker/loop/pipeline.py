"""A range's way through the worker: read thread -> one compute thread -> upload threads -> outbox.

Nothing waits for a stage but the one before it, and the number of ranges held bounds every queue between them.

A range whose budget is spent goes the same way with care (``worker.loop.budget``): its samples are computed one by one, in
this process after errors, in processes made to die after deaths. Meanwhile the worker holds no other range.
"""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from swathe import log
from swathe.errors import (
    NoSpaceError,
    PoisonRangeError,
    QueueError,
    WorkerError,
)
from swathe.queue import Back, Lease, Leases
from worker.loop.budget import judge, why
from worker.loop.contract import STORED, RangeWork, WorkerOptions
from worker.loop.faults import brief, classify
from worker.loop.flights import UNSTARTED, Flight, Flights
from worker.loop.outbox import Outbox

_NEXT_RANGE_S = 0.1
"""How long a range on the device waits for company before it is finished alone."""
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0


class Pipeline:
    """Threads between the claim and the settlement. ``on_fatal`` and ``on_mismatch`` tell the worker loop."""

    def __init__(
        self,
        work: RangeWork,
        flights: Flights,
        options: WorkerOptions,
        *,
        on_fatal: Callable[[BaseException], None],
        on_mismatch: Callable[[Flight, BaseException], None],
        on_outcome: Callable[[str, str], None] = lambda _outcome, _error: None,
    ) -> None:
        self._work = work
        self._flights = flights
        self._options = options
        self._on_fatal = on_fatal
        self._on_mismatch = on_mismatch
        self._on_outcome = on_outcome
        self._log: Any = log.get("worker")
        self._to_read: queue.SimpleQueue[Flight] = queue.SimpleQueue()
        self._to_compute: queue.SimpleQueue[Flight] = queue.SimpleQueue()
        self._to_store: queue.SimpleQueue[Flight] = queue.SimpleQueue()
        self.outbox = Outbox()
        self._failed_in_a_row: set[str] = set()
        self._backoff_s = 0.0
        self._backoff_until_s = 0.0
        self.out_of_space = False
        """Whether the last pause was for a full store."""
        self.progress_s = time.monotonic()
        self._left_device: list[Lease] = []
        self._halted = self._blamed = False
        self.apart = False
        """Whether a range is being isolated: this worker wants no other now."""
        self.done = 0

    def start(self) -> None:
        """Start all threads; they are daemons, so that a hung device cannot keep the process alive."""
        self.outbox.start()
        loops: list[tuple[str, Callable[[], None]]] = [
            ("read", lambda: self._forever(self._to_read, self._read)),
            ("compute", self._compute_forever),
        ]
        loops += [
            (f"upload-{index}", lambda: self._forever(self._to_store, self._store))
            for index in range(self._options.jobs_in_flight)
        ]
        for name, loop in loops:
            threading.Thread(target=loop, name=name, daemon=True).start()

    def submit(self, flight: Flight) -> None:
        """Take a claimed range."""
        self._flights.add(flight)
        self._to_read.put(flight)

    def progress(self) -> None:
        """The computation moved: the watchdog starts again."""
        self.progress_s = time.monotonic()

    @property
    def backoff_s(self) -> float:
        """How long nothing should be claimed, since store or Redis do not work."""
        return max(0.0, self._backoff_until_s - time.monotonic())

    def _forever(
        self, source: "queue.SimpleQueue[Flight]", step: Callable[[Flight], object]
    ) -> None:
        while True:
            self._guarded(source.get(), step)

    def _guarded(self, flight: Flight, step: Callable[[Flight], object]) -> bool:
        """Do a step; an error is settled here, whatever it was."""
        try:
            return bool(step(flight))
        except BaseException as error:  # noqa: BLE001 - a thread must tell, whatever it was
            self._settle_error(flight, error)
            return False

    def _read(self, flight: Flight) -> None:
        if not self._flights.advance(flight, "reading"):
            return
        if self.apart:
            self.give_back(self._flights.withdraw(UNSTARTED), "isolation")
            return
        verdict = judge(flight.lease, self._options)
        if verdict.set_aside:
            self._set_aside(flight, verdict.set_aside)
            return
        flight.care = flight.care or verdict.care
        prepared = self._work.prepare(flight.job)
        if prepared is STORED:
            self._succeeded(flight)
            return
        flight.load = prepared
        if self._flights.advance(flight, "ready"):
            self._to_compute.put(flight)

    def _compute_forever(self) -> None:
        """One range is put behind another before the first is finished, so that the device never waits for us."""
        on_device: Flight | None = None
        while True:
            flight = self._next_to_compute(on_device)
            if flight is not None and flight.care:
                if on_device is not None:
                    self._guarded(on_device, self._finish)
                    on_device = None
                self._guarded(flight, self._compute_with_care)
                continue
            began = flight is not None and self._guarded(flight, self._compute)
            if on_device is not None:
                self._guarded(on_device, self._finish)
            on_device = flight if began else None
            if on_device is not None and not self._work.overlaps:
                self._guarded(on_device, self._finish)
                on_device = None

    def _next_to_compute(self, on_device: Flight | None) -> Flight | None:
        try:
            return self._to_compute.get(timeout=None if on_device is None else _NEXT_RANGE_S)
        except queue.Empty:
            return None

    def _compute(self, flight: Flight) -> bool:
        if not self._begin(flight):
            return False
        prepared, flight.load = flight.load, None
        flight.load = self._work.compute(prepared)
        return True

    def _compute_with_care(self, flight: Flight) -> None:
        if not self._begin(flight):
            return
        prepared, flight.load = flight.load, None
        self._log.warning(
            "range computed sample by sample", job=flight.lease.job_id, how=flight.care,
            why=why(flight.care, flight.lease, flight.failures),
        )  # fmt: skip
        if flight.care == "alone":
            flight.load = self._work.compute_alone(prepared)
            self._hand_on(flight)
            return
        self.apart = True
        try:
            self.give_back(self._flights.withdraw(UNSTARTED), "isolation")
            self._work.compute_apart(flight.job)
        finally:
            self.apart = False
        if self._flights.advance(flight, "storing"):
            self._succeeded(flight)

    def _begin(self, flight: Flight) -> bool:
        """Say that the range goes onto the device now; False when it is no longer ours."""
        if self._halted or not self._flights.advance(flight, "computing"):
            return False
        self.progress()
        try:
            held = flight.book.start(flight.lease, self._left_device)
            self._left_device.clear()
        except QueueError:
            # Redis is away: nobody can take the range from us now, and its record will be exclusive.
            held = True
        if not held:
            self._flights.remove(flight)
            self._log.warning("lease lost before compute, range dropped", job=flight.lease.job_id)
            self._on_outcome("lost", "")
        return held

    def _finish(self, flight: Flight) -> bool:
        started, flight.load = flight.load, None
        flight.load = self._work.finish(started)
        return self._hand_on(flight)

    def _hand_on(self, flight: Flight) -> bool:
        self.progress()
        self._left_device.append(flight.lease)
        if self._flights.advance(flight, "storing"):
            self._to_store.put(flight)
            return True
        self._log.warning("lease lost during compute, result dropped", job=flight.lease.job_id)
        self._on_outcome("lost", "")
        return False

    def _store(self, flight: Flight) -> None:
        computed, flight.load = flight.load, None
        self._work.publish(computed)
        self._succeeded(flight)

    def _succeeded(self, flight: Flight) -> None:
        self._failed_in_a_row.clear()
        self._backoff_s = 0.0
        self._acknowledge(flight)

    def _acknowledge(self, flight: Flight) -> None:
        seconds = time.monotonic() - flight.claimed_s
        self._flights.advance(flight, "settling")

        def settle() -> None:
            if not flight.book.ack(flight.lease, seconds):
                # Also after an acknowledgement whose answer was lost.
                self._log.warning(
                    "not acknowledged: the lease was taken away; what is stored counts",
                    job=flight.lease.job_id,
                )
            self._flights.remove(flight)
            self.done += 1

        self._put(flight, settle)

    def _set_aside(self, flight: Flight, reason: str) -> None:
        history = flight.history
        self._work.set_aside(flight.job, reason, history)
        self._on_outcome("set_aside", reason)
        self._log.error(
            "range set aside; the run goes on without it, `swathe retry` brings it back",
            job=flight.lease.job_id, reason=reason, last=history[-1] if history else "",
        )  # fmt: skip
        self._acknowledge(flight)

    def _halt(self, error: BaseException) -> None:
        """Touch the device no more; what is not on it yet goes back when the worker drains."""
        self._halted = True
        self._on_fatal(error)

    def _settle_error(self, flight: Flight, error: BaseException) -> None:
        kind = classify(error)
        blamed = kind == "worker" and self._blame(flight)
        if kind == "worker":
            self._halt(error)
        if not self._flights.advance(flight, "settling"):
            return
        if kind == "infrastructure":
            self._back_off(flight, error)
        elif kind == "mismatch":
            self._on_mismatch(flight, error)
            self._on_outcome("handed_back", brief(error))
            self.hand_back(flight, "mismatch")
        elif kind == "refused":
            self._refuse(flight, str(error))
        elif kind == "worker":
            death = f"worker {flight.book.worker}: {brief(error)}" if blamed else ""
            self._on_outcome("handed_back", brief(error))
            self.hand_back(flight, "worker", death=death)
        elif flight.care:
            self._give_up(flight, error)
        else:
            self._fail(flight, error)

    def _blame(self, flight: Flight) -> bool:
        """Whether this range counts the death: the one that was first on the device when it broke, and no other."""
        on_device = [each for each in self._flights.snapshot() if each.place == "computing"]
        if self._blamed or not on_device or on_device[0] is not flight:
            return False
        self._blamed = True
        return True

    def give_back(self, flights: Sequence[Flight], reason: Back) -> None:
        """Ranges that left the table go to the front of their queues, in order, as soon as Redis answers."""
        by_book: dict[Leases, list[Lease]] = {}
        for flight in flights:
            flight.load = None
            by_book.setdefault(flight.book, []).append(flight.lease)
        for book, leases in by_book.items():
            self.outbox.put(partial(_hand_back, book, leases, reason))

    def hand_back(self, flight: Flight, reason: Back, *, death: str = "") -> None:
        """The range goes to the front of the queue as soon as Redis answers."""

        def settle() -> None:
            flight.book.hand_back([flight.lease], reason, death=death)
            self._flights.remove(flight)

        self._put(flight, settle)

    def _refuse(self, flight: Flight, reason: str) -> None:
        self._log.error("job refused and set aside", job=flight.lease.job_id, reason=reason)
        self._on_outcome("refused", reason)

        def settle() -> None:
            flight.book.refuse(flight.lease, reason)
            self._flights.remove(flight)

        self._put(flight, settle)

    def _back_off(self, flight: Flight, error: BaseException) -> None:
        if time.monotonic() >= self._backoff_until_s:
            # Ranges that fail together are one failure of the store, not several.
            self._backoff_s = min(max(self._backoff_s * 2, _FIRST_BACKOFF_S), _LONGEST_BACKOFF_S)
        self._backoff_until_s = time.monotonic() + self._backoff_s
        self._log.warning(
            "store or network does not work; range handed back, no budget spent",
            job=flight.lease.job_id, error=str(error), pause_s=self._backoff_s,
        )  # fmt: skip
        self.out_of_space = isinstance(error, NoSpaceError)
        self._on_outcome("store_error", brief(error))
        self.hand_back(flight, "infrastructure")

    def _fail(self, flight: Flight, error: BaseException) -> None:
        line = f"worker {flight.book.worker}: {brief(error)}"
        trace = "".join(traceback.format_exception(error))
        self._log.error("range failed", job=flight.lease.job_id, error=line, traceback=trace)
        self._on_outcome("failed", brief(error))
        self._failed_in_a_row.add(flight.lease.job_id)
        suspicious = len(self._failed_in_a_row) >= self._options.max_failures_in_a_row

        def settle() -> None:
            answer = flight.book.fail(flight.lease, self._options.max_failures, line)
            if answer.held and answer.spent:
                flight.failures, flight.history = answer.failures, answer.history
                flight.care, flight.load = "alone", None
                if self._flights.advance(flight, "claimed"):
                    self._to_read.put(flight)
                return
            if not answer.held:
                self._log.warning(
                    "lease lost, failure not counted; the range runs elsewhere",
                    job=flight.lease.job_id,
                )
            self._flights.remove(flight)

        self._put(flight, settle)
        if suspicious:
            self._halt(
                WorkerError(
                    f"{len(self._failed_in_a_row)} ranges failed one after another on this worker and none"
                    f" succeeded, the last with: {brief(error)}; it stops so as not to spend every range's budget"
                )
            )

    def _give_up(self, flight: Flight, error: BaseException) -> None:
        """Care did not help either: a durable marker, with all that was seen."""
        seen = error.history if isinstance(error, PoisonRangeError) else (brief(error),)
        flight.history += tuple(f"worker {flight.book.worker}: {line}" for line in seen)
        before = why(flight.care, flight.lease, flight.failures)
        reason = f"{before}, and could not be resolved sample by sample: {brief(error)}"
        self._later(lambda: self._set_aside(flight, reason), flight)

    def _put(self, flight: Flight, settle: Callable[[], None]) -> None:
        # A flight that stayed in the table would be renewed for ever.
        self.outbox.put(settle, dropped=partial(self._flights.remove, flight))

    def _later(self, action: Callable[[], None], flight: Flight) -> None:
        """Do store work off the outbox's thread, which must stay free for acknowledgements."""

        def guarded() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - the marker must come into being some time
                self._back_off(flight, error)

        threading.Thread(target=guarded, name="set-aside", daemon=True).start()


def _hand_back(book: Leases, leases: Sequence[Lease], reason: Back) -> None:
    book.hand_back(leases, reason)
