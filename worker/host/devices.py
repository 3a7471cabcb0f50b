"""The devices of this node, by UUID: what NVML shows, cut down to what CUDA_VISIBLE_DEVICES allows."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from swathe.errors import ConfigError

CPU_UUID: Final = "cpu"
_DRIVER: Final = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that gets a worker of its own."""

    uuid: str
    """``GPU-...``, ``MIG-...`` or ``cpu``."""
    label: str
    """Short name for worker names and logs."""
    name: str = ""

    @property
    def is_cpu(self) -> bool:
        """True for the processor."""
        return self.uuid == CPU_UUID

    def environment(self) -> dict[str, str]:
        """Variables that pin a process to this device: by UUID, since indices move when a device fails."""
        return {
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": "" if self.is_cpu else self.uuid,
        }


CPU: Final = Device(uuid=CPU_UUID, label="cpu", name="CPU")


def present_devices() -> list[Device] | None:
    """All GPUs and MIG instances in PCI order; empty without a driver, None when the driver does not answer now.

    None is no news: NVML can die in a running container while CUDA goes on working there.
    """
    try:
        import pynvml  # noqa: PLC0415 - a node without the gpu packages works on its CPU
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return []
    except pynvml.NVMLError:
        return None
    try:
        return list(_enumerate(pynvml))
    except pynvml.NVMLError:
        return None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def out_of_reach(folder: Path = _DRIVER) -> str | None:
    """What to do about GPUs that this machine's driver has and this process cannot use; None when there are none.

    So it is in a container that was given no GPU: the kernel's own list shows there all the same.
    """
    count = len(list(folder.iterdir())) if folder.is_dir() else 0
    if count == 0 or present_devices() != []:
        return None
    return (
        f"this machine has {count} NVIDIA GPUs, and none can be used here. In a container, make NVIDIA's runtime Docker's "
        "default or add the GPU override (docs/deploy.md); --devices cpu (in .env DEVICES=cpu) works without them"
    )


def visible(devices: Sequence[Device], environment: Mapping[str, str]) -> list[Device]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; as in CUDA, an unknown entry hides what follows it."""
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return list(devices)
    out: list[Device] = []
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        found = _find(devices, entry)
        if found is None:
            break
        out.append(found)
    return out


def choose(wanted: str, devices: Sequence[Device]) -> list[Device]:
    """What ``--devices`` asks for among the visible devices. Raises ConfigError for what is not there.

    ``all`` without any GPU means the CPU.
    """
    if wanted == "cpu":
        return [CPU]
    if wanted == "all":
        return list(devices) or [CPU]
    out = []
    for entry in filter(None, (part.strip() for part in wanted.split(","))):
        found = _find(devices, entry)
        if found is None:
            here = ", ".join(f"{index}: {device.uuid}" for index, device in enumerate(devices))
            msg = (
                f"--devices {wanted}: there is no device {entry} here; visible are {here or 'none'}"
            )
            raise ConfigError(msg)
        if found not in out:
            out.append(found)
    if not out:
        msg = f"--devices {wanted!r}: say all, cpu, or indices or UUIDs with commas between"
        raise ConfigError(msg)
    return out


class Wanted:
    """The devices that are to have a worker now, asked again and again; None when that cannot be told at the moment.

    Numbers are read once, when all is well: they move when a device fails, and its neighbours must not pay for it, nor
    a CPU take its place. With ``all``, and no CUDA_VISIBLE_DEVICES, devices that come later are taken too.
    """

    def __init__(self, wanted: str, environment: Mapping[str, str]) -> None:
        self._wanted = wanted
        self._environment = environment
        self._all = wanted == "all" and "CUDA_VISIBLE_DEVICES" not in environment
        self._chosen: list[Device] = []

    def __call__(self) -> list[Device] | None:
        """Raises ConfigError, at the first answer, for what is not there."""
        present = [] if self._wanted == "cpu" else present_devices()
        if present is None:
            return None
        if not self._chosen or (self._all and present):
            self._chosen = choose(self._wanted, visible(present, self._environment))
        return [device for device in self._chosen if device.is_cpu or device in present]


def _find(devices: Sequence[Device], entry: str) -> Device | None:
    if entry.isdecimal():
        return devices[int(entry)] if int(entry) < len(devices) else None
    matches = [device for device in devices if device.uuid.lower().startswith(entry.lower())]
    return matches[0] if len(matches) == 1 else None


def _enumerate(nvml: Any) -> Iterator[Device]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError_GpuIsLost:
            continue  # fell off the bus; its neighbours are fine
        instances = list(_instances(nvml, handle))
        if instances:
            for place, instance in enumerate(instances):
                yield _device(nvml, instance, f"gpu{index}mig{place}")
        else:
            yield _device(nvml, handle, f"gpu{index}")


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return  # a card without MIG
    if not current:
        return
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)


def _device(nvml: Any, handle: Any, label: str) -> Device:
    return Device(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        label=label,
        name=_text(nvml.nvmlDeviceGetName(handle)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
