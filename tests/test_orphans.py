"""Only shards that no record names, older than the grace period, are removed."""

import time
from dataclasses import replace

from swathe import names
from swathe.orphans import collect, find_orphans
from swathe.records import RunWatcher
from swathe.spec import RangeId
from swathe.store.memory import MemoryStore
from tests.support.states import state_with
from tests.support.synthetic_run import write_run


def test_only_old_shards_without_a_record_go() -> None:
    store = MemoryStore()
    state = state_with(stored=2)
    named = names.shard(RangeId(0), "a" * 12)
    orphan = names.shard(RangeId(1), "b" * 12)
    records = {**state.records, RangeId(0): replace(state.records[RangeId(0)], shard=named)}
    state = replace(state, records=records)
    for key in (named, orphan, "states/000001.json", "states/000001.failed.json", "run.json"):
        store.write(key, [b"12345"])
    now_s = time.time() + 100
    assert find_orphans(store, state, now_s=now_s, grace_s=1000) == []
    assert [item.key for item in find_orphans(store, state, now_s=now_s, grace_s=50)] == [orphan]
    assert collect(store, state, now_s=now_s, grace_s=50) == (1, 5)
    assert store.stat(orphan) is None
    assert {item.key for item in store.list("")} == {
        named, "states/000001.json", "states/000001.failed.json", "run.json",
    }  # fmt: skip


def test_shards_of_a_record_that_cannot_be_read_stay() -> None:
    store = MemoryStore()
    written = write_run(store, sealed=False)
    key = names.record(RangeId(1))
    store.write(key, [store.read(key)[:-20]])
    state = RunWatcher(store, written.spec).read()
    assert state.invalid == {1}
    assert collect(store, state, now_s=time.time() + 100, grace_s=50) == (0, 0)
