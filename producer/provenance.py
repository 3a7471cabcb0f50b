"""Where a plan came from: enough to make it again, nothing that is secret."""

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import swathe

_PACKAGES: Final = ("swathe", "numpy", "pyarrow", "safetensors", "tokenizers", "transformers")


def provenance(
    argv: Sequence[str], *, planned_at: str, inputs: Mapping[str, Mapping[str, int | str]]
) -> dict[str, Any]:
    """The content of provenance.json but for what the plan itself adds."""
    return {
        "format_version": 1,
        "planned_at": planned_at,
        "argv": list(argv),
        "host": platform.node(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "versions": versions(),
        "git": git_revision(),
        "inputs": {name: dict(entry) for name, entry in inputs.items()},
    }


def versions() -> dict[str, str]:
    """Versions of what turns rows into tokens."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """The revision of a source checkout, or None for an installed package."""
    root = Path(swathe.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
