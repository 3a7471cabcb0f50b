"""Leases: held, renewed, reaped by the server's time, and fenced afterwards."""

import time

import pytest
from redis import Redis

from swathe import names, queue
from swathe.errors import QueueError
from swathe.queue import RangeQueue
from swathe.queue.leases import Leases, new_execution
from swathe.spec import RangeId, RangeJob, RunId

RUN = RunId("run1")


def enqueue(redis, count):
    RangeQueue(redis, "q").enqueue_if_absent(
        RangeJob(run_url="/r", run_id=RUN, fingerprint="f", range_id=RangeId(index))
        for index in range(count)
    )


def leases(redis, worker="w1", lease_s=0.3):
    return Leases(redis, "q", worker, lease_s=lease_s)


def claim(book):
    found = book.claim(new_execution())
    assert found.lease is not None
    return found.lease


def waiting(redis):
    return [item.decode() for item in redis.lrange("rq:queue:q", 0, -1)]


def reap_until(book, count, bound_s=10.0):
    """Reap as the fleet does, until so many jobs went back."""
    back, end = [], time.monotonic() + bound_s
    while len(back) < count and time.monotonic() < end:
        back += book.reap().job_ids
        time.sleep(0.02)
    return back


def leftovers(redis):
    return sorted(key.decode() for key in redis.scan_iter() if b"run1" in key)


def test_claim_registers_and_ack_forgets(redis: Redis):
    enqueue(redis, 1)
    book = leases(redis)
    lease = claim(book)
    assert lease.job_id == names.job(RUN, 0)
    assert (lease.failures, lease.deaths, lease.history) == (0, 0, ())
    assert redis.hget(f"rq:job:{lease.job_id}", "status") == b"started"
    assert redis.zscore("rq:wip:q", f"{lease.job_id}:{lease.execution_id}") == float("inf")
    assert redis.ttl(f"rq:execution:{lease.job_id}:{lease.execution_id}") == -1
    assert book.ack(lease, 1.5)
    assert not book.ack(lease, 1.5)
    assert leftovers(redis) == ["swathe:runs"] or leftovers(redis) == []
    assert book.claim(new_execution()).state == "none"


def test_a_repeated_claim_gets_the_same_job(redis: Redis):
    enqueue(redis, 2)
    book, execution = leases(redis), new_execution()
    assert book.claim(execution).job_id == book.claim(execution).job_id
    assert len(waiting(redis)) == 1


def test_expired_ranges_go_to_the_front_in_order_with_no_retry_spent(redis: Redis):
    enqueue(redis, 5)
    dead, alive = leases(redis, "dead"), leases(redis, "alive")
    held = [claim(dead) for _ in range(3)]
    assert dead.start(held[0])
    assert reap_until(alive, 3)
    assert waiting(redis) == [names.job(RUN, index) for index in range(5)]
    again = [claim(alive) for _ in range(2)]
    assert (again[0].deaths, again[0].bystander_deaths, again[0].failures) == (1, 0, 0)
    assert (again[1].deaths, again[1].bystander_deaths, again[1].failures) == (0, 1, 0)
    assert "worker dead stopped renewing its lease, stage compute" in again[0].history[0]
    assert queue.requeued_counts(redis) == {"lease": 3}


def test_a_range_that_left_the_device_is_not_blamed_for_a_death(redis: Redis):
    enqueue(redis, 3)
    dead, alive = leases(redis, "dead", lease_s=30), leases(redis, "alive")
    first, second, third = (claim(dead) for _ in range(3))
    assert dead.start(first)
    assert dead.start(second, [first])
    assert dead.release_worker() == (first.job_id, second.job_id, third.job_id)
    assert [(each.deaths, each.bystander_deaths) for each in (claim(alive) for _ in range(3))] == [
        (0, 1),
        (1, 0),
        (0, 1),
    ]


def test_a_renewed_lease_is_not_reaped(redis: Redis):
    enqueue(redis, 1)
    book = leases(redis)
    lease = claim(book)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        assert book.renew([(lease, "compute")]) == frozenset()
        assert book.reap().job_ids == ()
        time.sleep(0.05)
    assert book.ack(lease, 1.0)


def test_a_lost_lease_cannot_renew_start_ack_fail_refuse_or_hand_back(redis: Redis):
    enqueue(redis, 1)
    zombie, other = leases(redis, "zombie"), leases(redis, "other")
    old = claim(zombie)
    assert reap_until(other, 1)
    new = claim(other)
    assert zombie.renew([(old, "compute")]) == {old.execution_id}
    assert not zombie.start(old)
    assert not zombie.ack(old, 1.0)
    assert not zombie.fail(old, 3, "boom").held
    assert not zombie.refuse(old, "x")
    assert zombie.hand_back([old], "drain", death="x") == 0
    assert waiting(redis) == []
    fields = redis.hgetall(f"rq:job:{new.job_id}")
    assert fields[b"worker_name"] == b"other"
    assert b"swathe_failures" not in fields
    assert other.ack(new, 1.0)


def test_an_expired_lease_that_nobody_reaped_can_still_be_acknowledged(redis: Redis):
    enqueue(redis, 1)
    book = leases(redis, lease_s=0.01)
    lease = claim(book)
    time.sleep(0.1)
    assert book.ack(lease, 1.0)


def test_failures_spend_the_budget_and_the_last_one_stays_held(redis: Redis):
    enqueue(redis, 2)
    book = leases(redis)
    lease = claim(book)
    first = book.fail(lease, 2, "bad\n  news")
    assert (first.held, first.failures, first.spent) == (True, 1, False)
    assert waiting(redis) == [names.job(RUN, 1), names.job(RUN, 0)]
    claim(book)
    lease = claim(book)
    assert lease.failures == 1
    second = book.fail(lease, 2, "again")
    assert (second.failures, second.spent, second.history) == (2, True, ("bad news", "again"))
    assert book.ack(lease, 0.1)


def test_hand_back_keeps_the_order_and_counts_a_death_only_where_told(redis: Redis):
    enqueue(redis, 4)
    book = leases(redis)
    held = [claim(book) for _ in range(3)]
    assert book.hand_back(held[1:], "drain") == 2
    assert book.hand_back(held[:1], "worker", death="device lost") == 1
    assert waiting(redis) == [names.job(RUN, index) for index in range(4)]
    again = claim(book)
    assert (again.deaths, again.history) == (1, ("device lost",))
    assert claim(book).deaths == 0


def test_a_history_stays_short(redis: Redis):
    enqueue(redis, 1)
    book = leases(redis)
    for _ in range(30):
        lease = claim(book)
        book.fail(lease, 100, "x" * 10_000)
    assert len(redis.hget(f"rq:job:{names.job(RUN, 0)}", "swathe_history")) < 5000


def test_nothing_is_reaped_for_one_lease_after_an_absence(redis: Redis):
    enqueue(redis, 1)
    book = leases(redis, lease_s=0.5)
    book.reap()
    time.sleep(0.6)
    lease = claim(book)
    book.reap()
    time.sleep(0.6)  # expired, but nobody was there to see it renewed: the whole fleet was away
    assert book.reap().hold_off_s > 0
    assert book.renew([(lease, "compute")]) == frozenset()
    assert book.ack(lease, 1.0)


def test_a_lease_survives_a_restart_of_redis(new_server):
    client = queue.connect(new_server.url)
    enqueue(client, 2)
    book = leases(client, lease_s=1.0)
    lease, lost = claim(book), claim(book)
    book.renew([(lease, "compute")])
    time.sleep(1.2)  # let the append-only file reach the disk
    new_server.stop(kill=True)
    time.sleep(2.0)
    new_server.start()
    assert book.reap() == queue.Reaped(hold_off_s=1)
    assert book.renew([(lease, "compute")]) == frozenset()
    assert book.ack(lease, 1.0)
    assert reap_until(book, 1) == [lost.job_id]


def test_a_client_with_a_wrong_clock_changes_nothing(redis: Redis, monkeypatch):
    enqueue(redis, 1)
    book, alive = leases(redis, lease_s=2.0), leases(redis, "alive", lease_s=2.0)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    lease = claim(book)
    book.renew([(lease, "compute")])
    monkeypatch.undo()
    for _ in range(10):
        assert alive.reap().job_ids == ()
        time.sleep(0.02)
    assert book.ack(lease, 1.0)


def test_ids_stuck_in_the_intermediate_list_come_back(redis: Redis):
    enqueue(redis, 2)
    redis.lmove("rq:queue:q", "rq:queue:q:intermediate")
    assert RangeQueue(redis, "q").counts().queued == 2
    assert reap_until(leases(redis), 1) == [names.job(RUN, 0)]
    assert waiting(redis) == [names.job(RUN, 0), names.job(RUN, 1)]


def test_a_registration_without_a_lease_gets_one_and_expires(redis: Redis):
    enqueue(redis, 1)
    book = leases(redis)
    claim(book)
    redis.delete(names.leases_key("q"))
    assert reap_until(book, 1) == [names.job(RUN, 0)]


@pytest.mark.parametrize("lost", ["hash", "duplicate"])
def test_claim_passes_over_ids_that_are_no_work(redis: Redis, lost):
    enqueue(redis, 2)
    if lost == "hash":
        redis.delete(f"rq:job:{names.job(RUN, 0)}")
        assert claim(leases(redis)).job_id == names.job(RUN, 1)
    else:
        redis.lpush("rq:queue:q", names.job(RUN, 0))
        book = leases(redis)
        assert claim(book).job_id == names.job(RUN, 0)
        assert claim(book).job_id == names.job(RUN, 1)


def test_a_reaped_range_whose_hash_was_evicted_is_left_to_the_rebuild(redis: Redis):
    enqueue(redis, 1)
    book = leases(redis)
    lease = claim(book)
    redis.delete(f"rq:job:{lease.job_id}")
    end = time.monotonic() + 10
    while redis.zcard("rq:wip:q") and time.monotonic() < end:
        book.reap()
        time.sleep(0.02)
    assert leftovers(redis) == []
    assert waiting(redis) == []


def test_hundreds_of_expired_leases_in_one_go(redis: Redis):
    enqueue(redis, 1200)
    book = leases(redis, "dead", lease_s=0.2)
    for _ in range(1200):
        claim(book)
    assert len(reap_until(leases(redis, "alive", lease_s=0.2), 1200, 20)) == 1200
    assert len(set(waiting(redis))) == 1200


def test_ranges_of_a_worker_that_is_known_to_be_dead_come_back_at_once(redis: Redis):
    enqueue(redis, 4)
    dead, alive = leases(redis, "dead", lease_s=60), leases(redis, "alive", lease_s=60)
    held = [claim(dead) for _ in range(3)]
    other = claim(alive)
    dead.start(held[0])
    redis.set(names.worker_key("dead"), "{}")
    assert queue.release_dead_worker(redis, "dead") == tuple(names.job(RUN, i) for i in range(3))
    assert queue.live_workers(redis) == {}
    assert waiting(redis) == [names.job(RUN, i) for i in range(3)]
    assert (claim(alive).deaths, claim(alive).bystander_deaths) == (1, 1)
    assert queue.release_dead_worker(redis, "dead") == ()
    assert alive.ack(other, 1.0)
    assert not dead.ack(held[0], 1.0)


def test_a_full_server_refuses_producers_and_serves_workers(new_server):
    client = queue.connect(new_server.url)
    enqueue(client, 100)
    book = leases(client, lease_s=60)
    held = [claim(book) for _ in range(3)]
    client.config_set("maxmemory", "1mb")
    with pytest.raises(QueueError, match="Redis is full"):
        RangeQueue(client, "q").enqueue_if_absent(
            RangeJob(run_url="/r", run_id=RUN, fingerprint="f", range_id=RangeId(i))
            for i in range(200)
        )
    assert book.renew([(lease, "compute") for lease in held]) == frozenset()
    assert book.ack(held[0], 1.0)
    assert book.hand_back(held[1:2], "drain") == 1
    assert book.fail(held[2], 3, "x").failures == 1
    assert claim(book).job_id == names.job(RUN, 1)
