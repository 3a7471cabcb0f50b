"""The runs that a worker has open; it opens runs, never creates one, and follows those that are moved.

A range may be read where the run was and stored where the run is: what it computed is worth the same in both places.
"""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

from swathe.errors import ConfigError, RefusedJobError, RunMismatchError
from swathe.location import at_home
from swathe.queue import allowed_run_url
from swathe.records import open_run
from swathe.settings import Settings
from swathe.spec import RangeJob, RangeRecord, RunId, RunSpec
from swathe.store import Store
from swathe.tokens import TokenReader
from worker.extraction.sink import Sink
from worker.extraction.steps import OpenRun
from worker.extraction.store_watch import StoreWatch
from worker.telemetry.totals import Telemetry

_MOST: Final = 8

_Value = TypeVar("_Value")


class OpenRuns:
    """The runs used last. Safe to call from several threads."""

    def __init__(self, settings: Settings, telemetry: Telemetry, watch: StoreWatch) -> None:
        self._roots = settings.store_roots
        self._min_free_bytes = settings.min_free_bytes
        self._telemetry = telemetry
        self._watch = watch
        self._runs: dict[tuple[RunId, str], OpenRun] = {}
        """By id and URL: a run that was moved, and is known under its new URL only, is not looked for at the old."""
        self._lock = threading.Lock()

    @property
    def store_retries(self) -> int:
        """Requests to stores after the first; stores that never repeat one count none."""
        # Without the lock: whoever asks must not wait for a store that does not answer.
        return max(
            (getattr(run.store, "retries", 0) for run in list(self._runs.values())), default=0
        )

    def open(self, job: RangeJob) -> OpenRun:
        """The job's run. Raises RunMismatchError when its URL holds another run here."""
        with self._lock:
            known = self._runs.get((job.run_id, job.run_url))
            run = known or self._made(*open_run(job.run_url))
            if (run.spec.run_id, run.spec.fingerprint) != (job.run_id, job.fingerprint):
                msg = (
                    f"{job.run_url} holds run {run.spec.run_id} on this node, the job is of run {job.run_id}: this "
                    "worker gives the range back; mount the same store on every node"
                )
                raise RunMismatchError(msg)
            self._keep(job.run_url, run)
            return run

    def at_home(self, run: OpenRun, action: Callable[[OpenRun], _Value]) -> _Value:
        """Do something where the run is now; again when it was moved meanwhile (see ``swathe.location``).

        Raises ConfigError when it was moved to where this worker may not go.
        """

        def there(store: Store) -> _Value:
            return action(run if store is run.store else self._reopened(run, store))

        return at_home(run.store, there)

    def commit(
        self, run: OpenRun, action: Callable[[OpenRun], RangeRecord | None]
    ) -> RangeRecord | None:
        """Commit a range where the run is; what was recorded where it was by then is taken back."""
        done: list[tuple[OpenRun, RangeRecord | None]] = []
        self.at_home(run, lambda run: done.append((run, action(run))))
        home, record = done.pop()
        for left, late in done:
            if late is not None and left.store.url != home.store.url:
                left.sink.withdraw(late)
        return record

    def _reopened(self, run: OpenRun, store: Store) -> OpenRun:
        with self._lock:
            known = self._runs.get((run.spec.run_id, store.url)) or self._made(store, run.spec)
            self._keep(store.url, known)
            return known

    def _made(self, store: Store, spec: RunSpec) -> OpenRun:
        self._require_allowed(store, spec)
        return OpenRun(
            store=store,
            spec=spec,
            tokens=TokenReader(store, spec),
            sink=Sink(store, spec, self._telemetry, self._watch, self._min_free_bytes),
        )

    def _keep(self, url: str, run: OpenRun) -> None:
        """As the one used last."""
        self._runs.pop((run.spec.run_id, url), None)
        if len(self._runs) >= _MOST:
            self._runs.pop(next(iter(self._runs)))
        self._runs[run.spec.run_id, url] = run

    def _require_allowed(self, store: Store, spec: RunSpec) -> None:
        """A job's own URL was looked at before; this is about where a marker in the store leads."""
        if not self._roots:
            return
        try:
            allowed_run_url(spec.run_id, store.url, self._roots)
        except RefusedJobError as error:
            msg = (
                f"run {spec.run_id} was moved to {store.url}, outside this worker's SWATHE_STORE_ROOTS: it gives the "
                "range back; add the place there and start the worker again"
            )
            raise ConfigError(msg) from error
