"""Float8 back to what was computed: codes times scales, and how far a code may be from the value that it stands for.

Legend: S tokens, K slots, H hidden size; codes float8_e4m3fn [S, K, H], scales float32 [S, K].
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def dequantize(
    codes_SKH: "torch.Tensor", scales_SK: "torch.Tensor", dtype: "torch.dtype"
) -> "torch.Tensor":
    """Values [S, K, H] in the dtype that they were computed in, which holds them exactly.

    One case apart: float16 below 2^-14, where it is coarser than the codes and gives the nearest, which is nearer to what
    was computed.
    """
    return (codes_SKH.float() * scales_SK[..., None]).to(dtype)


def rounding(codes_SKH: "torch.Tensor", scales_SK: "torch.Tensor") -> "torch.Tensor":
    """Half a step of float8 at each code, float32 [S, K, H]: what was computed lies within it."""
    import torch  # noqa: PLC0415 - torch is needed only where a tensor is asked for

    at_least_normal_SKH = codes_SKH.float().abs().clamp_min(2**-6)
    mantissa_SKH = torch.frexp(
        at_least_normal_SKH
    ).mantissa  # of [0.5, 1), so the quotient is a power of two
    return at_least_normal_SKH / mantissa_SKH / 32 * scales_SK[..., None]
