"""Progress of steps that are one loop: planning, verifying, exporting. A bar on a terminal, nothing elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from producer.tally import PlanProgress


@contextmanager
def plan_progress() -> Iterator[Callable[[PlanProgress], None]]:
    """A callback for ``plan``."""
    with _bar(quiet=False) as bar:
        task = bar.add_task("planning", total=1.0, note="")

        def show(progress: PlanProgress) -> None:
            note = f"{progress.rows:,} rows, {progress.tokens:,} tokens, {progress.rejected:,} rejected"
            bar.update(task, completed=progress.fraction, note=note)

        yield show


@contextmanager
def counted_progress(verb: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A callback that takes how many are done of how many."""
    with _bar(quiet=quiet) as bar:
        task = bar.add_task(verb, total=None, note="")
        yield lambda done, total: bar.update(
            task, completed=done, total=total, note=f"{done:,}/{total:,}"
        )


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Progress]:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    ) as bar:
        yield bar
