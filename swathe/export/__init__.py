"""From a run to the offline files of a trainer: streaming, in parallel, and resumable.

``export`` is the whole of it; what each format holds is in ``swathe.adapters``, which gives the same tensors without
files.
"""

import importlib.util
from pathlib import Path

from swathe.errors import ConfigError
from swathe.export.options import (
    ALGORITHMS,
    FORMATS,
    ExportOptions,
    ExportProgress,
    ExportReport,
    OnProgress,
)

__all__ = [
    "ALGORITHMS",
    "FORMATS",
    "ExportOptions",
    "ExportProgress",
    "ExportReport",
    "OnProgress",
    "export",
]


def export(
    run: str | Path,
    dest: str | Path,
    options: ExportOptions,
    *,
    progress: OnProgress | None = None,
) -> ExportReport:
    """Write the run into ``dest`` in a trainer's format; an interrupted export goes on where it stopped.

    ``progress`` is called from this thread after every sample. Raises ConfigError when the run cannot serve the format
    or ``dest`` holds something else, NoSpaceError before anything is written when it does not fit, IntegrityError
    naming the shard for damaged input.
    """
    if importlib.util.find_spec("torch") is None:
        msg = "exporting needs torch; install it with: pip install 'swathe[worker]'"
        raise ConfigError(msg)
    if "://" in str(dest):
        msg = f"{dest}: exports go to a local folder, because trainers read files"
        raise ConfigError(msg)
    from swathe.export.engine import run_export  # noqa: PLC0415 - imports torch

    return run_export(run, Path(dest), options, progress or (lambda _: None))
