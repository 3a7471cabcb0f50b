"""GatedDeltaNet with separate projections (qwen3_5), in ``[B, L, C]`` from one end to the other.

The stock forward transposes to ``[B, C, L]`` for the convolution and back, and splits the result into query, key and
value by copying; around fla's kernels, which want ``[B, L, C]``, that is 5 % of a 27B model's time. Here the
convolution runs on the three parts, each straight into a tensor of its own.

Shapes: B rows, L tokens of a row, C channels, N heads, D head size.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn import functional

_PARTS: Final = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "norm", "out_proj"}


class Kernels(Protocol):
    """The two operations that mix tokens; both keep the samples of a packed row apart."""

    def convolve(
        self, mixed_BLC: torch.Tensor, weight_CW: torch.Tensor, sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Causal convolution along L, then silu; the channels in parts of ``sizes``, each contiguous."""
        ...

    def delta_rule(
        self, qkv: Sequence[torch.Tensor], a_BLN: torch.Tensor, b_BLN: torch.Tensor
    ) -> torch.Tensor:
        """The gated delta rule on ``[B, L, N, D]`` with raw decay and update gates."""
        ...


def fits(net: Any) -> bool:
    """Whether ``fused_forward`` computes what this module computes."""
    return (
        {name for name, _ in net.named_children()} == _PARTS
        and net.conv1d.bias is None
        and getattr(net, "activation", None) == "silu"
    )


def fused_forward(net: Any, kernels: Kernels) -> Callable[..., torch.Tensor]:
    """A forward for the module; without cache, and without padding masks, which right padding does not need."""
    key_dim, value_dim = int(net.key_dim), int(net.value_dim)

    def forward(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        rows, length, _width = hidden_states.shape
        mixed_BLC = net.in_proj_qkv(hidden_states)
        z_BLND = net.in_proj_z(hidden_states).view(rows, length, -1, net.head_v_dim)
        a_BLN, b_BLN = net.in_proj_a(hidden_states), net.in_proj_b(hidden_states)
        sizes = (key_dim, key_dim, value_dim)
        parts = kernels.convolve(mixed_BLC, net.conv1d.weight.squeeze(1), sizes)
        heads = (net.head_k_dim, net.head_k_dim, net.head_v_dim)
        qkv = [x.view(rows, length, -1, head) for x, head in zip(parts, heads, strict=True)]
        core_BLND = kernels.delta_rule(qkv, a_BLN, b_BLN)
        gated_BLND = net.norm(core_BLND, z_BLND)
        out: torch.Tensor = net.out_proj(gated_BLND.reshape(rows, length, value_dim))
        return out

    return forward


class TorchKernels:
    """The stock torch functions, for machines without fla and as the proof of ``fused_forward``."""

    def __init__(
        self, net: nn.Module, rule: Callable[..., Any], convolution: Callable[..., torch.Tensor]
    ) -> None:
        """``rule`` and ``convolution`` are the stock ones, made to keep samples apart."""
        self._net: Any = net
        self._rule, self._convolution = rule, convolution

    def convolve(
        self, mixed_BLC: torch.Tensor, weight_CW: torch.Tensor, sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """See Kernels."""
        out_BCL = self._convolution(mixed_BLC.transpose(1, 2), weight_CW, None, activation="silu")
        return [x.contiguous() for x in torch.split(out_BCL.transpose(1, 2), list(sizes), dim=-1)]

    def delta_rule(
        self, qkv: Sequence[torch.Tensor], a_BLN: torch.Tensor, b_BLN: torch.Tensor
    ) -> torch.Tensor:
        """See Kernels."""
        net = self._net
        query, key, value = qkv
        repeats = value.shape[2] // query.shape[2]
        decay = -net.A_log.float().exp() * functional.softplus(a_BLN.float() + net.dt_bias)
        out_BLND: torch.Tensor = self._rule(
            query.repeat_interleave(repeats, dim=2),
            key.repeat_interleave(repeats, dim=2),
            value,
            g=decay,
            beta=b_BLN.sigmoid(),
            use_qk_l2norm_in_kernel=True,
        )[0]
        return out_BLND
