"""`swathe doctor` measures what is there, and exits with 1 and a reason where a node cannot work."""

import json
import os
import subprocess
import sys

import pytest
from pydantic import SecretStr
from redis import Redis

from producer.doctor import _roots
from swathe.settings import Settings


def doctor(tmp_path, **environment: str) -> tuple[int, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "producer.cli", "doctor", "--json"],
        env=os.environ | {"SWATHE_STATE_DIR": str(tmp_path / "state")} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_sound_node_can_work(tmp_path, redis: Redis, redis_url: str) -> None:
    redis.config_set("appendonly", "yes")
    roots = str(tmp_path / "runs")
    try:
        code, found = doctor(tmp_path, REDIS_URL=redis_url, SWATHE_STORE_ROOTS=roots)
    finally:
        redis.config_set("appendonly", "no")
    assert (code, found["problems"]) == (0, [])
    (device,) = found["devices"]
    assert device["matmul_flops"] > 1e8
    assert found["software"]["torch"]
    store = found["stores"][str(tmp_path / "runs")]
    assert store["works"]
    assert store["write_bytes_s"] > 0
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_redis_that_may_drop_jobs_and_a_store_that_cannot_be_written_are_problems(
    tmp_path, redis: Redis, redis_url: str
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    redis.config_set("maxmemory-policy", "allkeys-lru")
    try:
        code, found = doctor(
            tmp_path, REDIS_URL=redis_url, SWATHE_STORE_ROOTS=str(blocked / "runs")
        )
    finally:
        redis.config_set("maxmemory-policy", "noeviction")
    assert code == 1
    assert any("allkeys-lru" in problem for problem in found["problems"])
    assert any(str(blocked) in problem for problem in found["problems"])


@pytest.mark.parametrize(
    ("roots", "said"),
    [("", "is not set"), ("/elsewhere", "is outside SWATHE_STORE_ROOTS (/elsewhere)"), ("/a", "")],
)
def test_roots_that_would_keep_workers_from_the_run_are_told_of(roots, said) -> None:
    """It said "this node can work" where swathe-worker does not start, or refuses the run."""
    warnings: list[str] = []
    _roots(Settings(redis_url=SecretStr("redis://h/0"), store_roots=roots), "/a/run", warnings)
    assert said in "".join(warnings)
    assert bool(warnings) == bool(said)
