"""Progress of steps that are one loop: planning, verifying, exporting. A bar on a terminal, a plain line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from producer.tally import PlanProgress

_PLAIN_EVERY_S: Final = 10.0

Show = Callable[[str, float, str], None]
"""Takes a verb, the share that is done and a note."""


@contextmanager
def plan_progress(
    *, console: Console | None = None, plain_every_s: float = _PLAIN_EVERY_S
) -> Iterator[Callable[[PlanProgress], None]]:
    """A callback for ``plan``."""
    with _shown(console, plain_every_s) as show:

        def step(progress: PlanProgress) -> None:
            note = f"{progress.rows:,} rows, {progress.tokens:,} tokens, {progress.rejected:,} rejected"
            show(progress.step, progress.fraction, "" if progress.step == "hashing" else note)

        yield step


@contextmanager
def counted_progress(verb: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A callback that takes how many are done of how many."""
    if quiet:
        yield lambda _done, _total: None
        return
    with _shown(None, _PLAIN_EVERY_S) as show:
        yield lambda done, total: show(verb, done / total if total else 1.0, f"{done:,}/{total:,}")


@contextmanager
def _shown(console: Console | None, plain_every_s: float) -> Iterator[Show]:
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console, plain_every_s).show
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        tasks = {}

        def show(verb: str, share: float, note: str) -> None:
            if verb not in tasks:
                tasks[verb] = bar.add_task(verb, total=1.0, note=note)
            bar.update(tasks[verb], completed=share, note=note)

        yield show


class _Lines:
    """For logs: nothing from a step that is soon done, a line in ten seconds from others."""

    def __init__(self, console: Console, every_s: float) -> None:
        self._console, self._every_s = console, every_s
        self._last_s = time.monotonic()

    def show(self, verb: str, share: float, note: str) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < self._every_s:
            return
        self._last_s = now_s
        line = " · ".join(filter(None, (f"{verb} {share:.0%}", note)))
        self._console.print(line, highlight=False, soft_wrap=True)
