"""Samples on their way from a data set to the plan: many at a time, as flat arrays.

Legend: n samples of the block, T their tokens. Sample i is ``input_ids[offsets[i]:offsets[i + 1]]``; nothing is
padded, so a block costs five bytes a token and is sliced, reordered and joined without Python touching a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]
SampleId = int | str

INT_IDS: Final = pa.int64()
TEXT_IDS: Final = pa.string()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A row that cannot be processed, and why."""

    row: int
    id: SampleId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One sample's tokens as an encoder makes them: input_ids int32 [S], loss_mask uint8 [S]."""

    input_ids: Int32
    loss_mask: UInt8


class Encoder(Protocol):
    """Turns conversations or texts into tokens."""

    def __call__(self, values: Sequence[Any]) -> list[Encoded | str]:
        """For each value its tokens, or the reason why there are none; never raises for a bad value."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBlock:
    """Row int64 [n], ids arrow int64 or string [n], tokens and mask [T], offsets int64 [n + 1] from 0."""

    row: Int64
    ids: pa.Array
    input_ids: Int32
    loss_mask: UInt8
    offsets: Int64

    def __len__(self) -> int:
        return len(self.row)

    @property
    def lengths(self) -> Int64:
        """Tokens of each sample: int64 [n]."""
        return np.diff(self.offsets)

    def slice(self, first: int, stop: int) -> "SampleBlock":
        """Samples [first, stop), as views of the same memory."""
        start, end = int(self.offsets[first]), int(self.offsets[stop])
        return SampleBlock(
            row=self.row[first:stop],
            ids=self.ids.slice(first, stop - first),
            input_ids=self.input_ids[start:end],
            loss_mask=self.loss_mask[start:end],
            offsets=self.offsets[first : stop + 1] - start,
        )

    def take(self, order: Int64) -> "SampleBlock":
        """The samples named by ``order``, in that order, copied."""
        index, offsets = ragged_index(self.offsets[:-1][order], self.lengths[order])
        return SampleBlock(
            row=self.row[order],
            ids=self.ids.take(pa.array(order)),
            input_ids=self.input_ids[index],
            loss_mask=self.loss_mask[index],
            offsets=offsets,
        )


def ragged_index(starts: Int64, lengths: Int64) -> tuple[Int64, Int64]:
    """Where the items of parts [start, start + length) of a flat array lie, and the parts' new offsets."""
    offsets = offsets_of(lengths)
    index = np.arange(offsets[-1], dtype=np.int64)
    index += np.repeat(starts - offsets[:-1], lengths)
    return index, offsets


def offsets_of(lengths: NDArray[Any]) -> Int64:
    """Running total of lengths [n], with a leading 0: int64 [n + 1]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def empty_block() -> SampleBlock:
    """No samples."""
    return SampleBlock(
        row=np.empty(0, np.int64),
        ids=pa.array([], INT_IDS),
        input_ids=np.empty(0, np.int32),
        loss_mask=np.empty(0, np.uint8),
        offsets=np.zeros(1, np.int64),
    )


def join_blocks(blocks: Sequence[SampleBlock]) -> SampleBlock:
    """All samples of the blocks, one after another; ids become text where the blocks' ids differ in kind."""
    if len(blocks) == 1:
        return blocks[0]
    if not blocks:
        return empty_block()
    return SampleBlock(
        row=np.concatenate([block.row for block in blocks]),
        ids=join_ids([block.ids for block in blocks if len(block)]),
        input_ids=np.concatenate([block.input_ids for block in blocks]),
        loss_mask=np.concatenate([block.loss_mask for block in blocks]),
        offsets=offsets_of(np.concatenate([block.lengths for block in blocks])),
    )


def join_ids(parts: Sequence[pa.Array]) -> pa.Array:
    """Ids of many blocks as one array: int64 where all are integers, else all as text."""
    kinds = {part.type for part in parts}
    if len(kinds) > 1:
        parts = [part.cast(TEXT_IDS) for part in parts]
    return pa.concat_arrays(parts) if parts else pa.array([], INT_IDS)
