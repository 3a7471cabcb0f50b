"""Whether the last slot was stored after the final norm: the mistake behind many a drafter that accepts nothing.

A normed state divided by the norm's weight has root mean square 1 at every token; states before the norm have
magnitudes that differ by orders. So the weight alone tells them apart, without the model.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swathe import codec
from swathe.errors import FormatError

_TOLERANCE: Final = 0.05
"""Rounding moves a token's root mean square by less than one part in a hundred, also that of float8."""


class NormCheck:
    """Knows a norm's weight, from the bytes of a ``final_norm.safetensors``."""

    def __init__(self, data: bytes, *, origin: str) -> None:
        """Raises FormatError when the bytes are no such file."""
        header = codec.read_header(lambda at, size: data[at : at + size], origin=origin)
        info = header.tensors.get("weight")
        if info is None:
            msg = f"{origin}: holds no weight of a norm"
            raise FormatError(msg)
        raw = data[info.offset : info.offset + info.size_bytes]
        self._weight_H = to_float(codec.to_array(info, raw), info.dtype)
        if header.metadata.get("kind") == "rms_1p":
            self._weight_H = 1 + self._weight_H
        # A bias, or a mean taken off, leaves the magnitudes without this tell-tale.
        self.can_tell = header.metadata.get("kind") in ("rms", "rms_1p")

    def is_normed(self, last_SH: NDArray[np.float32]) -> bool:
        """Whether states [S, H] come after the norm; False where that cannot be told."""
        if not self.can_tell:
            return False
        kept_H = np.abs(self._weight_H) > 1e-3
        if not kept_H.any():
            return False
        unit_SH = last_SH[:, kept_H] / self._weight_H[kept_H]
        rms_S = np.sqrt((unit_SH**2).mean(axis=1))
        return bool(np.median(np.abs(rms_S - 1)) < _TOLERANCE)


def to_float(raw: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Raw items as float32; bfloat16 is its upper half, and float8_e4m3fn has 4 bits of exponent and 3 of mantissa."""
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e4m3fn":
        exponent, mantissa = (raw >> 3 & 15).astype(np.int32), (raw & 7).astype(np.float32)
        size = np.where(exponent, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
        return np.where(raw >> 7, -size, size)
    return raw.astype(np.float32)
