"""Where a worker's time goes and what it did: added from several threads, read as one snapshot."""

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from swathe.metrics import DURATION_BUCKETS_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """How long a stage took, one observation for each range; ``counts`` has one more entry than there are buckets."""

    counts: tuple[int, ...]
    sum_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Totals since the worker started, and what is true right now."""

    samples: int
    tokens: int
    padding_tokens: int
    ranges: int
    written_bytes: int
    stage_seconds: dict[str, float] = field(default_factory=dict)
    durations: dict[str, Durations] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    """Every total by name, the five above among them; outcomes of ranges as ``outcome:NAME``."""
    gauges: dict[str, float] = field(default_factory=dict)
    last_error: str = ""


class Telemetry:
    """Counters of one worker process."""

    def __init__(self) -> None:
        # A range that was dropped is noted by a finalizer, which the garbage collector runs on whichever thread it stops,
        # also on one that is in here.
        self._lock = threading.RLock()
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._buckets: dict[str, list[int]] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._open: Counter[str] = Counter()
        self._last_error = ""
        self.on_range: Callable[[], None] = lambda: None
        """Called after a range was counted, on the thread that counted it: totals must leave before a sudden death."""

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Add the time that one range spent in a stage."""
        with self._lock:
            self._seconds[stage] += seconds
            buckets = self._buckets.setdefault(stage, [0] * (len(DURATION_BUCKETS_S) + 1))
            buckets[bisect_left(DURATION_BUCKETS_S, seconds)] += 1

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block of code as a stage."""
        started = time.perf_counter()
        with self._lock:
            self._open[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[name] -= 1
            self.add_seconds(name, time.perf_counter() - started)

    def is_in(self, stage: str) -> bool:
        """Whether some thread is in a stage now."""
        with self._lock:
            return self._open[stage] > 0

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a total."""
        with self._lock:
            self._counts[name] += amount

    def put(self, name: str, total: float) -> None:
        """Set a total that is counted elsewhere."""
        with self._lock:
            self._counts[name] = total

    def add(self, amounts: Mapping[str, float]) -> None:
        """Add to several totals at one moment."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def outcome(self, name: str, error: str = "") -> None:
        """A range ended on this worker; one of ``swathe.metrics.OUTCOMES``."""
        with self._lock:
            self._counts[f"outcome:{name}"] += 1
            if error:
                self._last_error = error
        self.on_range()

    def set(self, gauge: str, value: float | None) -> None:
        """Say what is true now; None when it cannot be told."""
        with self._lock:
            if value is None:
                self._gauges.pop(gauge, None)
            else:
                self._gauges[gauge] = value

    def adjust(self, gauge: str, amount: float) -> None:
        """Change what is true now by an amount."""
        with self._lock:
            self._gauges[gauge] = self._gauges.get(gauge, 0.0) + amount

    def snapshot(self) -> Snapshot:
        """All totals at one moment."""
        with self._lock:
            counts = dict(self._counts)
            return Snapshot(
                samples=int(counts.get("samples", 0)),
                tokens=int(counts.get("tokens", 0)),
                padding_tokens=int(counts.get("padding_tokens", 0)),
                ranges=int(counts.get("outcome:stored", 0)),
                written_bytes=int(counts.get("written_bytes", 0)),
                stage_seconds=dict(self._seconds),
                durations={
                    stage: Durations(counts=tuple(buckets), sum_s=self._seconds[stage])
                    for stage, buckets in self._buckets.items()
                },
                counts=counts,
                gauges=dict(self._gauges),
                last_error=self._last_error,
            )
