"""The safetensors container, written from buffers and read by byte ranges, without a second copy.

The format (https://github.com/huggingface/safetensors#format): eight bytes of header length, a JSON header with
dtype, shape and offsets of each tensor, then the tensors' bytes. The library's own ``save`` joins all bytes first
and cannot read a slice over a network, so this module speaks the format itself; any safetensors reader opens the
result. Tensors are laid out by item size, largest first, behind a header padded to 64 bytes, so that each one is
aligned for memory mapping. No torch here: bfloat16 and float8 are handed over as raw buffers.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swathe.errors import FormatError

Buffer = bytes | bytearray | memoryview
Array = NDArray[Any]

_ALIGN: Final = 64
_MAX_HEADER_BYTES: Final = 100_000_000
"""The reference implementation refuses longer headers."""

# dtype: (name in safetensors, bytes of an item, numpy type of the raw items)
_DTYPES: Final[Mapping[str, tuple[str, int, str]]] = {
    "float8_e4m3fn": ("F8_E4M3", 1, "u1"),
    "bfloat16": ("BF16", 2, "u2"),
    "float16": ("F16", 2, "f2"),
    "float32": ("F32", 4, "f4"),
    "uint8": ("U8", 1, "u1"),
    "int32": ("I32", 4, "i4"),
    "int64": ("I64", 8, "i8"),
}
_BY_CODE: Final[Mapping[str, str]] = {code: name for name, (code, _, _) in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A tensor to be written: contiguous bytes with their meaning."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor inside a file; ``offset`` is from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file holds. ``size_bytes`` is the size that the whole file must have."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    size_bytes: int


def view(array: Array) -> TensorView:
    """A numpy array as a tensor to be written; made contiguous if it is not."""
    array = np.ascontiguousarray(array)
    return TensorView(
        dtype=array.dtype.name, shape=array.shape, data=array.reshape(-1).view("u1").data
    )


def encode(tensors: Mapping[str, TensorView], metadata: Mapping[str, str]) -> Iterator[Buffer]:
    """The file's bytes in pieces: the header, then each tensor's own buffer, not copied.

    Raises FormatError when a buffer's size does not fit its dtype and shape.
    """
    order = sorted(tensors, key=lambda name: (-_DTYPES[tensors[name].dtype][1], name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        code, item_bytes, _ = _DTYPES[tensor.dtype]
        size_bytes = memoryview(tensor.data).nbytes
        if size_bytes != math.prod(tensor.shape) * item_bytes:
            msg = (
                f"tensor {name}: {size_bytes} bytes do not make {tensor.dtype} {list(tensor.shape)}"
            )
            raise FormatError(msg)
        entries[name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size_bytes],
        }
        end += size_bytes
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-(8 + len(header)) % _ALIGN)
    yield struct.pack("<Q", len(header)) + header
    for name in order:
        yield tensors[name].data


def read_header(read_range: Callable[[int, int], bytes], *, origin: str) -> Header:
    """Read a file's header through ``read_range(offset, size_bytes)``; ``origin`` names the file in errors.

    Raises FormatError when the file does not start like a safetensors file.
    """
    try:
        (length,) = struct.unpack("<Q", read_range(0, 8))
    except struct.error as error:
        msg = f"{origin}: shorter than any header; the file is damaged or no safetensors file"
        raise FormatError(msg) from error
    if not 2 <= length <= _MAX_HEADER_BYTES:
        msg = f"{origin}: header of {length} bytes; the file is damaged or no safetensors file"
        raise FormatError(msg)
    try:
        entries: dict[str, Any] = json.loads(read_range(8, length))
        metadata = entries.pop("__metadata__", {})
        start = 8 + length
        tensors = {name: _tensor_info(entry, start) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"{origin}: unreadable header ({error}); the file is damaged or no safetensors file"
        raise FormatError(msg) from error
    end = max((tensor.offset + tensor.size_bytes for tensor in tensors.values()), default=start)
    return Header(tensors=tensors, metadata=metadata, size_bytes=end)


def _tensor_info(entry: dict[str, Any], start: int) -> TensorInfo:
    """An entry of a header. Raises ValueError, KeyError or TypeError for one that cannot be right: a wrong shape would
    cut a file into wrong slices.
    """  # noqa: D205 - one sentence
    first, end = entry["data_offsets"]
    dtype, shape = _BY_CODE.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"])
    whole = all(type(number) is int and number >= 0 for number in (*shape, first, end))
    known = _DTYPES.get(dtype)
    if not whole or (known is not None and end - first != math.prod(shape) * known[1]):
        msg = f"bytes {first} to {end} do not hold {dtype} {list(shape)}"
        raise ValueError(msg)
    return TensorInfo(dtype=dtype, shape=shape, offset=start + first, size_bytes=end - first)


def slice_rows(info: TensorInfo, first: int, stop: int) -> TensorInfo:
    """The contiguous part [first, stop) of a tensor's leading axis."""
    row_bytes = info.size_bytes // info.shape[0] if info.shape[0] else 0
    return TensorInfo(
        dtype=info.dtype,
        shape=(stop - first, *info.shape[1:]),
        offset=info.offset + first * row_bytes,
        size_bytes=(stop - first) * row_bytes,
    )


def to_array(info: TensorInfo, data: Buffer) -> Array:
    """A tensor's bytes as a numpy array, not copied; bfloat16 and float8 come as raw unsigned integers."""
    if info.dtype not in _DTYPES:
        msg = f"dtype {info.dtype} is none that swathe writes"
        raise FormatError(msg)
    return np.frombuffer(data, dtype=_DTYPES[info.dtype][2]).reshape(info.shape)
