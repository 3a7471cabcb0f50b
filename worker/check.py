"""Compare stored states with an independent forward pass of the full model, sample by sample, unpadded.

Nothing of the engine is used: the whole text model is loaded by transformers alone, one sample at a time goes through
it, and the expected states are transformers' own ``hidden_states`` (index k+1 is the output of block k; the last
block's output is caught on its way into the final norm, because transformers' last entry is already normed).

What float8 may have rounded off is known for each code, half a step; only what an error has beyond that is held against
the limit. It is never more than the error before rounding was, so the limit is that of the computed dtype. An error
of all values by p shows as about p^1.5, because a shifted value often rounds to the same code: 5 % show as 2 %.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from swathe import HiddenStates
from swathe.errors import ConfigError, IncompleteRunError
from swathe.reader.float8 import rounding
from swathe.reader.shards import SCALES
from swathe.spec import Layer
from worker.model.backbone import laid_out, load_text_config, text_key_mapping
from worker.model.norm import final_norm_module

LIMITS: Final = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}
"""Largest median relative error by dtype; a wrong layer, neighbour or norm is of order 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """Relative L2 errors of one layer, over all tokens of the checked samples."""

    layer: Layer
    median: float
    worst: float
    unexplained: float
    """The median of what float8's rounding does not explain; ``median`` where nothing was rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """Outcome of a check; ``ok`` when every layer's unexplained error is within the limit."""

    rows: tuple[int, ...]
    tokens: int
    limit: float
    layers: tuple[LayerError, ...]

    @property
    def ok(self) -> bool:
        """Whether what is stored is what the model computes."""
        return all(layer.unexplained <= self.limit for layer in self.layers)


def check_run(
    run: str, checkpoint: Path, *, samples: int, device: torch.device, seed: int = 0
) -> CheckResult:
    """Check a few random samples of a sealed run. Raises IncompleteRunError when it holds none."""
    dataset = HiddenStates(run)
    if not len(dataset):
        msg = f"{run}: no stored samples to check"
        raise IncompleteRunError(msg)
    chosen = random.Random(seed).sample(range(len(dataset)), min(samples, len(dataset)))  # noqa: S311
    spec = dataset.spec
    if spec.model.random_weights:
        msg = f"{run}: its model has random weights, there is no checkpoint to compare the states with"
        raise ConfigError(msg)
    model = _load(checkpoint, spec.compute_dtype, device, trust=spec.model.trust_remote_code)
    errors, rows, tokens = list[torch.Tensor](), [], 0
    for index in chosen:
        sample = dataset.as_stored(index)
        rows.append(sample["row"])
        tokens += len(sample["input_ids"])
        expected_SKH = _forward(model, sample["input_ids"].to(device), dataset.layers)
        errors.append(_token_errors(sample, expected_SKH))
    # NaN compares as neither small nor large: it must fail.
    errors_2TK = torch.nan_to_num(torch.cat(errors, dim=1), nan=float("inf"))
    medians_2K, worst_2K = errors_2TK.median(dim=1).values.tolist(), errors_2TK.amax(dim=1).tolist()
    return CheckResult(
        rows=tuple(rows),
        tokens=tokens,
        limit=LIMITS[spec.compute_dtype],
        layers=tuple(
            LayerError(layer=layer, median=median, worst=worst, unexplained=unexplained)
            for layer, median, worst, unexplained in zip(
                dataset.layers, medians_2K[0], worst_2K[0], medians_2K[1], strict=True
            )
        ),
    )


def _token_errors(sample: dict[str, Any], expected_SKH: torch.Tensor) -> torch.Tensor:
    """Relative L2 errors ``[2, S, K]`` of a stored sample: whole, and beyond what rounding to float8 explains."""
    stored_SKH = sample["hidden_states"].to(expected_SKH.device).float()
    explained_SKH = torch.zeros(())
    if SCALES in sample:
        scales_SK = sample[SCALES].to(expected_SKH.device)
        explained_SKH = rounding(stored_SKH, scales_SK)
        stored_SKH = stored_SKH * scales_SK[..., None]
    difference_SKH = (stored_SKH - expected_SKH).abs()
    beyond_SKH = (difference_SKH - explained_SKH.to(difference_SKH.device)).clamp_min(0)
    norm_SK = expected_SKH.norm(dim=2).clamp_min(1e-30)
    return torch.stack(
        [difference_SKH.norm(dim=2) / norm_SK, beyond_SKH.norm(dim=2) / norm_SK]
    ).cpu()


def _load(checkpoint: Path, dtype: str, device: torch.device, *, trust: bool) -> Any:
    transformers.utils.logging.disable_progress_bar()
    config = load_text_config(checkpoint, trust_remote_code=trust)
    model = transformers.AutoModel.from_pretrained(
        checkpoint,
        config=config,
        key_mapping=text_key_mapping(checkpoint, laid_out(config, trust_remote_code=trust)),
        dtype=getattr(torch, dtype),
        device_map={"": device},
        trust_remote_code=trust,
    )
    return model.eval()


@torch.inference_mode()
def _forward(model: Any, ids_S: torch.Tensor, layers: Sequence[Layer]) -> torch.Tensor:
    """Expected states ``[S, K, H]`` in float32 of one sample."""
    before_norm: list[torch.Tensor] = []
    handle = final_norm_module(model).register_forward_pre_hook(
        lambda _module, args: before_norm.append(args[0])
    )
    try:
        output = model(input_ids=ids_S[None], use_cache=False, output_hidden_states=True)
    finally:
        handle.remove()
    states = output.hidden_states
    last = len(states) - 2
    # Mamba's list begins with the first block's output instead of the embedding.
    first = 0 if torch.equal(states[-2], before_norm[-1]) else 1
    picked = [
        before_norm[-1] if layer in ("final", last) else states[int(layer) + first]
        for layer in layers
    ]
    return torch.stack([hidden_BSH[0].float() for hidden_BSH in picked], dim=1)
