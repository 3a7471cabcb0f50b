"""The model's final norm as data, so that exports can apply it without the model.

Architectures write the same three norms under many class names, some of them with ``1 + weight``. The kind is
therefore found by trying: the module is run on a probe and compared with each formula.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from swathe import codec, names
from swathe.errors import ModelError
from swathe.store import Store

NormKind = Literal["rms", "rms_1p", "layernorm"]
"""``rms``: x / rms(x) * w. ``rms_1p``: x / rms(x) * (1 + w). ``layernorm``: (x - mean) / std * w + b."""

_ATTRIBUTES: Final = (
    "norm", "ln_f", "final_layer_norm", "final_layernorm", "final_norm", "norm_f", "embedding_norm",
)  # fmt: skip
"""``embedding_norm`` is LFM2's, and follows its last block for all that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalNorm:
    """Weight (and bias) of the final norm on the host, in the model's dtype."""

    weight_H: torch.Tensor
    bias_H: torch.Tensor | None
    eps: float
    kind: NormKind


def final_norm_module(backbone: nn.Module) -> nn.Module:
    """The module between the last block and the head. Raises ModelError when there is none."""
    for name in _ATTRIBUTES:
        if isinstance(module := getattr(backbone, name, None), nn.Module):
            return module
    msg = f"{type(backbone).__name__} has no final norm that swathe knows"
    raise ModelError(msg)


def read_final_norm(backbone: nn.Module) -> FinalNorm:
    """Read the final norm of a backbone. Raises ModelError when it has none of a known kind."""
    module = final_norm_module(backbone)
    eps, weight_H = norm_eps(module), getattr(module, "weight", None)
    if eps is None or not isinstance(weight_H, torch.Tensor):
        msg = f"{type(module).__name__}, the final norm, has no weight or no epsilon"
        raise ModelError(msg)
    bias_H = getattr(module, "bias", None)
    kind = norm_kind(module)
    return FinalNorm(
        weight_H=weight_H.detach().cpu().clone(),
        bias_H=None if bias_H is None else bias_H.detach().cpu().clone(),
        eps=eps,
        kind=kind,
    )


def norm_kind(module: nn.Module) -> NormKind:
    """Which formula a norm module computes. Raises ModelError when it is none of the known ones."""
    eps, weight_H = norm_eps(module), getattr(module, "weight", None)
    if eps is not None and isinstance(weight_H, torch.Tensor):
        # On the host and in fp32: a GPU's bf16 rounding must not decide which formula fits.
        probe = copy.deepcopy(module).to(device="cpu", dtype=torch.float32)
        probe.__dict__.pop("forward", None)
        x_NH = probe_values(4, weight_H.shape[0])
        with torch.inference_mode():
            found_NH = probe(x_NH)
        weight_H = weight_H.detach().float().cpu()
        bias_H = getattr(module, "bias", None)
        bias_H = torch.zeros_like(weight_H) if bias_H is None else bias_H.detach().float().cpu()
        for kind, formula in _FORMULAS.items():
            if torch.allclose(formula(x_NH, weight_H, bias_H, eps), found_NH, rtol=1e-4, atol=1e-5):
                return kind
    msg = f"the norm {type(module).__name__} is none of {', '.join(_FORMULAS)}"
    raise ModelError(msg)


def norm_eps(module: Any) -> float | None:
    """The small number in a norm's denominator, under the names that architectures give it."""
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(module, name, None), float):
            return value
    return None


def probe_values(*shape: int) -> torch.Tensor:
    """Fixed random numbers to try a module with."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) + 0.5


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


_Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
_FORMULAS: Final[dict[NormKind, _Formula]] = {
    "rms": lambda x, w, b, eps: _rms(x, eps) * w + b,
    "rms_1p": lambda x, w, b, eps: _rms(x, eps) * (1 + w) + b,
    "layernorm": lambda x, w, b, eps: nn.functional.layer_norm(x, w.shape, w, b, eps),
}


def store_final_norm(store: Store, norm: FinalNorm, fingerprint: str) -> None:
    """Keep the norm beside a run's states; one that is there stays."""
    tensors = {"weight": norm.weight_H, "bias": norm.bias_H}
    views = {
        name: codec.TensorView(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            data=tensor.contiguous().view(torch.uint8).numpy().data,
        )
        for name, tensor in tensors.items()
        if tensor is not None
    }
    metadata = {"kind": norm.kind, "eps": repr(norm.eps), "fingerprint": fingerprint}
    store.create(names.FINAL_NORM, b"".join(codec.encode(views, metadata)))
