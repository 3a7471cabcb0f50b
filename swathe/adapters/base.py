"""What the three trainers' data sets have in common: which samples, which layers, which dtype.

Legend: S tokens of a sample, K layers, H hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from swathe.adapters.norm import FinalNorm, read_final_norm
from swathe.adapters.selection import Needs, select
from swathe.errors import ConfigError
from swathe.reader import HiddenStates
from swathe.reader.shards import SCALES, STATES
from swathe.spec import RunSpec

Tensors = dict[str, Any]
TrainDtype = Literal["bfloat16", "float16", "float32"]
_ANY_LENGTH: Final = 2**31 - 1


class Adapter(Dataset[Tensors], ABC):
    """A map-style data set in one trainer's terms, over the samples of a run that this trainer can use.

    ``layers`` are block numbers of the run (default: all it stores); ``dtype`` is that of the states; ``max_length``
    cuts samples; other options are those of ``HiddenStates``. A run of random weights is refused unless
    ``allow_random``: nothing may be trained on it.
    """

    def __init__(
        self,
        run: str | Path | HiddenStates,
        *,
        layers: Sequence[int] | None = None,
        dtype: TrainDtype = "bfloat16",
        max_length: int | None = None,
        allow_random: bool = False,
        **options: Any,
    ) -> None:
        """Raises ConfigError when the run cannot serve the trainer, saying what would be needed."""
        whole = run if isinstance(run, HiddenStates) else HiddenStates(run, **options)
        spec = whole.spec
        if spec.model.random_weights and not allow_random:
            msg = f"{whole.url}: the run is of random weights, nothing may be trained on it"
            raise ConfigError(msg)
        if whole.gives_codes:
            msg = (
                f"{whole.url}: opened with dequantize=False, but trainers take values; leave it out"
            )
            raise ConfigError(msg)
        self.selection = select(spec, self.needs, layers, run=whole.url)
        self.dataset = whole.with_layers(self.selection.layers)
        self.dtype = dtype
        self.max_length = max_length
        self._norm: FinalNorm | None = None
        if self.selection.final and self.post_norm:
            self._norm = read_final_norm(whole.store, spec)
        usable = self._usable()
        self.members: NDArray[Any] = (
            np.arange(len(whole)) if usable is None else usable.nonzero()[0]
        )
        """Samples of the run that the trainer can use: int64 [n]."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """What the trainer reads."""

    @property
    @abstractmethod
    def post_norm(self) -> bool:
        """Whether the trainer wants the final state after the model's final norm."""

    @abstractmethod
    def file(self, index: int) -> Tensors:
        """What the trainer's own offline file holds for a sample."""

    @abstractmethod
    def __getitem__(self, index: int) -> Tensors:
        """What the trainer's own data set gives for a sample."""

    @property
    def spec(self) -> RunSpec:
        """run.json."""
        return self.dataset.spec

    @property
    def lengths(self) -> NDArray[Any]:
        """Tokens of each usable sample, after the cut: int32 [n]."""
        lengths: NDArray[Any] = np.minimum(
            self.dataset.lengths[self.members], self.max_length or _ANY_LENGTH
        )
        return lengths

    @property
    def trainer_ids(self) -> list[int]:
        """The layers as the trainer numbers them."""
        return [layer + self.needs.id_offset for layer in self.selection.aux]

    def __len__(self) -> int:
        return len(self.members)

    def tokens(self, index: int) -> Tensors:
        """``row``, ``id``, ``input_ids`` int64 [S], ``loss_mask`` int64 [S] of a usable sample."""
        return self._cut(self.dataset.tokens(int(self.members[index])))

    def _parts(self, index: int) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        """A sample, its layers side by side [S, K * H], and its final state [S, H] (normed where that is wanted)."""
        sample = self._cut(self.dataset[int(self.members[index])])
        states_SKH = sample.pop("hidden_states")
        count = len(self.selection.aux)
        final_SH = states_SKH[:, -1]
        if self._norm is not None:
            # Before the cast: the norm must see what the model's own norm saw.
            final_SH = self._norm(final_SH)
        row = sample["row"]
        return sample, self._cast(states_SKH[:, :count].flatten(1), row), self._cast(final_SH, row)

    def _cast(self, states: torch.Tensor, row: int) -> torch.Tensor:
        """States in the trainer's dtype. Raises ConfigError for values that float16 does not hold."""
        cast = states.to(getattr(torch, self.dtype))
        if cast.dtype == torch.float16 and bool(cast.isinf().any()):
            msg = (
                f"{self.dataset.url}: row {row} has states up to {states.abs().max():.3g}, which float16 makes infinite "
                "(it ends at 65,504); use bfloat16 or float32"
            )
            raise ConfigError(msg)
        return cast

    def _cut(self, sample: Tensors) -> Tensors:
        sample["loss_mask"] = sample["loss_mask"].to(torch.int64)
        if self.max_length is not None:
            for name in {"input_ids", "loss_mask", STATES, SCALES} & sample.keys():
                sample[name] = sample[name][: self.max_length]
        return sample

    def _usable(self) -> NDArray[np.bool_] | None:
        """Which samples of the run the trainer takes: bool [n], or None for all."""
        return None


def supervised_pairs(dataset: HiddenStates, max_length: int | None) -> NDArray[np.bool_]:
    """Which samples have two supervised tokens in a row within their first ``max_length``: bool [n].

    One pass over the shards' loss masks, a byte a token, without Python touching a sample.
    """
    found = np.zeros(len(dataset), dtype=bool)
    for members, mask_T in dataset.shard_tokens("loss_mask"):
        pairs_before = np.concatenate([[0, 0], np.cumsum(mask_T[1:] & mask_T[:-1], dtype=np.int64)])
        first = dataset.offsets[members]
        stop = first + np.minimum(dataset.lengths[members], max_length or _ANY_LENGTH)
        # pairs_before[i] counts the pairs whose second token is before token i.
        found[members] = pairs_before[stop] > pairs_before[np.minimum(first + 1, stop)]
    return found
