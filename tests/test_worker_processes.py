"""Workers as processes that are killed, stopped, hung or cut off from Redis."""

import json
import os
import signal
import time

import pytest
from fleet import QUEUE, FakeWork, Running, end_all, enqueue, new_worker, spawn, wait_for

from swathe import queue
from swathe.queue import QueueCounts, RangeQueue, connect


@pytest.fixture(autouse=True)
def _ended():
    yield
    end_all()


def until_done(ranges, bound_s=20.0):
    wait_for(lambda: ranges.counts().work == 0, bound_s, "queue empty")


def test_killed_worker_its_ranges_run_elsewhere_and_nothing_is_doubled(redis, redis_url, tmp_path):
    ranges = enqueue(redis, 6)
    victim = spawn(redis_url, tmp_path, "victim", work={"faults": {"compute:0": "hang"}})
    work = FakeWork(tmp_path)
    wait_for(lambda: 0 in work.computed() and ranges.counts().running == 3)
    running = Running(new_worker(redis_url, work, "heir"))
    wait_for(lambda: len(work.records()) == 3)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    until_done(ranges)
    running.stop()
    assert work.records() == list(range(6))
    assert work.computed() == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}
    assert queue.requeued_counts(redis) == {"lease": 3}
    assert not (tmp_path / "lost").exists()


@pytest.mark.parametrize("ends", ["success", "failure"])
def test_a_worker_that_slept_past_its_lease_changes_nothing(redis, redis_url, tmp_path, ends):
    faults = {} if ends == "success" else {"publish:0": "value"}
    ranges = enqueue(redis, 1)
    zombie = spawn(redis_url, tmp_path, "zombie", work={"publish_s": 1.0, "faults": faults})
    work = FakeWork(tmp_path)
    wait_for(work.computed)
    time.sleep(0.3)
    os.kill(zombie.pid, signal.SIGSTOP)
    try:
        running = Running(new_worker(redis_url, FakeWork(tmp_path, publish_s=1.5), "heir"))
        wait_for(lambda: work.computed() == {0: 2})
    finally:
        os.kill(zombie.pid, signal.SIGCONT)
    until_done(ranges)
    wait_for(lambda: b"lease" in (tmp_path / "zombie.log").read_bytes())
    zombie.terminate()
    assert zombie.wait(20) == 0
    running.stop()
    assert work.records() == [0]
    assert work.failed() == {}
    assert ranges.counts() == QueueCounts()
    assert running.worker.pipeline.done == 1


def test_a_range_that_kills_its_process_is_set_aside_with_its_history(redis, redis_url, tmp_path):
    enqueue(redis, 3)
    work = FakeWork(tmp_path)
    faults = {"compute:1": "die"}
    for attempt in range(3):
        spawn(redis_url, tmp_path, f"v{attempt}", work={"faults": faults}).wait(30)
    running = Running(
        new_worker(redis_url, FakeWork(tmp_path, faults={"compute:1": "value"}), "heir")
    )
    until_done(RangeQueue(redis, QUEUE))
    running.stop()
    assert work.records() == [0, 2]
    aside = work.failed()[1]
    assert aside["reason"].startswith("3 processes died with it on their device")
    assert "could not be resolved" in aside["reason"]
    assert len(aside["history"]) == 4
    assert (tmp_path / "apart").read_text().split() == ["1"]


def test_acknowledgements_wait_for_redis_while_the_worker_stays(new_server, tmp_path):
    client = connect(new_server.url)
    ranges = enqueue(client, 6)
    worker = spawn(new_server.url, tmp_path, "w1", work={"publish_s": 0.5}, lease_s=2.0)
    work = FakeWork(tmp_path)
    wait_for(lambda: ranges.counts().running == 3 and work.computed())
    time.sleep(1.1)  # the append-only file is synced every second
    new_server.stop(kill=True)
    time.sleep(3)  # longer than the lease
    stored = len(work.records())
    assert stored >= 3
    new_server.start()
    until_done(ranges)
    assert worker.poll() is None
    worker.terminate()
    assert worker.wait(20) == 0
    assert work.records() == list(range(6))
    assert set(work.computed().values()) == {1}
    assert not (tmp_path / "lost").exists()


def test_the_watchdog_ends_a_hung_worker_which_touches_only_the_range_in_hand(
    redis, redis_url, tmp_path
):
    ranges = enqueue(redis, 4)
    worker = spawn(
        redis_url, tmp_path, "w1", work={"faults": {"compute:0": "hang"}}, watchdog_s=0.5
    )
    assert worker.wait(20) == 70
    assert ranges.counts() == QueueCounts(queued=3, running=1)
    running = Running(new_worker(redis_url, FakeWork(tmp_path), "heir"))
    until_done(ranges)
    running.stop()
    assert FakeWork(tmp_path).records() == [0, 1, 2, 3]


def test_sigterm_drains_and_a_second_signal_ends_at_once(redis, redis_url, tmp_path):
    ranges = enqueue(redis, 4)
    faults = {"faults": {"compute:0": "hang"}}
    worker = spawn(redis_url, tmp_path, "w1", work=faults, drain_s=60.0)
    wait_for(FakeWork(tmp_path).computed)
    worker.send_signal(signal.SIGTERM)
    wait_for(lambda: ranges.counts() == QueueCounts(queued=3, running=1))
    assert worker.poll() is None
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(5) == 1


def test_logs_never_show_the_password(new_server, tmp_path):
    connect(new_server.url).config_set("requirepass", "geheim")
    worker = spawn(new_server.url + "?password=geheim", tmp_path, "w1")
    wait_for(lambda: b"worker starts" in (tmp_path / "w1.log").read_bytes())
    new_server.stop(kill=True)
    wait_for(lambda: b"away" in (tmp_path / "w1.log").read_bytes())
    worker.terminate()
    worker.wait(20)
    text = (tmp_path / "w1.log").read_text()
    assert "geheim" not in text
    assert all(json.loads(line) for line in text.splitlines())
