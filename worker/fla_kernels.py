"""fla's Triton kernels in the form in which transformers' GatedDeltaNet calls its own functions.

fla is optional (the ``gpu`` extra) and needs a GPU; ``available`` says whether it can be used, and why not.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from worker import packing


@cache
def available() -> tuple[bool, str]:
    """Whether fla can be imported, with its version or the reason why not."""
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
        importlib.import_module("fla.modules.conv")
        version = importlib.import_module("fla").__version__
    # A half-installed Triton raises anything from OSError to AttributeError at import.
    except Exception as error:  # noqa: BLE001 - the reason is returned and logged by the caller
        return False, f"{type(error).__name__}: {error}"
    return True, f"fla {version}"


def delta_rule(net: Any) -> Callable[..., Any]:
    """The chunked gated delta rule over ``[B, L, N, D]``, with the packed pass's boundaries if there is one."""
    kernel = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        boundaries = packing.current()
        if boundaries is not None:
            boundaries.recurrence_calls += 1
        # transformers before 5.20 repeats query and key heads; the kernel takes unequal counts and is faster so.
        repeats = query.shape[2] // int(net.num_k_heads)
        if repeats > 1:
            query, key = query[:, :, ::repeats], key[:, :, ::repeats]
        out, _state = kernel(
            query,
            key,
            value,
            g=g,
            beta=beta,
            output_final_state=False,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            cu_seqlens=None if boundaries is None else boundaries.cu_seqlens,
        )
        return out, None

    return run


def convolution() -> Callable[..., torch.Tensor]:
    """The causal convolution over ``[B, C, L]``; fla itself works on ``[B, L, C]``."""
    kernel = importlib.import_module("fla.modules.conv").causal_conv1d

    def run(
        hidden_BCL: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        boundaries = packing.current()
        if boundaries is not None:
            boundaries.convolution_calls += 1
        out: Any = kernel(
            hidden_BCL.transpose(1, 2),
            weight=weight,
            bias=bias,
            activation=activation,
            cu_seqlens=None if boundaries is None else boundaries.cu_seqlens,
        )
        out_BLC: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return out_BLC.transpose(1, 2)

    return run
