"""What the driver says about GPUs, found by UUID: indices follow neither CUDA_VISIBLE_DEVICES nor a lost card.

A value that cannot be read is None, never 0: MIG instances have no utilization, and NVML may stop to answer in a
running container while CUDA goes on. Then there are no values until it answers again.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final, TypeVar

from swathe import log

_Value = TypeVar("_Value")

_THROTTLE_BITS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "power_cap": ("nvmlClocksThrottleReasonSwPowerCap",),
        "power_brake": ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown",),
        "thermal_software": ("nvmlClocksThrottleReasonSwThermalSlowdown",),
        "thermal_hardware": ("nvmlClocksThrottleReasonHwThermalSlowdown",),
        "slowdown": ("nvmlClocksThrottleReasonHwSlowdown",),
    }
)
_ECC_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "corrected": "NVML_MEMORY_ERROR_TYPE_CORRECTED",
        "uncorrected": "NVML_MEMORY_ERROR_TYPE_UNCORRECTED",
    }
)
_AGAIN_S: Final = 30.0
"""How long after NVML died it is asked again."""
_CPU: Final = "cpu"

logger = log.get("nvml")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """One GPU at one moment, in base units."""

    utilization: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    sm_clock_hz: float | None = None
    throttled: Mapping[str, bool] | None = None
    ecc_errors: Mapping[str, int] = field(default_factory=dict)
    xid_errors: int | None = None


class GpuReader:
    """Reads the GPUs of these UUIDs; of one thread. ``errors`` counts readings that failed where a driver is."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids = [uuid for uuid in uuids if uuid != _CPU]
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._events: Any = None
        self._xids: dict[str, int] = {}
        self._again_s = 0.0
        self.errors = 0

    def watch(self, uuids: Sequence[str]) -> None:
        """From now on read these."""
        wanted = [uuid for uuid in uuids if uuid != _CPU]
        if wanted != self._uuids:
            self._uuids = wanted
            self._close()

    def read(self) -> dict[str, GpuReading]:
        """One reading for each GPU that answers; nothing when NVML does not. Never raises."""
        if not self._uuids or not self._open():
            return {}
        self._take_xids()
        out: dict[str, GpuReading] = {}
        for uuid in self._uuids:
            handle = self._handle(uuid)
            reading = None if handle is None else self._reading(uuid, handle)
            if reading is None or reading.memory_used_bytes is None:
                self._handles.pop(uuid, None)  # every device has memory: this one is gone
            else:
                out[uuid] = reading
        if not out:
            self._died("no GPU answers")
        return out

    def _open(self) -> bool:
        if self._nvml is not None:
            return True
        if time.monotonic() < self._again_s:
            return False
        try:
            import pynvml  # noqa: PLC0415 - a node without the gpu packages works on its CPU

            pynvml.nvmlInit()
        except ImportError:
            self._again_s = float("inf")
            return False
        except Exception as error:  # noqa: BLE001 - any error of the driver means the same here
            self._died(str(error))
            return False
        self._nvml = pynvml
        self._again_s = 0.0
        return True

    def _died(self, why: str) -> None:
        self.errors += 1
        if self._again_s == 0.0:
            logger.warning(
                "NVML does not answer: no GPU metrics until it does, the work goes on", error=why
            )
        self._close()
        self._again_s = time.monotonic() + _AGAIN_S

    def _close(self) -> None:
        nvml, self._nvml = self._nvml, None
        self._handles, events, self._events = {}, self._events, None
        if nvml is not None:
            with contextlib.suppress(Exception):
                if events is not None:
                    nvml.nvmlEventSetFree(events)
                nvml.nvmlShutdown()

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            handle = self._try(lambda nvml: nvml.nvmlDeviceGetHandleByUUID(uuid))
            if handle is None:
                return None
            self._handles[uuid] = handle
            self._watch_xids(uuid, handle)
        return self._handles[uuid]

    def _reading(self, uuid: str, handle: Any) -> GpuReading:
        memory = self._try(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(handle))
        return GpuReading(
            utilization=self._try(
                lambda nvml: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, optional=True
            ),
            memory_used_bytes=memory and float(memory.used),
            memory_total_bytes=memory and float(memory.total),
            power_w=self._number("nvmlDeviceGetPowerUsage", handle, scale=1e-3),
            power_limit_w=self._number("nvmlDeviceGetEnforcedPowerLimit", handle, scale=1e-3),
            temperature_c=self._try(
                lambda nvml: float(
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
                ),
                optional=True,
            ),
            sm_clock_hz=self._try(
                lambda nvml: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
                optional=True,
            ),
            throttled=self._try(lambda nvml: _throttled(nvml, handle), optional=True),
            ecc_errors=self._ecc(handle),
            xid_errors=self._xids.get(uuid),
        )

    def _number(self, function: str, handle: Any, *, scale: float) -> float | None:
        return self._try(lambda nvml: getattr(nvml, function)(handle) * scale, optional=True)

    def _ecc(self, handle: Any) -> dict[str, int]:
        found = {}
        for kind, name in _ECC_TYPES.items():
            count = self._try(partial(_ecc_errors, handle=handle, kind=name), optional=True)
            if count is not None:
                found[kind] = count
        return found

    def _watch_xids(self, uuid: str, handle: Any) -> None:
        if self._events is None:
            self._events = self._try(lambda nvml: nvml.nvmlEventSetCreate(), optional=True)
        events = self._events
        if events is None:
            return

        def register(nvml: Any) -> bool:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            return True

        if self._try(register, optional=True):
            self._xids.setdefault(uuid, 0)

    def _take_xids(self) -> None:
        """Count critical errors since the last reading, without waiting."""
        while self._events is not None:
            event = self._try(lambda nvml: nvml.nvmlEventSetWait_v2(self._events, 0), optional=True)
            if event is None:
                return
            uuid = self._try(partial(_uuid, handle=event.device))
            if uuid in self._xids:
                self._xids[uuid] += 1
                logger.error("the GPU reports a critical error", device=uuid, xid=event.eventData)

    def _try(self, ask: Callable[[Any], _Value], *, optional: bool = False) -> _Value | None:
        """The answer, or None; ``optional`` ones, which many devices lack, are no errors."""
        try:
            return ask(self._nvml)
        except Exception:  # noqa: BLE001 - a driver fails in many ways; each means that there is no value
            self.errors += not optional
            return None


class GpuMonitor:
    """Reads on a thread of its own, since a call into a broken driver may never return; old readings are dropped."""

    def __init__(self, reader: GpuReader, *, every_s: float = 2.0, stale_s: float = 10.0) -> None:
        self._reader = reader
        self._every_s = every_s
        self._stale_s = stale_s
        self._latest: tuple[float, dict[str, GpuReading]] = (float("-inf"), {})
        self._uuids: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="nvml", daemon=True)

    @property
    def errors(self) -> int:
        """Readings that failed."""
        return self._reader.errors

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading; a call that hangs is left behind."""
        self._stop.set()

    def watch(self, uuids: Sequence[str]) -> None:
        """Read these from the next reading on."""
        self._uuids = list(uuids)

    def latest(self) -> dict[str, GpuReading]:
        """The last readings, unless they are old."""
        at_s, readings = self._latest
        return readings if time.monotonic() - at_s <= self._stale_s else {}

    def _loop(self) -> None:
        while not self._stop.is_set():
            self._reader.watch(self._uuids)
            self._latest = (time.monotonic(), self._reader.read())
            self._stop.wait(self._every_s)


def _throttled(nvml: Any, handle: Any) -> dict[str, bool]:
    bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {
        reason: any(bits & getattr(nvml, name, 0) for name in constants)
        for reason, constants in _THROTTLE_BITS.items()
    }


def _ecc_errors(nvml: Any, *, handle: Any, kind: str) -> int:
    return int(
        nvml.nvmlDeviceGetTotalEccErrors(handle, getattr(nvml, kind), nvml.NVML_VOLATILE_ECC)
    )


def _uuid(nvml: Any, *, handle: Any) -> str:
    return _text(nvml.nvmlDeviceGetUUID(handle))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
