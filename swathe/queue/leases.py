"""A worker's side of the queue: claim a job with its lease, keep it, give it up. Every step is one Lua transaction.

The execution id is the fencing token. A lease that exists is held, however old; only the reaper takes it away, and then
neither an acknowledgement nor a failure of the old holder changes anything.
"""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from redis import Redis
from rq.defaults import RQ_KEY_PREFIX

from swathe import names
from swathe.queue import lua_leases as lua
from swathe.queue.connection import redis_errors
from swathe.queue.keys import QueueKeys
from swathe.queue.payload import iso_now
from swathe.queue.ranges import queue_names
from swathe.queue.scripts import Scripts

Stage = Literal["read", "compute", "store"]
Back = Literal["drain", "infrastructure", "isolation", "mismatch", "worker"]
"""Why a job is handed back; a counter of the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A claimed job: what Redis held about it, and the token that proves the claim."""

    job_id: str
    execution_id: str
    fields: dict[str, bytes] = field(repr=False)

    @property
    def failures(self) -> int:
        """How often the range raised."""
        return int(self.fields.get("swathe_failures", b"0"))

    @property
    def deaths(self) -> int:
        """How often a process died with this range on its device."""
        return int(self.fields.get("swathe_deaths", b"0"))

    @property
    def bystander_deaths(self) -> int:
        """How often a process died that merely held this range."""
        return int(self.fields.get("swathe_bystander_deaths", b"0"))

    @property
    def history(self) -> tuple[str, ...]:
        """One line for each failure and death, oldest first."""
        return history_lines(self.fields.get("swathe_history", b""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Answer to a claim: a lease, or why there is none (``refused`` jobs were set aside already)."""

    state: Literal["job", "none", "suspended", "refused"]
    lease: Lease | None = None
    job_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Answer to a failure: ``spent`` leaves the lease held, so that its holder can set the range aside."""

    held: bool
    failures: int = 0
    spent: bool = False
    history: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaped:
    """Job ids that went back to the front; ``hold_off_s`` > 0 while nothing may be taken away."""

    job_ids: tuple[str, ...] = ()
    hold_off_s: int = 0


class Leases:
    """Leases of one worker on one queue. Every method raises QueueError when Redis does not answer.

    All calls may be repeated after an error whose outcome is unknown: a claim finds the same job again, everything else
    finds that there is nothing left to do.
    """

    def __init__(self, connection: Redis, queue: str, worker: str, *, lease_s: float) -> None:
        self.queue = queue
        self.worker = worker
        self.lease_s = lease_s
        self._gap_s = lease_s / 3
        """Without a trace of any worker for this long, Redis counts as having been away."""
        self._scripts = Scripts(connection, QueueKeys(queue))

    def claim(self, execution_id: str, skip_runs: Iterable[str] = ()) -> Claim:
        """The next job of a run that is neither paused nor in ``skip_runs``; never waits.

        ``execution_id`` is ``new_execution()``; after an error, ask again with the same.
        """
        skip = sorted(skip_runs)
        while True:
            answer = self._run(
                "claim", lua.CLAIM, self.worker, execution_id, self.lease_s, iso_now(), *skip
            )
            if answer[0] != b"again":
                break
        state = answer[0].decode()
        if state == "job":
            names_and_values = answer[2:]
            fields = {
                name.decode(errors="replace"): value
                for name, value in zip(names_and_values[::2], names_and_values[1::2], strict=True)
            }
            job_id = answer[1].decode(errors="replace")
            lease = Lease(job_id=job_id, execution_id=execution_id, fields=fields)
            return Claim(state="job", lease=lease, job_id=job_id)
        if state == "refused":
            return Claim(
                state="refused",
                job_id=answer[1].decode(errors="replace"),
                reason=answer[2].decode(),
            )
        return Claim(state=state)

    def start(self, lease: Lease, left: Iterable[Lease] = ()) -> bool:
        """Say that the range goes onto the device now; False when the lease was taken away.

        ``left`` are ranges that were on the device and are no more: a death is not theirs.
        """
        pairs = [part for each in left for part in (each.job_id, each.execution_id)]
        return bool(
            self._run("start", lua.START, lease.job_id, lease.execution_id, self.lease_s, *pairs)
        )

    def renew(self, held: Iterable[tuple[Lease, Stage]]) -> frozenset[str]:
        """Renew all leases in one call; returns the execution ids that were taken away."""
        args: list[str] = []
        for lease, stage in held:
            args += [lease.job_id, lease.execution_id, stage]
        lost = self._run("renewal", lua.RENEW, self.lease_s, self._gap_s, iso_now(), *args)
        return frozenset(execution_id.decode() for execution_id in lost)

    def ack(self, lease: Lease, seconds: float) -> bool:
        """The range is durable; False when the lease was taken away, which harms nothing."""
        return bool(
            self._run(
                "acknowledgement", lua.ACK,
                lease.job_id, lease.execution_id, self.worker, f"{seconds:.3f}",
            )
        )  # fmt: skip

    def fail(self, lease: Lease, budget: int, line: str) -> Failed:
        """The range raised: back to the end of the queue, or ``spent``."""
        answer = self._run(
            "failure", lua.FAIL,
            lease.job_id, lease.execution_id, self.worker, budget, one_line(line),
        )  # fmt: skip
        if not answer[0]:
            return Failed(held=False)
        if len(answer) == 1:
            return Failed(held=True, failures=answer[0])
        return Failed(
            held=True, failures=answer[0], spent=True, history=history_lines(answer[1] or b"")
        )

    def hand_back(self, leases: Sequence[Lease], reason: Back, *, death: str = "") -> int:
        """Jobs to the front, in this order, no retry spent; ``death`` counts one for each, with that line."""
        if not leases:
            return 0
        counter = "swathe_deaths" if death else ""
        pairs = [part for lease in leases for part in (lease.job_id, lease.execution_id)]
        return int(
            self._run(
                "hand-back",
                lua.HAND_BACK,
                self.worker,
                reason,
                counter,
                one_line(death),
                *pairs,
            )
        )

    def refuse(self, lease: Lease, reason: str) -> bool:
        """Set a claimed job aside in Redis with the reason; rq shows it as failed."""
        return bool(
            self._run(
                "refusal", lua.REFUSE,
                lease.job_id, lease.execution_id, self.worker, reason, iso_now(),
            )
        )  # fmt: skip

    def reap(self) -> Reaped:
        """Return expired ranges of this queue to its front; any worker may, any number of times."""
        hold_off_s, *job_ids = self._run("reaping", lua.REAP, self.lease_s, self._gap_s)
        return Reaped(
            job_ids=tuple(job_id.decode(errors="replace") for job_id in job_ids),
            hold_off_s=int(hold_off_s),
        )

    def release_worker(self) -> tuple[str, ...]:
        """The worker of these leases is dead for certain: its ranges go to the front now; returns their job ids."""
        job_ids = self._run("release of a dead worker", lua.RELEASE_WORKER, self.worker)
        return tuple(job_id.decode(errors="replace") for job_id in job_ids)

    def _run(self, what: str, script: str, *args: str | float) -> Any:
        with redis_errors(f"queue {self.queue}: {what}"):
            return self._scripts(script, *args)


def release_dead_worker(connection: Redis, worker: str) -> tuple[str, ...]:
    """Return the ranges of a worker whose process has ended, in all queues, and show it no more.

    The caller must have seen it end.
    """
    back: tuple[str, ...] = ()
    for queue in queue_names(connection):
        back += Leases(connection, queue, worker, lease_s=1.0).release_worker()
    with redis_errors(f"farewell of the dead worker {worker}"):
        connection.delete(names.worker_key(worker))
    return back


def acknowledged_by(connection: Redis, worker: str) -> int:
    """How many ranges a worker has acknowledged, live or dead for less than a minute."""
    with redis_errors(f"what worker {worker} has done"):
        found: Any = connection.hget(f"{RQ_KEY_PREFIX}:worker:{worker}", "successful_job_count")
    return int(found or 0)


def new_execution() -> str:
    """A fresh execution id, in rq's form."""
    return uuid.uuid4().hex


def one_line(text: str) -> str:
    """Text as it can stand in a history, one event a line."""
    return " ".join(text.split())[:500]


def history_lines(raw: bytes) -> tuple[str, ...]:
    """The lines of a history."""
    return tuple(line for line in raw.decode(errors="replace").split("\n") if line)
