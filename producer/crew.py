"""The workers as a person reads them: one line each, with speed and shares of the last half minute, in 80 columns."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swathe import stages
from swathe.stages import Limit, Spent

_WINDOW_S: Final = 30.0
_BAR: Final = 20
_SPARKS: Final = "▁▂▃▄▅▆▇█"
_MARKS: Final[Mapping[Limit, tuple[str, str, str]]] = {
    "compute": ("█", "green", "compute"),
    "copy": ("▓", "yellow", "copy"),
    "load": ("▒", "magenta", "load"),
    "input": ("i", "red", "input"),
    "write": ("w", "red", "write"),
    "queue_empty": ("·", "dim", "no work"),
    "space": ("!", "bold red", "full"),
    "store_away": ("x", "bold red", "store away"),
}
"""Mark, style and word of each limit; the marks differ without colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a live worker says about itself. Ratios are None where they cannot be told."""

    name: str
    node: str
    device: str
    samples: int
    spent: Spent
    utilization: float | None = None
    busy: float | None = None
    mfu: float | None = None
    last_error: str = ""

    @classmethod
    def of(cls, name: str, said: Mapping[str, Any]) -> "Worker":
        """From a worker's JSON in Redis; an older worker may say less."""
        return cls(
            name=name,
            node=str(said.get("node") or name),
            device=str(said.get("device") or "?"),
            samples=int(said.get("samples") or 0),
            spent=Spent(
                states=said.get("state_seconds") or {}, stages=said.get("stage_seconds") or {}
            ),
            utilization=said.get("utilization"),
            busy=said.get("busy"),
            mfu=said.get("mfu"),
            last_error=str(said.get("last_error") or ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A worker with what it did lately; ``samples_s`` is None at the first look."""

    worker: Worker
    samples_s: float | None
    spent: Spent


class Crew:
    """Successive looks at all workers."""

    def __init__(self) -> None:
        self._looks: dict[str, deque[tuple[float, Worker]]] = {}

    def look(self, workers: Iterable[Worker], now_s: float) -> list[Line]:
        """Take a look at a monotonic time; workers that are gone are forgotten."""
        found = {worker.name: worker for worker in workers}
        self._looks = {name: self._looks.get(name, deque()) for name in found}
        lines = []
        for name, worker in sorted(found.items(), key=lambda item: (item[1].node, item[1].device)):
            looks = self._looks[name]
            looks.append((now_s, worker))
            while now_s - looks[0][0] > _WINDOW_S and len(looks) > 2:
                looks.popleft()
            first_s, first = looks[0]
            seconds = now_s - first_s
            rate = (worker.samples - first.samples) / seconds if seconds > 0 else None
            earlier = first.spent if seconds > 0 else Spent()
            lines.append(Line(worker=worker, samples_s=rate, spent=worker.spent.since(earlier)))
        return lines


def limit_words(lines: Iterable[Line]) -> str:
    """What limits them all together; empty when nothing is known."""
    limit = stages.limiting(Spent.of(line.spent for line in lines))
    return stages.WORDS[limit] if limit else ""


def crew_table(lines: Sequence[Line]) -> RenderableType:
    """A line for each worker, the last errors, and what the marks mean."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("node", max_width=14, no_wrap=True)
    table.add_column("device", max_width=12, no_wrap=True)
    for title in ("GPU", "busy", "MFU", "samples/s"):
        table.add_column(title, justify="right", no_wrap=True, min_width=4)
    table.add_column("last half minute", width=_BAR, no_wrap=True)
    for line in lines:
        worker = line.worker
        table.add_row(
            worker.node,
            worker.device,
            _percent(worker.utilization),
            _percent(worker.busy),
            _percent(worker.mfu),
            "-" if line.samples_s is None else f"{line.samples_s:.1f}",
            stage_bar(line.spent),
        )
    errors = [
        Text(f"{line.worker.node} {line.worker.device}: {line.worker.last_error}", "red",
             no_wrap=True, overflow="ellipsis")
        for line in lines if line.worker.last_error
    ]  # fmt: skip
    return Group(table, *errors, _legend())


def stage_bar(spent: Spent) -> Text:
    """Shares as a bar; a share too small for a mark is left out, and the largest fills up."""
    found = stages.shares(spent)
    if not found:
        return Text()
    widths = {limit: round(share * _BAR) for limit, share in found.items()}
    widths[next(iter(widths))] += _BAR - sum(widths.values())
    bar = Text()
    for limit, (mark, style, _) in _MARKS.items():
        bar.append(mark * widths.get(limit, 0), style)
    return bar


def sparkline(values: Sequence[float]) -> str:
    """Values as a line of blocks, from 0 to the largest."""
    top = max(values, default=0.0)
    if top <= 0:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round(value / top * (len(_SPARKS) - 1))] for value in values)


class Spark:
    """A total's growth, one value for each few seconds."""

    def __init__(self, *, every_s: float = 5.0, width: int = 32) -> None:
        self._every_s = every_s
        self._last: tuple[float, float] | None = None
        self._rates: deque[float] = deque(maxlen=width)

    def add(self, total: float, now_s: float) -> None:
        """Note a total at a monotonic time."""
        if self._last is None:
            self._last = (now_s, total)
        elif now_s - self._last[0] >= self._every_s:
            self._rates.append(max(0.0, total - self._last[1]) / (now_s - self._last[0]))
            self._last = (now_s, total)

    def __str__(self) -> str:
        return sparkline(self._rates)


def _legend() -> Text:
    legend = Text(style="dim")
    for mark, style, word in _MARKS.values():
        legend.append(mark, style)
        legend.append(f" {word}  ")
    legend.rstrip()
    return legend


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"
