"""Slices of shards as tensors: views of mapped files where there are files, ranged reads everywhere else.

A sample is one slice of each tensor. Remotely that is one request a tensor, side by side, and one more for the header
of a shard that was not read lately; states are never cached, headers (about a kilobyte) are.
"""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from swathe import codec
from swathe.errors import IntegrityError, ObjectMissingError
from swathe.store import Store

if TYPE_CHECKING:
    import torch

_OPEN_SHARDS: Final = 128
"""Mapped shards kept at once by each process: far below any limit of open files or mappings."""
_KNOWN_HEADERS: Final = 4096
_HEAD_BYTES: Final = 4096
"""The first request for a header; every shard of ours has a shorter one."""
_REQUESTS: Final = 4


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [first, stop) of a shard of ``size_bytes``."""

    key: str
    size_bytes: int
    first: int
    stop: int


class ShardReader(Protocol):
    """Picklable; each process opens files and connections of its own."""

    def read(self, wanted: Slice, names: Sequence[str]) -> "list[torch.Tensor]":
        """The slice of each named tensor. Raises IntegrityError naming a shard that is missing or damaged."""
        ...


def shard_reader(store: Store) -> ShardReader:
    """The way to read a store's shards."""
    return RemoteShards(store) if store.local_path("") is None else MappedShards(store)


class MappedShards:
    """Files, mapped; the least recently used are unmapped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._open: OrderedDict[str, tuple[codec.Header, mmap.mmap]] = OrderedDict()

    def __reduce__(self) -> tuple[object, ...]:
        return MappedShards, (self._store,)

    def read(self, wanted: Slice, names: Sequence[str]) -> "list[torch.Tensor]":
        """Private views of the file: no byte is copied, no write reaches it."""
        header, mapped = self._map(wanted)
        infos = [_slice(header, name, wanted) for name in names]
        return [_tensor(info, mapped, info.offset) for info in infos]

    def _map(self, wanted: Slice) -> tuple[codec.Header, mmap.mmap]:
        key = wanted.key
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        path = self._store.local_path(key)
        if path is None or not path.is_file():
            raise _missing(self._store, key)
        _check_size(self._store, key, path.stat().st_size, wanted.size_bytes)
        with path.open("rb") as file:
            # Copy-on-write: torch wants writable memory, and no write of a trainer may reach the file.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header = codec.read_header(lambda at, size: mapped[at : at + size], origin=str(path))
        _check_size(self._store, key, header.size_bytes, wanted.size_bytes)
        self._open[key] = header, mapped
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)  # unmapped once the last tensor on it is gone
        return header, mapped


class RemoteShards:
    """Objects, read by ranges; safe for threads and forks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._headers: OrderedDict[str, codec.Header] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteShards, (self._store,)

    def read(self, wanted: Slice, names: Sequence[str]) -> "list[torch.Tensor]":
        """Tensors of their own memory."""
        try:
            header = self._header(wanted)
            infos = [_slice(header, name, wanted) for name in names]
            pieces = list(self._requests().map(lambda info: self._fetch(wanted.key, info), infos))
        except ObjectMissingError as error:
            raise _missing(self._store, wanted.key) from error
        return [_tensor(info, piece, 0) for info, piece in zip(infos, pieces, strict=True)]

    def _fetch(self, key: str, info: codec.TensorInfo) -> bytearray:
        # torch wants writable memory: one copy, of one sample.
        return bytearray(self._store.read_range(key, info.offset, info.size_bytes))

    def _header(self, wanted: Slice) -> codec.Header:
        key = wanted.key
        with self._lock:
            if key in self._headers:
                self._headers.move_to_end(key)
                return self._headers[key]
        head = self._store.read_range(key, 0, min(_HEAD_BYTES, wanted.size_bytes))

        def read(at: int, size: int) -> bytes:
            inside = at + size <= len(head)
            return head[at : at + size] if inside else self._store.read_range(key, at, size)

        header = codec.read_header(read, origin=f"{self._store.url}/{key}")
        _check_size(self._store, key, header.size_bytes, wanted.size_bytes)
        with self._lock:
            self._headers[key] = header
            if len(self._headers) > _KNOWN_HEADERS:
                self._headers.popitem(last=False)
        return header

    def _requests(self) -> ThreadPoolExecutor:
        """Threads of this process: a forked child inherits the pool without its threads."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(_REQUESTS, "shards")
        return self._pool[1]


def _slice(header: codec.Header, name: str, wanted: Slice) -> codec.TensorInfo:
    if name not in header.tensors:
        msg = f"{wanted.key}: no tensor {name}; find all damage with: swathe verify"
        raise IntegrityError(msg, key=wanted.key)
    return codec.slice_rows(header.tensors[name], wanted.first, wanted.stop)


def _tensor(info: codec.TensorInfo, data: Any, offset: int) -> "torch.Tensor":
    import torch  # noqa: PLC0415 - torch is needed only where a tensor is asked for

    dtype: torch.dtype = getattr(torch, info.dtype)
    count = info.size_bytes // dtype.itemsize
    if count == 0:
        return torch.empty(info.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(info.shape)


def _missing(store: Store, key: str) -> IntegrityError:
    msg = f"{store.url}/{key}: shard is missing; find all damage with: swathe verify"
    return IntegrityError(msg, key=key)


def _check_size(store: Store, key: str, size_bytes: int, recorded_bytes: int) -> None:
    if size_bytes != recorded_bytes:
        msg = f"{store.url}/{key}: {size_bytes} bytes, {recorded_bytes} recorded; run: swathe verify --repair"
        raise IntegrityError(msg, key=key)
