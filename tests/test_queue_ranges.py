"""Enqueue if absent, from every state; counts, pause, cancel; what rq itself sees."""

import itertools
import subprocess
import sys
import time

import pytest
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from swathe import names, queue
from swathe.errors import ConfigError, QueueError
from swathe.queue import Enqueued, QueueCounts, RangeQueue
from swathe.queue.leases import Leases, new_execution
from swathe.spec import RangeId, RangeJob, RunId

RUN = RunId("run1")


def job(range_id, run_id=RUN, url="/data/run1"):
    return RangeJob(run_url=url, run_id=run_id, fingerprint="f" * 64, range_id=RangeId(range_id))


def jobs(count, run_id=RUN):
    return [job(index, run_id) for index in range(count)]


@pytest.fixture
def ranges(redis: Redis) -> RangeQueue:
    return RangeQueue.of_model(redis, "abc")


def waiting(redis):
    return [item.decode() for item in redis.lrange("rq:queue:swathe-abc", 0, -1)]


def leases(redis, worker="w1", lease_s=30.0):
    return Leases(redis, "swathe-abc", worker, lease_s=lease_s)


def claim(book):
    found = book.claim(new_execution())
    assert found.lease is not None
    return found.lease


def test_enqueue_twice_changes_nothing(ranges, redis):
    assert ranges.enqueue_if_absent(jobs(5)) == Enqueued(added=5)
    assert ranges.enqueue_if_absent(jobs(5)) == Enqueued(known=5)
    assert waiting(redis) == [names.job(RUN, index) for index in range(5)]


def test_the_same_range_twice_in_one_call_is_one_job(ranges):
    assert ranges.enqueue_if_absent([job(1), job(1)]) == Enqueued(added=1, known=1)


def test_enqueue_works_in_chunks_and_fast_enough(ranges):
    started = time.monotonic()
    assert ranges.enqueue_if_absent(jobs(3500)).added == 3500
    assert ranges.counts() == QueueCounts(queued=3500)
    assert time.monotonic() - started < 7  # the promise is 30,000 in 60 s


def test_rq_reads_our_jobs(ranges, redis):
    ranges.enqueue_if_absent([job(7)])
    found = Job.fetch(names.job(RUN, 7), connection=redis, serializer=JSONSerializer)
    assert found.func_name == names.JOB_FUNCTION
    assert found.kwargs == {
        "version": 1, "run_url": "/data/run1", "run_id": "run1", "fingerprint": "f" * 64, "range_id": 7,
    }  # fmt: skip
    assert found.get_status() == "queued"
    assert found.result_ttl == 0
    assert Queue("swathe-abc", connection=redis).count == 1


def test_rq_info_tells_the_truth_and_changes_nothing(ranges, redis, redis_url):
    ranges.enqueue_if_absent(jobs(3))
    book = leases(redis, lease_s=0.05)
    claim(book)
    time.sleep(0.1)  # expired: rq's clean-up would fail the job if it saw the expiry
    command = [sys.executable, "-m", "rq.cli", "info", "--raw", "--url", redis_url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "queue swathe-abc 2, 1 executing, 0 finished, 0 failed" in shown
    assert ranges.counts() == QueueCounts(queued=2, running=1)


@pytest.mark.parametrize("damage", ["hash", "list", "both", "flush", "status"])
def test_enqueue_repairs_what_is_half_there(ranges, redis, damage):
    ranges.enqueue_if_absent(jobs(3))
    key = f"rq:job:{names.job(RUN, 1)}"
    if damage in ("hash", "both"):
        redis.delete(key)
    if damage in ("list", "both"):
        redis.lrem("rq:queue:swathe-abc", 0, names.job(RUN, 1))
    if damage == "flush":
        redis.flushall()
    if damage == "status":
        redis.hset(key, "status", "started")
    ranges.enqueue_if_absent(jobs(3))
    assert sorted(waiting(redis)) == [names.job(RUN, index) for index in range(3)]
    assert all(redis.hget(f"rq:job:{names.job(RUN, i)}", "status") == b"queued" for i in range(3))
    assert ranges.enqueue_if_absent(jobs(3)) == Enqueued(known=3)


@pytest.mark.parametrize("registry", ["finished", "failed", "deferred", "scheduled", "canceled"])
def test_enqueue_takes_a_job_out_of_rq_registries(ranges, redis, registry):
    job_id = names.job(RUN, 1)
    redis.zadd(f"rq:{registry}:swathe-abc", {job_id: time.time() + 100})
    redis.hset(
        f"rq:job:{job_id}", mapping={"status": registry, "failure_callback_name": "os.getcwd"}
    )
    assert ranges.enqueue_if_absent([job(1)]) == Enqueued(added=1)
    assert redis.zcard(f"rq:{registry}:swathe-abc") == 0
    assert not redis.hexists(f"rq:job:{job_id}", "failure_callback_name")


def test_a_running_range_is_not_queued_again_even_without_its_hash(ranges, redis):
    ranges.enqueue_if_absent(jobs(2))
    book = leases(redis)
    held = claim(book)
    assert ranges.enqueue_if_absent(jobs(2)) == Enqueued(known=2)
    redis.delete(f"rq:job:{held.job_id}")
    assert ranges.enqueue_if_absent(jobs(2)) == Enqueued(known=1, repaired=1)
    assert waiting(redis) == [names.job(RUN, 1)]
    assert book.ack(held, 1.0)
    assert ranges.enqueue_if_absent(jobs(2)) == Enqueued(added=1, known=1)


def test_a_remnant_keeps_its_budget_and_a_set_aside_job_starts_anew(ranges, redis):
    ranges.enqueue_if_absent(jobs(2))
    for index, status in enumerate(("started", "failed")):
        key = f"rq:job:{names.job(RUN, index)}"
        redis.hset(key, mapping={"swathe_failures": 2, "status": status})
    redis.delete("rq:queue:swathe-abc")
    ranges.enqueue_if_absent(jobs(2))
    kept = [redis.hget(f"rq:job:{names.job(RUN, index)}", "swathe_failures") for index in (0, 1)]
    assert kept == [b"2", None]


def test_two_producers_at_once_make_no_duplicates(ranges, redis_url):
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from swathe import queue; from swathe.spec import RangeJob\n"
        "q = queue.RangeQueue.of_model(queue.connect(sys.argv[1]), 'abc')\n"
        "print(q.enqueue_if_absent(RangeJob(run_url='/r', run_id='run1', fingerprint='f',"
        " range_id=i) for i in range(4000)).added)"
    )
    command = [sys.executable, "-c", code, redis_url]
    producers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert sum(int(producer.communicate()[0]) for producer in producers) == 4000
    assert ranges.counts().queued == 4000


def test_known_ranges_by_state(ranges, redis):
    ranges.enqueue_if_absent(jobs(4))
    ranges.enqueue_if_absent(jobs(2, RunId("other-run")))
    claim(leases(redis))
    known = ranges.known_ranges(RUN)
    assert (known.queued, known.running) == ({1, 2, 3}, {0})
    assert ranges.known_ranges(RunId("other-run")).queued == {0, 1}
    assert ranges.known_ranges(RunId("other")).all == frozenset()


def test_pause_parks_ranges_and_resume_brings_them_back_in_order(ranges, redis):
    ranges.enqueue_if_absent(jobs(3))
    ranges.enqueue_if_absent(jobs(2, RunId("run2")))
    ranges.pause(RUN)
    assert ranges.known_ranges(RUN).paused == {0, 1, 2}
    assert queue.paused_runs(redis) == {RUN}
    assert claim(leases(redis)).job_id == names.job(RunId("run2"), 0)
    assert ranges.counts() == QueueCounts(queued=1, running=1, paused=3)
    assert ranges.enqueue_if_absent(jobs(3)) == Enqueued(known=3)
    assert ranges.resume(RUN) == 3
    expected = [names.job(RUN, index) for index in range(3)] + [names.job(RunId("run2"), 1)]
    assert waiting(redis) == expected


def test_claim_passes_thousands_of_parked_ranges(ranges, redis):
    ranges.enqueue_if_absent(jobs(2500))
    ranges.enqueue_if_absent(jobs(1, RunId("run2")))
    ranges.pause(RUN)
    assert claim(leases(redis)).job_id == names.job(RunId("run2"), 0)


def test_claim_skips_runs_that_the_worker_does_not_serve(ranges, redis):
    ranges.enqueue_if_absent(jobs(1500))
    ranges.enqueue_if_absent(jobs(1, RunId("run2")))
    book = leases(redis)
    found = book.claim(new_execution(), skip_runs=[RUN])
    assert found.job_id == names.job(RunId("run2"), 0)
    assert book.claim(new_execution(), skip_runs=[RUN]).state == "none"
    assert waiting(redis)[:2] == [names.job(RUN, 0), names.job(RUN, 1)]


def test_cancel_forgets_one_run_and_fences_its_workers(ranges, redis):
    ranges.enqueue_if_absent(jobs(2))
    ranges.enqueue_if_absent(jobs(2, RunId("run2")))
    book = leases(redis)
    held = claim(book)
    assert ranges.cancel(RUN) == 2
    assert not book.ack(held, 1.0)
    assert ranges.counts() == QueueCounts(queued=2)
    assert queue.known_runs(redis) == {"run2": "/data/run1"}
    assert not [key for key in redis.scan_iter() if b"run1" in key]


def test_a_cancelled_run_comes_back_when_a_person_asks_and_not_by_a_rebuild(ranges, redis):
    ranges.enqueue_if_absent(jobs(2))
    ranges.cancel(RUN)
    assert ranges.enqueue_if_absent(jobs(2), rebuild=True).added == 0
    assert ranges.counts().queued == 0
    assert RUN not in queue.known_runs(redis)
    assert ranges.enqueue_if_absent(jobs(2)).added == 2
    assert RUN in queue.known_runs(redis)
    redis.flushall()
    assert ranges.enqueue_if_absent(jobs(2), rebuild=True).added == 2


def test_queues_are_listed_by_age(redis):
    for model in ("bbb", "aaa"):
        RangeQueue.of_model(redis, model).enqueue_if_absent([job(1)])
        time.sleep(0.002)
    assert queue.queue_names(redis) == ["swathe-bbb", "swathe-aaa"]


def test_redis_suspend_stops_claims(ranges, redis):
    ranges.enqueue_if_absent(jobs(1))
    redis.set("rq:suspended", 1)
    assert leases(redis).claim(new_execution()).state == "suspended"


SECRETS = ["p#ss", "p/ss", "p?ss", "12#34", "p[ss", "p/ss/1", "3?x"]


@pytest.mark.parametrize("secret", SECRETS)
def test_an_unquoted_password_is_refused_without_being_printed(secret):
    url = f"redis://user:{secret}@example.org:6379/0"
    with pytest.raises(ConfigError) as caught:
        queue.connect(url)
    assert "percent form" in str(caught.value)
    for text in (str(caught.value), queue.describe(url), repr(caught.value.__context__)):
        assert secret not in text or text == "None"


@pytest.mark.parametrize(
    "url", ["http://x", "", "redis://h:1/x", "unix://", "redis://h?nonsense=1&socket_timeout=x"]
)
def test_urls_that_make_no_sense(url):
    with pytest.raises(ConfigError, match="REDIS_URL"):
        queue.connect(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p%23ss@h:1/2", "redis://h:1/2"),
        ("rediss://me:s%2F@h", "rediss://me@h:6379"),
        ("redis://u:a@b@h:1", "redis://u@h:1"),
        ("unix:///tmp/s?password=geheim", "unix:///tmp/s"),
    ],
)
def test_describe_shows_no_password(url, shown):
    assert queue.describe(url) == shown


def test_a_quoted_password_and_tls_reach_the_client():
    client = queue.connect("rediss://me:p%23s%2Fs%40@h:1/3")
    settings = client.connection_pool.connection_kwargs
    assert (settings["username"], settings["password"], settings["db"]) == ("me", "p#s/s@", 3)
    assert client.connection_pool.connection_class.__name__ == "SSLConnection"
    assert settings["health_check_interval"] == 15


def test_a_password_with_special_characters_logs_in(new_server):
    admin = queue.connect(new_server.url)
    admin.config_set("requirepass", "p#s/s?@:")
    with pytest.raises(QueueError, match=r"refused the login|NOAUTH"):
        queue.queue_names(queue.connect(new_server.url, retries=0))
    assert queue.queue_names(queue.connect(new_server.url + "?password=p%23s%2Fs%3F%40%3A")) == []


def test_an_unreachable_server_is_a_retryable_error(tmp_path):
    with pytest.raises(QueueError, match="cannot be reached") as caught:
        queue.queue_names(queue.connect(f"unix://{tmp_path}/none", retries=0))
    assert caught.value.retryable


def test_policy_warnings(new_server, redis):
    safe = queue.connect(new_server.url)
    assert queue.policy_warnings(safe) == []
    safe.config_set("maxmemory-policy", "allkeys-lru")
    assert "allkeys-lru" in queue.policy_warnings(safe)[0]
    assert "appendonly is off" in queue.policy_warnings(redis)[0]


def test_a_full_server_says_so_and_the_repeat_completes(new_server):
    client = queue.connect(new_server.url)
    ranges = RangeQueue.of_model(client, "abc")
    client.config_set("maxmemory", "3mb")
    with pytest.raises(QueueError, match="Redis is full"):
        ranges.enqueue_if_absent(jobs(20_000))
    client.config_set("maxmemory", "0")
    ranges.enqueue_if_absent(jobs(20_000))
    listed = client.lrange("rq:queue:swathe-abc", 0, -1)
    assert len(listed) == len(set(listed)) == 20_000


def test_live_workers(redis):
    redis.set(names.worker_key("w1"), '{"device": "cpu"}', ex=10)
    assert queue.live_workers(redis) == {"w1": {"device": "cpu"}}


def test_counters_start_empty(redis):
    assert queue.requeued_counts(redis) == {}
    assert list(itertools.islice(queue.known_runs(redis), 1)) == []
