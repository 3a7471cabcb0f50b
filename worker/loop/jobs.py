"""The worker: claims ranges when a slot is free and brings each to its end, through outages and stops.

It is a SimpleWorker so that rq's commands see it. Of rq it uses the registration only: the loop, the leases and all
that follows a job are the project's own, because rq fails a job after its callbacks, re-runs a live one, and ends with
its model loaded when Redis is away for a moment.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from pydantic import SecretStr
from redis import Redis
from rq import Queue, SimpleWorker, worker_registration
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import now, utcformat

from swathe import log, names
from swathe.errors import OutOfBoundsJobError, QueueError, RefusedJobError
from swathe.queue import Back, Lease, Leases, connect, new_execution, parse, redis_errors
from worker.loop.activity import Activity
from worker.loop.contract import Hooks, RangeWork, WorkerOptions
from worker.loop.flights import UNSTARTED, Flight, Flights
from worker.loop.idle import Idle
from worker.loop.keeper import Keeper, about_key, worker_ttl_s
from worker.loop.pipeline import Pipeline


class RangeWorker(SimpleWorker):
    """One process, one device. ``serve`` runs until it is told to stop and returns the exit status."""

    def __init__(
        self,
        redis_url: str | SecretStr,
        work: RangeWork,
        *,
        name: str,
        roots: Sequence[str],
        options: WorkerOptions | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self._options = options or WorkerOptions()
        self._hooks = hooks or Hooks()
        self._roots = roots
        # Few retries inside the client: every loop here tries again itself and looks at signals in between.
        connection = connect(redis_url, retries=1, socket_timeout_s=5.0)
        super().__init__(
            [],
            name=name,
            connection=connection,
            serializer=JSONSerializer,
            worker_ttl=worker_ttl_s(self._options),
        )
        self._events: Any = log.get("worker")
        self._stop_event = threading.Event()
        self._fatal: BaseException | None = None
        self._book: Leases | None = None
        self._books: dict[str, Leases] = {}
        self._execution_id = new_execution()
        self._unserved: dict[str, str] = {}
        self._redis_pause_s = 0.0
        self.birth_date = self.last_heartbeat = now()
        self.ticked_s = time.monotonic()
        """When the loop last looked for work."""
        self._held = Flights()
        self._idle = Idle(connection, self._options, self._hooks)
        self.pipeline = self._new_pipeline(work)
        self._keeper = self._new_keeper(redis_url)

    def _new_pipeline(self, work: RangeWork) -> Pipeline:
        return Pipeline(
            work,
            self._held,
            self._options,
            on_fatal=self._on_fatal,
            on_mismatch=self._on_mismatch,
            on_outcome=self._hooks.outcome,
        )

    def _new_keeper(self, redis_url: str | SecretStr) -> Keeper:
        keeper = Keeper(
            connect(redis_url, retries=0, socket_timeout_s=3.0),
            self.name,
            self._held,
            self.pipeline,
            self._options,
            self._hooks,
        )
        keeper.beat = self._beat
        keeper.stop_claiming = self.stop
        return keeper

    # -- what rq would do otherwise

    def _set_ip_address(self, connection: Redis) -> None:  # noqa: ARG002
        """No command before ``serve``: a worker may be started before Redis is."""
        self.ip_address = "unknown"

    def _set_connection(self, connection: Redis) -> Redis:
        """Keep the client's timeouts; rq would stretch them to minutes."""
        return connection

    def run_maintenance_tasks(self) -> None:
        """Nothing: rq's clean-up imports callbacks and fails jobs; the reaper does what is needed."""

    def clean_registries(self) -> None:
        """Nothing, for the same reason."""

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Never: jobs are not executed through rq, which would import their function."""
        raise NotImplementedError

    def work(self, *_args: Any, **_kwargs: Any) -> bool:
        """Rq's name for ``serve``; all options are in WorkerOptions."""
        return self.serve() == 0

    # -- the loop

    def serve(self) -> int:
        """Work until stopped or idle long enough; 0 after an orderly end, 1 after an error of this worker."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)
        self._events.info("worker starts", worker=self.name, pid=os.getpid())
        self.pipeline.start()
        self._keeper.start()
        try:
            while not self._stop_event.is_set():
                self._turn()
        finally:
            self._drain()
        if self._fatal is not None:
            self._events.error("worker ends with an error", error=str(self._fatal))
            return max(1, getattr(self._fatal, "exit_code", 1))
        self._events.info("worker ends", worker=self.name, done=self.pipeline.done)
        return 0

    def stop(self) -> None:
        """Begin an orderly end, as SIGTERM does."""
        self._stop_event.set()

    def activity(
        self,
        *,
        loading: Callable[[], bool],
        blocked: Callable[[], bool],
        full: Callable[[], bool],
    ) -> Activity:
        """The clock of this worker's time: loading a model, blocked by its (full) store, or what its ranges say."""
        return Activity(
            self._held,
            self.pipeline,
            max_flights=self._options.jobs_in_flight,
            loading=loading,
            blocked=blocked,
            full=full,
        )

    def progress(self) -> None:
        """The engine calls this whenever it moved (a batch, a loaded block), for the watchdog."""
        self.pipeline.progress()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        # Only a flag: an exception out of a Redis call would leave its connection in the middle of an answer.
        if self._stop_event.is_set():
            os._exit(1)
        self._stop_event.set()

    def _turn(self) -> None:
        """One look for work."""
        self.ticked_s = time.monotonic()
        pause_s = self.pipeline.backoff_s
        if self.pipeline.apart:
            self._stop_event.wait(0.2)
        elif pause_s > 0:
            self._stop_event.wait(min(pause_s, 1.0))
        elif self._held.wait_for_room(self._options.jobs_in_flight, 0.2):
            try:
                found = self._claim()
                self._redis_pause_s = 0.0
                if found:
                    self._idle.reset()
                elif self._idle.rest(self._stop_event, holding=len(self._held)):
                    self._events.info(
                        "no work for the set time", seconds=self._options.exit_when_idle_s
                    )
                    self._stop_event.set()
            except QueueError as error:
                if not self._redis_pause_s:
                    self._events.warning("cannot claim, trying again", error=str(error))
                self._redis_pause_s = min(max(self._redis_pause_s * 2, 0.1), 2.0)
                self._stop_event.wait(self._redis_pause_s)

    def _claim(self) -> bool:
        """Claim one range and start it on its way; False when there is none for this worker."""
        queues = [self._book.queue] if self._book is not None else []
        if not len(self._held):
            # Only now may the model change: the queue that has waited longest comes first, unless ours has work.
            queues += [name for name in self._idle.queues() if name not in queues]
        for queue in queues:
            book = self._book_of(queue)
            claim = book.claim(self._execution_id, self._unserved)
            if claim.state == "none":
                continue
            if claim.state == "suspended":
                self._idle.hold()
                return False
            self._execution_id = new_execution()
            if claim.lease is None:
                self._events.error(
                    "job refused and set aside", job=claim.job_id, reason=claim.reason
                )
            else:
                self._accept(claim.lease, book)
            return True
        return False

    def _book_of(self, queue: str) -> Leases:
        if queue not in self._books:
            self._books[queue] = Leases(
                self.connection, queue, self.name, lease_s=self._options.lease_s
            )
        return self._books[queue]

    def _listen(self, book: Leases) -> None:
        """Show the queue that this worker serves now where rq looks for it."""
        if self._book is not book:
            self._book = book
            with redis_errors(f"worker {self.name} changes to queue {book.queue}"):
                worker_registration.unregister(self)
            self.queues = [Queue(book.queue, connection=self.connection, serializer=JSONSerializer)]

    def _accept(self, lease: Lease, book: Leases) -> None:
        try:
            job = parse(lease.job_id, lease.fields, self._roots)
        except RefusedJobError as error:
            self._events.error("job refused and set aside", job=lease.job_id, reason=str(error))
            book.refuse(lease, str(error))
            if isinstance(error, OutOfBoundsJobError) and (place := names.job_range(lease.job_id)):
                # One range tells; a node with a wrong setting must not empty the queue of all others.
                self._stop_listening(place[0], error)
            return
        self._idle.saw(job)
        self.pipeline.submit(Flight(lease, job, book))
        self._listen(book)

    # -- ends

    def _on_fatal(self, error: BaseException) -> None:
        if self._fatal is None:
            self._fatal = error
        self._stop_event.set()

    def _on_mismatch(self, flight: Flight, error: BaseException) -> None:
        self._stop_listening(flight.job.run_id, error)

    def _stop_listening(self, run_id: str, error: BaseException) -> None:
        if run_id not in self._unserved:
            self._unserved[run_id] = str(error)
            self._events.error(
                "this worker cannot serve the run and stops listening to it; its ranges go to others."
                " Mend the cause and start the worker again",
                run=run_id, error=str(error),
            )  # fmt: skip

    def _drain(self) -> None:
        """Un-started ranges go back in order, started ones are finished within the bound, the rest goes back too."""
        end_s = time.monotonic() + self._options.drain_s
        self._give_back(self._held.withdraw(UNSTARTED))
        if not self._held.wait_until_empty(max(0.0, end_s - time.monotonic())):
            left = self._held.withdraw()
            self._events.warning("stop takes too long, ranges handed back", ranges=len(left))
            self._give_back(left)
        undelivered = self.pipeline.outbox.close(max(1.0, end_s - time.monotonic()))
        if undelivered:
            self._events.warning(
                "Redis is away, leases run out by themselves", settlements=undelivered
            )
        self._keeper.close()
        try:
            with redis_errors("farewell"):
                self.register_death()  # type: ignore[no-untyped-call]
                self.connection.delete(about_key(self.name))
        except QueueError as error:
            self._events.warning("farewell not said", error=str(error))

    def _give_back(self, flights: list[Flight]) -> None:
        reason: Back = "drain" if self._fatal is None else "worker"
        self.pipeline.give_back(flights, reason)

    def _beat(self, connection: Redis, about: dict[str, Any]) -> None:
        """Everything about this worker, again at each beat: a flushed or restarted Redis knows it at once."""
        self.last_heartbeat = now()
        self._state = "busy" if len(self._held) else "idle"
        about = {
            **about,
            "queue": self._book.queue if self._book else None,
            "not_serving": self._unserved,
        }
        ttl_s = worker_ttl_s(self._options)
        with connection.pipeline() as pipe:
            pipe.hset(
                self.key,
                mapping={
                    **self.serialize(),
                    "state": self._state,
                    "last_heartbeat": utcformat(self.last_heartbeat),
                },
            )
            pipe.expire(self.key, ttl_s)
            worker_registration.register(self, pipe)
            pipe.set(about_key(self.name), json.dumps(about, default=str), ex=ttl_s)
            pipe.execute()
