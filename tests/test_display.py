"""What a person reads: the limiting stage in words, rates over a window, sizes and durations."""

import io
import json
import re

import pytest
from fleet import enqueue
from rich.console import Console

from producer.crew import Crew, Spark, Worker, limit_words, sparkline, stage_bar
from producer.display import Display, Pace, Snapshot, duration_text, size_text
from producer.top import watch_fleet
from swathe.queue import connect
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


def test_ranges_that_are_withdrawn_give_no_speed_below_zero() -> None:
    pace = Pace()
    pace.add(state_with(stored=500), 0.0)
    assert pace.add(state_with(stored=300), 10.0).samples_s is None


def test_sizes_and_durations_read_well() -> None:
    assert [size_text(n) for n in (5, 1500, 2_000_000, 15_700_000_000_000)] == [
        "5 B", "1.5 kB", "2.0 MB", "15.70 TB",
    ]  # fmt: skip
    assert [duration_text(s) for s in (8, 75, 7500)] == ["8 s", "1 min 15 s", "2 h 05 min"]


def worker(name: str, device: str = "GPU-1234abcd", samples: int = 0, **said: object) -> Worker:
    return Worker.of(name, {"node": "node-1", "device": device, "samples": samples, **said})


def shown(snapshots: list[Snapshot]) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with Display(console) as display:
        for snapshot in snapshots:
            display.show(snapshot)
    return out.getvalue()


def test_a_terminal_gets_a_table_and_no_line_is_wider_than_80_columns() -> None:
    busy = {"state_seconds": {"compute": 8.0, "write": 2.0}, "utilization": 0.93, "mfu": 0.71}
    workers = (
        worker("w1", **busy),
        worker("w2", node="a-node-with-a-very-long-name.example", last_error="disk gone " * 20),
    )
    text = shown([Snapshot(state=state_with(stored=500), workers=workers, queued=7)])
    assert "500 samples" in text
    assert "2 · 7 ranges queued" in text
    assert "limited by  computing" in text
    assert "93%" in text
    assert "71%" in text
    assert "█" * 16 + "w" * 4 in text
    assert "disk gone" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 80


def test_speed_and_shares_are_those_of_the_last_half_minute() -> None:
    crew = Crew()
    (line,) = crew.look([worker("w1", samples=100, state_seconds={"load": 60.0})], 0.0)
    assert line.samples_s is None
    assert limit_words([line]) == "loading the model"
    for second in range(5, 65, 5):
        spent = {"load": 60.0, "input": 0.8 * second, "compute": 0.2 * second}
        (line,) = crew.look([worker("w1", samples=100 + 3 * second, state_seconds=spent)], second)
    assert line.samples_s == pytest.approx(3.0)
    assert limit_words([line]) == "reading the plan's tokens"
    assert str(stage_bar(line.spent)) == "████" + "i" * 16
    assert crew.look([], 70.0) == []


def test_marks_of_the_bar_differ_without_colour() -> None:
    limits = {"compute": 1, "input": 1, "write": 1, "queue_empty": 1, "space": 1, "load": 1}
    assert len(set(str(stage_bar(Spent(states=limits | {"store_away": 1}))))) == 7


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 4, 8, 4]) == "▁▂▃▅█▅"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""
    spark = Spark(every_s=5.0)
    for second, total in ((0, 0), (2, 10), (5, 10), (10, 30), (15, 30)):
        spark.add(total, float(second))
    assert str(spark) == sparkline([2, 4, 0])


def test_top_shows_queues_workers_and_an_outage(redis) -> None:
    enqueue(redis, 3)
    about = {"node": "node-1", "device": "cpu", "samples": 5, "state_seconds": {"input": 9.0}}
    redis.set("swathe:worker:w1", json.dumps(about), ex=60)
    out = io.StringIO()
    console = Console(file=out, width=80)
    watch_fleet(redis, console, once=False)
    assert "swathe-m  3 queued · 0 running" in out.getvalue()
    assert "limited by reading the plan's tokens" in out.getvalue()
    assert "node-1" in out.getvalue()
    away = connect("unix:///nowhere/at/all", retries=0)
    watch_fleet(away, console, once=True)
    assert "cannot be reached" in out.getvalue()
