"""What the machine says about itself while a row runs, and its ceilings before any does."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

_EVERY_S = 0.2
_SUSTAINED_S = 2.0


@dataclass(slots=True)
class Gauges:
    """Samples of NVML, each with the wall clock's time and a value for each GPU; empty without a GPU."""

    times: list[float] = field(default_factory=list)
    utilization: list[list[float]] = field(default_factory=list)
    watts: list[list[float]] = field(default_factory=list)
    used_bytes: list[list[int]] = field(default_factory=list)

    def between(self, start: float, stop: float, gpus: int | None = None) -> dict[str, Any]:
        """The fields of a row that these samples give for a span of time: means, memory of the fullest.

        ``gpus`` of them, the first; all when None.
        """
        places = [i for i, at in enumerate(self.times) if start <= at <= stop]
        if not places:
            return {}
        return {
            "nvml_utilization": round(fmean(fmean(self.utilization[i][:gpus]) for i in places), 4),
            "power_watts": round(fmean(fmean(self.watts[i][:gpus]) for i in places), 1),
            "peak_memory_bytes": max(max(self.used_bytes[i][:gpus]) for i in places),
        }


@contextlib.contextmanager
def watching(gpus: int = 1) -> Iterator[Gauges]:
    """Read the first ``gpus`` GPUs a few times a second."""
    gauges = Gauges()
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(gauges, gpus, stop), daemon=True)
    thread.start()
    try:
        yield gauges
    finally:
        stop.set()
        thread.join(timeout=5)


def _watch(gauges: Gauges, gpus: int, stop: threading.Event) -> None:
    try:
        import pynvml as nvml  # noqa: PLC0415 - optional

        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(gpus)]
    except Exception:  # noqa: BLE001 - no GPU, no gauges
        return
    while not stop.wait(_EVERY_S):
        gauges.times.append(time.time())
        gauges.utilization.append(
            [nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100 for h in handles]
        )
        gauges.watts.append([nvml.nvmlDeviceGetPowerUsage(h) / 1000 for h in handles])
        gauges.used_bytes.append([nvml.nvmlDeviceGetMemoryInfo(h).used for h in handles])


def ceilings(device: str, folder: Path) -> dict[str, float]:
    """Matrix products, copies to the host and writes to a folder, at best."""
    import torch  # noqa: PLC0415 - only children load torch

    from worker.engine.rates import host_copy_bytes, matmul_flops  # noqa: PLC0415

    where = torch.device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    repeats = 20 if where.type == "cuda" else 2
    burst = matmul_flops(where, dtype, repeats=repeats)
    long = int(_SUSTAINED_S * burst / (2 * 8192**3)) if where.type == "cuda" else repeats
    return {
        "matmul_tflops": burst / 1e12,
        "sustained_matmul_tflops": matmul_flops(where, dtype, repeats=long) / 1e12,
        "host_copy_bytes_s": host_copy_bytes(where, size_bytes=1 << 28 if long > 2 else 1 << 22),
        "disk_write_bytes_s": _write_rate(folder, 4 << 30 if where.type == "cuda" else 16 << 20),
    }


def _write_rate(folder: Path, size_bytes: int) -> float:
    """Sequential writes of 16 MiB of random bytes, flushed once at the end."""
    block = os.urandom(16 << 20)
    path = folder / "write-rate"
    started = time.monotonic()
    with path.open("wb", buffering=0) as file:
        for _ in range(size_bytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    path.unlink()
    return size_bytes / seconds
