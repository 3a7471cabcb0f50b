"""A bounded folder of whole shards, for trainers that read a remote run for many epochs.

A shard is fetched once per machine, whichever of its processes asks first: it is downloaded in parallel parts to a
temporary, renamed, and then mapped like a local shard. The shards used longest ago make room, but for those that another
process is about to open. A file that is removed while a process has it open or mapped stays readable there.
"""

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from swathe.errors import IntegrityError, ObjectMissingError
from swathe.reader.index import Shard
from swathe.store import Store

_PART_BYTES: Final = 16 * 2**20
_PARTS_AT_ONCE: Final = 8
_LOCK: Final = ".lock"
_TEMPORARY: Final = ".tmp-"


class ShardCache:
    """``open(shard)`` is a local copy of a shard; the folder stays below ``limit_bytes`` plus one shard for each process."""

    def __init__(self, store: Store, folder: Path, *, run_id: str, limit_bytes: int) -> None:
        self._store = store
        self._folder = folder / run_id
        self._limit_bytes = limit_bytes

    def open(self, shard: Shard) -> BinaryIO:
        """The shard's local copy, fetched if it is not there, open for reading.

        Raises IntegrityError when the shard is not in the store, StoreError when it cannot be had now.
        """
        path = self._folder / Path(shard.key).name
        with self._locked(path):
            if _size(path) == shard.size_bytes:
                os.utime(path)  # the time of last use decides what makes room
            else:
                self._make_room(shard.size_bytes)
                self._fetch(shard, path)
            return path.open("rb")

    def _fetch(self, shard: Shard, path: Path) -> None:
        temporary = path.with_name(_TEMPORARY + path.name)
        starts = range(0, shard.size_bytes, _PART_BYTES)

        def fetch(start: int) -> None:
            size_bytes = min(_PART_BYTES, shard.size_bytes - start)
            data = memoryview(self._store.read_range(shard.key, start, size_bytes))
            while data:
                written = os.pwrite(descriptor, data, start)
                data, start = data[written:], start + written

        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE, "shard-cache") as pool:
                list(pool.map(fetch, starts))
        except ObjectMissingError as error:
            msg = f"{self._store.url}/{shard.key}: shard is missing; find all damage with: swathe verify"
            raise IntegrityError(msg, key=shard.key) from error
        else:
            temporary.replace(path)
        finally:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)

    def _make_room(self, size_bytes: int) -> None:
        held: list[tuple[float, int, Path]] = []
        for path in self._folder.glob(
            "[!.]*.safetensors"
        ):  # others' downloads are not to be touched
            try:
                info = path.stat()
            except FileNotFoundError:  # another process made room at the same time
                continue
            held.append((info.st_mtime, info.st_size, path))
        total = sum(size for _, size, _ in held) + size_bytes
        for _, size, path in sorted(held):
            if total <= self._limit_bytes:
                return
            with suppress(BlockingIOError), self._locked(path, fcntl.LOCK_NB):
                path.unlink(missing_ok=True)
                total -= size

    @contextmanager
    def _locked(self, path: Path, how: int = 0) -> Iterator[None]:
        """One process at a time per shard, so that none is fetched twice, or removed between its fetch and its use."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + _LOCK)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | how)
            yield
        finally:
            os.close(descriptor)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
