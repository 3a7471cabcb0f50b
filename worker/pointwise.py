"""Element-wise functions that cost memory traffic and no arithmetic, each written so that it becomes one kernel.

On a GPU they are compiled by ``torch.compile(dynamic=True)``, one kernel for all token counts. Whole layers are not
compiled: that traces the torch form of the delta rule, takes 200 s and is slower. fla's Triton norms are not used
because they tune again for each new token count. All compute in fp32 and round once at the end, so they differ from
the stock modules by less than those differ from exact arithmetic.

Shapes: ``...`` any leading dimensions, D the last.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * w``."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight_D.float()).to(x.dtype)


def rms_norm_1p(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * (1 + w)``."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight_D.float())).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """``x / rms(x) * w * silu(gate)``."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * weight_D.float() * functional.silu(gate.float())).to(x.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    return (functional.silu(gate.float()) * up.float()).to(gate.dtype)


def for_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function itself on a CPU, compiled on a GPU."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled
