"""NVIDIA ModelOpt: EAGLE-3 and DFlash from offline files.

Source: nvidia-modelopt 0.47 ``torch/speculative/eagle/utils.py`` (OfflineSupervisedDataset). Its id k is our layer k.
Final states are AFTER the final norm: it can also take them before, but applies a norm only for the architectures of
its own list, in which Qwen3.5 and Qwen3.6 are not.
"""

from typing import Any, Final

import torch

from swathe.adapters.base import Adapter, Tensors
from swathe.adapters.selection import Needs, eagle3_layers

_NEEDS: Final = Needs(trainer="ModelOpt", aux=None, final=True, usual=eagle3_layers)
_IGNORED: Final = -100
"""transformers' LabelSmoother.ignore_index, at the last position, which has no next token."""


class ModelOpt(Adapter):
    """``adapter[i]``: ``input_ids``, ``attention_mask``, ``loss_mask``, ``labels`` int64 [S], ``base_model_hidden_states``
    [S, H] (after the norm), ``aux_hidden_states`` [S, K * H], ``base_hidden_prenorm`` False; for EagleOfflineDataCollator.

    As there, the loss mask is all ones unless ``answer_only_loss``.
    """  # noqa: D205 - one sentence

    def __init__(self, *args: Any, answer_only_loss: bool = False, **options: Any) -> None:
        """See ``Adapter``."""
        self.answer_only_loss = answer_only_loss
        super().__init__(*args, **options)

    @property
    def needs(self) -> Needs:
        """One or more layers and the final state."""
        return _NEEDS

    @property
    def post_norm(self) -> bool:
        """After the norm."""
        return True

    def file(self, index: int) -> Tensors:
        """A ``.pt`` file that loads with ``weights_only=True``."""
        sample, aux_SD, final_SH = self._parts(index)
        return {
            "input_ids": sample["input_ids"],
            "loss_mask": sample["loss_mask"],
            "hidden_states": final_SH,
            "aux_hidden_states": aux_SD,
            "hidden_states_prenorm": False,
        }

    def __getitem__(self, index: int) -> Tensors:
        """Raises IndexError, and IntegrityError naming the file when a shard is missing or damaged."""
        file = self.file(index)
        ids_S = file["input_ids"]
        labels_S = torch.full_like(ids_S, _IGNORED)
        labels_S[:-1] = ids_S[1:]
        ones_S = torch.ones_like(ids_S)
        return {
            "input_ids": ids_S,
            "base_model_hidden_states": file["hidden_states"],
            "aux_hidden_states": file["aux_hidden_states"],
            "attention_mask": ones_S,
            "loss_mask": file["loss_mask"] if self.answer_only_loss else ones_S,
            "labels": labels_S,
            "base_hidden_prenorm": False,
        }
