"""What this node's devices are and can do, measured: the part of ``swathe doctor`` that needs torch."""

import importlib.util
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

from worker.engine.rates import host_copy_bytes, matmul_flops
from worker.host.devices import out_of_reach
from worker.model.kernels.packing import attention_kernel

_PACKAGES: Final = ("torch", "transformers", "triton", "fla-core", "safetensors", "rq", "redis")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device. Rates are None where they could not be measured; ``problems`` says why."""

    uuid: str
    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    capability: str | None
    matmul_flops: float | None
    host_copy_bytes_s: float | None
    attention: str
    problems: tuple[str, ...]


def examine_devices() -> list[DeviceReport]:
    """Every CUDA device that this process can see, or the CPU."""
    if not torch.cuda.is_available():
        return [_examine(torch.device("cpu"), torch.float32)]
    return [
        _examine(torch.device("cuda", index), torch.bfloat16)
        for index in range(torch.cuda.device_count())
    ]


def software() -> dict[str, str | None]:
    """Versions of what decides results and speed; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def software_problems() -> list[str]:
    """What is missing for work at full speed; nothing on a node without a GPU."""
    if not torch.cuda.is_available():
        advice = out_of_reach()
        return [] if advice is None else [advice]
    if importlib.util.find_spec("fla") is None:
        return [
            "fla-core is not installed: GatedDeltaNet hybrids run on torch's slow fallback; pip install 'swathe[gpu]'"
        ]
    return []


def _examine(device: torch.device, dtype: torch.dtype) -> DeviceReport:
    problems: list[str] = []
    facts: dict[str, Any] = {"memory_total_bytes": None, "memory_free_bytes": None}
    uuid, name, capability = "cpu", platform.processor() or platform.machine(), None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        uuid, name = f"GPU-{properties.uuid}", properties.name
        capability = f"{properties.major}.{properties.minor}"
        facts["memory_free_bytes"], facts["memory_total_bytes"] = torch.cuda.mem_get_info(device)

    def measured(what: str, measure: Any) -> float | None:
        try:
            return float(measure())
        except RuntimeError as error:  # CUDA's errors, out of memory included
            problems.append(f"{what} cannot be measured: {error}")
            return None

    return DeviceReport(
        uuid=uuid,
        name=name,
        capability=capability,
        matmul_flops=measured("matrix products", lambda: matmul_flops(device, dtype)),
        host_copy_bytes_s=measured("copies to the host", lambda: host_copy_bytes(device)),
        attention=attention_kernel(device, dtype),
        problems=tuple(problems),
        **facts,
    )
