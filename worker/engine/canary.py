"""Samples of finished ranges, computed again alone on the reference path and compared with what is to be stored.

The self-test asks once whether a device computes right; canaries ask during the run, on real samples, two questions.
Did the forward pass compute the sample right: its median token may differ from the reference path by ``SLACK`` times what
the self-test's median token did, or by as much as both paths were off float32 there: in a batch as small as the
self-test's, both may have run the same kernel and differ by nothing. And is that what lies in the buffer: the host makes
what is to be stored out of the same states once more, and every byte must agree. So a float8 run is judged as finely as any other; its rounding, which would
hide an error of a few hundredths, stands between the two questions and is not part of either. A device whose canary fails
is not to be trusted since its last good one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from swathe.clock import utc_now
from swathe.errors import SwatheError
from swathe.spec import CanaryRecord, Layer, RangeId, RunId
from worker.engine.layout import raw_bytes
from worker.engine.ranges import KeptSample, RangeStates, StateModel
from worker.engine.selftest import SelfTest, token_errors
from worker.engine.soundness import magnitudes

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
    stored_as_computed: bool

    @property
    def passed(self) -> bool:
        """Whether every layer is within its bound (NaN is not), and stored as it was computed."""
        return self.stored_as_computed and all(
            error <= self.bounds[layer] for layer, error in self.errors.items()
        )

    def record(self, run_id: RunId, *, worker: str, device: str) -> CanaryRecord:
        """The canary as it is kept in the store."""
        return CanaryRecord(
            run_id=run_id,
            range_id=self.range_id,
            row=self.row,
            tokens=self.tokens,
            errors=self.errors,
            bounds=self.bounds,
            stored_as_computed=self.stored_as_computed,
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
    return {
        error.layer: max(
            SLACK * error.between_median, error.fast_median + error.stock_median, _EXACT
        )
        for error in test.layers
    }


def take_canary(model: StateModel, states: RangeStates, bounds: Mapping[Layer, float]) -> Canary:
    """Compute the range's kept sample again and compare; ``states`` must not have been released."""
    kept = states.kept
    if kept is None:
        msg = f"range {states.samples.range_id} has no kept sample to take a canary from"
        raise SwatheError(msg)
    first, stop = (int(offset) for offset in states.samples.offsets[kept.sample : kept.sample + 2])
    again_SKH = model.reference(states.samples.ids(kept.sample))
    errors_K = np.median(token_errors(kept.states_SKH, again_SKH), axis=0)
    return Canary(
        range_id=states.samples.range_id,
        row=int(states.samples.rows[kept.sample]),
        tokens=stop - first,
        errors={
            str(layer): float(error) for layer, error in zip(model.layers, errors_K, strict=True)
        },
        bounds={str(layer): bounds[layer] for layer in model.layers},
        stored_as_computed=_stored_as_computed(states, kept, first),
    )


def _stored_as_computed(states: RangeStates, kept: KeptSample, first: int) -> bool:
    """Whether the kept sample's bytes, from token ``first`` of the range, are those that the host makes of its states."""
    states_SKH = kept.states_SKH.cpu()
    made = kept.layout.encode(states_SKH, magnitudes(states_SKH))
    for name, tensor in made.items():
        wanted = raw_bytes(tensor)
        found = np.frombuffer(states.tensors[name].data, np.uint8).reshape(-1, wanted.shape[1])
        if not np.array_equal(found[first : first + len(wanted)], wanted):
            return False
    return True
