"""What a worker without work may do to the runs that Redis names: only what it may do to their ranges."""

import pytest
import structlog
from pydantic import SecretStr

from swathe import names, records
from swathe.queue import RangeQueue
from swathe.records import read_record, read_run
from swathe.settings import Settings
from swathe.spec import RangeId
from tests.support.runs import Recipe, make_run
from worker.loop.contract import Hooks, WorkerOptions
from worker.loop.idle import Idle
from worker.serve import Place, _Fleet


def fleet(redis_url: str, *roots: object) -> _Fleet:
    settings = Settings(store_roots=",".join(map(str, roots)))
    return _Fleet(SecretStr(redis_url), Place(uuid="cpu", name="w1"), settings)


@pytest.fixture
def run(tmp_path):
    store = make_run(tmp_path / "runs" / "a", Recipe(), sealed=False)
    return store, read_run(store)


def test_a_run_outside_the_roots_is_neither_enqueued_nor_sealed(redis, redis_url, run, tmp_path):
    """Once its ranges were refused and enqueued again every 15 s, for ever; and any folder named in Redis was sealed."""
    store, spec = run
    assert fleet(redis_url, tmp_path / "others").rebuild(spec.run_id, store.url)
    assert store.stat(names.MANIFEST) is None
    store.delete(names.record(RangeId(1)))
    ranges = RangeQueue.of_model(redis, spec.model.key)
    assert fleet(redis_url, tmp_path / "others").rebuild(spec.run_id, store.url)
    assert ranges.counts().queued == 0
    assert not fleet(redis_url, tmp_path / "runs").rebuild(spec.run_id, store.url)
    assert ranges.known_ranges(spec.run_id).queued == {1}


def test_a_sealed_run_costs_no_reading_of_its_records(redis_url, run, tmp_path):
    store, spec = run
    here = fleet(redis_url, tmp_path)
    assert here.rebuild(spec.run_id, store.url)
    assert store.stat(names.MANIFEST) is not None
    # What it would do with the records it shows by an unreadable one.
    store.write(names.record(RangeId(1)), [b"?"])
    assert here.rebuild(spec.run_id, store.url)


def test_of_an_open_run_only_what_is_new_is_read(redis_url, run, tmp_path, monkeypatch):
    """Every 15 s a worker without work read all records, up to 30,000, while it could claim nothing."""
    store, spec = run
    kept = store.read(names.record(RangeId(1)))
    store.delete(names.record(RangeId(1)))
    read = []
    monkeypatch.setattr(
        records, "read_record", lambda *args: read.append(args[2]) or read_record(*args)
    )
    here = fleet(redis_url, tmp_path)
    assert not here.rebuild(spec.run_id, store.url)
    assert len(read) == spec.totals.ranges - 1
    assert not here.rebuild(spec.run_id, store.url)
    store.create(names.record(RangeId(1)), kept)
    assert here.rebuild(spec.run_id, store.url)
    assert read[spec.totals.ranges - 1 :] == [1]


def test_a_run_that_was_deleted_is_told_of_once(redis, redis_url, tmp_path):
    redis.hset(names.runs_key(), "r1", str(tmp_path / "gone"))
    hooks = Hooks(rebuild=fleet(redis_url, tmp_path).rebuild)
    idle = Idle(redis, WorkerOptions(), hooks)
    with structlog.testing.capture_logs() as said:
        for _ in range(3):
            idle._rebuild()
            redis.delete(names.rebuild_key("r1"))
    assert [line["log_level"] for line in said] == ["warning"]
    assert "swathe cancel" in said[0]["event"]
