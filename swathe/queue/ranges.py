"""One model's queue as producers, displays and idle workers use it: enqueue if absent, count, pause, cancel.

Redis is a cache of the truth in the store: every call may be repeated from any state. Nothing here reads through rq's
registries, whose getters clean up as a side effect; counts are LLEN and ZCARD.
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from redis import Redis
from rq.defaults import RQ_KEY_PREFIX

from swathe import names
from swathe.queue import lua_ranges as lua
from swathe.queue.connection import redis_errors
from swathe.queue.keys import QueueKeys
from swathe.queue.payload import absolute_run_url, encode, iso_now
from swathe.queue.scripts import Scripts
from swathe.spec import RangeId, RangeJob, RunId

CHUNK: Final = 1000
"""Jobs in one script call: some 15 ms during which Redis answers nobody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """What ``enqueue_if_absent`` found: jobs put in, jobs whose hash was lost and is back, jobs already there."""

    added: int = 0
    repaired: int = 0
    known: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts:
    """Jobs of one queue by state; ``refused`` were set aside in Redis and never executed."""

    queued: int = 0
    running: int = 0
    paused: int = 0
    refused: int = 0

    @property
    def work(self) -> int:
        """Jobs that a worker will have to do without anybody's doing."""
        return self.queued + self.running


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRanges:
    """The ranges of one run that the queue knows, by state."""

    queued: frozenset[RangeId] = frozenset()
    running: frozenset[RangeId] = frozenset()
    paused: frozenset[RangeId] = frozenset()
    refused: frozenset[RangeId] = frozenset()

    @property
    def all(self) -> frozenset[RangeId]:
        """Ranges in any state."""
        return self.queued | self.running | self.paused | self.refused


class RangeQueue:
    """The queue ``swathe-<model key>``. Every method raises QueueError when Redis does not answer."""

    def __init__(self, connection: Redis, name: str) -> None:
        self._connection = connection
        self.name = name
        self._keys = QueueKeys(name)
        self._scripts = Scripts(connection, self._keys)

    @classmethod
    def of_model(cls, connection: Redis, model_key: str) -> "RangeQueue":
        """The queue of one model."""
        return cls(connection, names.queue(model_key))

    def enqueue_if_absent(self, jobs: Iterable[RangeJob], *, rebuild: bool = False) -> Enqueued:
        """Put jobs at the end unless they are queued, parked or running; the same call twice changes nothing.

        Jobs that wait get the body given here, which differs when the run was moved.
        A ``rebuild`` leaves cancelled runs alone; a person's call brings them back.

        Safe from any state (flushed, evicted hashes, list and hash disagreeing, a producer killed halfway) and beside
        another producer. A range that was refused or is a remnant of an older accident comes back.
        """
        added = repaired = known = 0
        stamp = iso_now()
        remaining = iter(jobs)
        while chunk := list(itertools.islice(remaining, CHUNK)):
            args: list[Any] = ["rebuild" if rebuild else "asked"]
            for job in chunk:
                args += [names.job(job.run_id, job.range_id), encode(job)]
            urls: dict[Any, Any] = {job.run_id: absolute_run_url(job.run_url) for job in chunk}
            with redis_errors(f"queue {self.name}: enqueue of {len(chunk)} ranges"):
                self._connection.hset(names.runs_key(), mapping=urls)
                answer = self._scripts(lua.ENQUEUE, self.name, stamp, *args, when_full=False)
            added, repaired, known = added + answer[0], repaired + answer[1], known + answer[2]
        return Enqueued(added=added, repaired=repaired, known=known)

    def counts(self) -> QueueCounts:
        """Jobs by state, of all runs of this queue; changes nothing."""
        with redis_errors(f"queue {self.name}: counts"), self._connection.pipeline() as pipe:
            pipe.llen(self._keys.waiting)
            pipe.llen(self._keys.intermediate)
            pipe.zcard(self._keys.running)
            pipe.llen(self._keys.parked)
            pipe.zcard(self._keys.failed)
            waiting, popped, running, parked, failed = pipe.execute()
        return QueueCounts(queued=waiting + popped, running=running, paused=parked, refused=failed)

    def known_ranges(self, run_id: RunId) -> KnownRanges:
        """Which ranges of a run the queue knows; changes nothing. One snapshot: no range is between two states."""
        with redis_errors(f"queue {self.name}: ranges of run {run_id}"):
            with self._connection.pipeline(transaction=True) as pipe:
                pipe.lrange(self._keys.waiting, 0, -1)
                pipe.lrange(self._keys.intermediate, 0, -1)
                pipe.zrange(self._keys.running, 0, -1)
                pipe.lrange(self._keys.parked, 0, -1)
                pipe.zrange(self._keys.failed, 0, -1)
                waiting, popped, running, parked, failed = pipe.execute()
            paused = bool(self._connection.sismember(names.paused_key(), run_id))
        queued = _ranges(run_id, waiting + popped)
        parked_ranges = _ranges(run_id, parked)
        return KnownRanges(
            queued=frozenset() if paused else queued,
            running=_ranges(run_id, [composite.rpartition(b":")[0] for composite in running]),
            # Jobs of a paused run move to the parked list only when a worker meets them.
            paused=parked_ranges | queued if paused else parked_ranges,
            refused=_ranges(run_id, failed),
        )

    def refusal(self, run_id: RunId, range_id: RangeId) -> str:
        """Why a range was refused; empty when it was not."""
        job = f"{RQ_KEY_PREFIX}:job:{names.job(run_id, range_id)}"
        with redis_errors(f"queue {self.name}: why range {range_id} of run {run_id} was refused"):
            found: Any = self._connection.hget(job, "exc_info")
        return found.decode(errors="replace") if found else ""

    def pause(self, run_id: RunId) -> None:
        """Start no more ranges of a run; those being computed are finished and stored."""
        with redis_errors(f"pause of run {run_id}"):
            self._connection.sadd(names.paused_key(), run_id)

    def resume(self, run_id: RunId) -> int:
        """Undo ``pause``; returns how many parked ranges went back to the front of the queue."""
        with redis_errors(f"resume of run {run_id}"):
            return int(self._scripts(lua.RESUME, run_id))

    def relocate(self, run_id: RunId, run_url: str) -> bool:
        """Note where a run is now; False when the fleet does not know it. ``enqueue_if_absent`` then tells its jobs."""
        with redis_errors(f"new place of run {run_id}"):
            if not self._connection.hexists(names.runs_key(), run_id):
                return False
            self._connection.hset(names.runs_key(), run_id, absolute_run_url(run_url))
            return True

    def cancel(self, run_id: RunId) -> int:
        """Forget a run and all its jobs; returns how many. What is stored stays stored; ``submit`` brings it back."""
        with redis_errors(f"cancel of run {run_id}"):
            self._connection.hdel(names.runs_key(), run_id)
            return int(self._scripts(lua.CANCEL, run_id))


def known_runs(connection: Redis) -> dict[RunId, str]:
    """Runs that were submitted and not cancelled: run id and URL."""
    with redis_errors("list of runs"):
        found: Any = connection.hgetall(names.runs_key())
    runs = {RunId(run_id.decode()): url.decode() for run_id, url in found.items()}
    gone = cancelled_runs(connection)
    return {run_id: url for run_id, url in runs.items() if run_id not in gone}


def cancelled_runs(connection: Redis) -> frozenset[RunId]:
    """Runs that were cancelled and not submitted again."""
    with redis_errors("list of cancelled runs"):
        found: Any = connection.smembers(names.cancelled_key())
    return frozenset(RunId(run_id.decode()) for run_id in found)


def paused_runs(connection: Redis) -> frozenset[RunId]:
    """Runs that are paused."""
    with redis_errors("list of paused runs"):
        found: Any = connection.smembers(names.paused_key())
    return frozenset(RunId(run_id.decode()) for run_id in found)


def queue_names(connection: Redis) -> list[str]:
    """Every queue that ever held ranges, the one that has been non-empty longest first."""
    with redis_errors("list of queues"):
        found: Any = connection.zrange(names.queues_key(), 0, -1)
    return [name.decode() for name in found]


def requeued_counts(connection: Redis) -> dict[str, int]:
    """How many ranges went back to a queue since Redis was empty, by reason."""
    with redis_errors("counters of the fleet"):
        found: Any = connection.hgetall(names.requeued_key())
    return {reason.decode(): int(count) for reason, count in found.items()}


def live_workers(connection: Redis) -> dict[str, Mapping[str, Any]]:
    """What every live worker says about itself, by worker name."""
    prefix = names.worker_key("")
    out: dict[str, Mapping[str, Any]] = {}
    with redis_errors("list of workers"):
        keys = [key.decode() for key in connection.scan_iter(match=f"{prefix}*", count=1000)]
        values: Any = connection.mget(keys) if keys else []
    for key, value in zip(keys, values, strict=True):
        if value is not None:
            out[key.removeprefix(prefix)] = json.loads(value)
    return out


def _ranges(run_id: RunId, job_ids: Iterable[bytes]) -> frozenset[RangeId]:
    found = (names.job_range(job_id.decode(errors="replace")) for job_id in job_ids)
    return frozenset(place[1] for place in found if place and place[0] == run_id)
