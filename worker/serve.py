"""One worker process: its device, its work, its place in the fleet."""

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
from pydantic import SecretStr

from swathe import log
from swathe.manifest import seal
from swathe.queue import connect
from swathe.records import RunWatcher, read_run
from swathe.settings import Settings
from swathe.spec import RunId
from swathe.store import open_store
from swathe.submission import submit
from worker.contract import Hooks, WorkerOptions
from worker.devices import CPU_UUID
from worker.extraction import Extraction
from worker.jobs import RangeWorker
from worker.telemetry import Telemetry

_SWITCH_S: Final = 0.0005

logger = log.get("worker")


def serve(
    settings: Settings,
    redis_url: SecretStr,
    *,
    uuid: str,
    name: str,
    exit_when_idle_s: float | None,
) -> int:
    """Work until told to stop; returns the exit status.

    ``uuid`` is that of the one GPU that this process can see, or ``cpu``; ``name`` is this worker's in the fleet, one
    that no process had before.
    """
    device = torch.device("cpu" if uuid == CPU_UUID else "cuda:0")
    # A thread that computes in Python keeps the interpreter this long from the one that launches kernels.
    sys.setswitchinterval(_SWITCH_S)
    if device.type == "cpu":
        torch.set_num_threads(_threads())
    telemetry = Telemetry()
    work = Extraction(
        name=name,
        device=device,
        device_id=uuid,
        settings=settings,
        telemetry=telemetry,
    )
    fleet = _Fleet(redis_url, telemetry, uuid)
    worker = RangeWorker(
        redis_url,
        work,
        name=name,
        roots=settings.store_roots,
        options=WorkerOptions.from_settings(settings, exit_when_idle_s=exit_when_idle_s),
        hooks=Hooks(
            about=fleet.about, rebuild=fleet.rebuild, waits_for_buffer=work.waits_for_buffer
        ),
    )
    return worker.serve()


class _Fleet:
    """What the worker loop asks of the rest of the process."""

    def __init__(self, redis_url: SecretStr, telemetry: Telemetry, device_id: str) -> None:
        self._redis_url = redis_url
        self._telemetry = telemetry
        self._device_id = device_id

    def about(self) -> Mapping[str, Any]:
        """What displays show of this worker."""
        totals = self._telemetry.snapshot()
        return {
            "device": self._device_id,
            "pid": os.getpid(),
            "samples": totals.samples,
            "tokens": totals.tokens,
            "padding_tokens": totals.padding_tokens,
            "ranges": totals.ranges,
            "written_bytes": totals.written_bytes,
            "stage_seconds": {name: round(s, 3) for name, s in totals.stage_seconds.items()},
        }

    def rebuild(self, run_id: RunId, url: str) -> bool:
        """Compare a run with its store: enqueue what the queue lost, seal what is complete; True when nothing is left."""
        store = open_store(url)
        spec = read_run(store)
        if spec.run_id != run_id:
            return True
        state = RunWatcher(store, spec).read()
        if state.complete:
            seal(store, state)
            return True
        if state.missing:
            connection = connect(self._redis_url, retries=1)
            try:
                done = submit(connection, store, state)
            finally:
                connection.close()
            if done.added or done.repaired:
                logger.warning(
                    "the queue had lost ranges; they are back", run=run_id, ranges=done.added
                )
            return False
        return True  # the rest is set aside


def _threads() -> int:
    """Cores that this process may use: an affinity mask or a container's cpuset counts, not the machine."""
    return max(1, len(os.sched_getaffinity(0)))
