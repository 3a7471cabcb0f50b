"""A range on its way through the engine: what is on the device, what was copied, what went wrong.

Shapes: T tokens of the range, S of one sample, K slots, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swathe.tokens import RangeTokens
from worker.engine.layout import Layout, Tensors
from worker.engine.ranges import KeptSample
from worker.engine.transfer import Copy, HostBuffer, Timer
from worker.model.batch import Batch


@dataclass(slots=True, eq=False)
class StartedRange:
    """A range whose work is queued. Only the engine that made it looks inside. Two of one range are two."""

    samples: RangeTokens
    buffer: HostBuffer
    layout: Layout
    stored: Tensors
    """In ``buffer``."""
    magnitudes_TK: torch.Tensor
    started_at: float
    input_wait_s: float
    buffer_wait_s: float
    faults: dict[int, str] = field(default_factory=dict)
    """Samples that cannot be computed, by index, with the reason."""
    copies: list[Copy] = field(default_factory=list)
    timers: list[Timer] = field(default_factory=list)
    padding_tokens: int = 0
    batches: int = 0
    out_of_memory: int = 0
    keep: int | None = None
    """The sample whose states stay on the device as they were computed."""
    _kept_SKH: torch.Tensor | None = None

    def place(self, sample: int) -> slice:
        """A sample's tokens in the range."""
        return slice(int(self.samples.offsets[sample]), int(self.samples.offsets[sample + 1]))

    def keep_from(self, batch: Batch, states_TKH: torch.Tensor) -> None:
        """Keep the wanted sample's states if it is in the batch."""
        if self.keep in batch.samples:
            first = sum(batch.lengths[: batch.samples.index(self.keep)])
            length = self.samples.lengths[self.keep]
            self._kept_SKH = states_TKH[first : first + length].clone()

    def kept(self, samples: Sequence[int]) -> KeptSample | None:
        """The kept sample by its place among ``samples``, those that have states."""
        if self.keep not in samples or self._kept_SKH is None:
            return None
        return KeptSample(
            sample=samples.index(self.keep), states_SKH=self._kept_SKH, layout=self.layout
        )
