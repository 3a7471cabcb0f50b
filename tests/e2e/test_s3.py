"""A run that never touches this machine's disk: `swathe run --out s3://...`, killed, resumed, sealed, read, moved."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from producer.verify import verify
from swathe import HiddenStates, names
from swathe.location import open_home
from swathe.records import RunWatcher, open_run
from swathe.store import open_store
from tests.e2e.conftest import Command, assert_states_are_right, run_arguments, status
from tests.e2e.test_run import survivors, wait_until
from tests.support import s3_server
from tests.support.s3_server import BUCKET, S3Server, unfinished_uploads

LIMIT = 100
"""Rows of the data set; two of them are rejected."""
SLOW = Path(__file__).parents[1] / "support" / "slow"
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)  # a machine with much else to do needs minutes for these


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server.running(tmp_path_factory.mktemp("weed")) as one:
        yield one


@pytest.fixture
def bucket(server: S3Server, swathe: Command, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of its own, reachable by this process and by the command line."""
    settings = {
        "AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY,
        "AWS_ENDPOINT_URL_S3": server.endpoint_url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    # A range takes 0.3 s, so that the run is still going on when it is killed or moved.
    slow = {"TEST_SLOW": '{"compute": 0.3}', "PYTHONPATH": f"{SLOW}{os.pathsep}{ROOT}"}
    swathe.environment |= settings | slow
    return f"s3://{BUCKET}/{os.urandom(4).hex()}"


def records(url: str) -> dict[str, float]:
    store = open_store(url)
    return {
        item.key: item.modified_s
        for item in store.list(names.STATES)
        if names.record_range(item.key) is not None
    }


def test_a_run_in_a_bucket_is_killed_resumed_sealed_and_equal_to_a_local_one(
    swathe: Command,
    dataset: Path,
    model: Path,
    finished: tuple[Path, str],
    bucket: str,
    server: S3Server,
) -> None:
    out = f"{bucket}/run"
    arguments = [*run_arguments(dataset, model, out), "--limit", str(LIMIT)]
    process = swathe.popen(*arguments)
    wait_until(lambda: len(records(out)) >= 5, process)
    process.kill()
    process.communicate()
    wait_until(lambda: not survivors(out))
    before = records(out)
    assert not open_store(out).stat(names.MANIFEST), (
        "the run ended before it was killed: the test shows nothing"
    )

    text = swathe(*arguments)
    assert "complete: 98 stored" in text
    assert before.items() <= records(out).items(), "finished ranges were computed again"
    assert verify(open_store(out), full=True).ok
    assert status(swathe, out)["sealed"]
    assert_states_are_right(out, dataset, model, limit=LIMIT)
    ours, local = HiddenStates(out), HiddenStates(finished[0])
    for index in range(0, len(ours), 7):
        one, other = ours[index], local[index]
        assert (one["row"], one["id"]) == (other["row"], other["id"])
        assert (one["hidden_states"] - other["hidden_states"]).abs().max() < 1e-4
        assert torch.equal(one["input_ids"], other["input_ids"])
    client = server.client()
    assert not unfinished_uploads(client, out)
    client.close()
    assert not list(swathe.folder.rglob("*.safetensors*")), "no spool, no copy"


def test_a_run_that_goes_on_moves_into_a_bucket_and_ends_there(
    swathe: Command, dataset: Path, model: Path, bucket: str, tmp_path: Path
) -> None:
    source, dest = tmp_path / "run", f"{bucket}/moved"
    arguments = [*run_arguments(dataset, model, source), "--limit", str(LIMIT)]
    process = swathe.popen(*arguments)
    wait_until(lambda: source.exists() and len(records(str(source))) >= 5, process)
    text = swathe("move", source, dest)
    assert f"is at {dest} now" in text
    assert open_home(source).url == dest
    assert process.poll() is None, "the run ended before it was moved: the test shows nothing"
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "complete: 98 stored" in out
    assert [path.name for path in source.rglob("*")] == [names.MOVED]
    state = RunWatcher(*open_run(source)).read()
    assert state.complete
    assert state.sealed
    assert len({record.shard for record in state.records.values()}) == len(state.records)
    assert_states_are_right(source, dataset, model, limit=LIMIT)
    assert_states_are_right(dest, dataset, model, limit=LIMIT)
    swathe(*arguments)  # the old command still means the same run
