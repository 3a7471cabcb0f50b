"""The model's final norm, from the run itself.

Applied as the model's own module does it, down to the order of casts: ``rms`` casts before it multiplies by the weight
(Llama, Qwen3 and most others), ``rms_1p`` multiplies by (1 + weight) in float32 and casts then (Gemma, Qwen3.5), and
``layernorm`` is torch's. So bfloat16 results are the model's to the bit.
"""

from dataclasses import dataclass
from typing import Final

import torch

from swathe import codec, names
from swathe.errors import ConfigError, FormatError, RunMismatchError
from swathe.reader.shards import as_tensor
from swathe.spec import RunSpec
from swathe.store import Store

_KINDS: Final = ("rms", "rms_1p", "layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalNorm:
    """``norm(x)``: states before the final norm [..., H] to states after it, in the dtype they came in."""

    kind: str
    eps: float
    weight_H: torch.Tensor
    bias_H: torch.Tensor | None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Raises FormatError when H is not the norm's."""
        if states.shape[-1] != len(self.weight_H):
            msg = f"{names.FINAL_NORM}: {len(self.weight_H)} weights for states of size {states.shape[-1]}"
            raise FormatError(msg)
        if self.kind == "layernorm":
            bias_H = None if self.bias_H is None else self.bias_H.to(states.dtype)
            return torch.nn.functional.layer_norm(
                states, self.weight_H.shape, self.weight_H.to(states.dtype), bias_H, self.eps
            )
        x = states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.kind == "rms_1p":
            return (x * (1.0 + self.weight_H.float())).to(states.dtype)
        return self.weight_H.to(states.dtype) * x.to(states.dtype)


def read_final_norm(store: Store, spec: RunSpec) -> FinalNorm:
    """Read the norm that the first worker left in the run.

    Raises ConfigError when there is none, FormatError for a kind that this code does not know, RunMismatchError for the
    norm of another run.
    """
    if store.stat(names.FINAL_NORM) is None:
        msg = (
            f"{store.url}: {names.FINAL_NORM} is missing, so states after the final norm cannot be had; "
            "copy it from another run of the same model, or use a format that takes states before the norm"
        )
        raise ConfigError(msg)
    origin = f"{store.url}/{names.FINAL_NORM}"
    data = store.read(names.FINAL_NORM)
    header = codec.read_header(lambda at, size: data[at : at + size], origin=origin)
    kind, eps = header.metadata.get("kind", ""), header.metadata.get("eps", "")
    if kind not in _KINDS or not eps or "weight" not in header.tensors:
        msg = f"{origin}: kind {kind!r} with eps {eps!r} is no norm that swathe can apply"
        raise FormatError(msg)
    if header.metadata.get("fingerprint", spec.fingerprint) != spec.fingerprint:
        msg = f"{origin}: the norm of another run (fingerprint {header.metadata['fingerprint']})"
        raise RunMismatchError(msg)
    buffer = bytearray(data)
    tensors = {
        name: as_tensor(info, buffer, info.offset).clone() for name, info in header.tensors.items()
    }
    return FinalNorm(
        kind=kind, eps=float(eps), weight_H=tensors["weight"], bias_H=tensors.get("bias")
    )
