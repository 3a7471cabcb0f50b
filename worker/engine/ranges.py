"""What goes into the engine and what comes out of it: one range of samples, with and without states.

Shapes: n samples, T tokens of all of them, K slots, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swathe.codec import TensorView
from swathe.names import STATES_TENSOR
from swathe.spec import Layer, Quarantined
from swathe.tokens import RangeTokens
from worker.engine.layout import Layout
from worker.engine.transfer import HostBuffer
from worker.model.batch import Batch


class StateModel(Protocol):
    """What the engine needs of a model; ``worker.model.hidden_states.HiddenStateModel`` is the real one."""

    layers: tuple[Layer, ...]
    hidden_size: int

    @property
    def device(self) -> torch.device: ...  # noqa: D102 - see HiddenStateModel
    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102
    @property
    def can_pack(self) -> bool: ...  # noqa: D102
    @property
    def vocab_rows(self) -> int: ...  # noqa: D102
    @property
    def max_positions(self) -> int | None: ...  # noqa: D102
    @property
    def length_limits(self) -> tuple[int, ...]: ...  # noqa: D102
    def forward(self, batch: Batch, ids: Sequence[Any]) -> torch.Tensor: ...  # noqa: D102
    def reference(self, ids: Any) -> torch.Tensor: ...  # noqa: D102
    def flops(self, lengths: Sequence[int]) -> float: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeStats:
    """Where a range's time went and what it cost. Sums over ranges give rates: only seconds and counts are here."""

    samples: int
    tokens: int
    padding_tokens: int
    batches: int
    flops: float
    """Of the kept samples' tokens; see ``worker.model.flops``."""
    recomputed: int
    """Samples that went through the reference path because their states were not sound."""
    out_of_memory: int
    input_wait_s: float
    """Between the engine's last call and this range's start."""
    buffer_wait_s: float
    """For a free host buffer: the store is slower than the device."""
    forward_s: float
    """On the device, by events; on a CPU by the clock. Over ``wall_s`` it is the device's busy share."""
    copy_s: float
    """On the device, beside the next forward pass."""
    wall_s: float
    """From the end of the range before (or this one's start) to this one's end."""

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds by stage, as a range's record and the metrics name them."""
        return {
            "input_wait": self.input_wait_s,
            "buffer_wait": self.buffer_wait_s,
            "forward": self.forward_s,
            "copy": self.copy_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """One sample's states as the forward pass of its range made them, still on the device, for a canary."""

    sample: int
    """Its place in the range's ``samples``."""
    states_SKH: torch.Tensor
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeStates:
    """A computed range. ``tensors`` lie in one of the engine's host buffers until ``release``."""

    samples: RangeTokens
    """Those that have states, in planned order."""
    tensors: Mapping[str, TensorView]
    """``hidden_states`` [T, K, H] of ``samples`` end to end, and for float8 ``hidden_states_scales`` [T, K]."""
    quarantined: tuple[Quarantined, ...]
    stats: RangeStats
    buffer: HostBuffer
    kept: KeptSample | None = None
    """The sample that was asked to be kept; None when it was set aside or had to be computed again."""

    @property
    def hidden_states(self) -> TensorView:
        """[T, K, H] of ``samples``, end to end."""
        return self.tensors[STATES_TENSOR]

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(memoryview(tensor.data).nbytes for tensor in self.tensors.values())

    def release(self) -> None:
        """Give the host buffer back; ``tensors`` must not be read afterwards. Any thread, any number of times."""
        self.buffer.release()
