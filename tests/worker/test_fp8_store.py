"""A float8 run's ranges reach the store in each way that a worker has: batched, alone, apart in a process made to die."""

import json
import sys

import pytest
import torch

from producer.plan import PlanOptions, plan
from producer.verify import verify
from swathe import HiddenStates
from swathe.manifest import seal
from swathe.reader.float8 import rounding
from swathe.records import read_run
from swathe.settings import Settings
from swathe.spec import RangeId, RangeJob
from swathe.store.local import LocalStore
from tests.worker import tiny
from worker.extraction.extraction import Extraction
from worker.extraction.isolation import Isolation, Trials
from worker.telemetry.totals import Telemetry


@pytest.fixture
def store(tmp_path, checkpoint):
    samples = tiny.samples([30, 20, 40, 10, 25, 35])
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in samples))
    store = LocalStore(tmp_path / "run")
    options = PlanOptions(
        dataset=str(data),
        model=str(checkpoint("llama")),
        layers=(0, 2),
        dtype="fp8",
        range_tokens=60,
    )
    assert plan(store, options).spec.totals.ranges == 3
    return store


def test_batched_alone_and_apart_make_the_same_run(store, load, monkeypatch):
    monkeypatch.setenv("SWATHE_STORE_ROOTS", str(store.url))
    spec = read_run(store)
    work = Extraction(
        name="w",
        device=torch.device("cpu"),
        device_id="cpu",
        settings=Settings(canary_every=1),
        telemetry=Telemetry(),
    )
    batched, alone, apart = (
        RangeJob(
            run_url=store.url, run_id=spec.run_id, fingerprint=spec.fingerprint, range_id=range_id
        )
        for range_id in map(RangeId, range(3))
    )
    work.publish(work.finish(work.compute(work.prepare(batched))))
    work.publish(work.compute_alone(work.prepare(alone)))
    command = (sys.executable, "-P", "-m", "worker.cli", "apart")
    Isolation(Trials(command, worker="w", device="cpu")).resolve(apart)
    seal(store)

    assert verify(store, full=True).ok
    canary = json.loads(store.read("canaries/000000.json"))
    assert canary["passed"]
    assert canary["stored_as_computed"]
    model = load("llama")
    ds = HiddenStates(store)
    assert ds.rows.tolist() == list(range(6))
    for index in range(6):
        raw, sample = ds.as_stored(index), ds[index]
        wanted = model.reference(sample["input_ids"].numpy())
        half_steps = rounding(raw["hidden_states"], raw["hidden_states_scales"])
        assert ((sample["hidden_states"] - wanted).abs() <= half_steps * 1.001 + 1e-6).all()
