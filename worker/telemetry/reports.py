"""How a worker process tells its supervisor what it did: whole JSON messages over a socket pair, totals each time.

A message that was sent is the supervisor's even if the worker is killed in the next microsecond, and the socket's end
says that it died. Totals of dead processes are added to their device's, so that counters go on over restarts; what was
true of a dead process is forgotten with it.
"""

import contextlib
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from swathe import log

_MESSAGE_BYTES: Final = 1 << 17
STALE_S: Final = 10.0
"""What a process said longer ago is not shown as true."""

logger = log.get("reports")


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums that only grow: counts, seconds by state and stage, observations by stage."""

    counts: Mapping[str, float] = field(default_factory=dict)
    states: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            counts=_sum(self.counts, other.counts),
            states=_sum(self.states, other.states),
            stages=_sum(self.stages, other.stages),
            buckets={
                stage: _sum_buckets(self.buckets.get(stage, ()), other.buckets.get(stage, ()))
                for stage in {**self.buckets, **other.buckets}
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One message. ``gauges`` and the rest are true at the moment it was sent."""

    totals: Totals = field(default_factory=Totals)
    gauges: Mapping[str, float] = field(default_factory=dict)
    state: str = ""
    ready: bool = False
    loop_age_s: float = 0.0
    last_error: str = ""

    def encode(self) -> bytes:
        """As it goes over the socket."""
        totals = self.totals
        return json.dumps(
            {
                "totals": {
                    "counts": totals.counts, "states": totals.states,
                    "stages": totals.stages, "buckets": totals.buckets,
                },
                "gauges": self.gauges, "state": self.state, "ready": self.ready,
                "loop_age_s": self.loop_age_s, "last_error": self.last_error,
            }
        ).encode()  # fmt: skip

    @classmethod
    def decode(cls, data: bytes) -> "Report":
        """The other way."""
        value: dict[str, Any] = json.loads(data)
        totals = value.pop("totals")
        totals["buckets"] = {stage: tuple(counts) for stage, counts in totals["buckets"].items()}
        return cls(totals=Totals(**totals), **value)


class Outlet:
    """The worker's end. Never blocks and never raises: the next message repairs one that was not taken."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._socket.set_inheritable(False)

    def send(self, report: Report) -> None:
        """Hand a report over; dropped when the supervisor does not read or is gone."""
        with contextlib.suppress(OSError):
            self._socket.send(report.encode())

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


@dataclass(slots=True)
class _Line:
    """One worker process."""

    uuid: str
    ours: socket.socket
    theirs: socket.socket | None
    report: Report | None = None
    heard_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What is known of one live process. ``report`` is None before its first word and when that is stale."""

    worker: str
    uuid: str
    report: Report | None
    silent_s: float


class Inbox:
    """The supervisor's end, for all its workers. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[str, _Line] = {}
        self._past: defaultdict[str, Totals] = defaultdict(Totals)

    def open(self, worker: str, uuid: str) -> int:
        """A line for a process about to start; returns the file descriptor that it must inherit."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with self._lock:
            self._lines[worker] = _Line(uuid, ours, theirs, heard_s=time.monotonic())
        return theirs.fileno()

    def started(self, worker: str) -> None:
        """The process has its end: ours of it is closed, or its death would not be seen."""
        with self._lock:
            line = self._lines.get(worker)
            if line is not None and line.theirs is not None:
                line.theirs.close()
                line.theirs = None

    def ended(self, worker: str) -> None:
        """The process has ended: take its last words and keep its totals."""
        with self._lock:
            if worker in self._lines:
                self._drain(self._lines[worker])
                self._close(worker)

    def drain(self) -> None:
        """Take all that was sent; to be called more often than a socket's buffer fills (some hundred messages)."""
        with self._lock:
            for worker, line in list(self._lines.items()):
                if not self._drain(line):
                    self._close(worker)

    def totals(self) -> dict[str, Totals]:
        """Sums by device, over dead and live processes."""
        with self._lock:
            out = dict(self._past)
            for line in self._lines.values():
                if line.report is not None:
                    out[line.uuid] = out.get(line.uuid, Totals()) + line.report.totals
            return out

    def live(self) -> Iterator[Heard]:
        """Every live process."""
        with self._lock:
            lines = list(self._lines.items())
        for worker, line in lines:
            silent_s = time.monotonic() - line.heard_s
            report = line.report if silent_s <= STALE_S else None
            yield Heard(worker=worker, uuid=line.uuid, report=report, silent_s=silent_s)

    def close(self) -> None:
        """Hang up on all."""
        with self._lock:
            for worker in list(self._lines):
                self._close(worker)

    def _drain(self, line: _Line) -> bool:
        """False at the socket's end."""
        while True:
            try:
                data = line.ours.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            try:
                line.report = Report.decode(data)
                line.heard_s = time.monotonic()
            except (ValueError, TypeError, KeyError) as error:
                logger.warning("report not understood", device=line.uuid, error=str(error))

    def _close(self, worker: str) -> None:
        line = self._lines.pop(worker)
        line.ours.close()
        if line.theirs is not None:
            line.theirs.close()
        if line.report is not None:
            self._past[line.uuid] += line.report.totals


def _sum(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}


def _sum_buckets(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    if not left or not right:
        return left or right
    return tuple(a + b for a, b in zip(left, right, strict=True))
