"""The protocol of a store: keys with ``/``, whole objects, written once or replaced whole, never half."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object as a listing shows it."""

    key: str
    size_bytes: int
    modified_s: float
    """Unix time of the last write, by the store's clock."""
    tag: str = ""
    """Another one after each change of the content (an ETag), where the store has such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What a write put into the store; ``xxh3`` (128 bit, hex) is over all bytes."""

    size_bytes: int
    xxh3: str


class Store(Protocol):
    """A run's root. All methods are safe to call from several threads.

    Failures are StoreError (try again later), NoSpaceError (the same, when there is room) or ObjectMissingError.
    After a failed or interrupted write the key holds what it held before, or (a remote store whose last answer was
    lost) all of the new object; never a part of it.
    """

    @property
    def url(self) -> str:
        """The root as a user writes it: a path or an s3:// prefix."""
        ...

    def read(self, key: str) -> bytes:
        """All bytes of an object."""
        ...

    def read_range(self, key: str, offset: int, size_bytes: int) -> bytes:
        """Exactly ``size_bytes`` from ``offset``. Raises StoreError when the object ends before."""
        ...

    def write(self, key: str, chunks: Iterable[Buffer]) -> Written:
        """Store the chunks' bytes, one after another, durable when this returns; replaces an older object.

        Chunks are not copied: each must stay unchanged until this returns. Chunks of gigabytes are fine.
        """
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Store ``data`` only if the key is free, atomically and durably; False when it was taken."""
        ...

    def stat(self, key: str) -> ObjectInfo | None:
        """The object's size and time, or None when it is not there."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key starts with ``prefix``, in no particular order; temporaries are not shown."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""
        ...

    def collect(self, *, older_than_s: float, prefix: str = "") -> int:
        """Remove what dead writers left (temporaries, unfinished uploads) longer ago than this; returns how many.

        ``prefix`` is a folder's, with its slash, or all of the store.
        """
        ...

    def free_bytes(self) -> int | None:
        """Room left, or None where the store has no such limit."""
        ...

    def local_path(self, key: str) -> Path | None:
        """The file behind a key, for memory mapping, or None where there is none."""
        ...
