"""Floating point operations of a forward pass over real tokens, for achieved rates and utilization.

Per token: 2 for each weight of the blocks' matrices (experts count by the share that a token uses) and, for each
gated delta rule head, 6 * d_k * d_v (state decay and update, read before, read after). Per sample of S tokens and
attention layer: 4 * head_size * heads for each (query, key) pair that is seen, S * (S + 1) / 2 pairs or fewer inside a
window. Embedding, norms, activations and the language model head are not counted; the head is not computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """What one loaded model costs."""

    per_token: float
    per_pair: float
    """Of one attention layer, over all heads."""
    windows: tuple[int | None, ...]
    """One entry for each attention layer; None sees everything before."""

    def of(self, lengths: Iterable[int]) -> float:
        """Operations of samples of these lengths, each alone."""
        total = 0.0
        kinds = {window: self.windows.count(window) for window in self.windows}
        for length in lengths:
            total += self.per_token * length
            for window, layers in kinds.items():
                total += self.per_pair * layers * _pairs(length, window)
        return total


def count_flops(blocks: Sequence[nn.Module], config: Any) -> FlopCount:
    """Read the cost of the loaded blocks off their weights and config."""
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * len(blocks))
    types = types[: len(blocks)]
    window = getattr(config, "sliding_window", None)
    everywhere = window if getattr(config, "layer_types", None) is None else None
    return FlopCount(
        per_token=sum(2 * _active_weights(block, config) for block in blocks)
        + types.count("linear_attention") * _delta_rule(config),
        per_pair=4.0 * _attention_width(config),
        windows=tuple(
            window if kind == "sliding_attention" else everywhere
            for kind in types
            if "attention" in kind and kind != "linear_attention"
        ),
    )


def _attention_width(config: Any) -> int:
    """Numbers in all heads of one attention layer; 0 where there is none (Mamba)."""
    # Where layers differ (Gemma 4), the config of all has no such sizes: the first layer's stand for them.
    config = next(iter(getattr(config, "per_layer_config", None) or [config]))
    heads = int(getattr(config, "num_attention_heads", None) or 0)
    return heads * int(getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))


def _pairs(length: int, window: int | None) -> int:
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _active_weights(block: nn.Module, config: Any) -> float:
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    used = _first(config, "num_experts_per_tok", "top_k_experts")
    share = used / experts if experts and used else 1.0
    return sum(
        parameter.numel() * (share if ".experts." in f".{name}" else 1.0)
        for name, parameter in block.named_parameters()
        if parameter.ndim > 1 and "bias" not in name
    )


def _first(config: Any, *names: str) -> int:
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def _delta_rule(config: Any) -> float:
    heads = getattr(config, "linear_num_value_heads", 0)
    sizes = getattr(config, "linear_key_head_dim", 0), getattr(config, "linear_value_head_dim", 0)
    return 6.0 * heads * sizes[0] * sizes[1]
