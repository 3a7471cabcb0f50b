"""What a person sees while a run goes on: a live table on a terminal, a plain line now and then elsewhere."""

import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from producer.crew import Crew, Line, Spark, Worker, crew_table, limit_words
from swathe.records import RunState

_PLAIN_EVERY_S: Final = 10.0
_WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything a display needs at one moment; ``workers`` is None where no fleet is known."""

    state: RunState
    refusal: str = ""
    """Why every live worker has given the run up, if so."""
    note: str = ""
    """Why the run does not go on by itself, as far as Redis tells, and what to do."""
    workers: tuple[Worker, ...] | None = None
    queued: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speed over the last minute; None until something was stored."""

    samples_s: float | None
    tokens_s: float | None
    bytes_s: float | None
    eta_s: float | None


class Pace:
    """Speeds from successive snapshots, over a sliding window."""

    def __init__(self, window_s: float = _WINDOW_S) -> None:
        self._window_s = window_s
        self._points: list[tuple[float, int, int, int]] = []

    def add(self, state: RunState, now_s: float) -> Rates:
        """Take one snapshot at a monotonic time and tell the current speed."""
        point = (now_s, state.stored_samples, state.stored_tokens, state.stored_bytes)
        self._points.append(point)
        while now_s - self._points[0][0] > self._window_s and len(self._points) > 2:
            self._points.pop(0)
        first = self._points[0]
        seconds = now_s - first[0]
        if seconds <= 0 or point[2] <= first[2]:  # ranges may be withdrawn, too
            return Rates(samples_s=None, tokens_s=None, bytes_s=None, eta_s=None)
        tokens_s = (point[2] - first[2]) / seconds
        return Rates(
            samples_s=(point[1] - first[1]) / seconds,
            tokens_s=tokens_s,
            bytes_s=(point[3] - first[3]) / seconds,
            eta_s=(state.spec.totals.tokens - state.stored_tokens) / tokens_s,
        )


class Display:
    """Shows snapshots until it is closed; use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._pace = Pace()
        self._last_plain_s = float("-inf")
        self._crew = Crew()
        self._spark = Spark()
        self._lines: list[Line] = []
        self._limiting = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Show one snapshot."""
        now_s = time.monotonic()
        rates = self._pace.add(snapshot.state, now_s)
        self._spark.add(snapshot.state.stored_samples, now_s)
        self._lines = self._crew.look(snapshot.workers or (), now_s)
        self._limiting = limit_words(self._lines) or self._limiting
        if self._console.is_terminal:
            self._live.update(self._table(snapshot, rates), refresh=True)
        elif now_s - self._last_plain_s >= _PLAIN_EVERY_S or snapshot.state.complete:
            self._last_plain_s = now_s
            print(self._line(snapshot, rates), file=sys.stderr, flush=True)  # noqa: T201

    def _line(self, snapshot: Snapshot, rates: Rates) -> str:
        state = snapshot.state
        parts = [
            f"{len(state.records)}/{state.spec.totals.ranges} ranges",
            f"{state.stored_samples} samples",
            f"{size_text(state.stored_bytes)} stored",
        ]
        if rates.samples_s is not None and rates.tokens_s is not None and rates.bytes_s is not None:
            parts += [
                f"{rates.samples_s:.1f} samples/s",
                f"{rates.tokens_s:,.0f} tokens/s",
                f"{size_text(rates.bytes_s)}/s",
            ]
        if rates.eta_s is not None and not state.complete:
            parts.append(f"{duration_text(rates.eta_s)} left")
        if state.failed:
            parts.append(f"{len(state.failed)} set aside")
        if self._limiting:
            parts.append(f"limited by {self._limiting}")
        if snapshot.note and not state.complete:
            parts.append(snapshot.note)
        return " · ".join(parts)

    def _table(self, snapshot: Snapshot, rates: Rates) -> RenderableType:
        state = snapshot.state
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column()
        bar = ProgressBar(total=state.spec.totals.ranges, completed=len(state.records), width=40)
        table.add_row("ranges", bar)
        table.add_row("", f"{len(state.records)} of {state.spec.totals.ranges}")
        table.add_row(
            "stored", f"{state.stored_samples:,} samples · {size_text(state.stored_bytes)}"
        )
        if rates.samples_s is not None and rates.tokens_s is not None and rates.bytes_s is not None:
            speed = f"{rates.samples_s:.1f} samples/s · {rates.tokens_s:,.0f} tokens/s"
            table.add_row("speed", f"{speed} · {size_text(rates.bytes_s)}/s")
            table.add_row("", str(self._spark))
        if rates.eta_s is not None:
            table.add_row("left", duration_text(rates.eta_s))
        if snapshot.workers is not None:
            queued = f"{snapshot.queued or 0} ranges queued"
            table.add_row("workers", f"{len(snapshot.workers)} · {queued}")
        if self._limiting:
            table.add_row("limited by", self._limiting)
        parts: list[RenderableType] = [table]
        if state.failed:
            parts.append(Text(f"{len(state.failed)} ranges set aside", style="red"))
        if snapshot.note and not state.complete:
            parts.append(Text(snapshot.note, style="red"))
        if self._lines:
            parts += [Text(), crew_table(self._lines)]
        return Group(*parts)


def size_text(size_bytes: float) -> str:
    """Bytes in the unit that reads best."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.2f} TB"


def duration_text(seconds: float) -> str:
    """Seconds as a person says them."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
