"""What the three formats' files are called and how they are written."""

from pathlib import Path
from typing import Any, Protocol

import torch

from swathe.adapters import Adapter, ModelOpt, SpecForge, Speculators
from swathe.export import speculators_set
from swathe.export.files import write_safetensors, write_torch
from swathe.export.options import ExportOptions
from swathe.reader import HiddenStates

_FOLDER_SAMPLES = 2000
"""Files in a folder, as SpecForge's own dump has them."""


class FormatWriter(Protocol):
    """One format, bound to a run. ``write`` is called from several threads."""

    adapter: Adapter

    def path(self, index: int) -> Path:
        """Where a sample's file goes, relative to the export."""
        ...

    def write(self, index: int, path: Path) -> int:
        """Write a sample's file; returns its size."""
        ...

    def finish(self, dest: Path) -> int:
        """Write what goes with the samples; returns the bytes written. Parts that are there already stay."""
        ...


class SpeculatorsWriter:
    """``hidden_states/hs_{i}.safetensors`` beside an arrow set whose row i it belongs to, and ``token_freq.pt``."""

    def __init__(self, run: HiddenStates, options: ExportOptions) -> None:
        self.adapter: Adapter = Speculators(run, fp8=options.fp8, **_common(options))

    def path(self, index: int) -> Path:
        """Flat, without zero padding: the trainer builds the name from the row."""
        return Path("hidden_states", f"hs_{index}.safetensors")

    def write(self, index: int, path: Path) -> int:
        """One safetensors file."""
        return write_safetensors(path, self.adapter.file(index))

    def finish(self, dest: Path) -> int:
        """The arrow set and the token frequencies."""
        return speculators_set.write_set(self.adapter, dest)


class SpecForgeWriter:
    """``rows_{g}-{g + 2000}/data_{i}.ckpt``, as SpecForge's own preparation script lays them out."""

    def __init__(self, run: HiddenStates, options: ExportOptions) -> None:
        self.adapter: Adapter = SpecForge(run, algorithm=options.algorithm, **_common(options))

    def path(self, index: int) -> Path:
        """2,000 files to a folder."""
        return Path(_folder(index), f"data_{index}.ckpt")

    def write(self, index: int, path: Path) -> int:
        """One torch.save file."""
        return write_torch(path, self.adapter.file(index))

    def finish(self, dest: Path) -> int:
        """Nothing goes with the samples."""
        del dest
        return 0


class ModelOptWriter(SpecForgeWriter):
    """``rows_{g}-{g + 2000}/data_{i}.pt``: ModelOpt takes any ``**/*.pt``."""

    def __init__(self, run: HiddenStates, options: ExportOptions) -> None:
        self.adapter: Adapter = ModelOpt(run, **_common(options))

    def path(self, index: int) -> Path:
        """2,000 files to a folder."""
        return Path(_folder(index), f"data_{index}.pt")


def open_format(run: HiddenStates, options: ExportOptions) -> FormatWriter:
    """The writer of the format asked for. Raises ConfigError when the run cannot serve it."""
    if options.format == "speculators":
        return SpeculatorsWriter(run, options)
    return (SpecForgeWriter if options.format == "specforge" else ModelOptWriter)(run, options)


def sample_bytes(adapter: Adapter) -> Any:
    """Bytes of each sample's tensors, without headers: int64 [n]."""
    slots = len(adapter.selection.aux) + adapter.selection.final
    item_bytes = getattr(torch, adapter.dtype).itemsize
    if isinstance(adapter, Speculators):
        item_bytes = 1 if adapter.fp8 else item_bytes
        extra = 8 + 4 * adapter.fp8
    else:
        extra = 16
    per_token = slots * adapter.spec.model.hidden_size * item_bytes + extra
    return adapter.lengths.astype("i8") * per_token


def _folder(index: int) -> str:
    first = index // _FOLDER_SAMPLES * _FOLDER_SAMPLES
    return f"rows_{first}-{first + _FOLDER_SAMPLES}"


def _common(options: ExportOptions) -> dict[str, Any]:
    return {
        "layers": options.layers,
        "dtype": options.dtype,
        "max_length": options.max_length,
        "allow_random": options.allow_random,
    }
