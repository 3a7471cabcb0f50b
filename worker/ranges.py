"""What goes into the engine and what comes out of it: one range of samples, with and without states.

Shapes: n samples, T tokens of all of them, K slots, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from swathe.codec import TensorView
from swathe.spec import Layer, Quarantined, RangeId
from worker.batch import Batch
from worker.transfer import HostBuffer


class StateModel(Protocol):
    """What the engine needs of a model; ``worker.model.HiddenStateModel`` is the real one."""

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
    def forward(self, batch: Batch, ids: Sequence[Any]) -> torch.Tensor: ...  # noqa: D102
    def reference(self, ids: Any) -> torch.Tensor: ...  # noqa: D102
    def flops(self, lengths: Sequence[int]) -> float: ...  # noqa: D102


class TokenRange(Protocol):
    """A range's samples as the engine takes them; see RangeSamples for the meaning."""

    @property
    def range_id(self) -> RangeId: ...  # noqa: D102 - see RangeSamples
    @property
    def rows(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def offsets(self) -> NDArray[np.int64]: ...  # noqa: D102
    @property
    def input_ids(self) -> NDArray[np.int32]: ...  # noqa: D102
    @property
    def loss_mask(self) -> NDArray[np.uint8]: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeSamples:
    """The samples of one range, end to end in planned order."""

    range_id: RangeId
    rows: NDArray[np.int64]
    """[n] 0-based places in the user's data set."""
    offsets: NDArray[np.int64]
    """[n + 1] first token of each sample; the last is T."""
    input_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T]"""

    @classmethod
    def of(cls, tokens: TokenRange) -> "RangeSamples":
        """The same samples, whatever class holds them."""
        return cls(
            range_id=tokens.range_id,
            rows=tokens.rows,
            offsets=tokens.offsets,
            input_ids=tokens.input_ids,
            loss_mask=tokens.loss_mask,
        )

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

    def ids(self, sample: int) -> NDArray[np.int32]:
        """Input ids of one sample, not copied."""
        return self.input_ids[self.offsets[sample] : self.offsets[sample + 1]]

    def keep(self, samples: Sequence[int]) -> "RangeSamples":
        """Only these samples, in their order."""
        lengths = np.diff(self.offsets)[list(samples)]

        def join(values: NDArray[Any]) -> NDArray[Any]:
            parts = [values[self.offsets[i] : self.offsets[i + 1]] for i in samples]
            return np.concatenate(parts) if parts else values[:0]

        return RangeSamples(
            range_id=self.range_id,
            rows=self.rows[list(samples)],
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            input_ids=join(self.input_ids),
            loss_mask=join(self.loss_mask),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeStats:
    """Where a range's time went and what it cost. Sums over ranges give rates: only seconds and counts are here."""

    samples: int
    tokens: int
    padding_tokens: int
    batches: int
    flops: float
    """Of the kept samples' tokens; see ``worker.flops``."""
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
class RangeStates:
    """A computed range. ``hidden_states`` lies in one of the engine's host buffers until ``release``."""

    samples: RangeSamples
    """Those that have states, in planned order."""
    hidden_states: TensorView
    """[T, K, H] of ``samples``, end to end."""
    quarantined: tuple[Quarantined, ...]
    stats: RangeStats
    buffer: HostBuffer

    def release(self) -> None:
        """Give the host buffer back; ``hidden_states`` must not be read afterwards. Any thread, any number of times."""
        self.buffer.release()
