"""What displays and a person's commands ask of the queue: true at any moment, and true while Redis is away."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pydantic import SecretStr
from redis import Redis

from producer import fleet as commands
from producer import watching
from producer.fleet import Fleet
from producer.status import as_lines
from swathe import names, queue
from swathe.errors import ObjectMissingError
from swathe.queue import Leases, RangeQueue, connect, new_execution
from swathe.records import RunState, RunWatcher, read_run
from swathe.settings import Settings
from swathe.spec import RangeId, RunSpec
from swathe.store import Store
from tests.support.runs import Recipe, make_run


@dataclass
class Case:
    """An open run whose last three ranges are missing, in its fleet."""

    redis: Redis
    store: Store
    spec: RunSpec

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.redis, self.store, self.spec)

    @property
    def queue(self) -> RangeQueue:
        return RangeQueue.of_model(self.redis, self.spec.model.key)

    @property
    def leases(self) -> Leases:
        return Leases(self.redis, self.queue.name, "w1", lease_s=15)

    def read(self) -> RunState:
        return RunWatcher(self.store, self.spec).read()

    def lines(self) -> str:
        known = self.fleet.known()
        state = self.read()
        return "\n".join(as_lines(state, self.fleet.view(state, known)))


@pytest.fixture
def case(redis, tmp_path) -> Case:
    store = make_run(tmp_path / "run", Recipe(), sealed=False)
    spec = read_run(store)
    for range_id in spec.range_ids[-3:]:
        store.delete(names.record(RangeId(range_id)))
    case = Case(redis, store, spec)
    case.fleet.submit(case.read())
    return case


def test_a_range_stored_while_one_looks_is_not_called_lost(case, monkeypatch, capsys, redis_url):
    """Redis was read after the store: what was stored and acknowledged between the two was in neither."""
    settings = Settings(redis_url=SecretStr(redis_url))
    monkeypatch.setattr(watching, "read_settings", lambda: settings)
    read = RunWatcher.read

    def read_beside_a_worker(watcher: RunWatcher) -> RunState:
        state = read(watcher)
        if lease := case.leases.claim(new_execution()).lease:
            record = next(Path(case.store.url).glob("states/000000.json")).read_bytes()
            place = names.job_range(lease.job_id)
            assert place
            changed = json.loads(record) | {"range_id": place[1]}
            case.store.create(names.record(place[1]), json.dumps(changed).encode())
            case.leases.ack(lease, 1.0)
        return state

    monkeypatch.setattr(RunWatcher, "read", read_beside_a_worker)
    watching.status(case.store.url, json_=True)
    assert json.loads(capsys.readouterr().out)["queue"]["lost"] == []


def test_status_says_what_was_refused_and_who_does_not_serve_the_run(case):
    lease = case.leases.claim(new_execution()).lease
    assert lease
    case.leases.refuse(lease, "outside SWATHE_STORE_ROOTS")
    said = {"not_serving": {case.spec.run_id: "no such model"}}
    case.redis.set(names.worker_key("w2"), json.dumps(said))
    text = case.lines()
    assert "refused  1 ranges, run: swathe submit" in text
    assert "outside SWATHE_STORE_ROOTS" in text
    assert "worker w2 does not serve this run: no such model" in text
    assert "lost" not in text


def test_a_display_says_why_nothing_comes(case):
    def note(**options: bool) -> str:
        return case.fleet.snapshot(case.read(), **options).note

    assert note().startswith("no workers")
    assert note(own_workers=True) == ""
    case.redis.set(names.worker_key("w1"), json.dumps({}))
    assert note() == ""
    case.fleet.pause()
    assert note().startswith("paused")
    assert "3 paused (swathe resume)" in case.lines()
    assert case.fleet.resume() == 3  # though no worker had parked them
    case.redis.set(names.worker_key("w1"), json.dumps({"not_serving": {case.spec.run_id: "no"}}))
    assert note() == "no worker serves the run: no"
    case.redis.set(names.worker_key("w1"), json.dumps({}))
    case.fleet.cancel()
    assert note().startswith("cancelled")
    assert "3 ranges were cancelled; run: swathe submit" in case.lines()
    case.redis.flushall()
    case.redis.set(names.worker_key("w1"), json.dumps({}))
    assert note().startswith("nothing is queued")


def test_a_run_is_shown_from_its_store_while_redis_is_away(
    new_server, tmp_path, capsys, monkeypatch
):
    store = make_run(tmp_path / "run", Recipe(), sealed=False)
    spec = read_run(store)
    new_server.stop()
    with connect(new_server.url, retries=0) as client:
        snapshot = Fleet(client, store, spec).look(RunWatcher(store, spec).read())
    assert len(snapshot.state.records) == spec.totals.ranges
    assert "Redis cannot be reached" in snapshot.note
    settings = Settings(redis_url=SecretStr(new_server.url))
    monkeypatch.setattr(watching, "read_settings", lambda: settings)
    watching.status(store.url)
    assert "complete, not sealed yet" in capsys.readouterr().out


def test_warnings_go_to_stderr_and_leave_json_alone(tmp_path):
    """Loggers of modules were bound before the command line had said where events go: to stdout, in another form."""
    store = make_run(tmp_path / "run", Recipe())
    done = subprocess.run(
        [sys.executable, "-m", "producer.cli", "status", store.url, "--json"],
        env=os.environ | {"REDIS_URL": f"unix://{tmp_path}/none"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["sealed"]
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["event"] == "shown from the store alone"


@pytest.mark.parametrize("by", ["url", "id"])
def test_a_run_whose_store_is_gone_can_be_cancelled(case, redis_url, by):
    """As the runbook says; it could not be opened, so it stayed in the fleet for ever."""
    settings = Settings(redis_url=SecretStr(redis_url))
    shutil.rmtree(case.store.url)
    assert commands.cancel(case.store.url if by == "url" else case.spec.run_id, settings) == 3
    assert queue.known_runs(case.redis) == {}
    with pytest.raises(ObjectMissingError):
        commands.cancel(case.store.url, settings)


def test_the_view_of_a_long_queue_takes_no_quadratic_time(redis, tmp_path):
    """30,000 queued ranges: once 72 s, since the set of known ranges was made anew for each range."""
    store = make_run(tmp_path / "run", Recipe(samples=30), sealed=False)
    spec = read_run(store)
    spec = replace(spec, totals=replace(spec.totals, ranges=30_000))
    state = RunState(
        spec=spec, records={}, failed=frozenset(), invalid=frozenset(), sealed=False, canaries={}, suspect={}
    )  # fmt: skip
    fleet = Fleet(redis, store, spec)
    fleet.submit(state)
    redis.lrem(f"rq:queue:swathe-{spec.model.key}", 1, names.job(spec.run_id, RangeId(17)))
    started = time.monotonic()
    view = fleet.view(state, fleet.known())
    assert time.monotonic() - started < 10
    assert (view.queued, view.lost) == (29_999, (17,))
