"""What a status display asks of the queue, at the size of a real run."""

import time
from dataclasses import replace

from producer.fleet import Fleet
from swathe import names
from swathe.records import RunState, read_run
from swathe.spec import RangeId
from tests.support.runs import Recipe, make_run


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
    view = fleet.view(state)
    assert time.monotonic() - started < 10
    assert (view.queued, view.lost) == (29_999, (17,))
