"""One worker process: its device, its work, its place in the fleet."""

import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from pydantic import SecretStr

from swathe import log, names
from swathe.errors import RefusedJobError
from swathe.manifest import seal
from swathe.queue import allowed_run_url, connect
from swathe.records import RunWatcher, open_run
from swathe.settings import Settings
from swathe.spec import RunId
from swathe.submission import submit
from worker.extraction.extraction import Extraction
from worker.host.devices import CPU_UUID
from worker.loop.contract import Hooks, WorkerOptions
from worker.loop.jobs import RangeWorker
from worker.telemetry.reporter import Reporter
from worker.telemetry.reports import Outlet
from worker.telemetry.totals import Telemetry

_SWITCH_S: Final = 0.0005
_SPACE_EVERY_S: Final = 2.0

logger = log.get("worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A worker's place on its node. ``uuid`` is that of the one GPU that this process can see, or ``cpu``."""

    uuid: str
    name: str
    """In the fleet; one that no process had before."""
    report_fd: int | None = None
    """The line to the supervisor, if there is one."""
    metrics: str | None = None
    """Address of the node's metrics."""


def serve(
    settings: Settings, redis_url: SecretStr, place: Place, *, exit_when_idle_s: float | None
) -> int:
    """Work until told to stop; returns the exit status."""
    device = device_of(place.uuid)
    telemetry = Telemetry()
    work = Extraction(
        name=place.name,
        device=device,
        device_id=place.uuid,
        settings=settings,
        telemetry=telemetry,
    )
    fleet = _Fleet(redis_url, place, settings)
    worker = RangeWorker(
        redis_url,
        work,
        name=place.name,
        roots=settings.store_roots,
        options=WorkerOptions.from_settings(settings, exit_when_idle_s=exit_when_idle_s),
        hooks=Hooks(
            about=fleet.about,
            rebuild=fleet.rebuild,
            waits_for_buffer=work.waits_for_buffer,
            outcome=telemetry.outcome,
        ),
    )
    work.on_progress = worker.progress
    fleet.reporter = _reporter(worker, work, telemetry, place)
    fleet.reporter.start()
    return worker.serve()


def device_of(uuid: str) -> torch.device:
    """The one device that this process may use."""
    device = torch.device("cpu" if uuid == CPU_UUID else "cuda:0")
    # A thread that computes in Python keeps the interpreter this long from the one that launches kernels.
    sys.setswitchinterval(_SWITCH_S)
    if device.type == "cpu":
        torch.set_num_threads(_threads())
    return device


def _reporter(
    worker: RangeWorker, work: Extraction, telemetry: Telemetry, place: Place
) -> Reporter:
    activity = worker.activity(
        loading=lambda: telemetry.is_in("load"),
        blocked=work.waits_for_buffer,
        full=work.waits_for_room,
    )

    def refresh() -> None:
        work.watch.look()
        telemetry.put("store_retries", work.store_retries)

    # On a thread of its own: a file system that is away answers not even this.
    threading.Thread(target=_note_space, args=(work,), name="space", daemon=True).start()
    return Reporter(
        telemetry,
        activity,
        uuid=place.uuid,
        outlet=None if place.report_fd is None else Outlet(place.report_fd),
        ticked_s=lambda: worker.ticked_s,
        refresh=refresh,
    )


def _note_space(work: Extraction) -> None:
    while True:
        work.note_free_space()
        time.sleep(_SPACE_EVERY_S)


class _Fleet:
    """What the worker loop asks of the rest of the process."""

    def __init__(self, redis_url: SecretStr, place: Place, settings: Settings) -> None:
        self._redis_url = redis_url
        self._node = settings.node
        self._roots = settings.store_roots
        self._place = place
        self._watchers: dict[RunId, RunWatcher] = {}
        """Of open runs: each look reads what is new."""
        self.reporter: Reporter | None = None

    def about(self) -> Mapping[str, Any]:
        """What displays show of this worker."""
        return {
            "device": self._place.uuid,
            "node": self._node,
            "metrics": self._place.metrics,
            "pid": os.getpid(),
            **(self.reporter.about() if self.reporter else {}),
        }

    def rebuild(self, run_id: RunId, url: str) -> bool:
        """Compare a run with its store: enqueue what the queue lost, seal what is complete; True when nothing is left."""
        if not self._may_open(run_id, url):
            return True  # the business of workers that may; by this one its ranges would be refused again
        store, spec = open_run(url)
        if spec.run_id != run_id or not self._may_open(run_id, store.url):
            return True
        if store.stat(names.MANIFEST) is not None:
            self._watchers.pop(run_id, None)
            return True  # without reading the records of every run that there ever was
        watcher = self._watchers.get(run_id)
        if watcher is None or watcher.store.url != store.url:
            watcher = self._watchers[run_id] = RunWatcher(store, spec)
        state = watcher.read()
        if state.complete:
            seal(watcher.store, state)
            return True
        if state.missing:
            connection = connect(self._redis_url, retries=1)
            try:
                done = submit(connection, watcher.store, state, rebuild=True)
            finally:
                connection.close()
            if done.added or done.repaired:
                logger.warning(
                    "the queue had lost ranges; they are back", run=run_id, ranges=done.added
                )
            return False
        return True  # the rest is set aside

    def _may_open(self, run_id: RunId, url: str) -> bool:
        try:
            allowed_run_url(run_id, url, self._roots)
        except RefusedJobError:
            return False
        return True


def _threads() -> int:
    """Cores that this process may use: an affinity mask or a container's cpuset counts, not the machine."""
    return max(1, len(os.sched_getaffinity(0)))
