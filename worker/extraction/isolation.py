"""A range that killed its processes, cut down to the guilty samples by processes made to die (``worker.apart``).

Such a process computes the samples one after another, each alone on the reference path, and tells which one it begins.
When it dies, the sample in hand is the suspect, so finding one costs one death and no halving; the suspect is then
computed by a fresh process that does nothing else. Dying of it again makes it guilty, and the next process leaves it
out. The process that reaches the end commits the range, with the guilty quarantined. For g guilty samples that is 2 g + 1
processes, each of which loads the model; the worker has freed its own.

A process that dies before its first sample accuses the device, not the range. A sample that kills in company and lives
alone cannot be resolved, nor can more than eight guilty ones: the range is set aside.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Protocol

from swathe import log
from swathe.errors import ModelError, PoisonRangeError, StoreError, WorkerError
from swathe.spec import Quarantined, RangeJob
from worker.extraction.vouching import LOAD_LIMIT_S

MAX_GUILTY: Final = 8
MAX_DOUBTS: Final = 2
_SAMPLE_LIMIT_S: Final = 600.0
_EXIT_S: Final = 30.0

End = Literal["done", "died", "infrastructure", "mismatch", "refused", "worker", "range"]

logger = log.get("isolation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one process does: a range without the samples known to be guilty, or ``only`` one row, which is not stored."""

    job: RangeJob
    worker: str
    device: str
    guilty: tuple[Quarantined, ...] = ()
    only: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a process ended; ``row`` is the sample that it had in hand, None before the first."""

    end: End
    row: int | None = None
    text: str = ""


class Attempt(Protocol):
    """Runs a process."""

    def __call__(
        self, job: RangeJob, guilty: tuple[Quarantined, ...] = (), only: int | None = None
    ) -> Outcome:
        """Run one process on a range."""
        ...


@dataclass(slots=True)
class Isolation:
    """Resolves one range."""

    attempt: Attempt
    guilty: tuple[Quarantined, ...] = ()
    history: list[str] = field(default_factory=list)
    _doubts: int = 0

    def resolve(self, job: RangeJob) -> None:
        """Return when the range is committed. Raises PoisonRangeError when that cannot be had."""
        while len(self.guilty) <= MAX_GUILTY and self._doubts <= MAX_DOUBTS:
            outcome = self._try(job)
            if outcome.row is None:
                return
            alone = self._try(job, only=outcome.row)
            if alone.row is None:
                self._doubts += 1
                continue
            reason = f"the process {alone.text}, alone on the reference path"
            self.guilty += (Quarantined(row=outcome.row, reason=reason),)
            logger.warning(
                "guilty sample found", range_id=job.range_id, row=outcome.row, reason=reason
            )
        msg = f"{len(self.guilty)} samples kill their process even alone, and {self._doubts} times one did only after others"
        raise PoisonRangeError(msg, history=tuple(self.history))

    def _try(self, job: RangeJob, only: int | None = None) -> Outcome:
        """One process; its outcome has a row if and only if that sample killed it."""
        outcome = self.attempt(job, () if only is not None else self.guilty, only)
        if outcome.end == "done":
            return Outcome(end="done")
        what = "the range" if only is None else f"row {only} alone"
        self.history.append(f"isolating {what}: {outcome.text}, row in hand {outcome.row}")
        logger.warning(
            "isolation",
            range_id=job.range_id,
            of=what,
            end=outcome.end,
            row=outcome.row,
            text=outcome.text,
        )
        if outcome.end == "infrastructure":
            raise StoreError(outcome.text)
        if outcome.end in ("mismatch", "refused"):
            raise ModelError(outcome.text)
        if outcome.end == "range":
            raise PoisonRangeError(outcome.text, history=tuple(self.history))
        if outcome.row is None:
            msg = f"a process made to isolate range {job.range_id} {outcome.text} before its first sample: the device is at fault"
            raise WorkerError(msg)
        return outcome


@dataclass(frozen=True, slots=True)
class Trials:
    """Starts the processes, one at a time, and bounds their time. Their device is this process's own."""

    command: Sequence[str]
    worker: str = field(kw_only=True)
    device: str = field(kw_only=True)
    on_progress: Callable[[], None] = field(kw_only=True, default=lambda: None)
    load_limit_s: float = field(kw_only=True, default=LOAD_LIMIT_S)
    sample_limit_s: float = field(kw_only=True, default=_SAMPLE_LIMIT_S)

    def __call__(
        self, job: RangeJob, guilty: tuple[Quarantined, ...] = (), only: int | None = None
    ) -> Outcome:
        """Run one process to its end, whatever that is."""
        trial = Trial(job=job, worker=self.worker, device=self.device, guilty=guilty, only=only)
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [*self.command, json.dumps(asdict(trial)), str(write), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[write],
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
        try:
            return self._outcome(process, read)
        finally:
            os.close(read)
            process.kill()
            process.wait()

    def _outcome(self, process: "subprocess.Popen[bytes]", read: int) -> Outcome:
        row: int | None = None
        for event in self._events(process, read):
            if event is None:
                return Outcome(end="died", row=row, text="was killed, for it did not move any more")
            if "end" in event:
                return Outcome(end=event["end"], row=row, text=str(event.get("text", "")))
            row = int(event["row"])
        code = process.wait(_EXIT_S)
        return Outcome(end="died", row=row, text=f"ended by {_ending(code)}")

    def _events(
        self, process: "subprocess.Popen[bytes]", read: int
    ) -> Iterator[dict[str, Any] | None]:
        """What the process says, line by line; None when it said nothing for too long."""
        buffer, limit_s = b"", self.load_limit_s
        heard_s = time.monotonic()
        while True:
            self.on_progress()
            ready = select.select([read], [], [], 0.5)[0]
            if ready:
                data = os.read(read, 65536)
                if not data:
                    return
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    yield json.loads(line)
                heard_s, limit_s = time.monotonic(), self.sample_limit_s
            elif process.poll() is not None:
                return  # a process of its own holds the pipe
            elif time.monotonic() - heard_s > limit_s:
                yield None
                return


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
