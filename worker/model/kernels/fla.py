"""fla's Triton kernels for the gated delta rule and its convolution.

fla is optional (the ``gpu`` extra) and needs a GPU; ``available`` says whether it can be used, and why not. The
boundaries of a packed row are handed over on the host too, so that no kernel launch waits for the device.
"""

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from worker.model.kernels import packing, pointwise


@cache
def available() -> tuple[bool, str]:
    """Whether fla can be imported, with its version or the reason why not."""
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
        importlib.import_module("fla.modules.causal_conv1d")
        version = importlib.import_module("fla").__version__
    # A half-installed Triton raises anything from OSError to AttributeError at import.
    except Exception as error:  # noqa: BLE001 - the reason is returned and logged by the caller
        return False, f"{type(error).__name__}: {error}"
    return True, f"fla {version}"


class FlaKernels:
    """fla's kernels for one GatedDeltaNet, in both forms that the worker calls."""

    def __init__(self, net: Any) -> None:
        self._net = net
        self._rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        self._convolution = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d

    def convolve(
        self, mixed_BLC: torch.Tensor, weight_CW: torch.Tensor, sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """See ``worker.model.kernels.delta_net.Kernels``. Reads the parts where they lie and writes each to a tensor of its own."""
        self._count_convolution()
        parts = zip(
            torch.split(mixed_BLC, list(sizes), dim=-1),
            torch.split(weight_CW, list(sizes)),
            strict=True,
        )
        return [self._convolve(x, weight, None, "silu") for x, weight in parts]

    def delta_rule(
        self, qkv: Sequence[torch.Tensor], a_BLN: torch.Tensor, b_BLN: torch.Tensor
    ) -> torch.Tensor:
        """See ``worker.model.kernels.delta_net.Kernels``. The gates are computed inside the kernel."""
        net = self._net
        return self._run_rule(
            *qkv,
            g=a_BLN,
            beta=b_BLN,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=net.A_log,
            dt_bias=net.dt_bias,
        )

    def stock_delta_rule(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """In the form in which transformers' forward calls its own."""
        # transformers before 5.20 repeats query and key heads; the kernel takes unequal counts and is faster so.
        repeats = query.shape[2] // int(self._net.num_k_heads)
        if repeats > 1:
            query, key = query[:, :, ::repeats], key[:, :, ::repeats]
        wanted = ("g", "beta", "use_qk_l2norm_in_kernel")
        return self._run_rule(query, key, value, **{name: options[name] for name in wanted}), None

    def stock_convolution(
        self,
        hidden_BCL: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """In the form in which transformers' forward calls its own, over ``[B, C, L]``."""
        self._count_convolution()
        return self._convolve(hidden_BCL.transpose(1, 2), weight, bias, activation).transpose(1, 2)

    def _run_rule(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        boundaries = packing.current()
        if boundaries is not None:
            boundaries.recurrence_calls += 1
        if options.pop("use_qk_l2norm_in_kernel"):
            # fla's own kernel for it is tuned again, for 8 s, whenever the token count leaves its 4k bucket.
            norm = pointwise.for_device(pointwise.l2_norm, query.device)
            query, key = norm(query), norm(key)
        out: tuple[torch.Tensor, Any] = self._rule(
            query, key, value, output_final_state=False, **options, **_offsets(boundaries)
        )
        return out[0]

    def _count_convolution(self) -> None:
        boundaries = packing.current()
        if boundaries is not None:
            boundaries.convolution_calls += 1

    def _convolve(
        self,
        x_BLC: torch.Tensor,
        weight_CW: torch.Tensor,
        bias_C: torch.Tensor | None,
        activation: str | None,
    ) -> torch.Tensor:
        offsets = _offsets(packing.current())
        out: Any = self._convolution(
            x_BLC, weight=weight_CW, bias=bias_C, activation=activation, **offsets
        )
        out_BLC: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return out_BLC


def _offsets(boundaries: packing.Boundaries | None) -> dict[str, Any]:
    if boundaries is None:
        return {}
    # fla would make the chunks itself, and copy them in a way that waits for all work queued on the device: no range
    # could be put behind another then.
    return {
        "cu_seqlens": boundaries.cu_seqlens,
        "cu_seqlens_cpu": boundaries.cu_seqlens_host,
        "chunk_indices": boundaries.chunks,
    }
