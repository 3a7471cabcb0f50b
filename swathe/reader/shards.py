"""Tensors out of shards: views of mapped files where there are files, ranged reads where there are none.

One sample with all its layers is one contiguous piece of ``hidden_states``, so a remote sample costs one ranged read.
The small tensors of a shard (ids, mask, scales: five bytes a token and four a slot, against tens of thousands) are
read once, in at most three requests together with the header (two without scales), and kept for the shards used last.
"""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

from swathe import codec, names
from swathe.errors import FormatError, IntegrityError, ObjectMissingError
from swathe.reader.index import Shard
from swathe.store import Store

if TYPE_CHECKING:
    import torch

_OPEN_SHARDS: Final = 128
"""Mapped shards kept at once by each process: far below any limit of open files or mappings."""
_KEPT_SIDES: Final = 256
_FIRST_READ_BYTES: Final = 512 * 1024
"""Covers the header and, in every dtype, most of the small tensors that lie before the states."""
STATES: Final = names.STATES_TENSOR
SCALES: Final = names.SCALES_TENSOR


class ShardSource(Protocol):
    """Where tensors come from; picklable, and safe to call from several threads."""

    def read(self, shard: Shard, name: str, first: int, stop: int) -> "torch.Tensor":
        """Tokens [first, stop) of a tensor. Raises IntegrityError naming the file when it is missing or damaged."""
        ...

    def will_need(self, shard: Shard, first: int, stop: int) -> None:
        """A hint that the states of these tokens are read soon."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapping:
    data: mmap.mmap
    header: codec.Header


class MappedShards:
    """Files of this machine, mapped privately: tensors are views, and no write of a trainer reaches the file."""

    def __init__(
        self, open_shard: Callable[[Shard], BinaryIO], open_shards: int = _OPEN_SHARDS
    ) -> None:
        self._open = open_shard
        self._limit = open_shards
        self._maps: OrderedDict[str, _Mapping] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, shard: Shard, name: str, first: int, stop: int) -> "torch.Tensor":
        """A view of the mapped file."""
        mapping = self._map(shard)
        info = _slice(mapping.header, shard, name, first, stop)
        return as_tensor(info, mapping.data, info.offset)

    def will_need(self, shard: Shard, first: int, stop: int) -> None:
        """Start the kernel's read-ahead."""
        mapping = self._map(shard)
        info = _slice(mapping.header, shard, STATES, first, stop)
        start = info.offset - info.offset % mmap.PAGESIZE
        mapping.data.madvise(mmap.MADV_WILLNEED, start, info.offset + info.size_bytes - start)

    def __getstate__(self) -> dict[str, Any]:
        """Mappings belong to a process and are made again where the copy is used."""
        return {"_open": self._open, "_limit": self._limit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_open"], state["_limit"])  # type: ignore[misc]

    def _map(self, shard: Shard) -> _Mapping:
        with self._lock:
            if (mapping := self._maps.get(shard.key)) is None:
                mapping = self._maps[shard.key] = _map_file(self._open, shard)
                if len(self._maps) > self._limit:
                    self._maps.popitem(last=False)  # unmapped once the last tensor on it is gone
            else:
                self._maps.move_to_end(shard.key)
            return mapping


def _map_file(open_shard: Callable[[Shard], BinaryIO], shard: Shard) -> _Mapping:
    try:
        with open_shard(shard) as file:
            path = file.name
            # Copy-on-write: torch wants writable memory.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise _missing(str(error.filename), shard) from error
    except ValueError as error:  # an empty file cannot be mapped
        raise _damaged(path, shard, f"0 bytes, {shard.size_bytes} expected") from error
    header = _header(lambda at, size: data[at : at + size], len(data), path, shard)
    return _Mapping(data=data, header=header)


@dataclass(slots=True)
class _Side:
    """A remote shard's header and the small tensors read so far."""

    header: codec.Header
    first_bytes: bytes
    tensors: dict[str, "torch.Tensor"] = field(default_factory=dict)


class RemoteShards:
    """Objects of a store, read by ranges."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sides: OrderedDict[str, _Side] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, shard: Shard, name: str, first: int, stop: int) -> "torch.Tensor":
        """States by one ranged read; of other tensors the shard's whole, once."""
        side = self._side(shard)
        if name == STATES:
            return self._fetch(shard, side, _slice(side.header, shard, name, first, stop))
        if name not in side.tensors:
            side.tensors[name] = self._fetch(shard, side, _info(side.header, shard, name))
        return side.tensors[name][first:stop]

    def will_need(self, shard: Shard, first: int, stop: int) -> None:
        """Nothing: whoever reads ahead of a remote store holds the samples themselves."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_store": self._store}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_store"])  # type: ignore[misc]

    def _side(self, shard: Shard) -> _Side:
        with self._lock:
            if (side := self._sides.get(shard.key)) is not None:
                self._sides.move_to_end(shard.key)
                return side
        # Outside the lock: two threads may read one header twice, none waits for another's request.
        url = f"{self._store.url}/{shard.key}"
        data = self._read(shard, 0, min(_FIRST_READ_BYTES, shard.size_bytes))

        def read_range(offset: int, size_bytes: int) -> bytes:
            if offset + size_bytes <= len(data):
                return data[offset : offset + size_bytes]
            return self._read(shard, offset, size_bytes)

        header = _header(read_range, shard.size_bytes, url, shard)
        small_end = _info(header, shard, STATES).offset
        if small_end > len(data):
            data += self._read(shard, len(data), small_end - len(data))
        side = _Side(header, data)
        with self._lock:
            side = self._sides.setdefault(shard.key, side)
            if len(self._sides) > _KEPT_SIDES:
                self._sides.popitem(last=False)
        return side

    def _fetch(self, shard: Shard, side: _Side, info: codec.TensorInfo) -> "torch.Tensor":
        stop = info.offset + info.size_bytes
        if stop <= len(side.first_bytes):
            data = side.first_bytes[info.offset : stop]
        else:
            data = self._read(shard, info.offset, info.size_bytes)
        return as_tensor(info, bytearray(data), 0)

    def _read(self, shard: Shard, offset: int, size_bytes: int) -> bytes:
        try:
            return self._store.read_range(shard.key, offset, size_bytes)
        except ObjectMissingError as error:
            url = f"{self._store.url}/{shard.key}"
            raise _missing(url, shard) from error


def as_tensor(info: codec.TensorInfo, data: bytearray | mmap.mmap, offset: int) -> "torch.Tensor":
    """A tensor on a writable buffer, not copied. Raises FormatError for a dtype that torch does not have."""
    import torch  # noqa: PLC0415 - torch is needed only where a tensor is asked for

    dtype = getattr(torch, info.dtype, None)
    if not isinstance(dtype, torch.dtype):
        msg = f"dtype {info.dtype} is none that swathe writes"
        raise FormatError(msg)
    count = info.size_bytes // dtype.itemsize
    if count == 0:
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(info.shape)


def _header(
    read_range: Callable[[int, int], bytes], size_bytes: int, origin: str, shard: Shard
) -> codec.Header:
    if size_bytes != shard.size_bytes:
        raise _damaged(origin, shard, f"{size_bytes} bytes, {shard.size_bytes} expected")
    try:
        header = codec.read_header(read_range, origin=origin)
    except FormatError as error:
        raise _damaged(origin, shard, str(error)) from error
    if header.size_bytes != size_bytes:
        raise _damaged(origin, shard, f"{size_bytes} bytes, its header says {header.size_bytes}")
    return header


def _info(header: codec.Header, shard: Shard, name: str) -> codec.TensorInfo:
    if name not in header.tensors:
        raise _damaged(shard.key, shard, f"it holds no tensor {name}")
    return header.tensors[name]


def _slice(
    header: codec.Header, shard: Shard, name: str, first: int, stop: int
) -> codec.TensorInfo:
    info = _info(header, shard, name)
    if not 0 <= first <= stop <= info.shape[0]:
        why = f"it holds {info.shape[0]} tokens, {first} to {stop} wanted"
        raise _damaged(shard.key, shard, why)
    return codec.slice_rows(info, first, stop)


def _missing(origin: str, shard: Shard) -> IntegrityError:
    msg = f"{origin}: shard is missing; find all damage with: swathe verify"
    return IntegrityError(msg, key=shard.key)


def _damaged(origin: str, shard: Shard, why: str) -> IntegrityError:
    msg = f"{origin}: shard is damaged ({why}); withdraw it with: swathe verify --repair"
    return IntegrityError(msg, key=shard.key)
