"""Counters of a worker, told from any thread at any moment."""

import gc
import threading
import weakref

from worker.telemetry.totals import Telemetry


class Dropped:
    """Part of a cycle: only the garbage collector ends it."""

    def __init__(self) -> None:
        self.me = self


def test_a_range_that_the_garbage_collector_drops_during_a_snapshot_is_counted() -> None:
    telemetry = Telemetry()
    for number in range(200):
        telemetry.add_seconds(f"stage{number}", 1.0)
    before = gc.get_threshold()

    def look() -> None:
        for _ in range(20):
            weakref.finalize(Dropped(), telemetry.adjust, "backlog_bytes", -1.0)
            telemetry.snapshot()

    thread = threading.Thread(target=look, daemon=True)
    try:
        gc.set_threshold(50)
        thread.start()
        thread.join(20)
    finally:
        gc.set_threshold(*before)
    assert not thread.is_alive(), "a finalizer waits for the lock of the thread that it interrupted"
    gc.collect()
    assert telemetry.snapshot().gauges["backlog_bytes"] == -20.0
