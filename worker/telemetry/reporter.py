"""A worker's voice: looks at the worker ten times a second, and says once a second what it did.

What it says goes to the supervisor (metrics) and, when asked, to Redis (displays). It runs on a thread of its own, so
that a driver that does not answer delays nothing else.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from swathe import log
from worker.loop.activity import Activity
from worker.telemetry.nvml import GpuReader
from worker.telemetry.reports import Outlet, Report, Totals
from worker.telemetry.totals import Snapshot, Telemetry

_LOOK_S: Final = 0.1
_SEND_S: Final = 1.0
_WINDOW_S: Final = 60.0
_SHORTEST_WINDOW_S: Final = 5.0


class Utilization:
    """Shares over the last minute, from totals: how busy the device was and how well it was used."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float, float]] = deque()

    def add(self, now_s: float, forward_s: float, flops: float) -> None:
        """Note totals at a moment."""
        self._points.append((now_s, forward_s, flops))
        while now_s - self._points[0][0] > _WINDOW_S:
            self._points.popleft()

    def shares(self, matmul_flops: float | None) -> dict[str, float]:
        """Busy share and, where the device's rate is known, model FLOP utilization; nothing in the first seconds."""
        first, last = self._points[0], self._points[-1]
        seconds = last[0] - first[0]
        if seconds < _SHORTEST_WINDOW_S:
            return {}
        found = {"busy": min(1.0, (last[1] - first[1]) / seconds)}
        if matmul_flops:
            found["mfu"] = (last[2] - first[2]) / seconds / matmul_flops
        return found


class Reporter:
    """``about`` for displays; reports for the supervisor, where there is one."""

    def __init__(
        self,
        telemetry: Telemetry,
        activity: Activity,
        *,
        uuid: str,
        outlet: Outlet | None,
        ticked_s: Callable[[], float],
        refresh: Callable[[], None],
    ) -> None:
        """``refresh`` is called before each report, to set gauges that nobody sets by himself."""
        self._telemetry = telemetry
        self._activity = activity
        self._gpu = GpuReader([uuid])
        self._uuid = uuid
        self._outlet = outlet
        self._ticked_s = ticked_s
        self._refresh = refresh
        self._utilization = Utilization()
        self._shares: Mapping[str, float] = {}
        self._gpu_utilization: tuple[float, float] | None = None
        self._log: Any = log.get("reporter")
        self._thread = threading.Thread(target=self._loop, name="reporter", daemon=True)

    def start(self) -> None:
        """Begin; the thread ends with the process."""
        self._telemetry.on_range = self.send
        self._thread.start()

    def about(self) -> dict[str, Any]:
        """What displays show of this worker."""
        totals = self._telemetry.snapshot()
        return {
            "samples": totals.samples,
            "tokens": totals.tokens,
            "padding_tokens": totals.padding_tokens,
            "ranges": totals.ranges,
            "written_bytes": totals.written_bytes,
            "stage_seconds": {name: round(s, 3) for name, s in totals.stage_seconds.items()},
            "state_seconds": {name: round(s, 3) for name, s in self._activity.seconds.items()},
            "state": self._activity.state,
            "utilization": self._recent_gpu_utilization(),
            "busy": self._shares.get("busy"),
            "mfu": self._shares.get("mfu"),
            "last_error": totals.last_error,
        }

    def send(self) -> None:
        """Send the totals of now."""
        if self._outlet is not None:
            self._outlet.send(self._report(self._telemetry.snapshot()))

    def _loop(self) -> None:
        send_at_s = 0.0
        while True:
            try:
                self._activity.look()
                if time.monotonic() >= send_at_s:
                    send_at_s = time.monotonic() + _SEND_S
                    self._second()
            except Exception:  # noqa: BLE001 - what is not seen now is seen the next time
                self._log.exception("report failed")
            time.sleep(_LOOK_S)

    def _second(self) -> None:
        self._refresh()
        totals = self._telemetry.snapshot()
        forward_s = totals.stage_seconds.get("forward", 0.0)
        self._utilization.add(time.monotonic(), forward_s, totals.counts.get("flops", 0.0))
        self._shares = self._utilization.shares(totals.gauges.get("matmul_flops"))
        self.send()
        found = self._gpu.read().get(self._uuid)
        utilization = None if found is None else found.utilization
        self._gpu_utilization = None if utilization is None else (time.monotonic(), utilization)

    def _recent_gpu_utilization(self) -> float | None:
        latest = self._gpu_utilization
        return latest[1] if latest and time.monotonic() - latest[0] < _SHORTEST_WINDOW_S else None

    def _report(self, totals: Snapshot) -> Report:
        return Report(
            totals=Totals(
                counts=totals.counts,
                states=self._activity.seconds,
                stages=totals.stage_seconds,
                buckets={stage: found.counts for stage, found in totals.durations.items()},
            ),
            gauges={**totals.gauges, **self._shares},
            state=self._activity.state,
            ready=not self._telemetry.is_in("load"),
            loop_age_s=time.monotonic() - self._ticked_s(),
            last_error=totals.last_error,
        )
