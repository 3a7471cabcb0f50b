"""A whole run in each kind of store: read back sample by sample, verified, damaged, repaired."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from producer.verify import verify, withdraw
from swathe import HiddenStates, names
from swathe.errors import IncompleteRunError, IntegrityError, StoreError
from swathe.manifest import seal
from swathe.records import RunWatcher, read_run
from swathe.spec import RangeId
from swathe.store import Store, open_store
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import BUCKET, S3Server
from tests.support.synthetic_run import LAYERS, SyntheticRun, write_run


@pytest.fixture(params=["local", "s3"])
def url(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)
    if request.param == "local":
        return str(tmp_path / "run")
    return f"s3://{BUCKET}/runs/{os.urandom(4).hex()}"


@pytest.fixture
def store(url: str) -> Store:
    return open_store(url)


@pytest.fixture
def written(store: Store) -> SyntheticRun:
    return write_run(store)


def assert_same(sample: dict[str, Any], written: SyntheticRun) -> None:
    row = sample["row"]
    assert sample["id"] == f"chat-{row}"
    assert sample["input_ids"].dtype == torch.int64
    assert np.array_equal(sample["input_ids"].numpy(), written.ids[row])
    assert len(sample["loss_mask"]) == len(written.ids[row])
    assert sample["hidden_states"].dtype == torch.bfloat16
    bits = sample["hidden_states"].view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(bits, written.states[row])


def test_every_sample_comes_back_as_it_was_written(url: str, written: SyntheticRun) -> None:
    ds = HiddenStates(url)
    assert ds.layers == list(LAYERS)
    assert [ds[index]["row"] for index in range(len(ds))] == list(range(len(written.ids)))
    for index in np.random.default_rng(0).permutation(len(ds)):
        assert_same(ds[int(index)], written)
    assert_same(ds[-1], written)
    ds[0]["hidden_states"].zero_()  # private memory: the store does not see it
    assert_same(HiddenStates(url)[0], written)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_samples_cross_the_processes_of_a_data_loader(url: str, written: SyntheticRun) -> None:
    ds = HiddenStates(url)
    assert_same(ds[3], written)  # files or connections are open before the fork
    loader = DataLoader(ds, batch_size=None, num_workers=2, multiprocessing_context="fork")
    rows = []
    for sample in loader:
        assert_same(sample, written)
        rows.append(sample["row"])
    assert rows == list(range(len(written.ids)))
    assert_same(pickle.loads(pickle.dumps(ds))[5], written)  # noqa: S301 - our own


def test_an_unsealed_run_is_read_as_far_as_it_has_come(url: str, store: Store) -> None:
    written = write_run(store, sealed=False)
    store.delete(names.record(RangeId(2)))
    with pytest.raises(IncompleteRunError, match="not sealed"):
        HiddenStates(url)
    ds = HiddenStates(url, unsealed=True)
    assert [ds[index]["row"] for index in range(len(ds))] == [*range(10), *range(15, 20)]
    assert_same(ds[12], written)


def test_a_missing_or_cut_shard_is_named(url: str, store: Store, written: SyntheticRun) -> None:
    assert written
    shards = sorted(item.key for item in store.list("states/") if item.key.endswith(".safetensors"))
    store.delete(shards[0])
    store.write(shards[1], [store.read(shards[1])[:100]])
    ds = HiddenStates(url)
    with pytest.raises(IntegrityError, match=shards[0]):
        ds[0]
    with pytest.raises((IntegrityError, StoreError), match=shards[1]):
        ds[5]


def test_verification_finds_each_damage_and_repair_takes_back_exactly_these_ranges(
    store: Store, written: SyntheticRun
) -> None:
    assert verify(store, full=True).ok
    shards = sorted(item.key for item in store.list("states/") if item.key.endswith(".safetensors"))
    data = bytearray(store.read(shards[0]))
    data[-300:-100] = bytes(200)
    store.write(shards[0], [data])
    store.write(shards[1], [store.read(shards[1])[:-1]])
    store.delete(shards[3])
    quick, full = verify(store), verify(store, full=True)
    assert set(quick.damaged) == {1, 3}
    assert set(full.damaged) == {0, 1, 3}
    assert "hash" in full.damaged[RangeId(0)]
    assert "bytes" in full.damaged[RangeId(1)]
    assert "missing" in full.damaged[RangeId(3)]
    untouched = store.stat(shards[2])
    withdraw(store, RunWatcher(store, read_run(store)).read(), list(full.damaged))
    after = verify(store, full=True)
    assert after.missing == (0, 1, 3)
    assert not after.damaged
    assert store.stat(shards[2]) == untouched
    assert written


def test_sealing_twice_writes_the_same_bytes(store: Store, written: SyntheticRun) -> None:
    assert written
    first = store.read(names.MANIFEST), store.read(names.ROWS)
    store.delete(names.MANIFEST)
    seal(store)
    assert (store.read(names.MANIFEST), store.read(names.ROWS)) == first


def test_reading_survives_a_bad_network(proxy: FaultProxy, s3: Any) -> None:
    url = f"s3://{BUCKET}/runs/bad-network"
    written = write_run(s3(url=url))
    store = s3(url=url, endpoint_url=proxy.endpoint_url, attempts=10)
    ds = HiddenStates(store)
    kinds = ("reset in answer", "truncated answer", "slow down", "internal error")
    proxy.inject(*(Fault(kind, method="GET", after=n) for n in range(3) for kind in kinds))
    for index in range(len(ds)):
        assert_same(ds[index], written)
    assert store.retries == 12


def test_a_sample_of_a_shard_read_before_costs_no_request_for_its_header(
    proxy: FaultProxy, s3: Any
) -> None:
    url = f"s3://{BUCKET}/runs/headers"
    written = write_run(s3(url=url))
    ds = HiddenStates(s3(url=url, endpoint_url=proxy.endpoint_url))
    for index in range(len(ds)):
        ds[index]
    proxy.clear()
    for index in range(len(ds)):
        assert_same(ds[index], written)
    assert len(proxy.seen) <= len(ds)
