"""Buffers as what S3 takes: cut into parts without a copy, sent from where they lie, with a checksum."""

import base64
import hashlib
import itertools
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from swathe.store.base import Buffer

_BLOCK_BYTES: Final = 1 << 20
_MAX_PIECES: Final = 256


class Body:
    """Slices of buffers as the file that botocore asks for.

    ``read`` may return more than it was asked for, up to 1 MiB: both of its callers (hashing for the signature, and
    urllib3, which asks for 16 KiB) take what they get, and 64 times fewer steps leave the interpreter to others.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self._pieces = pieces
        self._starts = [0, *itertools.accumulate(piece.nbytes for piece in pieces)]
        self._at = 0

    def __len__(self) -> int:
        return self._starts[-1]

    def tell(self) -> int:
        """The place of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place, as in a file."""
        self._at = offset + (0, self._at, len(self))[whence]
        return self._at

    def read(self, size: int | None = None) -> Buffer:
        """The next piece, or nothing at the end; all that is left when no size is given."""
        if size is None or size < 0:
            return b"".join(iter(lambda: self.read(_BLOCK_BYTES), b""))
        if self._at >= len(self):
            return b""
        index = bisect_right(self._starts, self._at) - 1
        first = self._at - self._starts[index]
        block = self._pieces[index][first : first + max(size, _BLOCK_BYTES)]
        self._at += block.nbytes
        return block


def cut(chunks: Iterable[Buffer], part_bytes: int) -> Iterator[list[memoryview]]:
    """The chunks' bytes in parts of exactly ``part_bytes`` (the last may be shorter), as slices."""
    pieces: list[memoryview] = []
    room = part_bytes
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest.nbytes >= room:
            pieces.append(rest[:room])
            yield pieces
            rest, pieces, room = rest[room:], [], part_bytes
        if rest.nbytes:
            pieces.append(rest)
            room -= rest.nbytes
        if len(pieces) > _MAX_PIECES:
            # Crumbs cost more as slices than as a copy.
            pieces = [memoryview(b"".join(pieces))]
    if pieces:
        yield pieces


def checksum(kind: str, pieces: Iterable[memoryview]) -> dict[str, str]:
    """The parameter of a request that makes the store check what arrives."""
    if kind == "none":
        return {}
    if kind == "crc32":
        crc = 0
        for piece in pieces:
            crc = zlib.crc32(piece, crc)
        return {"ChecksumCRC32": base64.b64encode(crc.to_bytes(4, "big")).decode()}
    digest = hashlib.sha256() if kind == "sha256" else hashlib.md5(usedforsecurity=False)
    for piece in pieces:
        digest.update(piece)
    name = "ChecksumSHA256" if kind == "sha256" else "ContentMD5"
    return {name: base64.b64encode(digest.digest()).decode()}
