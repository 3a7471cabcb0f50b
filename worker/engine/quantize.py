"""Float8 with one power-of-two scale per token and slot, made on the device, before anything is copied to the host.

A scale is the smallest power of two that brings the largest magnitude of its row of H values to 448, the largest number
of float8_e4m3fn, or below. It is read off the bits of that magnitude: a logarithm rounds, and at 448 * 2^n a rounded one
wastes a bit or saturates. Dividing by a power of two is exact, so all that is lost is one rounding (to nearest, ties to
even): at most 1/16 of a value, or 2^-10 of the scale where that is more, which is less than the row's largest / 2^17.

Cost, in eager kernels over a chunk at a time: 15 bytes of device memory moved for each bfloat16 value, 13 GB for 32k
tokens of five layers of 5120, and at most 384 MB held beside the result.

Shapes: T tokens, K slots, H hidden size.
"""

import functools
import math
from typing import Final

import torch

from swathe.errors import WorkerError
from worker.engine.soundness import magnitudes

FLOAT8: Final = torch.float8_e4m3fn
_CHUNK_ITEMS: Final = 1 << 26
_MANTISSA: Final = 0x7FFFFF
_OF_448: Final = 0x600000
"""Mantissa of 448 = 1.75 * 2^8: a magnitude with a larger one needs the next scale."""


def quantize(
    states_TKH: torch.Tensor, magnitudes_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 ``[T, K, H]`` and scales float32 ``[T, K]`` of states in any dtype, with the magnitudes of their rows.

    The scale of a row of zeros is 1. What is not finite must have been found before: its codes mean nothing.
    """
    scales_TK = scales_of(magnitudes_TK)
    codes_TKH = torch.empty(states_TKH.shape, dtype=FLOAT8, device=states_TKH.device)
    limit = _largest(states_TKH.dtype)
    step = max(1, _CHUNK_ITEMS // max(1, math.prod(states_TKH.shape[1:])))
    chunks = (torch.split(tensor, step) for tensor in (states_TKH, scales_TK, codes_TKH))
    for states, scales, codes in zip(*chunks, strict=True):
        codes.copy_(states.clamp(-limit, limit) / scales[..., None])
    return codes_TKH, scales_TK


def scales_of(magnitudes_TK: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2(magnitude / 448)) exactly, and 1 for 0.

    Not below 2^-126: hardware that takes subnormal numbers for zero must be able to read a scale.
    """
    bits_TK = magnitudes_TK.view(torch.int32)
    exponent_TK = (bits_TK >> 23) - 8 + ((bits_TK & _MANTISSA) > _OF_448).int()
    scales_TK = (exponent_TK.clamp(min=1) << 23).view(torch.float32)
    return torch.where(magnitudes_TK == 0, 1.0, scales_TK)


def _largest(dtype: torch.dtype) -> float:
    """The largest number with float8's four bits that is finite in a dtype; above it, rounding might give infinity."""
    _, exponent = math.frexp(torch.finfo(dtype).max)
    return math.ldexp(0.9375, exponent)


@functools.cache
def require_float8(device: torch.device) -> None:
    """Compare what a device makes of numbers of every magnitude with what the host makes of them, bit by bit.

    Raises WorkerError when they differ: then the device must not store float8.
    """
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        states_TKH = _all_magnitudes(dtype)
        expected = quantize(states_TKH, magnitudes(states_TKH))
        there = states_TKH.to(device)
        found = quantize(there, magnitudes(there))
        for one, other in zip(expected, found, strict=True):
            if not torch.equal(one.view(torch.uint8), other.cpu().view(torch.uint8)):
                msg = (
                    f"device {device} rounds {dtype} to float8 otherwise than its host; it must not work on this run: "
                    "plan it with another --dtype, or use other devices"
                )
                raise WorkerError(msg)


def _all_magnitudes(dtype: torch.dtype) -> torch.Tensor:
    """Random rows [4096, 1, 64] from subnormal to the largest, each spread over what float8 resolves and more."""
    generator = torch.Generator().manual_seed(0)
    info = torch.finfo(dtype)
    low, high = math.frexp(info.tiny)[1] - 4, math.frexp(info.max)[1] - 4
    row_T = torch.linspace(low, high, 4096, dtype=torch.float64).round()[:, None, None]
    spread_TKH = torch.randint(-24, 1, (4096, 1, 64), generator=generator)
    values_TKH = torch.randn((4096, 1, 64), generator=generator, dtype=torch.float64)
    values_TKH[7] = 0
    return (values_TKH * torch.exp2(row_T + spread_TKH)).to(dtype)
