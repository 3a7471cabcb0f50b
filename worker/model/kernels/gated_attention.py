"""Attention whose output is gated (qwen3_5, qwen3_next), without the stock forward's copies.

The query projection makes query and gate side by side for each head. The stock forward copies the gate out, takes its
sigmoid and multiplies in three passes over memory; here one kernel reads the gate where it lies.

Shapes: B rows, L tokens of a row, N heads, D head size.
"""

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PARTS: Final = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_EAGER: Final = "eager_attention_forward"
_ROTARY: Final = "apply_rotary_pos_emb"

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fits(attention: Any) -> bool:
    """Whether ``fused_forward`` computes what this module computes."""
    if {name for name, _ in attention.named_children()} != _PARTS:
        return False
    names = inspect.unwrap(type(attention).forward).__code__.co_names
    doubled = attention.q_proj.out_features == 2 * attention.o_proj.in_features
    return doubled and {_EAGER, _ROTARY, "chunk", "sigmoid"} <= set(names)


def fused_forward(attention: Any, rotate: Rotate, gate: Gate) -> Callable[..., Any]:
    """A forward for the module, without cache. ``rotate`` takes ``[B, N, L, D]``, ``gate`` ``[B, L, N, D]``."""
    eager = inspect.unwrap(type(attention).forward).__globals__[_EAGER]
    size = int(attention.head_dim)

    def forward(
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        rows, length, _width = hidden_states.shape
        heads = (rows, length, -1, size)
        both = attention.q_proj(hidden_states).view(rows, length, -1, 2 * size)
        query_BLND, gate_BLND = both[..., :size], both[..., size:]
        query = attention.q_norm(query_BLND).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(hidden_states).view(heads)).transpose(1, 2)
        value = attention.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = rotate(query, key, *position_embeddings)
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(
            attention.config._attn_implementation,  # noqa: SLF001 - as the stock forward reads it
            eager,
        )
        out_BLND, weights = attend(
            attention,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=attention.scaling,
            **kwargs,
        )
        gated_BLND = gate(out_BLND, gate_BLND)
        return attention.o_proj(gated_BLND.reshape(rows, length, -1)), weights

    return forward
