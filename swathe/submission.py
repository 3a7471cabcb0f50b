"""From the store's truth to the queue: every range that is neither stored nor set aside, enqueued if absent."""

from redis import Redis

from swathe.queue import Enqueued, RangeQueue
from swathe.records import RunState
from swathe.spec import RangeJob
from swathe.store import Store


def submit(connection: Redis, store: Store, state: RunState, *, rebuild: bool = False) -> Enqueued:
    """Enqueue a run's open ranges. Safe to repeat, beside others, from any state of Redis.

    ``rebuild``: nobody asked for it, so a run that was cancelled stays so.

    Raises QueueError when Redis does not answer; what was enqueued before stays, the rest comes with the next call.
    """
    spec = state.spec
    jobs = (
        RangeJob(
            run_url=store.url, run_id=spec.run_id, fingerprint=spec.fingerprint, range_id=range_id
        )
        for range_id in state.missing
    )
    return RangeQueue.of_model(connection, spec.model.key).enqueue_if_absent(jobs, rebuild=rebuild)
