"""The package ``speculators`` (vLLM): EAGLE-3, DFlash and others.

Source: speculators 0.9 ``train/data.py`` (ArrowDataset, BaseDataset) and hs_connectors 0.9 ``fp8_utils.py``. Its id k is
transformers' ``hidden_states[k]``, our layer k - 1; the last slot is the state BEFORE the final norm, which its
models apply themselves.
"""

from typing import Any, Final

import torch

from swathe.adapters.base import Adapter, Tensors
from swathe.adapters.selection import Needs, eagle3_layers
from swathe.reader.shards import SCALES, STATES

_FP8_MAX: Final = 448.0

_NEEDS: Final = Needs(trainer="speculators", aux=None, final=True, usual=eagle3_layers, id_offset=1)


class Speculators(Adapter):
    """``adapter[i]``: ``hidden_states`` [S, K * H], ``input_ids`` [S], ``verifier_last_hidden_states`` [S, H] (before
    the norm), ``loss_mask`` int64 [S], ``lengths`` [1], ``position_ids`` [S]; with ``approx_lengths``, as its loaders want.

    With ``fp8``, ``file(i)`` holds float8 with one scale per token, for ``hs_connectors.FP8Transfer``; from a float8 run
    by re-scaling its codes, from others by hs_connectors' own rule.
    """  # noqa: D205 - one sentence

    def __init__(self, *args: Any, fp8: bool = False, **options: Any) -> None:
        """See ``Adapter``."""
        super().__init__(*args, **options)
        self.fp8 = fp8

    @property
    def needs(self) -> Needs:
        """One or more layers and the final state."""
        return _NEEDS

    @property
    def post_norm(self) -> bool:
        """Before the norm."""
        return False

    @property
    def approx_lengths(self) -> list[int]:
        """Tokens of each sample, for ``MultipackDistributedBatchSamplerV2``."""
        return [int(length) for length in self.lengths]

    def file(self, index: int) -> Tensors:
        """``hs_{index}.safetensors``: ``token_ids`` int64 [S], ``hidden_states`` [S, K + 1, H] (, ``_scales``)."""
        member = int(self.members[index])
        if not self.fp8:
            sample = self._cut(self.dataset[member])
            states_SKH = self._cast(sample[STATES], sample["row"])
            return {"token_ids": sample["input_ids"], STATES: states_SKH}
        sample = self._cut(self.dataset.as_stored(member))
        if SCALES in sample:
            codes_SKH, scales_S11 = rescale_fp8(sample[STATES], sample[SCALES])
        else:
            codes_SKH, scales_S11 = quantize_fp8(self._cast(sample[STATES], sample["row"]))
        return {"token_ids": sample["input_ids"], STATES: codes_SKH, SCALES: scales_S11}

    def __getitem__(self, index: int) -> Tensors:
        """Raises IndexError, and IntegrityError naming the file when a shard is missing or damaged."""
        sample, aux_SD, final_SH = self._parts(index)
        length = len(sample["input_ids"])
        return {
            "hidden_states": aux_SD,
            "input_ids": sample["input_ids"],
            "verifier_last_hidden_states": final_SH,
            "loss_mask": sample["loss_mask"],
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }


def quantize_fp8(states_SKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """hs_connectors' rule: one float32 scale per token, largest magnitude over layers and channels / 448."""
    full_SKH = states_SKH.float()
    scales_S11 = (full_SKH.abs().amax(dim=(1, 2), keepdim=True) / _FP8_MAX).clamp(min=1e-12)
    return (full_SKH / scales_S11).to(torch.float8_e4m3fn), scales_S11


def rescale_fp8(
    codes_SKH: torch.Tensor, scales_SK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale per token, the largest of its slots', instead of one per slot.

    Power-of-two scales differ by shifts of the exponent, so no value changes but those of other slots that fall below
    2^-6 of the common scale, where float8 has fewer bits: these are rounded to multiples of 2^-9 of it. Quantizing
    anew with amax / 448, which is no power of two, would round nearly every value a second time.
    """
    # The scale of a row of zeros says nothing.
    used_SK = scales_SK.where(codes_SKH.float().any(dim=2), 0)
    common_S1 = used_SK.amax(dim=1, keepdim=True)
    common_S1 = common_S1.where(common_S1 > 0, scales_SK.amax(dim=1, keepdim=True))
    shifted_SKH = codes_SKH.float() * (scales_SK / common_S1)[..., None]
    return shifted_SKH.to(torch.float8_e4m3fn), common_S1[..., None]
