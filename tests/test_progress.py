"""What long steps say on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from producer.plan import PlanProgress
from producer.progress import plan_progress

HASHING = PlanProgress(step="hashing", fraction=0.5)
PLANNING = PlanProgress(step="planning", fraction=0.25, rows=1200, tokens=90_000, rejected=3)


def said(*, terminal: bool, plain_every_s: float = 0.0) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None)
    with plan_progress(console=console, plain_every_s=plain_every_s) as progress:
        progress(HASHING)
        progress(PLANNING)
    return console.file.getvalue()


def test_a_log_gets_plain_lines() -> None:
    lines = said(terminal=False).splitlines()
    assert lines == ["hashing 50%", "planning 25% · 1,200 rows, 90,000 tokens, 3 rejected"]


def test_a_log_hears_nothing_of_what_is_soon_done() -> None:
    assert said(terminal=False, plain_every_s=60.0) == ""


@pytest.mark.parametrize("word", ["hashing", "planning", "1,200 rows, 90,000 tokens, 3 rejected"])
def test_a_terminal_gets_a_bar_for_each_step(word: str) -> None:
    assert word in said(terminal=True)
