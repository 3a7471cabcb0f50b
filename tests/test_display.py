"""What a person reads: the limiting stage in words, rates over a window, sizes and durations."""

import io

import pytest
from rich.console import Console

from producer.display import Display, Pace, Snapshot, duration_text, size_text
from swathe.stages import Spent
from tests.support.states import state_with


def test_rates_are_those_of_the_last_minute() -> None:
    pace = Pace()
    assert pace.add(state_with(stored=0), 0.0).samples_s is None
    assert pace.add(state_with(stored=10), 10.0).samples_s == pytest.approx(1.0)
    for second in range(20, 100, 10):
        rates = pace.add(state_with(stored=10 + (second - 10) * 5), float(second))
    assert rates.samples_s == pytest.approx(5.0)
    assert rates.tokens_s == pytest.approx(500.0)
    assert rates.eta_s == pytest.approx((100_000 - 100 * (10 + 80 * 5)) / 500.0)


def test_sizes_and_durations_read_well() -> None:
    assert [size_text(n) for n in (5, 1500, 2_000_000, 15_700_000_000_000)] == [
        "5 B", "1.5 kB", "2.0 MB", "15.70 TB",
    ]  # fmt: skip
    assert [duration_text(s) for s in (8, 75, 7500)] == ["8 s", "1 min 15 s", "2 h 05 min"]


def test_a_terminal_gets_a_table_and_no_line_is_wider_than_80_columns() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with Display(console) as display:
        display.show(
            Snapshot(
                state=state_with(stored=500),
                workers=2,
                queued=7,
                spent={"w1": Spent(states={"compute": 1.0, "input": 0.4})},
            )
        )
    text = out.getvalue()
    assert "500 samples" in text
    assert "2 · 7 ranges queued" in text
    assert "computing" in text
