"""Every metric by name, kind, unit and meaning, and how values become Prometheus' text.

Base units: seconds, bytes, ratios from 0 to 1. Labels are bounded by the devices, stages and runs of a fleet; no range,
job or process is a label. A value that cannot be had is left out, never written as 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)

Kind = Literal["counter", "gauge", "histogram"]

DURATION_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

OUTCOMES: Final = (
    "stored",
    "present",
    "duplicate",
    "failed",
    "set_aside",
    "refused",
    "handed_back",
    "store_error",
    "lost",
)
"""Ends of a range in a worker. present: its record was there already; duplicate: another worker committed it first;
failed: it raised and goes round again; handed_back: no fault of the range; store_error: handed back
because store or network did not work; lost: the lease was taken away."""

REQUEUE_REASONS: Final = (
    "death",
    "lease",
    "drain",
    "infrastructure",
    "isolation",
    "mismatch",
    "worker",
    "error",
)
QUEUE_STATES: Final = ("queued", "running", "paused", "refused")
SAMPLE_STATES: Final = ("stored", "rejected", "quarantined", "remaining")
RANGE_STATES: Final = ("stored", "open", "set_aside", "invalid", "suspect")
THROTTLE_REASONS: Final = (
    "power_cap",
    "power_brake",
    "thermal_software",
    "thermal_hardware",
    "slowdown",
)
ECC_KINDS: Final = ("corrected", "uncorrected")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; ``labels`` in the order in which values are given."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


def _worker(name: str, kind: Kind, text: str, *labels: str) -> Metric:
    return Metric(f"swathe_{name}", kind, text, ("device", *labels))


def _gpu(name: str, kind: Kind, text: str, *labels: str) -> Metric:
    return Metric(f"swathe_gpu_{name}", kind, text, ("uuid", "device", *labels))


# -- of a worker, summed over its processes by the node's supervisor

SAMPLES = _worker("samples_total", "counter", "Samples whose hidden states were stored.")
TOKENS = _worker("tokens_total", "counter", "Tokens whose hidden states were stored.")
PADDING_TOKENS = _worker("padding_tokens_total", "counter", "Tokens computed but not wanted.")
RANGES = _worker("ranges_total", "counter", "Ranges by how they ended on this worker.", "outcome")
STAGE_SECONDS = _worker(
    "stage_seconds_total", "counter", "Seconds of work by stage; stages overlap.", "stage"
)
STAGE_DURATION = _worker(
    "stage_duration_seconds", "histogram", "Seconds of one range (or load) in a stage.", "stage"
)
STATE_SECONDS = _worker(
    "state_seconds_total",
    "counter",
    "Seconds by what the device was doing or waiting for; they add up to the clock's.",
    "state",
)
WRITTEN_BYTES = _worker("written_bytes_total", "counter", "Bytes of shards that were stored.")
STORE_RETRIES = _worker("store_retries_total", "counter", "Requests to the store after the first.")
QUARANTINED = _worker(
    "quarantined_samples_total", "counter", "Samples that failed alone on the reference path too."
)
RECOMPUTED = _worker(
    "recomputed_samples_total", "counter", "Samples computed again because they were not sound."
)
OUT_OF_MEMORY = _worker(
    "out_of_memory_total", "counter", "Batches that did not fit into the device's memory."
)
CANARIES = _worker(
    "canaries_total", "counter", "Samples computed twice to prove the device.", "outcome"
)
MODEL_FLOPS = _worker(
    "model_flops_total", "counter", "Useful floating point operations, of kept tokens only."
)
DEATHS = _worker("worker_deaths_total", "counter", "Worker processes that ended badly.")
RESTARTS = _worker("worker_restarts_total", "counter", "Worker processes after the first.")
WORKER_UP = _worker("worker_up", "gauge", "1 while the device has a running worker process.")
WORKER_READY = _worker(
    "worker_ready", "gauge", "1 while the worker is idle or its model is loaded."
)
BACKLOG_BYTES = _worker("backlog_bytes", "gauge", "Bytes computed and not yet stored.")
STORE_FREE_BYTES = _worker("store_free_bytes", "gauge", "Room left in the store last written to.")
PAUSED_FOR_SPACE = _worker(
    "paused_for_space", "gauge", "1 while computed ranges wait for room in their store."
)
STORE_STALLED = _worker(
    "store_stalled_seconds",
    "gauge",
    "Since when the store operation that waits longest has not moved.",
)
GPU_BUSY = _worker(
    "gpu_busy_ratio", "gauge", "Share of the last minute in which the model computed."
)
MFU = _worker(
    "model_flops_utilization_ratio",
    "gauge",
    "Useful operations of the last minute over the matrix rate measured on this device.",
)
MATMUL_FLOPS = _worker(
    "matmul_flops_per_second", "gauge", "Matrix rate measured when the model was loaded."
)
CANARY_ERROR = _worker(
    "canary_error_ratio",
    "gauge",
    "Error of the last canary over what is allowed; above 1 is wrong.",
)
LAST_RANGE = _worker(
    "last_range_completed_timestamp_seconds", "gauge", "Unix time of the last stored range."
)
DEVICE_INFO = Metric(
    "swathe_device_info", "gauge", "1 for each device of the node.", ("device", "label", "name")
)

# -- of a GPU, by NVML

GPU_UTILIZATION = _gpu("utilization_ratio", "gauge", "Share of time with any kernel running.")
GPU_MEMORY_USED = _gpu("memory_used_bytes", "gauge", "Device memory in use.")
GPU_MEMORY_TOTAL = _gpu("memory_total_bytes", "gauge", "Device memory.")
GPU_POWER = _gpu("power_watts", "gauge", "Power drawn.")
GPU_POWER_LIMIT = _gpu("power_limit_watts", "gauge", "Power limit that is enforced.")
GPU_TEMPERATURE = _gpu("temperature_celsius", "gauge", "Temperature of the chip.")
GPU_CLOCK = _gpu("sm_clock_hertz", "gauge", "Clock of the multiprocessors.")
GPU_THROTTLED = _gpu(
    "throttled", "gauge", "1 while clocks are held down for this reason.", "reason"
)
GPU_ECC = _gpu("ecc_errors_total", "counter", "Memory errors since the driver was loaded.", "kind")
GPU_XID = _gpu("xid_errors_total", "counter", "Critical errors (Xid) since the supervisor started.")
NVML_ERRORS = Metric("swathe_nvml_errors_total", "counter", "Readings of a GPU that failed.")

# -- of a node or of the exporter

BUILD_INFO = Metric("swathe_build_info", "gauge", "1; the version of the software.", ("version",))

# -- of the fleet

WORKERS = Metric("swathe_workers", "gauge", "Live workers by state.", ("state",))
QUEUE_RANGES = Metric("swathe_queue_ranges", "gauge", "Ranges in Redis.", ("queue", "state"))
REQUEUED = Metric(
    "swathe_requeued_ranges_total", "counter", "Ranges that went back to a queue.", ("reason",)
)
RUN_INFO = Metric("swathe_run_info", "gauge", "1 for each run.", ("run", "url", "model"))
RUN_SAMPLES = Metric("swathe_run_samples", "gauge", "Rows of the data set.", ("run", "state"))
RUN_RANGES = Metric("swathe_run_ranges", "gauge", "Ranges of the plan.", ("run", "state"))
RUN_TOKENS = Metric("swathe_run_tokens", "gauge", "Tokens of the plan.", ("run", "state"))
RUN_STORED_BYTES = Metric("swathe_run_stored_bytes", "gauge", "Bytes stored.", ("run",))
RUN_REMAINING_BYTES = Metric(
    "swathe_run_remaining_bytes", "gauge", "Bytes of states still to be stored.", ("run",)
)
RUN_FREE_BYTES = Metric(
    "swathe_run_store_free_bytes",
    "gauge",
    "Room in the run's store, as the exporter sees it.",
    ("run",),
)
RUN_ETA = Metric(
    "swathe_run_eta_seconds",
    "gauge",
    "Seconds to go at the pace of the last ten minutes.",
    ("run",),
)
RUN_COMPLETE = Metric("swathe_run_complete", "gauge", "1 when the run is sealed.", ("run",))
RUN_PAUSED = Metric("swathe_run_paused", "gauge", "1 while no ranges are started.", ("run",))
RUN_OBSERVED = Metric(
    "swathe_run_observed_timestamp_seconds", "gauge", "Unix time of the store's reading.", ("run",)
)
REDIS_UP = Metric("swathe_redis_up", "gauge", "1 when Redis answered this scrape.")
REDIS_MEMORY = Metric("swathe_redis_memory_used_bytes", "gauge", "Memory that Redis uses.")
REDIS_MEMORY_MAX = Metric("swathe_redis_memory_max_bytes", "gauge", "Its limit, where one is set.")
REDIS_DURABLE = Metric(
    "swathe_redis_durable", "gauge", "1 when an append-only file is kept and can be written."
)
REDIS_EVICTS = Metric(
    "swathe_redis_may_evict", "gauge", "1 when Redis may drop queued ranges under memory pressure."
)
REDIS_EVICTED = Metric("swathe_redis_evicted_keys_total", "counter", "Keys dropped for memory.")
REDIS_UPTIME = Metric("swathe_redis_uptime_seconds", "gauge", "Since Redis started.")
EXPORTER_ERRORS = Metric(
    "swathe_exporter_errors_total", "counter", "Readings that failed, by source.", ("source",)
)


def all_metrics() -> tuple[Metric, ...]:
    """Every metric of this module."""
    return tuple(value for value in globals().values() if isinstance(value, Metric))


class Sheet:
    """Values of one scrape, in the order they were added; a value of None is left out."""

    def __init__(self) -> None:
        self._families: dict[str, Any] = {}

    def add(self, metric: Metric, value: float | None, *labels: str) -> None:
        """Add one value of a counter or gauge."""
        if value is not None:
            self._family(metric).add_metric(labels, value)

    def add_each(
        self, metric: Metric, values: Mapping[str, float], keys: Iterable[str], *labels: str
    ) -> None:
        """Add a series for each of a fixed set of names, as the last label; missing ones are 0."""
        for key in keys:
            self.add(metric, values.get(key, 0), *labels, key)

    def add_histogram(
        self, metric: Metric, counts: Sequence[int], sum_: float, *labels: str
    ) -> None:
        """Add a histogram; ``counts`` are those of each bucket of DURATION_BUCKETS_S, and of the rest."""
        bounds = [*(str(bound) for bound in DURATION_BUCKETS_S), "+Inf"]
        total, buckets = 0, []
        for bound, count in zip(bounds, counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        self._family(metric).add_metric(labels, buckets=buckets, sum_value=sum_)

    def collect(self) -> Iterable[Family]:
        """What prometheus-client asks a collector for."""
        return self._families.values()

    def render(self) -> bytes:
        """Prometheus' text format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def _family(self, metric: Metric) -> Any:
        if metric.name not in self._families:
            kind = {
                "counter": CounterMetricFamily,
                "gauge": GaugeMetricFamily,
                "histogram": HistogramMetricFamily,
            }[metric.kind]
            self._families[metric.name] = kind(metric.name, metric.help, labels=metric.labels)
        return self._families[metric.name]
