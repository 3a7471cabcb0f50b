"""What the worker loop drives, and what it can be told: the seam between queue and engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from swathe.errors import ConfigError
from swathe.settings import Settings
from swathe.spec import RangeJob, RunId


class RangeWork(Protocol):
    """The work on one range, in steps on three kinds of thread. Every step may raise.

    ``swathe.errors`` decides what follows: retryable errors (store, Redis) and OSError put the range back without a
    word; ModelError, ConfigError, FormatError and RunMismatchError say that this worker cannot serve the run; a
    WorkerError ends the worker; all others are the range's own and spend its budget.
    """

    def prepare(self, job: RangeJob) -> object:
        """Read thread: open the run, look for a valid record (then return ``STORED``), read the tokens."""
        ...

    @property
    def overlaps(self) -> bool:
        """Whether ``compute`` returns before the device is done, so that the next range should be put behind it."""
        ...

    def compute(self, prepared: object) -> object:
        """Compute thread, the only one that touches the device; may block while no host buffer is free."""
        ...

    def finish(self, started: object) -> object:
        """Compute thread; waits for what ``compute`` started. Called once for each, in order."""
        ...

    def publish(self, computed: object) -> None:
        """Upload thread; the record is durable when it returns."""
        ...

    def compute_alone(self, prepared: object) -> object:
        """Compute thread, nothing else on the device: each sample by itself on the reference path.

        Samples that raise are quarantined; what is returned goes to ``publish``. Raises WorkerError when a harmless
        sample raises too.
        """
        ...

    def compute_apart(self, job: RangeJob) -> None:
        """Compute thread; the same and the commit in processes made to die, with this one's device memory freed.

        The record is durable when it returns. Raises PoisonRangeError when the range cannot be resolved.
        """
        ...

    def set_aside(self, job: RangeJob, reason: str, history: Sequence[str]) -> None:
        """Write the durable failure marker; nothing else will touch the range until ``retry``."""
        ...


STORED: Final = object()
"""What ``prepare`` returns for a range that has a valid record already: it is acknowledged at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Bounds and budgets of a worker."""

    jobs_in_flight: int = 5
    lease_s: float = 15.0
    heartbeat_s: float = 3.0
    drain_s: float = 60.0
    max_failures: int = 3
    """Errors of a range before its samples are computed one by one."""
    max_deaths: int = 3
    """Processes that may die with a range on their device before it is isolated in processes made to die."""
    max_deaths_apart: int = 3
    """Further workers that may die while they isolate it, before it is set aside."""
    max_bystander_deaths: int = 30
    """The same for a range that was merely held; far higher, for spot nodes die a lot."""
    max_failures_in_a_row: int = 5
    """Different ranges that fail without one success between: then the worker itself is suspected, and ends."""
    watchdog_s: float = 600.0
    """Longest time without progress of a computation that has all it needs."""
    exit_when_idle_s: float | None = None
    rebuild_every_s: float = 15.0
    """How often a worker with nothing to do asks whether a known run has ranges that the queue lost."""

    @property
    def tick_s(self) -> float:
        """How often expired leases are looked for; a fifteenth of a lease, at most a second."""
        return min(1.0, self.lease_s / 15)

    @classmethod
    def from_settings(
        cls, settings: Settings, *, exit_when_idle_s: float | None = None
    ) -> "WorkerOptions":
        """The operator's wishes. Raises ConfigError for a lease that a live worker cannot keep."""
        if settings.lease_s < 2 * settings.heartbeat_s:
            msg = (
                f"SWATHE_LEASE_S={settings.lease_s:g} is too short for SWATHE_HEARTBEAT_S={settings.heartbeat_s:g}: leases "
                "would run out between two renewals, and live workers count as dead; a lease takes two heartbeats at least"
            )
            raise ConfigError(msg)
        return cls(
            jobs_in_flight=settings.jobs_in_flight,
            lease_s=settings.lease_s,
            heartbeat_s=settings.heartbeat_s,
            drain_s=settings.drain_s,
            exit_when_idle_s=exit_when_idle_s,
        )


def _nothing() -> Mapping[str, Any]:
    return {}


def _never() -> bool:
    return False


def _any_queue(_name: str) -> bool:
    return True


def _no_outcome(_outcome: str, _error: str) -> None:
    return None


def _no_rebuild(_run_id: RunId, _url: str) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the loop asks the rest of the worker. None of these may block for long or raise, but ``rebuild``."""

    about: Callable[[], Mapping[str, Any]] = field(default=_nothing)
    """What a status display should know: device, stage seconds, samples, tokens. JSON values."""
    may_serve: Callable[[str], bool] = field(default=_any_queue)
    """Whether this worker can serve a queue (its model is here)."""
    waits_for_buffer: Callable[[], bool] = field(default=_never)
    """Whether the computation is blocked by a slow store: no hang then."""
    outcome: Callable[[str, str], None] = field(default=_no_outcome)
    """A range ended here without being stored: one of ``swathe.metrics.OUTCOMES``, and the error in a few words."""
    rebuild: Callable[[RunId, str], bool] = field(default=_no_rebuild)
    """Compare a run with its store: enqueue what is missing, seal what is complete; True when nothing is left to do.
    One worker of the fleet at a time, when its queue is empty; errors are logged and it is asked again later."""
