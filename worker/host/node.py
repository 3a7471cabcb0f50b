"""One node as Prometheus and an orchestrator see it: /metrics, /healthz and /readyz of all its workers, on one port."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from swathe import log, metrics, stages
from swathe.metrics import Metric, Sheet
from swathe.settings import RELAY, Settings
from swathe.web import Address, Answer, WebServer
from worker.telemetry.nvml import GpuMonitor, GpuReading
from worker.telemetry.reports import Heard, Inbox, Report, Totals

_LOOP_S: Final = 60.0
"""A loop that has not come round for so long is stuck; the bounds of a Redis outage are far below."""
_COUNTS: Final[Mapping[str, Metric]] = {
    "samples": metrics.SAMPLES,
    "tokens": metrics.TOKENS,
    "padding_tokens": metrics.PADDING_TOKENS,
    "written_bytes": metrics.WRITTEN_BYTES,
    "store_retries": metrics.STORE_RETRIES,
    "quarantined": metrics.QUARANTINED,
    "recomputed": metrics.RECOMPUTED,
    "out_of_memory": metrics.OUT_OF_MEMORY,
    "flops": metrics.MODEL_FLOPS,
}
_GAUGES: Final[Mapping[str, Metric]] = {
    "backlog_bytes": metrics.BACKLOG_BYTES,
    "store_free_bytes": metrics.STORE_FREE_BYTES,
    "paused_for_space": metrics.PAUSED_FOR_SPACE,
    "store_stalled_s": metrics.STORE_STALLED,
    "busy": metrics.GPU_BUSY,
    "mfu": metrics.MFU,
    "matmul_flops": metrics.MATMUL_FLOPS,
    "canary_error": metrics.CANARY_ERROR,
    "last_range_s": metrics.LAST_RANGE,
}

logger = log.get("node")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildView:
    """A device and the worker process that it has now, if any."""

    uuid: str
    label: str
    device_name: str
    worker: str
    state: str
    running: bool
    restarts: int
    deaths: int


class Node:
    """Joins what the supervisor knows, what the workers report and what the driver says."""

    def __init__(self, inbox: Inbox, gpus: GpuMonitor) -> None:
        self._children: Callable[[], Sequence[ChildView]] = lambda: ()
        self._ticked_s: Callable[[], float] = time.monotonic
        self._inbox = inbox
        self._gpus = gpus
        self._server: WebServer | None = None

    def follow(
        self, children: Callable[[], Sequence[ChildView]], ticked_s: Callable[[], float]
    ) -> None:
        """From now on show this supervisor's devices, and when its loop last came round."""
        self._children, self._ticked_s = children, ticked_s

    def serve(self, settings: Settings) -> str | None:
        """Listen where the settings say; returns the address to tell others, or None when there is none to tell.

        An address that another program has is a warning: extraction is worth more than its metrics.
        """
        address = Address.parse(settings.metrics_address, name="SWATHE_METRICS_ADDRESS")
        if address is None:
            return None
        routes = {"/metrics": self.metrics, "/healthz": self.healthz, "/readyz": self.readyz}
        try:
            self._server = server = WebServer(address, routes)
        except OSError as error:
            logger.warning(
                "no metrics of this node: the address cannot be had; set SWATHE_METRICS_ADDRESS to a free one",
                address=str(address), error=str(error),
            )  # fmt: skip
            return None
        self._gpus.start()
        logger.info("metrics", url=f"http://{server.address}/metrics")
        if settings.metrics_advertise == RELAY:
            return None
        return settings.metrics_advertise or server.address.reachable

    def close(self) -> None:
        """Stop listening."""
        self._gpus.close()
        if self._server is not None:
            self._server.close()

    def metrics(self) -> Answer:
        """Everything, in Prometheus' text format."""
        self._inbox.drain()
        children = self._children()
        self._gpus.watch([child.uuid for child in children])
        sheet, totals = Sheet(), self._inbox.totals()
        sheet.add(metrics.BUILD_INFO, 1, _version())
        sheet.add(metrics.NVML_ERRORS, self._gpus.errors)
        reports = {heard.uuid: heard.report for heard in self._inbox.live()}
        readings = self._gpus.latest()
        for child in children:
            _add_child(sheet, child)
            _add_totals(sheet, child.uuid, totals.get(child.uuid, Totals()))
            report = reports.get(child.uuid)
            if child.running and report is not None:
                _add_report(sheet, child.uuid, report)
            if child.uuid in readings:
                _add_gpu(sheet, child.uuid, readings[child.uuid])
        return Answer.metrics(sheet.render())

    def healthz(self) -> Answer:
        """200 while the supervisor's loop and those of all running workers come round."""
        self._inbox.drain()
        late: dict[str, float] = {}
        if (age_s := time.monotonic() - self._ticked_s()) > _LOOP_S:
            late["supervisor"] = age_s
        for heard in self._inbox.live():
            age_s = _loop_age_s(heard)
            if age_s > _LOOP_S:
                late[heard.worker] = age_s
        found = {name: round(age_s, 1) for name, age_s in late.items()}
        return Answer.json({"ok": not late, "stuck_s": found}, 503 if late else 200)

    def readyz(self) -> Answer:
        """200 when every device's worker is idle or has its model loaded and tested."""
        self._inbox.drain()
        reports = {heard.uuid: heard.report for heard in self._inbox.live()}
        devices: dict[str, Any] = {
            child.uuid: _readiness(child, reports.get(child.uuid)) for child in self._children()
        }
        ready = bool(devices) and all(said in {"ready", "done"} for said in devices.values())
        return Answer.json({"ok": ready, "devices": devices}, 200 if ready else 503)


def _loop_age_s(heard: Heard) -> float:
    return heard.silent_s + (heard.report.loop_age_s if heard.report else 0.0)


def _readiness(child: ChildView, report: Report | None) -> str:
    if not child.running:
        return child.state
    if report is None:
        return "starting"
    return "ready" if report.ready else "loading"


def _add_child(sheet: Sheet, child: ChildView) -> None:
    sheet.add(metrics.DEVICE_INFO, 1, child.uuid, child.label, child.device_name)
    up = None if child.state == "done" else int(child.running)
    sheet.add(metrics.WORKER_UP, up, child.uuid)
    sheet.add(metrics.RESTARTS, child.restarts, child.uuid)
    sheet.add(metrics.DEATHS, child.deaths, child.uuid)


def _add_totals(sheet: Sheet, uuid: str, totals: Totals) -> None:
    """Counters: the same series from the first scrape on, so that no increase is missed."""
    for name, metric in _COUNTS.items():
        sheet.add(metric, totals.counts.get(name, 0), uuid)
    for outcome in metrics.OUTCOMES:
        sheet.add(metrics.RANGES, totals.counts.get(f"outcome:{outcome}", 0), uuid, outcome)
    for outcome in ("passed", "failed"):
        sheet.add(metrics.CANARIES, totals.counts.get(f"canary:{outcome}", 0), uuid, outcome)
    sheet.add_each(metrics.STATE_SECONDS, totals.states, stages.STATES, uuid)
    sheet.add_each(metrics.STAGE_SECONDS, totals.stages, stages.STAGES, uuid)
    nothing = (0,) * (len(metrics.DURATION_BUCKETS_S) + 1)
    for stage in stages.STAGES:
        counts = totals.buckets.get(stage, nothing)
        sheet.add_histogram(
            metrics.STAGE_DURATION, counts, totals.stages.get(stage, 0.0), uuid, stage
        )


def _add_report(sheet: Sheet, uuid: str, report: Report) -> None:
    sheet.add(metrics.WORKER_READY, int(report.ready), uuid)
    for name, metric in _GAUGES.items():
        sheet.add(metric, report.gauges.get(name), uuid)


def _add_gpu(sheet: Sheet, uuid: str, gpu: GpuReading) -> None:
    for metric, value in (
        (metrics.GPU_UTILIZATION, gpu.utilization),
        (metrics.GPU_MEMORY_USED, gpu.memory_used_bytes),
        (metrics.GPU_MEMORY_TOTAL, gpu.memory_total_bytes),
        (metrics.GPU_POWER, gpu.power_w),
        (metrics.GPU_POWER_LIMIT, gpu.power_limit_w),
        (metrics.GPU_TEMPERATURE, gpu.temperature_c),
        (metrics.GPU_CLOCK, gpu.sm_clock_hz),
        (metrics.GPU_XID, gpu.xid_errors),
    ):
        sheet.add(metric, value, uuid, uuid)
    for reason in metrics.THROTTLE_REASONS if gpu.throttled is not None else ():
        held = gpu.throttled is not None and gpu.throttled.get(reason, False)
        sheet.add(metrics.GPU_THROTTLED, int(held), uuid, uuid, reason)
    for kind, errors in gpu.ecc_errors.items():
        sheet.add(metrics.GPU_ECC, errors, uuid, uuid, kind)


def _version() -> str:
    try:
        return version("swathe")
    except PackageNotFoundError:
        return "source tree"
