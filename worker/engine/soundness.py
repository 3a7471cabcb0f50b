"""Is what came out of the model possible at all: finite, and not all zero.

A broken kernel, an overflow in float16 or a layer that silently was not computed shows here, before anything is
stored. The check reads the largest magnitude of each token and slot, which the device reduces in one pass.

Shapes: T tokens, K slots, H hidden size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from swathe.spec import Layer


def magnitudes(states_TKH: torch.Tensor) -> torch.Tensor:
    """Largest magnitude ``[T, K]`` in float32; NaN and infinity survive the reduction."""
    largest_TK: torch.Tensor = torch.linalg.vector_norm(states_TKH, ord=float("inf"), dim=-1)
    return largest_TK.float()


def fault(magnitudes_SK: NDArray[np.float32], layers: Sequence[Layer]) -> str | None:
    """What is wrong with one sample, in words; None when nothing is."""
    broken = np.argwhere(~np.isfinite(magnitudes_SK))
    if len(broken):
        token, slot = broken[0].tolist()
        return f"layer {layers[slot]} is not finite at token {token}"
    empty = np.flatnonzero(magnitudes_SK.max(axis=0) == 0)
    if len(empty):
        return f"layer {layers[int(empty[0])]} is zero at every token"
    return None
