"""What the producer does with the queue: fill it from the store's truth, look at it, steer a run."""

from dataclasses import dataclass
from typing import Any

from redis import Redis

from producer.crew import Worker
from producer.display import Snapshot
from producer.status import QueueView
from swathe import names, queue
from swathe.errors import ConfigError, QueueError, StoreError
from swathe.location import at_home
from swathe.records import RunState, open_run, read_failed
from swathe.settings import Settings
from swathe.spec import RangeId, RunSpec
from swathe.store import Store, open_store
from swathe.submission import submit


@dataclass(frozen=True, slots=True)
class Fleet:
    """One run's side of the fleet's Redis."""

    connection: Redis
    store: Store
    spec: RunSpec

    @property
    def _queue(self) -> queue.RangeQueue:
        return queue.RangeQueue.of_model(self.connection, self.spec.model.key)

    def submit(self, state: RunState) -> queue.Enqueued:
        """Enqueue every open range that the queue does not know; safe to repeat, from any state of Redis."""
        return submit(self.connection, self.store, state)

    def relocate(self, state: RunState) -> bool:
        """Tell the queue and its jobs where the run is now; False when the fleet does not know the run."""
        known = self._queue.relocate(self.spec.run_id, self.store.url)
        if known:
            self.submit(state)
        return known

    def pause(self) -> None:
        """Start no more ranges of the run."""
        self._queue.pause(self.spec.run_id)

    def resume(self) -> int:
        """Undo ``pause``; returns how many ranges are queued."""
        self._queue.resume(self.spec.run_id)
        # Those that no worker has met since the pause never left.
        return len(self.known().queued)

    def cancel(self) -> int:
        """Forget the run's jobs; what is stored stays. Returns how many there were."""
        return self._queue.cancel(self.spec.run_id)

    def known(self) -> queue.KnownRanges:
        """The run's ranges in the queue."""
        return self._queue.known_ranges(self.spec.run_id)

    def view(self, state: RunState, known: queue.KnownRanges) -> QueueView:
        """What the queue and the workers say, without side effects.

        ``known`` must be older than ``state``: a range that is stored between the two would count as lost.
        """
        anywhere = known.all
        workers = queue.live_workers(self.connection)
        refused = sorted(known.refused.intersection(state.missing))
        return QueueView(
            queued=len(known.queued),
            started=len(known.running),
            parked=len(known.paused),
            refused=tuple(refused),
            refusal=self._queue.refusal(self.spec.run_id, refused[0]) if refused else "",
            cancelled=self.spec.run_id in queue.cancelled_runs(self.connection),
            lost=tuple(range_id for range_id in state.missing if range_id not in anywhere),
            paused=self.spec.run_id in queue.paused_runs(self.connection),
            workers=tuple({"name": name, **said} for name, said in sorted(workers.items())),
            warnings=tuple(queue.policy_warnings(self.connection)),
        )

    def look(self, state: RunState, *, own_workers: bool = False) -> Snapshot:
        """The same as ``snapshot``; while Redis is away, from the store alone."""
        try:
            return self.snapshot(state, own_workers=own_workers)
        except QueueError as error:
            return Snapshot(state=state, note=str(error))

    def snapshot(self, state: RunState, *, own_workers: bool = False) -> Snapshot:
        """What a display shows at this moment; who has ``own_workers`` is starting them."""
        counts = self._queue.counts()
        workers = queue.live_workers(self.connection)
        refusals = [
            dict(said.get("not_serving", {})).get(self.spec.run_id, "") for said in workers.values()
        ]
        refusal = refusals[0] if refusals and all(refusals) else ""
        return Snapshot(
            state=state,
            refusal=refusal,
            note=self._note(counts, refusal, workers=bool(workers) or own_workers),
            workers=tuple(Worker.of(name, said) for name, said in workers.items()),
            queued=counts.queued,
        )

    def _note(self, counts: queue.QueueCounts, refusal: str, *, workers: bool) -> str:
        """Why nothing comes, if so."""
        run_id = self.spec.run_id
        if run_id in queue.cancelled_runs(self.connection):
            return "cancelled; swathe submit brings it back"
        if run_id in queue.paused_runs(self.connection):
            return "paused; swathe resume goes on"
        if refusal:
            return f"no worker serves the run: {refusal}"
        if not workers:
            return "no workers; start some with: swathe-worker"
        if not counts.work:
            return "nothing is queued; if that stays so: swathe submit"
        return ""


def connect(settings: Settings, *, retries: int = 20) -> Redis:
    """The fleet's Redis. Raises ConfigError when REDIS_URL is not set."""
    if settings.redis_url is None:
        msg = "REDIS_URL is not set: it says where the fleet's queue is, e.g. redis://:PASSWORD@HOST:6379/0"
        raise ConfigError(msg)
    return queue.connect(settings.redis_url, retries=retries)


def cancel(run: str, settings: Settings) -> int:
    """Forget a run's jobs, also those of a run whose store is gone: by its URL or id, as ``swathe list`` shows them.

    Raises what ``open_run`` does for a run that the fleet does not know either.
    """
    connection = connect(settings)
    try:
        store, spec = open_run(run)
    except StoreError:
        url = open_store(run).url
        gone = [
            each for each, at in queue.known_runs(connection).items() if run == each or url == at
        ]
        if not gone:
            raise
        ranges = [queue.RangeQueue(connection, name) for name in queue.queue_names(connection)]
        return sum(each.cancel(run_id) for run_id in gone for each in ranges)
    return Fleet(connection, store, spec).cancel()


def revive(store: Store, state: RunState) -> list[RangeId]:
    """Delete the markers of ranges that were set aside, so that they are open again."""
    back = sorted(state.failed)

    def delete(home: Store) -> None:
        for range_id in back:
            home.delete(names.failed(range_id))

    at_home(store, delete)
    return back


def failures(store: Store, state: RunState, limit: int = 10) -> list[dict[str, Any]]:
    """The first ranges that were set aside, with their reasons."""
    return [
        {"range": range_id, "reason": read_failed(store, range_id).reason}
        for range_id in sorted(state.failed)[:limit]
    ]
