"""The planned tokens of a run: written once by the plan, read range by range by whoever works on it.

A file ``tokens/00000.safetensors`` holds whole ranges of about four million tokens together:

    input_ids int32 [T]   loss_mask uint8 [T]   offsets int64 [n + 1], from 0   row int64 [n]
    range_starts int64 [m + 1]   index in the file of each range's first sample, and n

so a range is one contiguous slice of ``input_ids`` and one of ``loss_mask``. Workers come through a file in order and
read it whole, one request for its hundred ranges.
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
import xxhash

from swathe import codec, names
from swathe.errors import ObjectMissingError, RunMismatchError
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
_HELD_FILES: Final = 4


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
class _Tokens:
    """A token file in memory, proven to be the planned one."""

    input_ids: Int32
    loss_mask: UInt8
    offsets: Int64
    rows: Int64
    range_starts: Int64


class TokenReader:
    """Reads planned ranges; holds the files it read last. Safe to use from several threads.

    A file is read whole and must have the hash that run.json records: two plans at once in one folder write under the
    same names, and a range of the other plan's tokens would look like any other.
    """

    def __init__(self, store: Store, spec: RunSpec) -> None:
        self._store = store
        self._spec = spec
        self._held: OrderedDict[str, _Tokens] = OrderedDict()
        self._lock = threading.Lock()

    def read_range(self, range_id: RangeId) -> RangeTokens:
        """The samples of a range, views of the file that is held.

        Raises FormatError for a range outside the plan, RunMismatchError when its file is missing or is not the
        planned one (no range can be blamed for that), StoreError when the store does not give it now.
        """
        file = self._spec.token_file_of(range_id)
        with self._lock:
            tokens = self._held.pop(file.name, None) or _read_tokens(self._store, file)
            self._held[file.name] = tokens
            while len(self._held) > _HELD_FILES:
                self._held.popitem(last=False)
        place = range_id - file.first_range
        first, stop = (int(at) for at in tokens.range_starts[place : place + 2])
        start, end = int(tokens.offsets[first]), int(tokens.offsets[stop])
        return RangeTokens(
            range_id=range_id,
            rows=tokens.rows[first:stop],
            offsets=tokens.offsets[first : stop + 1] - start,
            input_ids=tokens.input_ids[start:end],
            loss_mask=tokens.loss_mask[start:end],
        )


def _read_tokens(store: Store, file: TokenFile) -> _Tokens:
    data = memoryview(_read_file(store, file))
    header = codec.read_header(lambda at, size: bytes(data[at : at + size]), origin=file.name)

    def tensor(name: str) -> Any:
        info = header.tensors[name]
        return codec.to_array(info, data[info.offset : info.offset + info.size_bytes])

    return _Tokens(
        input_ids=tensor("input_ids"),
        loss_mask=tensor("loss_mask"),
        offsets=tensor("offsets"),
        rows=tensor("row"),
        range_starts=tensor("range_starts"),
    )


def _read_file(store: Store, file: TokenFile) -> bytes:
    """All bytes of a token file. Raises RunMismatchError when they are not those that the plan wrote."""
    try:
        data = store.read(file.name)
    except ObjectMissingError:
        problem = "it is not there"
    else:
        if xxhash.xxh3_128_hexdigest(data) == file.xxh3:
            return data
        problem = f"it has {len(data)} bytes, {file.size_bytes} planned"
        if len(data) == file.size_bytes:
            problem = "its content has another hash than run.json records"
    msg = (
        f"{store.url}/{file.name}: not the tokens that this run was planned with: {problem}; its ranges are not computed; "
        "it is damaged, or another plan was made here at the same time: copy the file back, or plan the run again in "
        "another folder"
    )
    raise RunMismatchError(msg)


def check_files(store: Store, spec: RunSpec) -> None:
    """Read all token files of a run. Raises RunMismatchError when one is missing or is not the planned one."""
    for file in spec.token_files:
        _read_file(store, file)


def read_range(store: Store, spec: RunSpec, range_id: RangeId) -> RangeTokens:
    """The samples of one range; a TokenReader is better for more than one."""
    return TokenReader(store, spec).read_range(range_id)


def all_keys(files: Sequence[TokenFile]) -> set[str]:
    """Every key below ``tokens/`` that belongs to a plan of these files."""
    return {names.TOKEN_ROWS, *(file.name for file in files)}
