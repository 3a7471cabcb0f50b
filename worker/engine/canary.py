"""Samples of finished ranges, computed again alone on the reference path and compared with what is to be stored.

The self-test asks once whether a device computes right; canaries ask during the run, on real samples. The bound comes
from the self-test: the median token of a canary may differ from the reference path by ``SLACK`` times what the
self-test's median token did. A device whose canary fails is not to be trusted since its last good one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import torch

from swathe.clock import utc_now
from swathe.errors import SwatheError
from swathe.spec import CanaryRecord, Layer, RangeId, RunId
from worker.engine.engine import StateModel
from worker.engine.ranges import RangeStates
from worker.engine.selftest import SelfTest, token_errors

SLACK: Final = 4.0
_EXACT: Final = 1e-4
EVERY_RANGES: Final = 200
"""One range in so many is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """One sample computed twice. ``errors`` are medians over its tokens, by layer."""

    range_id: RangeId
    row: int
    tokens: int
    errors: dict[str, float]
    bounds: dict[str, float]

    @property
    def passed(self) -> bool:
        """Whether every layer is within its bound; NaN is not."""
        return all(error <= self.bounds[layer] for layer, error in self.errors.items())

    def record(self, run_id: RunId, *, worker: str, device: str) -> CanaryRecord:
        """The canary as it is kept in the store."""
        return CanaryRecord(
            run_id=run_id,
            range_id=self.range_id,
            row=self.row,
            tokens=self.tokens,
            errors=self.errors,
            bounds=self.bounds,
            passed=self.passed,
            worker=worker,
            device=device,
            taken_at=utc_now(),
        )


class Choice(Protocol):
    """Picks the ranges that get a canary, and the sample in each."""

    def __call__(self, range_id: int, samples: int) -> int | None:
        """The place of the sample to compute again, of ``samples``; mostly None."""
        ...


def one_in(every: int = EVERY_RANGES) -> Choice:
    """A choice of one range in ``every``, at random but the same on every node and at every try; 0: none."""

    def choose(range_id: int, samples: int) -> int | None:
        rng = np.random.default_rng(range_id)
        chosen = bool(samples and every) and rng.integers(every) == 0
        return int(rng.integers(samples)) if chosen else None

    return choose


def canary_bounds(test: SelfTest) -> dict[Layer, float]:
    """How far a layer's median token may be from the reference path."""
    return {error.layer: max(SLACK * error.between_median, _EXACT) for error in test.layers}


def take_canary(
    model: StateModel, states: RangeStates, sample: int, bounds: Mapping[Layer, float]
) -> Canary:
    """Compute one sample of a range again and compare; ``states`` must not have been released."""
    view = states.hidden_states
    if states.samples.count == 0:
        msg = f"range {states.samples.range_id} has no samples to take a canary from"
        raise SwatheError(msg)
    first, stop = (int(offset) for offset in states.samples.offsets[sample : sample + 2])
    dtype = getattr(torch, view.dtype)
    stored_TKH = torch.frombuffer(view.data, dtype=dtype).view(view.shape)
    again_SKH = model.reference(states.samples.ids(sample)).cpu()
    errors_K = np.median(token_errors(stored_TKH[first:stop], again_SKH), axis=0)
    return Canary(
        range_id=states.samples.range_id,
        row=int(states.samples.rows[sample]),
        tokens=stop - first,
        errors={
            str(layer): float(error) for layer, error in zip(model.layers, errors_K, strict=True)
        },
        bounds={str(layer): bounds[layer] for layer in model.layers},
    )
