"""The worker loop on a real server: order, budgets, errors, stops, idleness. Effects of the fake work are files."""

import subprocess
import sys
import time

import pytest
from fleet import QUEUE, FakeWork, Running, end_all, enqueue, job, new_worker, wait_for

from swathe import names, queue
from swathe.queue import Leases, QueueCounts, RangeQueue, connect, new_execution
from swathe.spec import RunId
from worker.host.supervisor import worker_name
from worker.loop.contract import Hooks


@pytest.fixture(autouse=True)
def _ended():
    yield
    end_all()


@pytest.fixture
def work(tmp_path):
    return FakeWork(tmp_path)


def until_done(ranges, bound_s=20.0):
    wait_for(lambda: ranges.counts().work == 0, bound_s, "queue empty")


def test_every_range_is_stored_once_and_nothing_is_left(redis, redis_url, work):
    ranges = enqueue(redis, 40)
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    assert 0 < queue.acknowledged_by(redis, "w1") <= 40
    assert running.stop() == 0
    assert 0 < queue.acknowledged_by(redis, "w1") <= 40
    assert work.records() == list(range(40))
    assert set(work.computed().values()) == {1}
    # A worker that was idle for a moment leaves the lock of its last rebuild, which goes by itself.
    left = [key for key in redis.scan_iter() if b"run1" in key or b"execution" in key]
    assert [key.decode() for key in left if redis.ttl(key) == -1] == []
    assert queue.requeued_counts(redis) == {}


def test_ranges_are_read_computed_and_stored_at_the_same_time(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, read_s=0.1, compute_s=0.1, publish_s=0.15)
    ranges = enqueue(redis, 12)
    started = time.monotonic()
    running = Running(new_worker(redis_url, work, jobs_in_flight=4))
    until_done(ranges)
    took = time.monotonic() - started
    running.stop()
    assert took < 12 * 0.35 * 0.75  # one after another: 4.2 s


def test_no_more_ranges_are_held_than_slots(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, faults={"compute:*": "slow"})
    ranges = enqueue(redis, 10)
    running = Running(new_worker(redis_url, work, jobs_in_flight=3))
    wait_for(lambda: ranges.counts().running == 3)
    time.sleep(0.5)
    assert ranges.counts() == QueueCounts(queued=7, running=3)
    running.stop()


def test_a_stored_range_is_acknowledged_without_compute(redis, redis_url, work):
    (work.folder / "records" / "000000").write_text("before")
    ranges = enqueue(redis, 2)
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    running.stop()
    assert work.computed() == {1: 1}


def test_a_range_that_raises_is_set_aside_after_its_budget(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, faults={"compute:1": "value", "publish:2": "value*2"})
    ranges = enqueue(redis, 4)
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    running.stop()
    assert work.records() == [0, 2, 3]
    assert work.computed() == {0: 1, 1: 3, 2: 3, 3: 1}
    aside = work.failed()
    assert list(aside) == [1]
    assert aside[1]["reason"].startswith(
        "raised 3 times, and could not be resolved sample by sample"
    )
    assert [line.split(": ", 1)[1] for line in aside[1]["history"]] == [
        "ValueError: bad sample"
    ] * 4
    assert (tmp_path / "alone").read_text().split() == ["1"]
    assert ranges.counts() == QueueCounts()


def test_a_range_that_raised_too_often_is_computed_sample_by_sample_and_stored(
    redis, redis_url, tmp_path
):
    work = FakeWork(tmp_path, faults={"compute:1": "value*3"})
    ranges = enqueue(redis, 3)
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    assert running.stop() == 0
    assert work.records() == [0, 1, 2]
    assert (tmp_path / "alone").read_text().split() == ["1"]
    assert work.failed() == {}


def test_a_spent_budget_is_known_to_the_next_worker(redis, redis_url, tmp_path):
    ranges = enqueue(redis, 1)
    redis.hset(f"rq:job:{names.job('run1', 0)}", "swathe_failures", 3)
    work = FakeWork(tmp_path)
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    running.stop()
    assert (work.records(), work.computed()) == ([0], {})
    assert (tmp_path / "alone").read_text().split() == ["0"]


def test_a_range_that_killed_is_isolated_while_the_worker_holds_nothing_else(
    redis, redis_url, tmp_path
):
    enqueue(redis, 6)
    ranges = RangeQueue(redis, QUEUE)
    redis.hset(f"rq:job:{names.job('run1', 1)}", "swathe_deaths", 3)
    work = FakeWork(tmp_path)
    held = []

    def apart(job):
        wait_for(lambda: ranges.counts().running == 1)
        time.sleep(0.3)
        held.append((job.range_id, ranges.counts().running, ranges.counts().queued))
        FakeWork.compute_apart(work, job)

    work.compute_apart = apart
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    assert running.stop() == 0
    assert held == [(1, 1, 4)]
    assert work.records() == list(range(6))
    assert set(queue.requeued_counts(redis)) == {"isolation"}


def test_infrastructure_errors_while_isolating_spend_nothing(redis, redis_url, tmp_path):
    enqueue(redis, 2)
    redis.hset(f"rq:job:{names.job('run1', 1)}", "swathe_deaths", 3)
    work = FakeWork(tmp_path, faults={"publish:1": "store*2"})
    running = Running(new_worker(redis_url, work))
    until_done(RangeQueue(redis, QUEUE))
    assert running.stop() == 0
    assert (work.records(), work.failed()) == ([0, 1], {})
    assert (tmp_path / "apart").read_text().split() == ["1"] * 3


def test_a_range_that_kills_those_who_isolate_it_is_set_aside(redis, redis_url, tmp_path):
    enqueue(redis, 1)
    redis.hset(f"rq:job:{names.job('run1', 0)}", "swathe_deaths", 6)
    work = FakeWork(tmp_path)
    running = Running(new_worker(redis_url, work))
    until_done(RangeQueue(redis, QUEUE))
    running.stop()
    assert "isolated" in work.failed()[0]["reason"]
    assert not (tmp_path / "apart").exists()


def test_a_marker_that_cannot_be_written_is_written_later(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, faults={"compute:0": "value", "set_aside:0": "store*2"})
    ranges = enqueue(redis, 1)
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    running.stop()
    assert list(work.failed()) == [0]


@pytest.mark.parametrize(
    ("step", "kind"), [("prepare", "store"), ("publish", "space"), ("publish", "os")]
)
def test_infrastructure_errors_spend_no_budget(redis, redis_url, tmp_path, kind, step):
    work = FakeWork(tmp_path, faults={f"{step}:1": f"{kind}*3"})
    ranges = enqueue(redis, 3)
    running = Running(new_worker(redis_url, work, max_failures=1, max_deaths=1))
    until_done(ranges)
    assert running.stop() == 0
    assert work.records() == [0, 1, 2]
    assert work.failed() == {}
    assert queue.requeued_counts(redis) == {"infrastructure": 3}


@pytest.mark.parametrize("kind", ["mismatch", "model"])
def test_a_run_that_the_worker_cannot_serve_goes_back_untouched(redis, redis_url, tmp_path, kind):
    work = FakeWork(tmp_path, faults={"prepare:*": kind})
    enqueue(redis, 3)
    running = Running(new_worker(redis_url, work))
    wait_for(lambda: queue.live_workers(redis).get("w1", {}).get("not_serving"))
    wait_for(lambda: RangeQueue(redis, QUEUE).counts() == QueueCounts(queued=3))
    assert running.worker.pipeline.done == 0
    enqueue(redis, 1, run_id="run2")
    work.faults.clear()
    wait_for(lambda: work.records() == [0])  # run2's only range
    assert running.stop() == 0
    assert len(redis.lrange(f"rq:queue:{QUEUE}", 0, -1)) == 3


def test_foreign_jobs_are_set_aside_and_never_reach_the_work(redis, redis_url, work):
    ranges = enqueue(redis, 2)
    redis.hset(f"rq:job:{names.job('run1', 0)}", "failure_callback_name", "os.abort")
    ranges.enqueue_if_absent([job(5)])
    redis.hset(f"rq:job:{names.job('run1', 5)}", "data", b'["os.abort", null, [], {}]')
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    running.stop()
    assert work.records() == [1]
    assert ranges.known_ranges("run1").refused == {0, 5}


def test_a_worker_outside_whose_roots_a_run_lies_leaves_it_after_one_refusal(
    redis, redis_url, work
):
    """A node with a wrong setting must not take all ranges from those that could do them."""
    ranges = enqueue(redis, 3)
    worker = new_worker(redis_url, work)
    worker._roots = ["/elsewhere"]
    running = Running(worker)
    said = wait_for(lambda: queue.live_workers(redis).get("w1", {}).get("not_serving"))
    running.stop()
    assert "SWATHE_STORE_ROOTS" in said["run1"]
    assert work.computed() == {}
    assert ranges.counts() == QueueCounts(queued=2, refused=1)
    reason = redis.hget(f"rq:job:{names.job('run1', 0)}", "exc_info").decode()
    assert "SWATHE_STORE_ROOTS" in reason


def test_a_worker_error_hands_everything_back_and_ends_the_worker(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, faults={"compute:0": "worker"})
    enqueue(redis, 6)
    running = Running(new_worker(redis_url, work))
    assert running.wait() == 1
    waiting = redis.lrange(f"rq:queue:{QUEUE}", 0, -1)
    assert sorted(waiting) == [names.job("run1", i).encode() for i in range(6)]
    assert RangeQueue(redis, QUEUE).counts().running == 0
    deaths = [redis.hget(f"rq:job:{names.job('run1', i)}", "swathe_deaths") for i in range(6)]
    assert deaths == [b"1", None, None, None, None, None]


def test_a_worker_that_fails_range_after_range_suspects_itself(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, faults={"compute:*": "value"})
    enqueue(redis, 20)
    assert Running(new_worker(redis_url, work)).wait() == 1
    assert work.failed() == {}
    assert RangeQueue(redis, QUEUE).counts() == QueueCounts(queued=20)


def test_drain_finishes_started_ranges_and_hands_back_the_others_in_order(
    redis, redis_url, tmp_path
):
    work = FakeWork(tmp_path, compute_s=0.5)
    ranges = enqueue(redis, 8)
    running = Running(new_worker(redis_url, work, jobs_in_flight=4))
    wait_for(lambda: ranges.counts().running == 4 and work.computed())
    assert running.stop() == 0
    done = work.records()
    assert done
    assert set(work.computed()) == set(done)
    waiting = [item.decode() for item in redis.lrange(f"rq:queue:{QUEUE}", 0, -1)]
    assert waiting == [names.job("run1", i) for i in range(8) if i not in done]


def test_a_drain_that_takes_too_long_hands_the_rest_back(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, faults={"compute:0": "hang"})
    ranges = enqueue(redis, 3)
    running = Running(new_worker(redis_url, work, drain_s=0.5))
    wait_for(work.computed)
    assert running.stop() == 0
    assert ranges.counts() == QueueCounts(queued=3)
    assert redis.lindex(f"rq:queue:{QUEUE}", 0) == names.job("run1", 0).encode()


def test_exit_when_idle(redis, redis_url, work):
    enqueue(redis, 5)
    running = Running(new_worker(redis_url, work, exit_when_idle_s=0.5))
    assert running.wait() == 0
    assert work.records() == list(range(5))


def test_exit_when_idle_waits_for_ranges_that_run_elsewhere(redis, redis_url, work):
    enqueue(redis, 1)
    other = queue.Leases(redis, QUEUE, "other", lease_s=1.5)
    assert other.claim(queue.new_execution()).lease
    running = Running(new_worker(redis_url, work, exit_when_idle_s=0.2))
    assert running.wait() == 0
    assert work.records() == [0]  # the other died, its range came back


def test_an_idle_worker_takes_the_queue_that_waited_longest(redis, redis_url, work):
    for name in ("swathe-old", "swathe-new"):
        enqueue(redis, 3, queue=name, run_id=name[7:])
    seen = []
    original = work.compute
    work.compute = lambda prepared: (seen.append(prepared.run_id), original(prepared))[1]
    work._record = lambda each: (
        work.folder / "records" / f"{each.range_id + 10 * (each.run_id == 'new'):06d}"
    )
    hooks = Hooks(may_serve=lambda name: name != "swathe-none")
    running = Running(new_worker(redis_url, work, hooks=hooks, exit_when_idle_s=0.3))
    assert running.wait() == 0
    assert seen == ["old"] * 3 + ["new"] * 3


def test_on_a_full_server_the_ranges_of_the_dead_come_back_all_the_same(new_server, work):
    """What a worker says about itself was refused, and with it ended the turn in which it would have reaped."""
    with connect(new_server.url) as client:
        ranges = enqueue(client, 3)
        dead = Leases(client, QUEUE, "dead", lease_s=0.5)
        assert dead.claim(new_execution()).lease
        client.config_set("maxmemory", "1")
        running = Running(new_worker(new_server.url, work))
        until_done(ranges)
        assert work.records() == [0, 1, 2]
        client.config_set("maxmemory", "0")
        assert running.stop() == 0


def test_an_error_whose_text_is_no_unicode_is_a_failure_like_any_other(redis, redis_url, work):
    """A path with bytes of another encoding is enough; Redis' client would not send it, and the range was held for ever."""
    work.faults["compute:0"] = "bytes*1"
    ranges = enqueue(redis, 2)
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    assert running.stop() == 0
    assert work.records() == [0, 1]
    assert work.computed()[0] == 2


def test_a_marker_tells_of_such_an_error_too(redis, redis_url, work):
    work.faults["compute:0"] = "bytes"
    ranges = enqueue(redis, 2)
    running = Running(new_worker(redis_url, work))
    until_done(ranges)
    assert running.stop() == 0
    assert "\\udcff" in work.failed()[0]["reason"]


def test_a_settlement_that_cannot_be_delivered_frees_its_range(redis, redis_url, work, monkeypatch):
    def broken(*_args):
        monkeypatch.undo()
        raise TypeError("a fault of ours")

    monkeypatch.setattr(Leases, "ack", broken)
    ranges = enqueue(redis, 1)
    running = Running(new_worker(redis_url, work, heartbeat_s=0.1))
    until_done(ranges)  # its lease ran out, and its record was found
    assert running.stop() == 0


def test_an_idle_worker_rebuilds_what_the_queue_lost(redis, redis_url, work):
    ranges = enqueue(redis, 6)
    redis.delete(f"rq:job:{names.job('run1', 3)}")  # evicted

    def rebuild(run_id, url):
        assert (run_id, url) == ("run1", "/fake/run1")
        missing = [job(i) for i in range(6) if i not in work.records()]
        ranges.enqueue_if_absent(missing)
        return not missing

    running = Running(
        new_worker(redis_url, work, hooks=Hooks(rebuild=rebuild), exit_when_idle_s=0.2)
    )
    assert running.wait() == 0
    assert work.records() == list(range(6))


def test_a_flushed_redis_is_rebuilt_by_a_worker_that_remembers_the_run(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, compute_s=0.1)
    ranges = enqueue(redis, 10)

    def rebuild(_run_id, _url):
        missing = [job(i) for i in range(10) if i not in work.records()]
        ranges.enqueue_if_absent(missing)
        return not missing

    running = Running(new_worker(redis_url, work, hooks=Hooks(rebuild=rebuild)))
    wait_for(lambda: len(work.records()) > 2)
    redis.flushall()
    wait_for(lambda: len(work.records()) == 10)
    assert running.stop() == 0


def test_a_cancelled_run_stays_away_though_a_worker_remembers_it(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, compute_s=0.1)
    ranges = enqueue(redis, 10)
    asked = []
    hooks = Hooks(rebuild=lambda run_id, _url: asked.append(run_id) or False)
    running = Running(new_worker(redis_url, work, hooks=hooks, exit_when_idle_s=1.5))
    wait_for(lambda: len(work.records()) > 2)
    ranges.cancel(RunId("run1"))
    assert running.wait() == 0  # its last look at the stores of the runs it knows lies behind it
    assert asked == []
    assert len(work.records()) < 10


def test_pause_and_resume_while_working(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, compute_s=0.05)
    ranges = enqueue(redis, 20)
    running = Running(new_worker(redis_url, work))
    wait_for(lambda: len(work.records()) > 2)
    ranges.pause("run1")
    wait_for(lambda: ranges.counts().work == 0)
    assert len(work.records()) < 20
    ranges.resume("run1")
    wait_for(lambda: len(work.records()) == 20)
    running.stop()


def test_what_a_worker_says_about_itself(redis, redis_url, tmp_path):
    work = FakeWork(tmp_path, faults={"compute:0": "hang"})
    enqueue(redis, 1)
    hooks = Hooks(about=lambda: {"device": "cpu", "samples": 3})
    running = Running(new_worker(redis_url, work, hooks=hooks, drain_s=0.5))
    said = wait_for(
        lambda: (found := queue.live_workers(redis).get("w1")) and found["range"] and found
    )
    assert (said["device"], said["samples"], said["queue"]) == ("cpu", 3, QUEUE)
    assert said["range"] == names.job("run1", 0)
    command = [sys.executable, "-m", "rq.cli", "info", "--raw", "--url", redis_url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "worker w1" in shown
    assert f"queue {QUEUE} 0, 1 executing" in shown
    redis.flushall()  # everything is there again at the next beat
    wait_for(lambda: redis.sismember("rq:workers", "rq:worker:w1") and queue.live_workers(redis))
    running.stop()
    assert queue.live_workers(redis) == {}
    assert redis.smembers("rq:workers") == set()


def test_names_carry_a_boot_id():
    assert worker_name("gpu0") != worker_name("gpu0")
