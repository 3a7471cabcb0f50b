"""The element-wise functions of ``worker.model.kernels.pointwise`` as Triton kernels, where what torch.compile makes is much slower.

With token counts left open, torch.compile's code does its index arithmetic in the inner loop: SwiGLU runs at 3.1 TB/s
instead of 4.3, and functions of strided or joined tensors at a third of the memory's rate. Each kernel here reads and
writes once, needs no tuning, and knows no token count at compile time.

Shapes: ``...`` leading dimensions, D the last; B rows, L tokens of a row, N heads, R the rotated part of a head.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl

_ELEMENTS: Final = 2048
_ROWS: Final = 32


@triton.jit
def _swiglu_kernel(gate, up, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate + place, mask=inside).to(tl.float32)
    u = tl.load(up + place, mask=inside).to(tl.float32)
    tl.store(out + place, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _l2_norm_kernel(x, out, rows, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    place = row[:, None] * D + column[None, :]
    inside = (row < rows)[:, None] & (column < D)[None, :]
    y = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)
    tl.store(out + place, (y * scale[:, None]).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid_gate_kernel(
    x,
    gate,
    out,
    gate_token,
    gate_head,
    N,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    inside = (head < N)[:, None] & (column < D)[None, :]
    place = token * N * D + head[:, None] * D + column[None, :]
    there = token * gate_token + head[:, None] * gate_head + column[None, :]
    y = tl.load(x + place, mask=inside).to(tl.float32)
    g = tl.load(gate + there, mask=inside).to(tl.float32)
    tl.store(out + place, (y * tl.sigmoid(g)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    x, cos, sin, x_token, x_head, N, HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    half = column < HALF
    inside = (head < N)[:, None] & half[None, :]
    angle = token * 2 * HALF + column
    cos_low = tl.load(cos + angle, mask=half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + angle + HALF, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + angle + HALF, mask=half, other=0.0).to(tl.float32)[None, :]
    place = token * x_token + head[:, None] * x_head + column[None, :]
    low = tl.load(x + place, mask=inside).to(tl.float32)
    high = tl.load(x + place + HALF, mask=inside).to(tl.float32)
    kind = x.dtype.element_ty
    tl.store(x + place, (low * cos_low - high * sin_low).to(kind), mask=inside)
    tl.store(x + place + HALF, (high * cos_high + low * sin_high).to(kind), mask=inside)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    size = gate.numel()
    _swiglu_kernel[(triton.cdiv(size, _ELEMENTS),)](gate, up, out, size, _ELEMENTS, num_warps=8)
    return out


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """``x / |x|``."""
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    rows, width = x.numel() // size, triton.next_power_of_2(size)
    _l2_norm_kernel[(triton.cdiv(rows, _ROWS),)](x, out, rows, size, width, _ROWS)
    return out


def sigmoid_gate(x_BLND: torch.Tensor, gate_BLND: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)``; the gate is read where it lies."""
    x_BLND = x_BLND.contiguous()
    out = torch.empty_like(x_BLND)
    rows, length, heads, size = x_BLND.shape
    gate = gate_BLND.reshape(rows * length, heads, size)
    _sigmoid_gate_kernel[(rows * length,)](
        x_BLND, gate, out, gate.stride(0), gate.stride(1), heads, size,
        triton.next_power_of_2(size), triton.next_power_of_2(heads), num_warps=8,
    )  # fmt: skip
    return out


def rotate_in_place(x_BLND: torch.Tensor, cos_BLR: torch.Tensor, sin_BLR: torch.Tensor) -> None:
    """Turn the first R of each head's D numbers by the token's angles."""
    rows, length, heads, _size = x_BLND.shape
    if x_BLND.stride(0) != length * x_BLND.stride(1) and rows > 1:
        for row in range(rows):
            one = slice(row, row + 1)
            rotate_in_place(
                x_BLND[one], cos_BLR.expand(rows, -1, -1)[one], sin_BLR.expand(rows, -1, -1)[one]
            )
        return
    shape = (rows, length, cos_BLR.shape[-1])
    cos, sin = cos_BLR.expand(shape).contiguous(), sin_BLR.expand(shape).contiguous()
    half = shape[-1] // 2
    _rotate_kernel[(rows * length,)](
        x_BLND, cos, sin, x_BLND.stride(1), x_BLND.stride(2), heads, half,
        triton.next_power_of_2(half), triton.next_power_of_2(heads),
    )  # fmt: skip


KERNELS: Final[dict[str, Callable[..., Any]]] = {
    function.__name__: function for function in (swiglu, l2_norm, sigmoid_gate, rotate_in_place)
}
"""By the name of the function in ``worker.model.kernels.pointwise`` that each replaces."""
