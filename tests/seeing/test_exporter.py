"""The fleet's metrics and its list of nodes: right, without side effects, and right again after Redis was away."""

import dataclasses
import json
from typing import get_args

import pytest
import structlog
from fleet import enqueue

from producer.exporter import Exporter
from producer.runs import Runs
from swathe import metrics, names, queue
from swathe.manifest import seal
from swathe.queue import Leases, connect, new_execution
from swathe.settings import Settings
from swathe.spec import RangeId, RangeRecord, from_json, to_json
from swathe.store.local import LocalStore
from tests.seeing.test_metrics import parse
from tests.support.synthetic_run import RANGES, SAMPLES, write_run
from worker.loop.keeper import about_key


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "run")


def exporter_of(client, **settings):
    return Exporter(client, Runs(lambda: queue.known_runs(client), Settings(**settings)))


def values(exporter):
    exporter._runs.refresh()
    return parse(exporter.metrics().body)


def announce(client, name, *, node="n1", metrics="n1:9410", state="compute"):
    about = {"node": node, "metrics": metrics, "state": state}
    client.set(about_key(name), json.dumps(about), ex=60)


def run_known(client, store):
    client.hset(names.runs_key(), "synthetic", str(store.url))


def test_queue_workers_and_requeues(redis):
    ranges = enqueue(redis, 5)
    leases = Leases(redis, ranges.name, "w1", lease_s=15)
    first = leases.claim(new_execution()).lease
    second = leases.claim(new_execution()).lease
    leases.hand_back([second], "drain")
    leases.refuse(first, "foreign")
    leases.claim(new_execution())
    announce(redis, "w1")
    announce(redis, "w2", state="write")
    found = values(exporter_of(redis))
    queue_states = {state: found["swathe_queue_ranges", "swathe-m", state] for state in ("queued", "running", "paused", "refused")}  # fmt: skip
    assert queue_states == {"queued": 3, "running": 1, "paused": 0, "refused": 1}
    assert found["swathe_workers", "compute"] == found["swathe_workers", "write"] == 1
    assert found["swathe_workers", "queue_empty"] == 0
    assert found["swathe_requeued_ranges_total", "drain"] == 1
    assert found["swathe_requeued_ranges_total", "death"] == 0
    assert found["swathe_redis_up",] == 1
    assert found["swathe_redis_durable",] == 0
    assert found["swathe_redis_may_evict",] == 0
    assert ("swathe_redis_memory_max_bytes",) not in found


def test_every_reason_for_a_requeue_is_shown():
    ours = set(get_args(queue.Back)) | {"error", "death", "lease"}
    assert set(metrics.REQUEUE_REASONS) == ours


def test_progress_of_a_run_until_it_is_sealed(redis, store):
    write_run(store, sealed=False)
    run_known(redis, store)
    record = store.read(names.record(RangeId(2)))
    store.delete(names.record(RangeId(2)))
    exporter = exporter_of(redis)
    found = values(exporter)
    samples = {state: found["swathe_run_samples", "synthetic", state] for state in ("stored", "rejected", "quarantined", "remaining")}  # fmt: skip
    whole = SAMPLES * RANGES
    assert samples == {"stored": whole - SAMPLES, "rejected": 0, "quarantined": 0, "remaining": SAMPLES}  # fmt: skip
    assert found["swathe_run_ranges", "synthetic", "open"] == 1
    assert found["swathe_run_complete", "synthetic"] == 0
    missing = from_json(RangeRecord, record, origin="record").tokens
    assert found["swathe_run_remaining_bytes", "synthetic"] == missing * 2 * 16 * 2
    assert ("swathe_run_eta_seconds", "synthetic") not in found, "no pace is known yet"
    store.create(names.record(RangeId(2)), record)
    found = values(exporter)
    assert found["swathe_run_samples", "synthetic", "remaining"] == 0
    assert found["swathe_run_eta_seconds", "synthetic"] == 0
    seal(store)
    found = values(exporter)
    assert found["swathe_run_complete", "synthetic"] == 1
    assert found["swathe_run_samples", "synthetic", "stored"] == whole
    assert found["swathe_run_tokens", "synthetic", "stored"] == found["swathe_run_tokens", "synthetic", "planned"]  # fmt: skip


def test_a_run_that_cannot_be_read_hides_no_other(redis, store, tmp_path):
    write_run(store)
    run_known(redis, store)
    redis.hset(names.runs_key(), "gone", str(tmp_path / "gone"))
    exporter = exporter_of(redis)
    found = values(exporter)
    assert found["swathe_run_complete", "synthetic"] == 1
    assert ("swathe_run_complete", "gone") not in found
    assert found["swathe_exporter_errors_total", "store"] == 1


def test_runs_outside_the_roots_are_not_opened(redis, store, tmp_path):
    write_run(store)
    run_known(redis, store)
    found = values(exporter_of(redis, store_roots=[str(tmp_path / "elsewhere")]))
    assert ("swathe_run_complete", "synthetic") not in found
    found = values(exporter_of(redis, store_roots=[str(tmp_path)]))
    assert found["swathe_run_complete", "synthetic"] == 1


def test_a_cancelled_run_is_not_shown_any_more(redis, store):
    write_run(store)
    run_known(redis, store)
    exporter = exporter_of(redis)
    assert ("swathe_run_complete", "synthetic") in values(exporter)
    redis.delete(names.runs_key())
    assert ("swathe_run_complete", "synthetic") not in values(exporter)


def test_scrapes_change_nothing_in_redis(redis, store):
    write_run(store)
    run_known(redis, store)
    enqueue(redis, 5)
    announce(redis, "w1")
    exporter = exporter_of(redis)
    before = dump(redis)
    for _ in range(3):
        values(exporter)
        exporter.targets()
    assert dump(redis) == before


def dump(client):
    return {key: (client.type(key), client.dump(key)) for key in client.scan_iter()}


def test_each_node_is_listed_once_and_stays_for_a_minute(redis, monkeypatch):
    announce(redis, "w1")
    announce(redis, "w2")
    announce(redis, "w3", node="n2", metrics="n2:9410")
    announce(redis, "old", metrics=None)
    exporter = exporter_of(redis)
    expected = [
        {"targets": ["n1:9410"], "labels": {"node": "n1"}},
        {"targets": ["n2:9410"], "labels": {"node": "n2"}},
    ]
    assert json.loads(exporter.targets().body) == expected
    redis.flushall()
    assert json.loads(exporter.targets().body) == expected, "a restart of Redis blinds nobody"
    monkeypatch.setattr("producer.exporter._REMEMBER_S", -1.0)
    assert json.loads(exporter.targets().body) == []


def test_a_run_that_was_planned_anew_in_the_same_place_is_not_shown_twice(redis, store):
    write_run(store)
    run_known(redis, store)
    redis.hset(names.runs_key(), "before", str(store.url))
    found = values(exporter_of(redis))
    assert {key[1] for key in found if key[0] == "swathe_run_samples"} == {"synthetic"}
    assert found["swathe_exporter_errors_total", "store"] == 0


def test_while_redis_is_away_its_values_are_absent_and_the_runs_stay(new_server, store):
    client = connect(new_server.url, retries=0)
    write_run(store)
    run_known(client, store)
    enqueue(client, 5)
    exporter = exporter_of(client)
    assert values(exporter)["swathe_redis_durable",] == 1
    new_server.stop()
    with structlog.testing.capture_logs() as said:
        found = values(exporter)
        values(exporter)
    assert len(said) == 1, "an outage is told of once"
    assert found["swathe_redis_up",] == 0
    assert not [key for key in found if key[0] in {"swathe_queue_ranges", "swathe_workers"}]
    assert found["swathe_run_complete", "synthetic"] == 1
    assert exporter.targets().status == 503
    new_server.start()
    found = values(exporter)
    assert found["swathe_redis_up",] == 1
    assert found["swathe_queue_ranges", "swathe-m", "queued"] == 5
    client.close()


def test_thirty_thousand_ranges_cost_a_scrape_no_reading_of_the_store(redis, store):
    run = write_run(store, sealed=False)
    totals = dataclasses.replace(run.spec.totals, ranges=30_000, rows=30_000 * SAMPLES)
    store.write(names.RUN, [to_json(dataclasses.replace(run.spec, totals=totals))])
    run_known(redis, store)
    enqueue(redis, 30_000)
    exporter = exporter_of(redis)
    exporter._runs.refresh()
    store.delete(names.record(RangeId(0)))
    before = redis.info("stats")["total_commands_processed"]
    found = parse(exporter.metrics().body)
    commands = redis.info("stats")["total_commands_processed"] - before
    assert found["swathe_run_ranges", "synthetic", "stored"] == RANGES, "from memory"
    assert found["swathe_run_ranges", "synthetic", "open"] == 30_000 - RANGES
    assert found["swathe_queue_ranges", "swathe-m", "queued"] == 30_000
    assert commands < 100
