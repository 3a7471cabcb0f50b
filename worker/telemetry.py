"""Where a worker's time goes: seconds by stage and counts, added from several threads, read as one snapshot."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Totals since the worker started."""

    samples: int
    tokens: int
    padding_tokens: int
    ranges: int
    written_bytes: int
    stage_seconds: dict[str, float] = field(default_factory=dict)


class Telemetry:
    """Counters of one worker process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, int] = defaultdict(int)

    def add_seconds(self, stage: str, seconds: float) -> None:
        """Add time spent in a stage."""
        with self._lock:
            self._seconds[stage] += seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block of code as a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(name, time.perf_counter() - started)

    def count(self, name: str, amount: int = 1) -> None:
        """Add to one of the counts of a snapshot."""
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> Snapshot:
        """All totals at one moment."""
        with self._lock:
            return Snapshot(
                samples=self._counts["samples"],
                tokens=self._counts["tokens"],
                padding_tokens=self._counts["padding_tokens"],
                ranges=self._counts["ranges"],
                written_bytes=self._counts["written_bytes"],
                stage_seconds=dict(self._seconds),
            )
