"""The planned tokens of a run: written once by the plan, read range by range by whoever works on it.

A file ``tokens/00000.safetensors`` holds whole ranges of about four million tokens together:

    input_ids int32 [T]   loss_mask uint8 [T]   offsets int64 [n + 1], from 0   row int64 [n]
    range_starts int64 [m + 1]   index in the file of each range's first sample, and n

so a range is one contiguous slice of ``input_ids`` and one of ``loss_mask``: two ranged reads, once the file's
index (header, offsets, rows: about 200 KB) is known.
"""

import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from swathe import codec, names
from swathe.errors import FormatError, IntegrityError, ObjectMissingError
from swathe.samples import (
    TEXT_IDS,
    Int32,
    Int64,
    SampleBlock,
    UInt8,
    join_blocks,
    join_ids,
    offsets_of,
)
from swathe.spec import FORMAT_VERSION, RangeId, RunSpec, TokenFile
from swathe.store import Store

FILE_TOKENS: Final = 4_000_000
"""A file is closed with the range that brings it here: 20 MB, read whole in no time, few in number."""
_CACHED_FILES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeTokens:
    """The samples of one range, end to end in planned order: n samples, T tokens of all of them."""

    range_id: RangeId
    rows: Int64
    """[n] 0-based places in the user's data set."""
    offsets: Int64
    """[n + 1] first token of each sample, from 0; the last is T."""
    input_ids: Int32
    """[T]"""
    loss_mask: UInt8
    """[T]"""

    @property
    def count(self) -> int:
        """Samples n."""
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Tokens T."""
        return len(self.input_ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        lengths: list[int] = np.diff(self.offsets).tolist()
        return lengths

    def ids(self, sample: int) -> Int32:
        """Input ids of one sample, not copied."""
        return self.input_ids[self.offsets[sample] : self.offsets[sample + 1]]

    def keep(self, samples: Sequence[int]) -> "RangeTokens":
        """Only these samples, in their order."""
        chosen = list(samples)

        def join(values: Any) -> Any:
            parts = [values[self.offsets[i] : self.offsets[i + 1]] for i in chosen]
            return np.concatenate(parts) if parts else values[:0]

        return RangeTokens(
            range_id=self.range_id,
            rows=self.rows[chosen],
            offsets=offsets_of(np.diff(self.offsets)[chosen]),
            input_ids=join(self.input_ids),
            loss_mask=join(self.loss_mask),
        )


class TokenWriter:
    """Takes whole ranges in planned order and writes them; nothing counts before ``close``."""

    def __init__(self, store: Store, *, file_tokens: int = FILE_TOKENS) -> None:
        self._store = store
        self._file_tokens = file_tokens
        self._pending: list[tuple[SampleBlock, Int64]] = []
        self._files: list[TokenFile] = []
        self._rows: list[Int64] = []
        self._ids: list[pa.Array] = []
        self._lengths: list[Int32] = []
        self._samples = self._ranges = self._tokens = 0
        self._pending_tokens = 0
        self.ids_are_text = False
        """Whether the ids of the plan are strings; known after ``close``."""

    def add(self, block: SampleBlock, starts: Int64) -> None:
        """Append a block whose ranges begin at the samples ``starts`` (the first is 0)."""
        bounds = np.append(starts, len(block))
        first = 0
        while first < len(starts):
            stop = self._fitting(block.offsets[bounds], first)
            piece = block.slice(int(bounds[first]), int(bounds[stop]))
            self._pending.append((piece, bounds[first:stop] - bounds[first]))
            self._pending_tokens += len(piece.input_ids)
            if self._pending_tokens >= self._file_tokens:
                self._flush()
            first = stop

    def close(self) -> tuple[TokenFile, ...]:
        """Write the last file and ``rows.parquet``; returns what stands in run.json."""
        if self._pending:
            self._flush()
        table = pa.table({
            "row": np.concatenate([np.empty(0, np.int64), *self._rows]),
            "id": join_ids(self._ids),
            "length": np.concatenate([np.empty(0, np.int32), *self._lengths]),
        })  # fmt: skip
        self.ids_are_text = table.schema.field("id").type == TEXT_IDS
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", use_dictionary=False)
        self._store.write(names.TOKEN_ROWS, [buffer.getbuffer()])
        return tuple(self._files)

    def _fitting(self, ends: Int64, first: int) -> int:
        """The range up to which [first, stop) fills the open file; at least one range."""
        room = self._file_tokens - self._pending_tokens
        return max(first + 1, min(int(np.searchsorted(ends, ends[first] + room)), len(ends) - 1))

    def _flush(self) -> None:
        block = join_blocks([piece for piece, _ in self._pending])
        before = offsets_of(np.array([len(piece) for piece, _ in self._pending]))
        starts = [s + b for (_, s), b in zip(self._pending, before[:-1], strict=True)]
        range_starts = np.concatenate([*starts, before[-1:]]).astype(np.int64)
        tensors = {
            "input_ids": codec.view(block.input_ids),
            "loss_mask": codec.view(block.loss_mask),
            "offsets": codec.view(block.offsets),
            "row": codec.view(block.row),
            "range_starts": codec.view(range_starts),
        }
        metadata = {"format": "swathe tokens", "format_version": str(FORMAT_VERSION)}
        name = names.token_file(len(self._files))
        written = self._store.write(name, codec.encode(tensors, metadata))
        file = TokenFile(
            name=name,
            size_bytes=written.size_bytes,
            xxh3=written.xxh3,
            first_sample=self._samples,
            samples=len(block),
            tokens=len(block.input_ids),
            first_range=self._ranges,
            ranges=len(range_starts) - 1,
        )
        self._files.append(file)
        self._rows.append(block.row)
        self._ids.append(block.ids)
        self._lengths.append(block.lengths.astype(np.int32))
        self._samples += file.samples
        self._ranges += file.ranges
        self._pending, self._pending_tokens = [], 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """What must be known of a file before one of its ranges can be read."""

    header: codec.Header
    offsets: Int64
    rows: Int64
    range_starts: Int64


class TokenReader:
    """Reads planned ranges; keeps the indexes of the files it read last. Safe to use from several threads."""

    def __init__(self, store: Store, spec: RunSpec) -> None:
        self._store = store
        self._spec = spec
        self._indexes: OrderedDict[str, _Index] = OrderedDict()
        self._lock = threading.Lock()

    def read_range(self, range_id: RangeId) -> RangeTokens:
        """The samples of a range.

        Raises FormatError for a range outside the plan, IntegrityError when a file is missing or is not the
        planned one, StoreError when the store does not give it now.
        """
        file = self._spec.token_file_of(range_id)
        index = self._index(file)
        place = range_id - file.first_range
        first, stop = (int(at) for at in index.range_starts[place : place + 2])
        start, end = int(index.offsets[first]), int(index.offsets[stop])
        return RangeTokens(
            range_id=range_id,
            rows=index.rows[first:stop],
            offsets=index.offsets[first : stop + 1] - start,
            input_ids=self._tensor(file, index.header, "input_ids", (start, end)),
            loss_mask=self._tensor(file, index.header, "loss_mask", (start, end)),
        )

    def _index(self, file: TokenFile) -> _Index:
        with self._lock:
            if file.name in self._indexes:
                self._indexes.move_to_end(file.name)
                return self._indexes[file.name]
        index = self._read_index(file)
        with self._lock:
            self._indexes[file.name] = index
            while len(self._indexes) > _CACHED_FILES:
                self._indexes.popitem(last=False)
        return index

    def _read_index(self, file: TokenFile) -> _Index:
        info = self._store.stat(file.name)
        if info is None or info.size_bytes != file.size_bytes:
            found = "it is not there" if info is None else f"it has {info.size_bytes} bytes"
            raise self._damaged(file, f"{found}, the plan wrote {file.size_bytes}")
        try:
            header = codec.read_header(
                lambda at, size: self._store.read_range(file.name, at, size), origin=file.name
            )
        except (FormatError, ObjectMissingError) as error:
            raise self._damaged(file, str(error)) from error
        shapes = {
            "input_ids": ("int32", (file.tokens,)),
            "loss_mask": ("uint8", (file.tokens,)),
            "offsets": ("int64", (file.samples + 1,)),
            "row": ("int64", (file.samples,)),
            "range_starts": ("int64", (file.ranges + 1,)),
        }
        found_shapes = {name: (info.dtype, info.shape) for name, info in header.tensors.items()}
        if found_shapes != shapes or header.size_bytes != file.size_bytes:
            raise self._damaged(file, "its tensors are not those of the plan")
        index = _Index(
            header=header,
            offsets=self._tensor(file, header, "offsets"),
            rows=self._tensor(file, header, "row"),
            range_starts=self._tensor(file, header, "range_starts"),
        )
        self._check(file, index)
        return index

    def _check(self, file: TokenFile, index: _Index) -> None:
        """Refuse an index that would cut samples in the wrong places."""
        for array, last in ((index.offsets, file.tokens), (index.range_starts, file.samples)):
            if array[0] != 0 or array[-1] != last or bool((np.diff(array) <= 0).any()):
                raise self._damaged(file, "its offsets do not ascend from 0 to its end")

    def _tensor(
        self, file: TokenFile, header: codec.Header, name: str, part: tuple[int, int] | None = None
    ) -> Any:
        info = header.tensors[name]
        if part is not None:
            info = codec.slice_rows(info, *part)
        return codec.to_array(info, self._store.read_range(file.name, info.offset, info.size_bytes))

    def _damaged(self, file: TokenFile, reason: str) -> IntegrityError:
        msg = (
            f"{self._store.url}/{file.name}: planned tokens are damaged: {reason}; its ranges cannot be computed; "
            "copy the file back, or plan the run again in another folder"
        )
        return IntegrityError(msg, key=file.name)


def read_range(store: Store, spec: RunSpec, range_id: RangeId) -> RangeTokens:
    """The samples of one range; a TokenReader is better for more than one."""
    return TokenReader(store, spec).read_range(range_id)


def all_keys(files: Sequence[TokenFile]) -> set[str]:
    """Every key below ``tokens/`` that belongs to a plan of these files."""
    return {names.TOKEN_ROWS, *(file.name for file in files)}
