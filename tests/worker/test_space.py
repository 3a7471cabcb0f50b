"""A store that is full or does not move: what is computed waits, nothing is left behind, nobody is blamed, and it shows."""

import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from producer.move import move
from producer.plan import PlanOptions, plan
from producer.verify import verify
from swathe import names
from swathe.errors import NoSpaceError
from swathe.queue import Lease
from swathe.records import RunWatcher, read_record, read_run
from swathe.settings import Settings
from swathe.spec import RangeId, RangeJob
from swathe.store.local import LocalStore
from tests.worker import tiny
from worker.extraction.extraction import Extraction
from worker.extraction.room import Room
from worker.extraction.store_watch import StoreWatch
from worker.loop.activity import Activity
from worker.loop.flights import Flight, Flights
from worker.telemetry.totals import Telemetry


class Disk:
    """How much room the stores of a test see, and whether a write finds some."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.free_bytes = 1 << 40
        self.full = False
        self.small = ""
        """URL of the one store that has no room."""
        write = os.write

        def limited(descriptor: int, data: Any) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(descriptor, data)

        patch.setattr(
            LocalStore,
            "free_bytes",
            lambda store: 0 if store.url == self.small else self.free_bytes,
        )
        patch.setattr("swathe.store.local.os.write", limited)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr("worker.extraction.room._FIRST_PAUSE_S", 0.05)
    return Disk(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> LocalStore:
    rng = random.Random(3)
    rows = [[rng.randrange(tiny.VOCAB) for _ in range(rng.randrange(4, 20))] for _ in range(8)]
    data, config = tmp_path / "rows.jsonl", tmp_path / "config.json"
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))
    config.write_text(json.dumps({"model_type": "llama", **tiny._GQA}))
    store = LocalStore(tmp_path / "run")
    plan(
        store,
        PlanOptions(dataset=str(data), model=f"random:{config}", layers=(0, 2), range_tokens=50),
    )
    return store


class Worker:
    """An extraction on the CPU, one range at a time."""

    def __init__(self, store: LocalStore, **settings: Any) -> None:
        self.spec = read_run(store)
        self.store = store
        self.telemetry = Telemetry()
        self.work = Extraction(
            name="w", device=torch.device("cpu"), device_id="cpu",
            settings=Settings(**settings), telemetry=self.telemetry,
        )  # fmt: skip

    def computed(self, range_id: int) -> object:
        job = RangeJob(
            run_url=self.store.url, run_id=self.spec.run_id, fingerprint=self.spec.fingerprint,
            range_id=RangeId(range_id),
        )  # fmt: skip
        return self.work.finish(self.work.compute(self.work.prepare(job)))

    def publish(self, computed: object) -> threading.Thread:
        thread = threading.Thread(target=self.work.publish, args=(computed,), daemon=True)
        thread.start()
        return thread

    @property
    def gauges(self) -> dict[str, float]:
        return self.telemetry.snapshot().gauges


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def files(store: LocalStore) -> list[str]:
    return (
        [path.name for path in Path(store.url, "states").glob("*")]
        if Path(store.url, "states").exists()
        else []
    )


@pytest.mark.parametrize("how", ["low", "full"])
def test_a_computed_range_waits_for_room_and_is_stored_once(
    run: LocalStore, disk: Disk, how: str
) -> None:
    worker = Worker(run, min_free_bytes=1 << 30)
    computed = worker.computed(0)
    assert worker.gauges["paused_for_space"] == 0
    disk.free_bytes, disk.full = ((1 << 30), False) if how == "low" else (1 << 40, True)
    thread = worker.publish(computed)
    until(lambda: worker.gauges["paused_for_space"] == 1)
    assert worker.work.waits_for_room()
    time.sleep(0.3)
    assert thread.is_alive()
    assert files(run) == [], "no shard, no record, no temporary"
    assert worker.telemetry.snapshot().ranges == 0
    disk.free_bytes, disk.full = 1 << 40, False
    thread.join(60)
    assert not worker.work.waits_for_room()
    assert worker.gauges["paused_for_space"] == 0
    assert worker.telemetry.snapshot().ranges == 1
    assert len(files(run)) == 2
    assert read_record(run, worker.spec, RangeId(0)).samples > 0


def test_the_mark_counts_the_shard_to_come_and_zero_turns_it_off(
    run: LocalStore, disk: Disk
) -> None:
    worker = Worker(run, min_free_bytes=1000)
    computed = worker.computed(0)
    disk.free_bytes = 1000 + len(computed.states.hidden_states.data) - 1
    thread = worker.publish(computed)
    until(worker.work.waits_for_room)
    disk.free_bytes += 1
    thread.join(60)
    assert worker.telemetry.snapshot().ranges == 1
    off = Worker(run, min_free_bytes=0)
    computed = off.computed(1)
    disk.free_bytes = len(computed.states.hidden_states.data)
    off.work.publish(computed)
    assert off.telemetry.snapshot().ranges == 1


def test_a_run_on_a_full_disk_is_moved_and_what_waited_is_stored_there(
    run: LocalStore, disk: Disk, tmp_path: Path
) -> None:
    worker = Worker(run, min_free_bytes=1 << 30)
    worker.work.publish(worker.computed(0))
    computed = worker.computed(1)
    small = Path(run.url)
    disk.small = run.url
    thread = worker.publish(computed)
    until(worker.work.waits_for_room)
    dest = LocalStore(tmp_path / "larger")
    move(run.url, dest.url)
    thread.join(60)
    assert RunWatcher(dest, worker.spec).read().records.keys() == {0, 1}
    assert not verify(dest, full=True).damaged
    assert [path.name for path in small.rglob("*")] == [names.MOVED]


def test_whoever_must_not_wait_hands_the_range_back(run: LocalStore, disk: Disk) -> None:
    """A process made to die is killed when it is silent for long."""
    worker = Worker(run, min_free_bytes=1 << 30)
    worker.work._room = None
    computed = worker.computed(0)
    disk.free_bytes = 0
    with pytest.raises(NoSpaceError, match="SWATHE_MIN_FREE_BYTES"):
        worker.work.publish(computed)
    assert files(run) == []


def test_pausing_and_going_on_are_said_once() -> None:
    telemetry = Telemetry()
    full = threading.Event()

    def step() -> None:
        if not full.is_set():
            raise NoSpaceError("none")

    with structlog.testing.capture_logs() as logs:
        room = Room(telemetry, StoreWatch(telemetry, limit_s=60))
        threads = [
            threading.Thread(target=room.wait_for, args=(step,), daemon=True) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        until(lambda: room._waiting == 3)
        full.set()
        for thread in threads:
            thread.join(60)
    assert [line["event"][:10] for line in logs] == ["paused for", "there is r"]


def test_a_full_store_is_what_limits_a_blocked_worker() -> None:
    flights = Flights()
    full = blocked = False
    activity = Activity(
        flights, type("Pipeline", (), {"backoff_s": 0.0})(), max_flights=1, loading=lambda: False,
        blocked=lambda: blocked, full=lambda: full,
    )  # fmt: skip
    flight = Flight(
        Lease(job_id="r-000001", execution_id="e", fields={}),
        object(),
        object(),  # type: ignore[arg-type]
    )
    flights.add(flight)
    flights.advance(flight, "storing")
    assert activity._now() == "write"
    full = True
    assert activity._now() == "space"
    flights.advance(flight, "computing")
    assert activity._now() == "compute"
    blocked = True
    assert activity._now() == "space"
    full = False
    assert activity._now() == "write"
