"""A store in memory, for units and rehearsals: same protocol, nothing outlives the process."""

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from swathe.errors import ObjectMissingError, StoreError
from swathe.store.base import Buffer, ObjectInfo, Written


class MemoryStore:
    """A dict of objects behind a lock."""

    def __init__(self, url: str = "memory://run") -> None:
        self._url = url
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """A name for messages; it cannot be opened by another process."""
        return self._url

    def read(self, key: str) -> bytes:
        """All bytes of an object."""
        with self._lock:
            if key not in self._objects:
                msg = f"{self._url}/{key}: not there, cannot read it"
                raise ObjectMissingError(msg)
            return self._objects[key][0]

    def read_range(self, key: str, offset: int, size_bytes: int) -> bytes:
        """A slice of an object."""
        data = self.read(key)[offset : offset + size_bytes]
        if len(data) < size_bytes:
            msg = f"{self._url}/{key}: ends at byte {offset + len(data)}, {offset + size_bytes} wanted"
            raise StoreError(msg)
        return data

    def write(self, key: str, chunks: Iterable[Buffer]) -> Written:
        """Store the joined chunks."""
        data = b"".join(chunks)
        with self._lock:
            self._objects[key] = (data, time.time())
        return Written(size_bytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))

    def create(self, key: str, data: bytes) -> bool:
        """Store only under a free key."""
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = (bytes(data), time.time())
            return True

    def stat(self, key: str) -> ObjectInfo | None:
        """Size and time of an object."""
        with self._lock:
            found = self._objects.get(key)
        return found and ObjectInfo(key=key, size_bytes=len(found[0]), modified_s=found[1])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """A snapshot of the objects under a prefix."""
        with self._lock:
            items = [item for item in self._objects.items() if item[0].startswith(prefix)]
        for key, (data, modified_s) in items:
            yield ObjectInfo(key=key, size_bytes=len(data), modified_s=modified_s)

    def delete(self, key: str) -> None:
        """Forget an object."""
        with self._lock:
            self._objects.pop(key, None)

    def collect(self, *, older_than_s: float, prefix: str = "") -> int:
        """Dead writers leave nothing here."""
        del older_than_s, prefix
        return 0

    def free_bytes(self) -> int | None:
        """No limit of its own."""
        return None

    def local_path(self, key: str) -> Path | None:
        """There is no file."""
        del key
        return None
