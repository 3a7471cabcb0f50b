"""Which rows can be processed: one vectorized pass over a block, the first reason of each bad row kept.

Legend: n rows of the block, T their items. A row is judged alone, so that a bad one never hurts its neighbours.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from swathe.errors import ConfigError
from swathe.samples import Int64, Rejected, SampleBlock, ragged_index
from swathe.spec import Overlong

Values = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the model and the user's policies allow; ``vocab_rows`` are the rows of the embedding table."""

    vocab_rows: int
    max_length: int | None = None
    overlong: Overlong = "reject"
    min_length: int = 1
    min_supervised: int = 1
    min_supervised_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.min_supervised_ratio <= 1:
            msg = f"min_supervised_ratio {self.min_supervised_ratio}: give a share from 0 to 1"
            raise ConfigError(msg)
        for name in ("max_length", "min_length", "min_supervised"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "min_supervised" else 1):
                msg = f"{name} {value} makes no sense; give a positive number"
                raise ConfigError(msg)
        if self.max_length is not None and self.min_length > self.max_length:
            msg = f"min_length {self.min_length} is more than max_length {self.max_length}: no row could stay"
            raise ConfigError(msg)


@dataclass(slots=True, kw_only=True)
class RawRows:
    """Rows before they are judged: values of any number type [T], offsets [n + 1]; a mask has its own offsets."""

    row: Int64
    ids: pa.Array
    values: Values
    offsets: Int64
    mask: Values | None
    mask_offsets: Int64
    reasons: dict[int, str] = field(default_factory=dict)
    """Place in the block -> why the row is rejected."""

    def reject(self, places: Values, reason: str) -> None:
        """Note a reason for rows that have none yet."""
        for place in places.tolist():
            self.reasons.setdefault(place, reason)


def judge(raw: RawRows, limits: Limits) -> tuple[SampleBlock, list[Rejected]]:
    """The rows that can be processed, and why the others cannot."""
    lengths = np.diff(raw.offsets)
    raw.reject(np.flatnonzero(lengths == 0), "empty")
    _judge_values(raw, limits.vocab_rows)
    if raw.mask is not None:
        _judge_mask(raw, lengths)
    if limits.max_length is not None and limits.overlong == "reject":
        for place in np.flatnonzero(lengths > limits.max_length).tolist():
            reason = f"too long ({lengths[place]} tokens, {limits.max_length} allowed)"
            raw.reasons.setdefault(place, reason)
    for place in np.flatnonzero(lengths < limits.min_length).tolist():
        reason = f"too short ({lengths[place]} tokens, {limits.min_length} wanted)"
        raw.reasons.setdefault(place, reason)
    block = _judge_supervised(raw, limits)
    rejected = [
        Rejected(row=int(raw.row[place]), id=raw.ids[place].as_py(), reason=raw.reasons[place])
        for place in sorted(raw.reasons)
    ]
    return block, rejected


def _judge_supervised(raw: RawRows, limits: Limits) -> SampleBlock:
    """The rows without a reason, cut to the longest length, less those of which too little is supervised then."""
    block, kept = _keep(raw, limits.max_length)
    if not len(block):
        return block
    supervised = np.add.reduceat(block.loss_mask, block.offsets[:-1], dtype=np.int64)
    # 0.07 of 100 tokens are 7, whatever the product rounds to.
    share = np.ceil(limits.min_supervised_ratio * block.lengths - 1e-6).astype(np.int64)
    wanted = np.maximum(share, limits.min_supervised)
    few = supervised < wanted
    for place in np.flatnonzero(few).tolist():
        found, enough = supervised[place], wanted[place]
        raw.reasons[int(kept[place])] = f"too few supervised tokens ({found}, {enough} wanted)"
    return block.take(np.flatnonzero(~few)) if few.any() else block


def _judge_values(raw: RawRows, vocab_rows: int) -> None:
    values = raw.values
    if values.dtype.kind == "f":
        values = values.astype(
            np.float64
        )  # float16 rounds a vocabulary of 50,257 and calls one of 128,256 infinite
        broken = ~np.isfinite(values) | (values != np.floor(values))
        for place, position in _first_of_rows(raw.offsets, broken):
            raw.reasons.setdefault(place, f"input_ids holds {values[position]}, no integer")
    elif len(values) == 0 or (int(values.min()) >= 0 and int(values.max()) < vocab_rows):
        return
    for place, position in _first_of_rows(raw.offsets, (values < 0) | (values >= vocab_rows)):
        at, value = position - int(raw.offsets[place]), values[position].item()
        shown = f"{value:.0f}" if isinstance(value, float) else value
        reason = (
            f"input id {shown} at position {at} is out of range: the model has {vocab_rows} rows"
        )
        raw.reasons.setdefault(place, reason)


def _judge_mask(raw: RawRows, lengths: Int64) -> None:
    mask_lengths = np.diff(raw.mask_offsets)
    for place in np.flatnonzero(mask_lengths != lengths).tolist():
        reason = f"loss_mask has {mask_lengths[place]} entries for {lengths[place]} input_ids"
        raw.reasons.setdefault(place, reason)
    mask = raw.mask
    if mask is None or mask.dtype.kind == "b":
        return
    for place, position in _first_of_rows(raw.mask_offsets, (mask != 0) & (mask != 1)):
        raw.reasons.setdefault(place, f"loss_mask holds {mask[position]}, neither 0 nor 1")


def _first_of_rows(offsets: Int64, flags: Values) -> list[tuple[int, int]]:
    """For each row with a flagged item: its place and the position of its first one in the flat array."""
    positions = np.flatnonzero(flags)
    places = np.searchsorted(offsets, positions, side="right") - 1
    rows, first = np.unique(places, return_index=True)
    return list(zip(rows.tolist(), positions[first].tolist(), strict=True))


def _keep(raw: RawRows, max_length: int | None) -> tuple[SampleBlock, Int64]:
    """The rows without a reason, cut to the longest length; and their places [n']."""
    kept = np.arange(len(raw.row), dtype=np.int64)
    if raw.reasons:
        kept = np.delete(kept, list(raw.reasons))
    lengths = np.diff(raw.offsets)[kept]
    cut = lengths if max_length is None else np.minimum(lengths, max_length)
    whole = len(kept) == len(raw.row) and cut.sum() == raw.offsets[-1] == len(raw.values)
    values, mask, offsets = raw.values, raw.mask, raw.offsets
    if not whole:
        index, offsets = ragged_index(raw.offsets[:-1][kept], cut)
        values = values[index]
        if mask is not None:
            mask_index, _ = ragged_index(raw.mask_offsets[:-1][kept], cut)
            mask = mask[mask_index]
    block = SampleBlock(
        row=raw.row[kept],
        ids=raw.ids.take(pa.array(kept)) if raw.reasons else raw.ids,
        input_ids=values.astype(np.int32),
        loss_mask=np.ones(len(values), np.uint8) if mask is None else mask.astype(np.uint8),
        offsets=offsets,
    )
    return block, kept
