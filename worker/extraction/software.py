"""Versions that may change a result's last bits; they stand in every record."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def software_versions(device: torch.device) -> dict[str, str]:
    """The libraries, the interpreter and the device."""
    versions = {name: version(name) for name in ("torch", "transformers")}
    try:
        versions["swathe"] = version("swathe")
    except PackageNotFoundError:
        versions["swathe"] = "source tree"
    versions["python"] = platform.python_version()
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["device"] = torch.cuda.get_device_name(device)
    return versions
