"""What a worker without work does: rests, looks for other queues, asks for rebuilds, and ends when told to."""

import threading
import time
from typing import Any

from redis import Redis

from swathe import log, names
from swathe.errors import QueueError, SwatheError
from swathe.queue import RangeQueue, cancelled_runs, known_runs, queue_names, redis_errors
from swathe.spec import RangeJob, RunId
from worker.loop.contract import Hooks, WorkerOptions

_SHORTEST_REST_S = 0.05
_LONGEST_REST_S = 1.0
_REMEMBERED_RUNS = 64


class Idle:
    """Used by the worker's main thread only. Raises QueueError when Redis does not answer."""

    def __init__(self, connection: Redis, options: WorkerOptions, hooks: Hooks) -> None:
        self._connection = connection
        self._options = options
        self._hooks = hooks
        self._log: Any = log.get("worker")
        self._rest_s = _SHORTEST_REST_S
        self._idle_since_s: float | None = None
        self._rebuilt_at_s = time.monotonic()
        self._runs: dict[RunId, str] = {}
        self._complete: set[RunId] = set()
        self._told: dict[RunId, str] = {}
        self._last_look = False

    def reset(self) -> None:
        """There was work."""
        self._rest_s = _SHORTEST_REST_S
        self.hold()

    def hold(self) -> None:
        """There is work, though not to be done now: the time until the end starts anew."""
        self._idle_since_s = None
        self._last_look = False

    def saw(self, job: RangeJob) -> None:
        """Remember the run: a flushed Redis does not know it any more."""
        if job.run_id not in self._runs and len(self._runs) >= _REMEMBERED_RUNS:
            self._runs.pop(next(iter(self._runs)))
        self._runs[job.run_id] = job.run_url
        self._complete.discard(job.run_id)

    def queues(self) -> list[str]:
        """Queues that this worker may serve, the one that has been non-empty longest first."""
        return [name for name in queue_names(self._connection) if self._hooks.may_serve(name)]

    def rest(self, stop: threading.Event, *, holding: int) -> bool:
        """Wait a little; True when the queues have held no work for as long as the operator set."""
        if not holding:
            if self._is_time_to_go():
                if self._last_look:
                    return True
                # What the queue lost is found now, or the run would end incomplete; then one more claim.
                self._last_look = True
                self._rebuild()
                return False
            if time.monotonic() - self._rebuilt_at_s >= self._options.rebuild_every_s:
                self._rebuild()
        stop.wait(self._rest_s)
        self._rest_s = min(self._rest_s * 1.5, _LONGEST_REST_S)
        return False

    def _is_time_to_go(self) -> bool:
        limit_s = self._options.exit_when_idle_s
        if limit_s is None:
            return False
        # Ranges that run elsewhere may come back; queued ones are none for us, or the claim had found them.
        if any(RangeQueue(self._connection, name).counts().running for name in self.queues()):
            self.hold()
            return False
        if self._idle_since_s is None:
            self._idle_since_s = time.monotonic()
        return time.monotonic() - self._idle_since_s >= limit_s

    def _rebuild(self) -> None:
        """Let one worker of the fleet compare the known runs with their stores."""
        self._rebuilt_at_s = time.monotonic()
        for run_id in cancelled_runs(self._connection):
            self._runs.pop(run_id, None)
        runs = {**self._runs, **known_runs(self._connection)}
        for run_id, url in runs.items():
            if run_id in self._complete:
                continue
            with redis_errors(f"lock for the rebuild of run {run_id}"):
                mine = self._connection.set(
                    names.rebuild_key(run_id),
                    "1",
                    nx=True,
                    ex=max(1, round(self._options.rebuild_every_s)),
                )
            if not mine:
                continue
            try:
                if self._hooks.rebuild(run_id, url):
                    self._complete.add(run_id)
            except QueueError:
                raise
            except SwatheError as error:
                if self._told.get(run_id) != str(error):  # a run that was deleted stays so
                    self._told[run_id] = str(error)
                    self._log.warning(
                        "run cannot be compared with its store; asked again later. Is it gone for good: swathe cancel",
                        run=run_id, url=url, error=str(error),
                    )  # fmt: skip
            except Exception:  # noqa: BLE001
                self._log.exception(
                    "rebuild of the queue failed; asked again later", run=run_id, url=url
                )
