"""The steps of a range's work around a model that comes and goes."""

import dataclasses
import json
import weakref

import pytest
import torch
from chaos.real import job_of, write_inputs

from producer.plan import plan
from swathe import names
from swathe.records import read_record
from swathe.settings import Settings
from swathe.spec import RangeId
from swathe.store.local import LocalStore
from worker.extraction.extraction import Extraction
from worker.telemetry.totals import Telemetry


def test_a_range_is_stored_when_its_model_was_unloaded_meanwhile(tmp_path):
    store = LocalStore(tmp_path / "run")
    spec = plan(store, write_inputs(tmp_path, {})).spec
    work = Extraction(
        name="w1",
        device=torch.device("cpu"),
        device_id="cpu",
        settings=Settings(),
        telemetry=Telemetry(),
    )
    computed = work.finish(work.compute(work.prepare(job_of(store, RangeId(3)))))
    work._unload()
    assert not work.ready
    work.publish(computed)
    record = read_record(store, spec, RangeId(3))
    assert record.worker == "w1"
    assert record.kernels
    work.publish(work.finish(work.compute(work.prepare(job_of(store, RangeId(4))))))
    assert read_record(store, spec, RangeId(4)).samples


def test_a_range_on_the_device_is_finished_with_its_own_model_when_another_run_needs_another(
    tmp_path,
):
    """Two runs of one model, thus of one queue, that want other layers."""
    options = write_inputs(tmp_path, {})
    stores = [LocalStore(tmp_path / name) for name in ("one", "two")]
    plan(stores[0], options)
    plan(stores[1], dataclasses.replace(options, layers=(1,), final=False))
    telemetry = Telemetry()
    work = Extraction(
        name="w1",
        device=torch.device("cpu"),
        device_id="cpu",
        settings=Settings(canary_every=1),
        telemetry=telemetry,
    )
    started = [work.compute(work.prepare(job_of(stores[0], RangeId(3))))]
    model = weakref.ref(work._model)
    started.append(work.compute(work.prepare(job_of(stores[1], RangeId(3)))))
    assert model() is None, "two models on one device"
    for one in started:
        work.publish(work.finish(one))
    for store in stores:
        canary = json.loads(store.read(names.canary(RangeId(3))))
        assert canary["passed"]
        assert canary["stored_as_computed"]
    counts = telemetry.snapshot().counts
    assert counts["canary:passed"] == 2


@pytest.mark.timeout(30)
def test_two_ranges_fit_on_the_device_however_few_a_worker_may_hold(tmp_path):
    """The second waited for the buffer of the first, which is finished only behind it."""
    store = LocalStore(tmp_path / "run")
    plan(store, write_inputs(tmp_path, {}))
    work = Extraction(
        name="w1",
        device=torch.device("cpu"),
        device_id="cpu",
        settings=Settings(jobs_in_flight=2),
        telemetry=Telemetry(),
    )
    started = [work.compute(work.prepare(job_of(store, RangeId(range_id)))) for range_id in (3, 4)]
    for one in started:
        work.publish(work.finish(one))
