"""Element-wise functions that cost memory traffic and no arithmetic, each written so that it becomes one kernel.

On a GPU they run as Triton kernels of our own where these are much faster (``worker.model.kernels.triton_pointwise``), else compiled by
``torch.compile(dynamic=True)``, one kernel for all token counts. Whole layers are not
compiled: that traces the torch form of the delta rule, takes 200 s and is slower. fla's Triton norms are not used
because they tune again for each new token count. All compute in fp32 and round once at the end, so they differ from
the stock modules by less than those differ from exact arithmetic.

Shapes: ``...`` any leading dimensions, D the last.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from swathe import log


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


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)``."""
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """``x / |x|``, as fla's kernels and transformers define it for queries and keys."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate_in_place(x_BLND: torch.Tensor, cos_BLR: torch.Tensor, sin_BLR: torch.Tensor) -> None:
    """Turn the first R of each head's D numbers by the token's angles; halves of R are the pairs."""
    half = cos_BLR.shape[-1] // 2
    low, high = x_BLND[..., :half].float(), x_BLND[..., half : 2 * half].float()
    cos, sin = cos_BLR.float()[:, :, None], sin_BLR.float()[:, :, None]
    turned = low * cos[..., :half] - high * sin[..., :half]
    x_BLND[..., half : 2 * half] = high * cos[..., half:] + low * sin[..., half:]
    x_BLND[..., :half] = turned


def for_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function itself on a CPU; on a GPU our own kernel for it, or the function compiled."""
    if device.type != "cuda":
        return function
    return _own_kernels().get(function.__name__) or _compiled(function)


def has_own_kernels() -> bool:
    """Whether our own kernels can be used here."""
    return bool(_own_kernels())


@cache
def _own_kernels() -> dict[str, Callable[..., Any]]:
    try:
        kernels = importlib.import_module("worker.model.kernels.triton_pointwise")
    # A half-installed Triton raises anything at import; torch.compile then tells what is wrong with it.
    except Exception as error:  # noqa: BLE001 - see above
        log.get("kernels").warning("Triton kernels cannot be used", reason=str(error))
        return {}
    found: dict[str, Callable[..., Any]] = kernels.KERNELS
    return found


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled
