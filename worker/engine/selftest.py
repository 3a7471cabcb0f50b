"""Is the fast path of this model right on this device? Asked before the first range, answered with numbers.

bf16 results of two implementations differ by rounding, so neither is compared with the other but both with float32:
the fast path may not be farther from it than 1.25 times the stock path is, at the median and at the 99th percentile of
tokens, for each layer. In float32 itself fast and stock must agree to 1e-4. A path that fails is not used: packing
falls back to padding, padding to the stock kernels. Where the stock path's own median token is half its length off, the
float32 pass is not that of this model, and a bound made of it would let anything pass.

Shapes: S tokens of a sample, K slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from swathe import log
from swathe.errors import ModelError, WorkerError
from swathe.spec import BatchForm, Layer
from worker.engine.soundness import fault, magnitudes
from worker.model.batch import cut_batches
from worker.model.hidden_states import HiddenStateModel

LENGTHS: Final = (5, 130, 1, 64, 335, 37, 700)
"""Shorter than a convolution, longer than a chunk of the delta rule; 1,272 tokens in all."""
SHORT_LENGTHS: Final = (5, 70, 1, 33)
"""For a CPU, where the long ones would take longer than a range."""
_RATIO: Final = 1.25
_EXACT: Final = 1e-4
_LARGEST: Final = 0.5
_AHEAD: Final = 0.1
_SEED: Final = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """Relative L2 errors of one layer against float32, over all tokens of the test."""

    layer: Layer
    fast_median: float
    fast_p99: float
    stock_median: float
    stock_p99: float
    between_median: float
    """Of the fast path against the stock path: what a canary may expect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """What the test of one batch form found; ``reason`` is empty when it passed."""

    form: BatchForm
    kernels: dict[str, str]
    layers: tuple[LayerError, ...]
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the form may be used."""
        return not self.reason


def prove(
    model: HiddenStateModel,
    form: BatchForm,
    *,
    failure: Literal["fall back", "refuse"] = "fall back",
    lengths: Sequence[int] = LENGTHS,
) -> SelfTest:
    """Test a form on the model's device; on failure give up packing, then the fast kernels, until one passes.

    Returns the test that passed; its ``form`` is the one to use. Raises WorkerError when none passes, or at once
    with ``refuse``, and ModelError when the model cannot be computed in batches on any device.
    """
    logger = log.get("selftest")
    forms: list[BatchForm] = (
        ["packed", "padded"] if form == "packed" and model.can_pack else ["padded"]
    )
    for attempt in (*forms, None):
        if attempt is None:
            model.fall_back("reference")
        elif attempt != forms[0]:
            model.fall_back("padded")
        test = self_test(model, attempt or "padded", lengths)
        if test.passed:
            logger.info(
                "self-test passed", form=test.form, kernels=test.kernels, layers=test.layers
            )
            return test
        logger.error("self-test failed", form=test.form, kernels=test.kernels, reason=test.reason)
        if failure == "refuse":
            break
    if sees_ahead(model):
        msg = f"{model.config.model_type} is not causal: states of a token depend on those after it; swathe cannot batch it"
        raise ModelError(msg)
    msg = f"the model's results are wrong on this device: {test.reason}; not computing with it"
    raise WorkerError(msg)


def self_test(
    model: HiddenStateModel, form: BatchForm, lengths: Sequence[int] = LENGTHS
) -> SelfTest:
    """Compare the fast path with the stock path and with float32 on a few short and long samples.

    Raises ModelError for a model whose states cannot be taken, whatever it runs on.
    """
    samples = random_samples(model, lengths)
    layers: tuple[LayerError, ...] = ()
    try:
        fast = _together(model, form, samples)
        stock = [model.reference(sample) for sample in samples]
        wide = [model.exact(sample) for sample in samples]
        reason = _unsound(fast, model.layers)
        layers = _layer_errors(model.layers, fast, stock, wide)
        reason = reason or _too_far(layers, model.dtype)
    except ModelError as error:
        if form == "padded":
            raise
        reason = str(error)
    # Whatever a kernel raises on a device it does not know is a failed test, told with its reason.
    except Exception as error:  # noqa: BLE001 - reported; the caller falls back or refuses
        reason = f"{type(error).__name__}: {error}"
    return SelfTest(form=form, kernels=model.kernels, layers=layers, reason=reason)


def sees_ahead(model: HiddenStateModel) -> bool:
    """Whether a sample's first half has other states when the second half is there."""
    (whole,) = random_samples(model, [64])
    half = len(whole) // 2
    errors_SK = token_errors(model.reference(whole)[:half], model.reference(whole[:half]))
    return bool(np.median(errors_SK) > _AHEAD)


def _together(
    model: HiddenStateModel, form: BatchForm, samples: Sequence[NDArray[np.int32]]
) -> list[torch.Tensor]:
    """States of each sample, from as few batches as the model allows."""
    lengths = [len(sample) for sample in samples]
    batches = cut_batches(
        lengths,
        form=form,
        max_batch_tokens=len(lengths) * max(lengths),
        limits=model.length_limits,
    )
    states: dict[int, torch.Tensor] = {}
    for batch in batches:
        states_TKH = model.forward(batch, [samples[sample] for sample in batch.samples])
        states.update(zip(batch.samples, torch.split(states_TKH, list(batch.lengths)), strict=True))
    return [states[sample] for sample in range(len(samples))]


def random_samples(model: HiddenStateModel, lengths: Sequence[int]) -> list[NDArray[np.int32]]:
    """Random ids, the same on every device."""
    rng = np.random.default_rng(_SEED)
    longest = model.max_positions or max(lengths)
    return [
        rng.integers(0, model.vocab_rows, min(length, longest)).astype(np.int32)
        for length in lengths
    ]


def token_errors(found_SKH: torch.Tensor, wanted_SKH: torch.Tensor) -> NDArray[np.float32]:
    """Relative L2 error ``[S, K]`` of each token and slot; 0 where both are zero, as those of unused ids may be."""
    difference = (found_SKH.float() - wanted_SKH.float()).norm(dim=-1)
    length = wanted_SKH.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    errors: NDArray[np.float32] = (difference / length).cpu().numpy()
    return errors


def _layer_errors(
    layers: tuple[Layer, ...], fast: Any, stock: Any, wide: Any
) -> tuple[LayerError, ...]:
    def join(found: Any, wanted: Any) -> NDArray[np.float32]:
        return np.concatenate([token_errors(f, w) for f, w in zip(found, wanted, strict=True)])

    fast_TK, stock_TK, between_TK = join(fast, wide), join(stock, wide), join(fast, stock)
    return tuple(
        LayerError(
            layer=layer,
            fast_median=float(np.median(fast_TK[:, slot])),
            fast_p99=float(np.quantile(fast_TK[:, slot], 0.99)),
            stock_median=float(np.median(stock_TK[:, slot])),
            stock_p99=float(np.quantile(stock_TK[:, slot], 0.99)),
            between_median=float(np.median(between_TK[:, slot])),
        )
        for slot, layer in enumerate(layers)
    )


def _unsound(fast: Any, layers: tuple[Layer, ...]) -> str:
    for states_SKH in fast:
        reason = fault(magnitudes(states_SKH).cpu().numpy(), layers)
        if reason is not None:
            return reason
    return ""


def _too_far(layers: tuple[LayerError, ...], dtype: torch.dtype) -> str:
    for errors in layers:
        if not errors.stock_median <= _LARGEST:
            return f"layer {errors.layer}: the stock path is {errors.stock_median:.2e} off the float32 pass, which cannot be its own"
        for name, fast, stock in (
            ("median", errors.fast_median, errors.stock_median),
            ("99th percentile", errors.fast_p99, errors.stock_p99),
        ):
            bound = _EXACT if dtype == torch.float32 else _RATIO * stock
            # Written so that NaN fails.
            if not fast <= bound:
                return (
                    f"layer {errors.layer}: error {fast:.2e} against float32 at the {name} of tokens, "
                    f"more than {bound:.2e} (the stock path: {stock:.2e})"
                )
    return ""
