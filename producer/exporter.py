"""``swathe exporter``: the fleet as Prometheus sees it, and where Prometheus finds the fleet's workers.

All that is asked of Redis are reads. Redis may be empty, restarted or away: what cannot be read is absent, and workers
seen within the last minute stay on the list, so that an outage of Redis does not blind anybody.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final
from urllib.parse import quote

from redis import Redis

from producer.runs import Progress, Runs
from swathe import log, metrics, queue, stages
from swathe.errors import QueueError
from swathe.metrics import Sheet
from swathe.spec import RunId
from swathe.web import Answer

_REMEMBER_S: Final = 60.0

logger = log.get("exporter")

Workers = Mapping[str, Mapping[str, Any]]


class Exporter:
    """Answers scrapes; each call reads Redis anew."""

    def __init__(self, connection: Redis, runs: Runs) -> None:
        self._connection = connection
        self._runs = runs
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], float] = {}
        self._redis_errors = 0
        self._away = False

    def metrics(self) -> Answer:
        """The fleet in Prometheus' text format."""
        sheet = Sheet()
        sheet.add(metrics.BUILD_INFO, 1, _version())
        paused: frozenset[RunId] | None = None
        try:
            paused = self._add_redis(sheet)
            self._away = False
        except QueueError as error:
            self._failed(error)
            # A half-read Redis is no reading: what was added before the error would look like all there is.
            sheet = Sheet()
            sheet.add(metrics.BUILD_INFO, 1, _version())
        sheet.add(metrics.REDIS_UP, int(paused is not None))
        for run_id, progress in sorted(self._runs.latest().items()):
            _add_run(sheet, run_id, progress)
            if paused is not None:
                sheet.add(metrics.RUN_PAUSED, int(run_id in paused), run_id)
        sheet.add(metrics.EXPORTER_ERRORS, self._redis_errors, "redis")
        sheet.add(metrics.EXPORTER_ERRORS, self._runs.errors, "store")
        return Answer.metrics(sheet.render())

    def targets(self) -> Answer:
        """Prometheus' HTTP service discovery: one entry for each node's metrics.

        503 while Redis cannot be read: Prometheus then keeps the list it has. A node that hands its metrics over is
        listed under its name, and marked: prometheus.yml makes this exporter the address.
        """
        try:
            self._note_nodes(queue.live_workers(self._connection))
            relayed = queue.relayed_nodes(self._connection)
        except QueueError as error:
            self._failed(error)
            return Answer.json({"error": "Redis cannot be read"}, 503)
        with self._lock:
            known = sorted(self._seen)
        return Answer.json(
            [
                *({"targets": [address], "labels": {"node": node}} for address, node in known),
                *({"targets": [node], "labels": _relayed(node)} for node in relayed),
            ]
        )

    def node(self, name: str) -> Answer:
        """The metrics of a node that hands them over; 404 when it is gone, 503 while Redis cannot be read."""
        try:
            page = queue.relayed_metrics(self._connection, name)
        except QueueError as error:
            self._failed(error)
            return Answer.json({"error": "Redis cannot be read"}, 503)
        if page is None:
            return Answer.json({"error": f"no metrics of node {name}"}, 404)
        return Answer.metrics(page)

    def healthz(self) -> Answer:
        """200: this process answers; Redis has a metric of its own."""
        return Answer.json({"ok": True})

    def _failed(self, error: QueueError) -> None:
        self._redis_errors += 1
        if not self._away:  # two lines every scrape would be thousands a night
            self._away = True
            logger.warning("Redis cannot be read", error=str(error))

    def _note_nodes(self, workers: Workers) -> None:
        now_s = time.monotonic()
        with self._lock:
            for said in workers.values():
                if address := said.get("metrics"):
                    self._seen[str(address), str(said.get("node") or address)] = now_s
            for key in [key for key, at_s in self._seen.items() if now_s - at_s > _REMEMBER_S]:
                del self._seen[key]

    def _add_redis(self, sheet: Sheet) -> frozenset[RunId]:
        connection = self._connection
        for name in queue.queue_names(connection):
            counts = queue.RangeQueue(connection, name).counts()
            for state in metrics.QUEUE_STATES:
                sheet.add(metrics.QUEUE_RANGES, getattr(counts, state), name, state)
        workers = queue.live_workers(connection)
        self._note_nodes(workers)
        by_state = Counter(str(said.get("state") or "queue_empty") for said in workers.values())
        sheet.add_each(metrics.WORKERS, by_state, stages.STATES)
        requeued = queue.requeued_counts(connection)
        sheet.add_each(metrics.REQUEUED, requeued, metrics.REQUEUE_REASONS)
        with queue.redis_errors("health of Redis"):
            info: Any = connection.info()
        _add_health(sheet, info)
        return queue.paused_runs(connection)


def _relayed(node: str) -> dict[str, str]:
    path = f"/nodes/{quote(node, safe='')}"
    return {"node": node, "__metrics_path__": path, "__meta_swathe_relayed": "yes"}


def _add_health(sheet: Sheet, info: Mapping[str, Any]) -> None:
    sheet.add(metrics.REDIS_MEMORY, int(info.get("used_memory", 0)))
    sheet.add(metrics.REDIS_MEMORY_MAX, int(info.get("maxmemory", 0)) or None)
    durable = int(info.get("aof_enabled", 0)) and info.get("aof_last_write_status", "ok") == "ok"
    sheet.add(metrics.REDIS_DURABLE, int(bool(durable)))
    evicts = str(info.get("maxmemory_policy", "noeviction")) != "noeviction"
    sheet.add(metrics.REDIS_EVICTS, int(evicts))
    sheet.add(metrics.REDIS_EVICTED, int(info.get("evicted_keys", 0)))
    sheet.add(metrics.REDIS_UPTIME, int(info.get("uptime_in_seconds", 0)))


def _add_run(sheet: Sheet, run_id: RunId, progress: Progress) -> None:
    sheet.add(metrics.RUN_INFO, 1, run_id, progress.url, progress.model)
    sheet.add_each(metrics.RUN_SAMPLES, progress.samples, metrics.SAMPLE_STATES, run_id)
    sheet.add_each(metrics.RUN_RANGES, progress.ranges, metrics.RANGE_STATES, run_id)
    sheet.add_each(metrics.RUN_TOKENS, progress.tokens, ("stored", "planned"), run_id)
    sheet.add(metrics.RUN_STORED_BYTES, progress.stored_bytes, run_id)
    sheet.add(metrics.RUN_REMAINING_BYTES, progress.remaining_bytes, run_id)
    sheet.add(metrics.RUN_FREE_BYTES, progress.free_bytes, run_id)
    sheet.add(metrics.RUN_ETA, progress.eta_s, run_id)
    sheet.add(metrics.RUN_COMPLETE, int(progress.complete), run_id)
    sheet.add(metrics.RUN_OBSERVED, progress.observed_s, run_id)


def _version() -> str:
    try:
        return version("swathe")
    except PackageNotFoundError:
        return "source tree"
