"""What a worker refuses before anything of it could run."""

import json
import pickle
import time
import zlib
from pathlib import Path

import pytest
from redis import Redis
from rq import Callback, Queue
from rq.serializers import JSONSerializer

from swathe import names
from swathe.errors import RefusedJobError
from swathe.queue import RangeQueue, encode, parse
from swathe.queue.leases import Leases, new_execution
from swathe.spec import RangeId, RangeJob, RunId

JOB = RangeJob(run_url="/data/runs/a", run_id=RunId("r1"), fingerprint="f", range_id=RangeId(3))
ID = names.job(RunId("r1"), RangeId(3))
ROOTS = ("/data/runs", "s3://bucket/runs")


def body(*, function=names.JOB_FUNCTION, instance=None, args=(), **changes):
    payload = {
        "version": 1,
        "run_url": "/data/runs/a",
        "run_id": "r1",
        "fingerprint": "f",
        "range_id": 3,
    }
    call = [function, instance, list(args), payload | changes]
    return {"data": zlib.compress(json.dumps(call).encode())}


def test_a_plain_job_comes_back_as_it_was():
    assert parse(ID, {"data": encode(JOB)}, ROOTS) == JOB
    assert parse(ID, body(), ROOTS) == JOB


def test_an_uncompressed_json_body_is_read_too():
    assert parse(ID, {"data": zlib.decompress(encode(JOB))}, ROOTS) == JOB


REFUSED = {
    "another function": (body(function="os.system"), "os.system"),
    "a function of another kind": (body(function=["os", "system"]), "only swathe.extract_range"),
    "an instance": (body(instance={"a": 1}), "instance"),
    "positional arguments": (body(args=[1]), "arguments"),
    "an older version": (body(version=0), "payload version 0"),
    "a newer version": (body(version=2), "payload version 2"),
    "no version": (body(version=None), "payload version None"),
    "a boolean version": (body(version="1"), "payload version '1'"),
    "a pickled body": ({"data": pickle.dumps((names.JOB_FUNCTION, None, (), {}))}, "not JSON"),
    "a compressed pickle": ({"data": zlib.compress(pickle.dumps([1, 2]))}, "not JSON"),
    "no body": ({}, "not JSON"),
    "a body of another shape": ({"data": b'{"a": 1}'}, "four parts"),
    "a deep body": ({"data": b"[" * 60_000}, "not JSON"),
    "a bomb": ({"data": zlib.compress(b" " * 10_000_000)}, "unpacks to more"),
    "a long body": ({"data": b" " * 100_000}, "100000 bytes"),
    "another range than its id": (body(range_id=4), "range 4 of run r1"),
    "a negative range": (body(range_id=-1), "not one that swathe makes"),
    "a range that is text": (body(range_id="x"), "range_id"),
    "a run id with a slash": (body(run_id="../x"), "not one that swathe makes"),
    "a failure callback": (
        body() | {"failure_callback_name": b"os.getcwd"},
        "failure_callback_name",
    ),
    "a webhook": (body() | {"webhooks": b"[]"}, "webhooks"),
    "a dependency": (body() | {"dependency_ids": b'["x"]'}, "dependency_ids"),
    "an unknown field": (body() | {"later": b"1"}, "later"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    fields, reason = REFUSED[case]
    with pytest.raises(RefusedJobError) as caught:
        parse(ID, fields, ROOTS)
    assert reason in str(caught.value)
    assert ID in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "/data/runs-evil/a", "/data", "/", "/data/runs/../secret", "runs/a", "", "/data/runs\0/../x",
        "file://data/runs/a", "s3://bucket/runs-evil", "s3://bucket/runs/../x", "s3://bucket", "s3://bucket/runs//x",
        "s3://other/runs/a", "http://bucket/runs/a", "s3:/data/runs/a",
    ],
)  # fmt: skip
def test_a_run_outside_the_roots_is_refused(url):
    with pytest.raises(RefusedJobError):
        parse(ID, body(run_url=url), ROOTS)


@pytest.mark.parametrize(
    ("url", "resolved"),
    [
        ("/data/runs", "/data/runs"),
        ("/data/runs/a/../b/", "/data/runs/b"),
        ("file:///data/runs/a", "/data/runs/a"),
        ("s3://bucket/runs/a/", "s3://bucket/runs/a"),
    ],
)
def test_a_run_below_a_root_is_opened_by_its_resolved_url(url, resolved):
    assert parse(ID, body(run_url=url), ROOTS).run_url == resolved


def test_a_link_out_of_the_root_is_followed_and_refused(tmp_path: Path):
    root, outside = tmp_path / "runs", tmp_path / "secret"
    root.mkdir()
    outside.mkdir()
    (root / "a").symlink_to(outside)
    with pytest.raises(RefusedJobError, match="SWATHE_STORE_ROOTS"):
        parse(ID, body(run_url=str(root / "a")), [str(root)])
    (tmp_path / "alias").symlink_to(root)
    (root / "b").mkdir()
    parsed = parse(ID, body(run_url=str(root / "b")), [str(tmp_path / "alias")])
    assert parsed.run_url == str(root / "b")


def test_no_roots_allow_nothing():
    with pytest.raises(RefusedJobError, match="none are set"):
        parse(ID, body(), ())


def test_a_relative_path_is_made_absolute_by_the_producer(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = RangeJob(run_url="runs/a", run_id=RunId("r1"), fingerprint="f", range_id=RangeId(3))
    assert parse(ID, {"data": encode(job)}, [str(tmp_path)]).run_url == str(tmp_path / "runs" / "a")


def evil(marker: str) -> None:
    Path(marker).write_text("ran")


FOREIGN = {
    "on_failure": lambda: {"on_failure": Callback("tests.test_queue_payload.evil")},
    "on_success": lambda: {"on_success": Callback("tests.test_queue_payload.evil")},
    "on_stopped": lambda: {"on_stopped": Callback("tests.test_queue_payload.evil")},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_job_with_a_callback_is_set_aside_at_the_claim_and_never_registered(redis: Redis, kind):
    queue = Queue("swathe-abc", connection=redis, serializer=JSONSerializer)
    queue.enqueue(names.JOB_FUNCTION, job_id=ID, **FOREIGN[kind]())
    ranges, book = RangeQueue(redis, "swathe-abc"), Leases(redis, "swathe-abc", "w", lease_s=0.01)
    found = book.claim(new_execution())
    assert (found.state, found.job_id) == ("refused", ID)
    assert "callback" in found.reason
    assert ranges.counts().refused == 1
    assert ranges.counts().running == 0
    time.sleep(0.02)
    fields = redis.hgetall(f"rq:job:{ID}")
    assert not [name for name in fields if b"callback" in name]
    assert b"refused" in fields[b"exc_info"]
    queue.started_job_registry.cleanup()
    assert book.claim(new_execution()).state == "none"


def test_a_dependent_job_and_a_pickled_one_are_set_aside(redis: Redis):
    parent = Queue("other", connection=redis).enqueue("builtins.print")
    for index, options in enumerate(({"depends_on": parent}, {})):
        Queue("swathe-abc", connection=redis).enqueue(
            names.JOB_FUNCTION, job_id=names.job(RunId("r1"), RangeId(index)), **options
        )
    redis.rpush("rq:queue:swathe-abc", names.job(RunId("r1"), RangeId(0)))
    book = Leases(redis, "swathe-abc", "w", lease_s=5)
    for _ in range(2):
        found = book.claim(new_execution())
        if found.lease is not None:
            with pytest.raises(RefusedJobError) as caught:
                parse(found.job_id, found.lease.fields, ROOTS)
            assert book.refuse(found.lease, str(caught.value))
    assert RangeQueue(redis, "swathe-abc").counts().refused == 2
    for index in range(2):
        data = redis.hget(f"rq:job:{names.job(RunId('r1'), RangeId(index))}", "data")
        assert b"swathe.refused" in data


def test_a_refused_job_comes_back_with_the_next_submit(redis: Redis):
    ranges, book = RangeQueue(redis, "swathe-abc"), Leases(redis, "swathe-abc", "w", lease_s=5)
    ranges.enqueue_if_absent([JOB])
    lease = book.claim(new_execution()).lease
    assert lease is not None
    assert book.refuse(lease, "refused: no root")
    assert not book.refuse(lease, "refused: no root")
    assert ranges.known_ranges(RunId("r1")).refused == {3}
    ranges.enqueue_if_absent([JOB])
    assert ranges.known_ranges(RunId("r1")).queued == {3}
    assert redis.ttl(f"rq:job:{ID}") == -1
