"""The order of samples and the cut into ranges: pure functions of lengths, and a stream of blocks through them.

Where an architecture packs, the order is the user's own. Where it must pad, samples are sorted by length inside windows
of 16,384 rows: 32k-token batches then compute about 1.4 % more tokens than they hold, and the data stay mixed.
A range takes samples until the next one would exceed its budget of tokens; padded tokens count where there is padding.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

from swathe.samples import Int64, SampleBlock, join_blocks
from swathe.spec import BatchForm, Batching

WINDOW_TOKENS: Final = 16_000_000
"""A window of very long samples closes here already: it is held in memory twice while it is sorted."""


def cut_ranges(lengths: Int64, budget: int, form: BatchForm) -> Int64:
    """Places where ranges start. A sample longer than the budget is a range of its own."""
    starts = []
    first = 0
    while first < len(lengths):
        starts.append(first)
        # Look at about as many samples as will fit, not at all that are left.
        part = lengths[first : first + 2 * (budget // int(lengths[first])) + 16]
        fitting = _fitting(part, budget, form)
        while fitting == len(part) < len(lengths) - first:
            part = lengths[first : first + 2 * len(part)]
            fitting = _fitting(part, budget, form)
        first += max(1, fitting)
    return np.array(starts, np.int64)


def _fitting(lengths: Int64, budget: int, form: BatchForm) -> int:
    """How many samples from the first on cost at most the budget; the cost only grows."""
    return int(np.searchsorted(_cost(lengths, form), budget, side="right"))


def _cost(lengths: Int64, form: BatchForm) -> Int64:
    if form == "packed":
        return np.cumsum(lengths)
    cost: Int64 = np.maximum.accumulate(lengths) * np.arange(1, len(lengths) + 1)
    return cost


def computed_tokens(lengths: Int64, starts: Int64, form: BatchForm) -> int:
    """Tokens that the ranges cost if each is one batch, padding included."""
    if form == "packed" or len(starts) == 0:
        return int(lengths.sum())
    longest = np.maximum.reduceat(lengths, starts)
    return int((longest * np.diff(np.append(starts, len(lengths)))).sum())


class Arranger:
    """Takes blocks in the user's order, gives blocks of whole ranges in planned order."""

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._pending: list[SampleBlock] = []
        self._rows = self._tokens = 0

    def add(self, block: SampleBlock) -> Iterator[tuple[SampleBlock, Int64]]:
        """Take a block; gives (samples, starts of their ranges) when enough are held."""
        self._hold(block)
        while self._rows >= self._batching.window_rows or self._tokens >= WINDOW_TOKENS:
            held = join_blocks(self._pending)
            self._drop()
            if self._batching.order == "user":
                yield from self._cut_stream(held)
                return
            # Where a window ends must not depend on how the rows came in blocks.
            full = int(np.searchsorted(held.offsets[1:], WINDOW_TOKENS)) + 1
            size = min(self._batching.window_rows, full, len(held))
            self._hold(held.slice(size, len(held)))
            yield self._sorted(held.slice(0, size))

    def finish(self) -> Iterator[tuple[SampleBlock, Int64]]:
        """Give what is left."""
        if self._rows:
            held = join_blocks(self._pending)
            self._drop()
            if self._batching.order == "user":
                yield held, self._cut(held)
            else:
                yield self._sorted(held)

    def _hold(self, block: SampleBlock) -> None:
        if len(block):
            self._pending.append(block)
            self._rows += len(block)
            self._tokens += len(block.input_ids)

    def _drop(self) -> None:
        self._pending, self._rows, self._tokens = [], 0, 0

    def _cut(self, block: SampleBlock) -> Int64:
        return cut_ranges(block.lengths, self._batching.range_tokens, self._batching.form)

    def _sorted(self, window: SampleBlock) -> tuple[SampleBlock, Int64]:
        window = window.take(np.argsort(window.lengths, kind="stable"))
        return window, self._cut(window)

    def _cut_stream(self, held: SampleBlock) -> Iterator[tuple[SampleBlock, Int64]]:
        """All but the last range, which goes on with the rows to come."""
        starts = self._cut(held)
        last = int(starts[-1])
        self._hold(held.slice(last, len(held)))
        if last:
            yield held.slice(0, last), starts[:-1]
