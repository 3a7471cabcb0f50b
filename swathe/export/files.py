"""Files of an export: whole or not there.

Each is written beside its place and renamed. A million small files are not flushed one by one (that would cost hours);
instead the disk is flushed once before the export is declared complete, and a resumed export writes again what is too
short to hold its tensors.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from swathe import codec

_PART: Final = ".part"
"""After the real suffix, so that no trainer takes a half-written file for one of its own."""


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> int:
    """Write a file by ``write`` and give it its name; returns its size."""
    part = path.with_name(path.name + _PART)
    with part.open("wb") as file:
        write(file)
        size_bytes = file.tell()
    part.replace(path)
    return size_bytes


def write_chunks(path: Path, chunks: Iterable[codec.Buffer]) -> int:
    """Write buffers one after another."""
    return write_atomically(path, lambda file: file.writelines(chunks))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON value, durably."""
    part = path.with_name(path.name + _PART)
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write tensors as one safetensors file, their bytes not copied."""
    views = {name: view(tensor) for name, tensor in tensors.items()}
    return write_chunks(path, codec.encode(views, {"format": "pt"}))


def write_torch(path: Path, value: Mapping[str, Any]) -> int:
    """Write a dict as ``torch.save`` does, each tensor with its own bytes only."""
    owned = {
        name: _owned(item) if isinstance(item, torch.Tensor) else item
        for name, item in value.items()
    }
    return write_atomically(path, lambda file: torch.save(owned, file))


def view(tensor: torch.Tensor) -> codec.TensorView:
    """A tensor as buffers for the codec."""
    return codec.TensorView(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data=tensor.contiguous().view(-1).view(torch.uint8).numpy().data,
    )


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    # torch.save writes the whole storage behind a view: here that would be the mapped shard.
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole and tensor.is_contiguous() else tensor.contiguous().clone()
