"""A range that was set aside: no flushed queue revives it, `retry` does."""

import torch

from producer import fleet
from swathe import names, submission
from swathe.queue import Enqueued, RangeQueue
from swathe.records import RunWatcher, read_failed, read_run
from swathe.settings import Settings
from swathe.spec import RangeId, RangeJob
from tests.support.runs import Recipe, make_run
from worker.extraction.extraction import Extraction
from worker.telemetry.totals import Telemetry


def test_the_marker_survives_flushall_and_retry_brings_the_range_back(redis, tmp_path):
    store = make_run(tmp_path / "run", Recipe(), sealed=False)
    spec = read_run(store)
    for range_id in (1, 2):
        store.delete(names.record(RangeId(range_id)))
    work = Extraction(
        name="w1",
        device=torch.device("cpu"),
        device_id="cpu",
        settings=Settings(),
        telemetry=Telemetry(),
    )
    job = RangeJob(
        run_url=store.url, run_id=spec.run_id, fingerprint=spec.fingerprint, range_id=RangeId(1)
    )
    work.set_aside(job, "3 processes died with it", ["died: worker a", "died: worker b"])
    marker = read_failed(store, RangeId(1))
    assert (marker.reason, marker.history) == (
        "3 processes died with it",
        ("died: worker a", "died: worker b"),
    )

    def submit() -> Enqueued:
        return submission.submit(redis, store, RunWatcher(store, spec).read())

    ranges = RangeQueue.of_model(redis, spec.model.key)
    submit()
    redis.flushall()
    submit()
    assert ranges.known_ranges(spec.run_id).queued == {2}
    state = RunWatcher(store, spec).read()
    assert not state.complete
    assert fleet.revive(store, state) == [1]
    assert submit() == Enqueued(added=1, known=1)
    assert ranges.known_ranges(spec.run_id).queued == {1, 2}
