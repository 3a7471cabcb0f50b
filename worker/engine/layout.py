"""What is kept of a range on the host: which tensors, where in its buffer, and how the model's states become them.

A run stored in the dtype that it is computed in keeps the states as they are; a float8 run keeps codes and scales. All
else (copies, gaps, shards) treats either as named tensors with tokens first.

Shapes: T tokens, K slots, H hidden size.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from swathe.codec import TensorView
from swathe.names import SCALES_TENSOR, STATES_TENSOR
from swathe.spec import StoredDtype
from worker.engine.quantize import FLOAT8, quantize, require_float8
from worker.engine.transfer import HostBuffer

Tensors = dict[str, torch.Tensor]
"""By the names that they have in a shard, [T, ...]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``parts``: dtype and shape of one token, widest dtype first, so that each is aligned behind the one before."""

    parts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    encode: Callable[[torch.Tensor, torch.Tensor], Tensors]
    """From states [T, K, H] and their magnitudes [T, K], on their device."""

    def size_bytes(self, tokens: int) -> int:
        """Of a buffer for so many tokens."""
        return tokens * sum(
            torch.Size(shape).numel() * dtype.itemsize for dtype, shape in self.parts.values()
        )

    def place(self, buffer: HostBuffer, tokens: int) -> Tensors:
        """The tensors in a buffer, to be filled."""
        placed: Tensors = {}
        end = 0
        for name, (dtype, shape) in self.parts.items():
            placed[name] = buffer.tensor(dtype, (tokens, *shape), offset_bytes=end)
            end += placed[name].nbytes
        return placed


def layout_of(
    stored: StoredDtype | None, *, dtype: torch.dtype, row: tuple[int, int], device: torch.device
) -> Layout:
    """The layout of states computed in ``dtype``, ``row`` = (K, H); stored as they are unless ``stored`` is float8.

    Raises WorkerError when the device cannot make float8.
    """
    if stored == "float8_e4m3fn":
        require_float8(device)
        parts = {SCALES_TENSOR: (torch.float32, row[:1]), STATES_TENSOR: (FLOAT8, row)}
        return Layout(parts=parts, encode=_float8)
    return Layout(parts={STATES_TENSOR: (dtype, row)}, encode=_as_they_are)


def _as_they_are(states_TKH: torch.Tensor, _magnitudes_TK: torch.Tensor) -> Tensors:
    return {STATES_TENSOR: states_TKH}


def _float8(states_TKH: torch.Tensor, magnitudes_TK: torch.Tensor) -> Tensors:
    codes_TKH, scales_TK = quantize(states_TKH, magnitudes_TK)
    return {SCALES_TENSOR: scales_TK, STATES_TENSOR: codes_TKH}


def close_gaps(tensors: Tensors, spans: Iterable[tuple[int, int]]) -> int:
    """Move the tokens of ascending ``spans`` together, in place; returns how many there are.

    What is left out are quarantined samples, which are rare, so this is too.
    """
    raw = [raw_bytes(tensor) for tensor in tensors.values()]
    end = 0
    for first, stop in spans:
        if first != end:
            for data in raw:
                data[end : end + stop - first] = data[first:stop]
        end += stop - first
    return end


def views(tensors: Tensors, tokens: int) -> dict[str, TensorView]:
    """The first ``tokens`` tokens, not copied, as they are written to a shard."""
    return {
        name: TensorView(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=(tokens, *tensor.shape[1:]),
            data=raw_bytes(tensor)[:tokens].reshape(-1).data,
        )
        for name, tensor in tensors.items()
    }


def raw_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """A host tensor's memory: [T, bytes of a token]."""
    tokens = tensor.shape[0]
    width = torch.Size(tensor.shape[1:]).numel() * tensor.element_size()
    return tensor.reshape(-1).view(torch.uint8).numpy().reshape(tokens, width)
