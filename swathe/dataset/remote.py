"""An object of a store as a seekable file, for readers that want one.

``RemoteFile`` asks for what it is asked for: a parquet footer is one request. ``ReadAhead`` is for whoever reads most of the
file: blocks of 2 MiB, the next three on their way while one is read, at several places in turn (a parquet file's
columns lie apart). It holds four blocks for each such place and never more than 64, 128 MiB.
"""

import io
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise, takewhile
from typing import Any, Final

from swathe.store import Store

BLOCK_BYTES: Final = 2 << 20
_AHEAD: Final = 3
_HELD: Final = 64


class RemoteFile(io.RawIOBase):
    """Reads of a store's object, one request each. For one thread at a time."""

    def __init__(self, store: Store, key: str, size_bytes: int) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        """It is only read."""
        return True

    def seekable(self) -> bool:
        """Any place costs the same."""
        return True

    def tell(self) -> int:
        """The place of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move without a request."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as the object goes. Raises StoreError."""
        target = memoryview(buffer).cast("B")
        size_bytes = max(0, min(target.nbytes, self._size_bytes - self._at))
        self._fill(target[:size_bytes])
        self._at += size_bytes
        return size_bytes

    def _fill(self, target: memoryview) -> None:
        target[:] = self._store.read_range(self._key, self._at, target.nbytes)


class ReadAhead(RemoteFile):
    """The same, block by block, ahead of the reader.

    ``edges`` are places where something begins that is read by itself, such as a column of parquet: nobody who reads
    up to an edge goes on behind it, so no block reaches across one and no byte is asked for in vain.
    """

    def __init__(self, store: Store, key: str, size_bytes: int, edges: Iterable[int] = ()) -> None:
        super().__init__(store, key, size_bytes)
        cuts = sorted({0, *(edge for edge in edges if 0 < edge < size_bytes)})
        pieces = list(pairwise([*cuts, size_bytes]))
        self._starts = [at for piece in pieces for at in range(*piece, BLOCK_BYTES)] or [0]
        self._ends = [*self._starts[1:], size_bytes]
        self._edges = frozenset(bisect_right(self._starts, cut) - 1 for cut in cuts)
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._pool = ThreadPoolExecutor(_AHEAD + 1, "read-ahead")

    def close(self) -> None:
        """Wait for what is on its way, forget the rest."""
        self._pool.shutdown(cancel_futures=True)
        self._blocks.clear()
        super().close()

    def _fill(self, target: memoryview) -> None:
        done = 0
        while done < target.nbytes:
            at = self._at + done
            number = bisect_right(self._starts, at) - 1
            first = at - self._starts[number]
            part = memoryview(self._block(number))[first : first + target.nbytes - done]
            target[done : done + part.nbytes] = part
            done += part.nbytes

    def _block(self, number: int) -> bytes:
        """A block. Whoever begins a piece or comes from the block before it will want the next ones, and not that one."""
        wanted = [number]
        if number in self._edges or self._blocks.pop(number - 1, None) is not None:
            further = range(number + 1, min(number + 1 + _AHEAD, len(self._starts)))
            wanted += takewhile(lambda one: one not in self._edges, further)
        for one in wanted:
            if one not in self._blocks:
                self._blocks[one] = self._pool.submit(self._fetch, one)
        self._blocks.move_to_end(number)
        while len(self._blocks) > _HELD:
            self._blocks.popitem(last=False)
        return self._blocks[number].result()

    def _fetch(self, number: int) -> bytes:
        first = self._starts[number]
        return self._store.read_range(self._key, first, self._ends[number] - first)
