"""`swathe move`: between all kinds of stores, killed at every step, with writers and readers that know nothing of it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from producer import cli, fleet
from producer.move import move
from producer.verify import verify, withdraw
from swathe import HiddenStates, codec, names
from swathe.errors import (
    ConfigError,
    IntegrityError,
    NoSpaceError,
    ObjectMissingError,
    RunMismatchError,
    StoreError,
    SwatheError,
)
from swathe.location import at_home, open_home
from swathe.manifest import seal
from swathe.queue import RangeQueue, known_runs, parse
from swathe.records import RunWatcher, open_run, read_record, read_run
from swathe.settings import Settings
from swathe.spec import CanaryRecord, FailedMarker, RangeId, RangeJob, to_json
from swathe.store import Store, open_store
from swathe.store.local import LocalStore
from tests.support.killed_move import killed_move
from tests.support.s3_server import BUCKET, S3Server, unfinished_uploads
from tests.support.synthetic_run import RANGES, SyntheticRun, write_run
from worker.extraction.open_runs import OpenRuns
from worker.extraction.sink import Author
from worker.extraction.store_watch import StoreWatch
from worker.telemetry.totals import Telemetry

Place = Callable[[str], str]


@pytest.fixture
def place(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A new URL in the kind of store."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)

    def new(kind: str) -> str:
        name = os.urandom(4).hex()
        return str(tmp_path / name) if kind == "local" else f"s3://{BUCKET}/moves/{name}"

    return new


def keys(store: Store) -> set[str]:
    return {item.key for item in store.list("")}


def contents(store: Store) -> dict[str, bytes]:
    return {key: store.read(key) for key in keys(store)}


def assert_readable(url: str, written: SyntheticRun, *, unsealed: bool = False) -> None:
    ds = HiddenStates(url, unsealed=unsealed)
    assert len(ds) == len(written.states)
    for index in range(len(ds)):
        sample = ds[index]
        bits = sample["hidden_states"].view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, written.states[sample["row"]])


PAIRS = [("local", "local"), ("local", "s3"), ("s3", "local"), ("s3", "s3")]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_run_moves_whole_and_the_old_url_leads_to_it(place: Place, one: str, other: str) -> None:
    source, dest = place(one), place(other)
    written = write_run(open_store(source))
    before = contents(open_store(source))
    seen: list[tuple[int, int]] = []
    report = move(source, dest, progress=lambda done, all_: seen.append((done, all_)))
    assert report.ranges == RANGES
    assert (seen[0], seen[-1]) == ((0, RANGES), (RANGES, RANGES))
    assert contents(open_store(dest)) == before, "the same bytes under the same names"
    assert keys(open_store(source)) == {names.MOVED}
    for url in (source, dest):
        assert_readable(url, written)
        assert verify(open_store(url), full=True).ok

    assert move(source, dest).ranges == 0, "again does nothing"
    assert contents(open_store(dest)) == before
    back = move(dest, source)
    assert back.dest.url == source
    assert contents(open_store(source)) == before
    assert_readable(dest, written)
    third = place(one)
    move(dest, third)
    for url in (source, dest, third):
        assert open_home(url).url == third


@pytest.mark.parametrize("when", ["after", "during"])
def test_killed_at_every_step_it_is_readable_and_goes_on(place: Place, when: str) -> None:
    at, killed = 0, True
    while killed:
        at += 1
        source, dest = place("local"), place("local")
        written = write_run(open_store(source))
        before = contents(open_store(source))
        killed = killed_move(source, dest, at=at, when=when)
        assert_readable(source, written)
        assert verify(open_store(source), full=True).ok
        if keys(open_store(dest)):
            assert_readable(dest, written)
        for key in keys(open_store(dest)):
            if names.record_range(key) is not None:
                assert read_record_shard(open_store(dest).read(key)) in keys(open_store(dest))
        left = keys(open_store(source)) - {names.MOVED}
        assert left == before.keys() or names.RUN not in left, "half a run is no run"
        # The home is one place, whichever end is asked.
        assert open_home(source).url == open_home(dest).url or not keys(open_store(dest))
        move(source, dest)
        assert contents(open_store(dest)) == before
        # Small temporaries beside run.json are left to gc: who knows what else lies there.
        left_over = {path.name for path in Path(source).rglob("*")} - {names.MOVED}
        assert all(name.startswith(f".tmp-{names.MOVED}") for name in left_over)
        assert not list(Path(dest).glob("*/.tmp-*"))
    assert at > 30, "there are that many steps"


@pytest.mark.parametrize(("one", "other"), [("local", "s3"), ("s3", "local")])
def test_killed_again_and_again_between_s3_and_a_folder(
    place: Place, server: S3Server, one: str, other: str
) -> None:
    source, dest = place(one), place(other)
    written = write_run(open_store(source))
    before = contents(open_store(source))
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    kills = 0
    while killed_move(source, dest, at=3 + kills, environment=environment):
        kills += 1
        assert_readable(source, written)
        assert_readable(dest, written)
        assert kills < 100
    assert kills > 5
    assert contents(open_store(dest)) == before
    assert keys(open_store(source)) == {names.MOVED}
    client = server.client()
    assert not unfinished_uploads(client, dest if other == "s3" else source)
    client.close()


def test_what_changes_in_the_source_while_it_is_copied_is_so_at_the_destination(
    place: Place,
) -> None:
    source, dest = place("local"), place("local")
    store = open_store(source)
    written = write_run(store)
    spec = written.spec
    canary = CanaryRecord(
        run_id=spec.run_id, range_id=RangeId(1), row=5, tokens=3, errors={}, bounds={}, passed=True,
        worker="w", device="none", taken_at="2026-01-01T00:00:00Z",
    )  # fmt: skip
    store.create(
        names.failed(RangeId(3)),
        to_json(FailedMarker(run_id=spec.run_id, range_id=RangeId(3), reason="r")),
    )
    assert killed_move(source, dest, at=names.MOVED, when="before")
    assert names.failed(RangeId(3)) in keys(open_store(dest))
    assert names.MANIFEST in keys(open_store(dest))
    # A repair, a retry, and a range that is done again, all in the source, where the run still is.
    withdraw(store, RunWatcher(store, spec).read(), [RangeId(2)])
    store.delete(names.failed(RangeId(3)))
    store.create(names.canary(RangeId(1)), to_json(canary))
    before = contents(store)
    move(source, dest)
    found = contents(open_store(dest))
    orphans = found.keys() - before.keys()
    assert {key: found[key] for key in before} == before
    assert all(names.shard_range(key) == 2 for key in orphans), "the withdrawn shard, for gc"
    assert RunWatcher(open_store(dest), spec).read().missing == [2]


class LateStore(LocalStore):
    """Calls ``meanwhile`` once, before or after the first record is created: a run moves under a writer's hands."""

    meanwhile: Callable[[], object]
    before = True

    def create(self, key: str, data: bytes) -> bool:
        hook = self.__dict__.pop("meanwhile", None) if names.record_range(key) is not None else None
        if hook and self.before:
            hook()
        done = super().create(key, data)
        if hook and not self.before:
            hook()
        return done


def reopened(store: Store, range_id: int) -> tuple[bytes, bytes]:
    """Take a range back; returns its record and shard."""
    spec = read_run(store)
    record = read_record(store, spec, RangeId(range_id))
    found = store.read(names.record(RangeId(range_id))), store.read(record.shard or "")
    withdraw(store, RunWatcher(store, spec).read(), [RangeId(range_id)])
    return found


@pytest.mark.parametrize("before", [True, False])
def test_a_range_that_is_committed_while_the_run_leaves_is_where_the_run_is(
    place: Place, *, before: bool
) -> None:
    source, dest = place("local"), place("local")
    written = write_run(open_store(source))
    reopened(open_store(source), 2)
    late = LateStore(Path(source))
    late.before = before
    late.meanwhile = lambda: move(source, dest)
    commit_by_worker(late, written, 2)
    assert verify(open_store(source), full=True).ok
    assert_readable(dest, written, unsealed=True)
    assert keys(open_store(source)) == {names.MOVED}, "the worker took back what came too late"
    shards = [key for key in keys(open_store(dest)) if names.shard_range(key) == 2]
    assert len(shards) == 1, "stored once"


def open_runs(*roots: str) -> OpenRuns:
    telemetry = Telemetry()
    watch = StoreWatch(telemetry, limit_s=60)
    return OpenRuns(Settings(store_roots=roots, min_free_bytes=0), telemetry, watch)


def commit_by_worker(store: Store, written: SyntheticRun, range_id: int) -> None:
    """What ``Extraction.publish`` does with a computed range."""
    runs = open_runs()
    spec = written.spec
    run = runs._made(store, spec)
    tokens = run.tokens.read_range(RangeId(range_id))
    bits = np.concatenate([written.states[int(row)] for row in tokens.rows])
    view = codec.TensorView(
        dtype="bfloat16", shape=bits.shape, data=bits.reshape(-1).view("u1").data
    )
    author = Author(worker="w", device="none", software={}, kernels={})
    runs.commit(run, lambda one: one.sink.commit(tokens, {"hidden_states": view}, (), author, {}))


def test_a_record_of_the_last_moment_is_carried_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker recorded a range between the last look and the marker, and died."""
    source, dest = place("local"), place("local")
    store = open_store(source)
    written = write_run(store)
    record, shard = reopened(store, 1)
    create = LocalStore.create

    def late(self: LocalStore, key: str, data: bytes) -> bool:
        if key == names.MOVED:
            self.write(read_record_shard(record), [shard])
            self.write(names.FINAL_NORM, [b"norm"])
            create(self, names.record(RangeId(1)), record)
        return create(self, key, data)

    monkeypatch.setattr(LocalStore, "create", late)
    move(source, dest)
    assert_readable(dest, written)
    assert verify(open_store(dest), full=True).ok
    assert open_store(dest).read(names.FINAL_NORM) == b"norm"
    assert keys(store) == {names.MOVED}


def read_record_shard(record: bytes) -> str:
    return str(json.loads(record)["shard"])


def test_of_two_records_of_one_range_the_one_at_the_destination_counts(place: Place) -> None:
    """The mover died after the run had left; a worker did the range again; the old record must not come back."""
    source, dest = place("local"), place("local")
    store = open_store(source)
    written = write_run(store)
    record, shard = reopened(store, 1)
    assert killed_move(source, dest, at=names.MOVED, when="after")
    commit_by_worker(open_store(dest), written, 1)
    mine = read_record(open_store(dest), written.spec, RangeId(1))
    store.write(read_record_shard(record), [shard])
    store.create(names.record(RangeId(1)), record)
    move(source, dest)
    assert read_record(open_store(dest), written.spec, RangeId(1)) == mine
    assert {key for key in keys(open_store(dest)) if names.shard_range(key) == 1} == {mine.shard}
    assert verify(open_store(dest), full=True).ok
    assert keys(store) == {names.MOVED}


@pytest.mark.parametrize("other", ["local", "s3"])
def test_a_data_set_that_is_open_reads_on_while_the_run_leaves(place: Place, other: str) -> None:
    source, dest = place("local"), place(other)
    written = write_run(open_store(source))
    ds = HiddenStates(source)
    ds[0]
    move(source, dest)
    for index in range(len(ds)):
        bits = ds[index]["hidden_states"].view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(bits, written.states[ds[index]["row"]])
    assert ds.url == dest
    assert ds.remote == (other == "s3")


def test_whoever_watches_a_run_sees_it_whole_before_and_after(place: Place) -> None:
    source, dest = place("local"), place("local")
    written = write_run(open_store(source), sealed=False)
    watcher = RunWatcher(open_store(source), written.spec)
    assert not watcher.read().missing
    move(source, dest)
    state = watcher.read()
    assert not state.missing
    assert state.sealed, "the mover sealed what was complete"
    assert watcher.store.url == dest


def test_who_seals_what_left_meanwhile_seals_what_is_there(place: Place) -> None:
    source, dest = place("local"), place("local")
    store = open_store(source)
    written = write_run(store, sealed=False)
    state = RunWatcher(store, written.spec).read()
    move(source, dest)
    reopened(open_store(dest), 1)
    commit_by_worker(open_store(dest), written, 1)
    manifest = seal(store, state)
    there = RunWatcher(open_store(dest), written.spec).read()
    assert {one.range_id: one.key for one in manifest.shards} == {
        range_id: record.shard for range_id, record in there.records.items()
    }
    assert there.sealed
    assert_readable(source, written)


def test_damage_is_not_moved_and_named(place: Place) -> None:
    source, dest = place("local"), place("local")
    store = open_store(source)
    written = write_run(store)
    victim = read_record(store, written.spec, RangeId(2)).shard or ""
    data = bytearray(store.read(victim))
    data[-10] ^= 1
    store.write(victim, [data])
    before = contents(store)
    with pytest.raises(IntegrityError, match=r"1 ranges are damaged, first range 2.*hash"):
        move(source, dest)
    assert contents(store) == before
    assert victim not in keys(open_store(dest))
    assert open_home(dest).url == source
    withdraw(store, RunWatcher(store, written.spec).read(), [RangeId(2)])
    assert move(source, dest).ranges == 0, "the others were copied before"
    assert RunWatcher(open_store(dest), written.spec).read().missing == [2]


def test_what_cannot_be_moved_there_is_refused_and_nothing_changes(place: Place) -> None:
    source, other, dest = place("local"), place("local"), place("local")
    written = write_run(open_store(source))
    write_run(open_store(other))
    before = contents(open_store(source)), contents(open_store(other))
    for url in (other, source, f"{source}/inner", str(Path(source).parent)):
        with pytest.raises((RunMismatchError, ConfigError)):
            move(source, url)
    with pytest.raises(ObjectMissingError, match="no run here"):
        move(dest, place("local"))
    assert (contents(open_store(source)), contents(open_store(other))) == before
    # Two moves to one place, and two moves of one run.
    assert killed_move(source, dest, at=8)
    with pytest.raises(RunMismatchError, match="on its way here"):
        move(other, dest)
    third = place("local")
    move(source, third)
    with pytest.raises(SwatheError):
        move(other, dest)
    assert_readable(dest, written)
    assert open_home(dest).url == third


def test_what_else_lies_in_the_two_places_is_left_alone(place: Place) -> None:
    source, dest = place("local"), place("local")
    write_run(open_store(source))
    others = [Path(url, *parts) for url in (source, dest) for parts in (
        ("notes.txt",), ("states-of-mine.json",), ("other", "states", ".tmp-000001-under-way"), ("other", "run.json"),
    )]  # fmt: skip
    others.append(
        Path(source, "tokens", "my-data.parquet")
    )  # a run made beside a data set of that name
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    move(source, dest)
    assert all(path.read_text() == "mine" for path in others)


def test_a_destination_that_is_too_small_is_refused_before_the_copy(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dest = place("local"), place("local")
    written = write_run(open_store(source))
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _self: 1000)
    with pytest.raises(NoSpaceError, match="make room"):
        move(source, dest)
    assert keys(open_store(dest)) == {names.MOVING}
    assert_readable(source, written)
    monkeypatch.undo()


def test_a_worker_does_not_follow_a_run_out_of_its_roots(place: Place, tmp_path: Path) -> None:
    source, dest = place("local"), place("local")
    written = write_run(open_store(source))
    spec = written.spec
    job = RangeJob(
        run_url=source, run_id=spec.run_id, fingerprint=spec.fingerprint, range_id=RangeId(0)
    )
    inside, outside = open_runs(str(tmp_path)), open_runs(source)
    runs = [one.open(job) for one in (inside, outside)]
    move(source, dest)
    assert inside.at_home(runs[0], lambda run: run.store.url) == dest
    with pytest.raises(ConfigError, match="SWATHE_STORE_ROOTS"):
        outside.at_home(runs[1], lambda run: run.store.url)
    with pytest.raises(ConfigError, match="SWATHE_STORE_ROOTS"):
        open_runs(source).open(job)
    # The old folder is deleted for good: who is told the new place does not miss it.
    (Path(source) / names.MOVED).unlink()
    there = RangeJob(
        run_url=dest, run_id=spec.run_id, fingerprint=spec.fingerprint, range_id=RangeId(0)
    )
    assert inside.open(there).store.url == dest


def test_another_run_at_the_new_place_is_no_answer(place: Place) -> None:
    source, dest = place("local"), place("local")
    write_run(open_store(source))
    move(source, dest)
    data = open_store(dest).read(names.RUN).replace(b'"synthetic"', b'"stranger"')
    open_store(dest).write(names.RUN, [data])
    with pytest.raises(RunMismatchError, match="stranger"):
        open_run(source)


def test_an_action_is_repeated_where_the_run_is_and_its_own_errors_pass(place: Place) -> None:
    source, dest = place("local"), place("local")
    write_run(open_store(source))
    seen: list[str] = []

    def action(store: Store) -> int:
        seen.append(store.url)
        if len(seen) == 1:
            move(source, dest)
            raise IntegrityError("gone under my hands")
        return len(seen)

    assert at_home(open_store(source), action) == 2
    assert seen == [source, dest]
    assert at_home(open_store(source), lambda store: store.url) == dest
    assert at_home(open_store(source), action) == 3
    assert seen == [source, dest, dest], "nothing is tried where the run is no more"
    with pytest.raises(IntegrityError, match="own"):
        at_home(open_store(dest), lambda _store: (_ for _ in ()).throw(IntegrityError("own")))

    def away(store: Store) -> None:
        move(store.url, place("local"))
        msg = "away"
        raise StoreError(msg)

    # Worth another attempt of the whole work, which opens the run anew.
    with pytest.raises(StoreError, match="away"):
        at_home(open_store(dest), away)


@pytest.fixture
def runner(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("REDIS_URL", redis_url)
    return CliRunner()


def test_the_queue_and_its_jobs_learn_the_new_place(
    place: Place, runner: CliRunner, redis_url: str
) -> None:
    source, dest = place("local"), place("local")
    store = open_store(source)
    written = write_run(store)
    spec = written.spec
    reopened(store, 1)
    reopened(store, 3)
    connection = fleet.connect(Settings(REDIS_URL=redis_url))
    fleet.Fleet(connection, store, spec).submit(RunWatcher(store, spec).read())
    fleet.Fleet(connection, store, spec).pause()
    said = runner.invoke(cli.app, ["move", source, dest])
    assert said.exit_code == 0, said.output
    assert dest in said.output
    assert known_runs(connection) == {spec.run_id: dest}
    ranges = RangeQueue.of_model(connection, spec.model.key)
    assert ranges.known_ranges(spec.run_id).paused == {1, 3}, "a paused run stays paused"
    for range_id in (1, 3):
        job_id = names.job(spec.run_id, RangeId(range_id))
        fields = {
            name.decode(): value for name, value in connection.hgetall(f"rq:job:{job_id}").items()
        }
        assert parse(job_id, fields, [dest]).run_url == dest
    connection.close()
