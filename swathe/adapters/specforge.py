"""SpecForge (sglang): EAGLE-3, DFlash, Domino, DSpark.

Source: SpecForge 0.2 ``algorithms/eagle3/data.py``, ``algorithms/common/dflash_family_data.py``. Its id k is our layer k;
final states are AFTER the final norm, because its trainers multiply them by the head at once. The DFlash family
refuses a sample without two supervised tokens in a row, so such samples are left out here.
"""

from typing import Any, Final, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from swathe.adapters.base import Adapter, Tensors, supervised_pairs
from swathe.adapters.selection import Needs, dflash_layers, eagle3_layers
from swathe.errors import ConfigError

Algorithm = Literal["eagle3", "dflash", "domino", "dspark"]

_NEEDS: Final[dict[str, Needs]] = {
    "eagle3": Needs(trainer="SpecForge eagle3", aux=3, final=True, usual=eagle3_layers),
    "dflash": Needs(trainer="SpecForge dflash", aux=None, final=False, usual=dflash_layers),
    "domino": Needs(trainer="SpecForge domino", aux=None, final=False, usual=dflash_layers),
    "dspark": Needs(trainer="SpecForge dspark", aux=None, final=True, usual=dflash_layers),
}


class SpecForge(Adapter):
    """``adapter[i]`` is what SpecForge's own normalizer makes of ``file(i)``, each tensor with a leading axis of 1.

    eagle3: ``input_ids``, ``attention_mask``, ``loss_mask`` (0 at the last token), ``hidden_state`` [1, S, 3H], ``target``
    [1, S, H] (after the norm). dflash, domino: ``input_ids``, ``loss_mask``, ``hidden_states`` [1, S, K * H]; dspark also
    ``target_last_hidden_states`` [1, S, H] (after the norm). Its collators take these as they are.
    """

    def __init__(self, *args: Any, algorithm: Algorithm = "eagle3", **options: Any) -> None:
        """See ``Adapter``. Raises ConfigError for an algorithm that SpecForge does not train offline."""
        if algorithm not in _NEEDS:
            msg = f"SpecForge has no offline algorithm {algorithm!r}; there are {', '.join(get_args(Algorithm))}"
            raise ConfigError(msg)
        self.algorithm = algorithm
        super().__init__(*args, **options)

    @property
    def needs(self) -> Needs:
        """By algorithm."""
        return _NEEDS[self.algorithm]

    @property
    def post_norm(self) -> bool:
        """After the norm."""
        return True

    def file(self, index: int) -> Tensors:
        """``data_{index}.ckpt``."""
        sample, aux_SD, final_SH = self._parts(index)
        tokens = {"input_ids": sample["input_ids"], "loss_mask": sample["loss_mask"]}
        if self.algorithm == "eagle3":
            return tokens | {"aux_hidden_state": aux_SD[None], "hidden_state": final_SH[None]}
        states = {"hidden_states": aux_SD[None]}
        if self.algorithm == "dspark":
            states["target_last_hidden_states"] = final_SH[None]
        return tokens | states

    def __getitem__(self, index: int) -> Tensors:
        """Raises IndexError, and IntegrityError naming the file when a shard is missing or damaged."""
        file = self.file(index)
        ids_1S, mask_1S = file["input_ids"][None], file["loss_mask"][None]
        if self.algorithm != "eagle3":
            return file | {"input_ids": ids_1S, "loss_mask": mask_1S}
        mask_1S[0, -1:] = 0
        return {
            "attention_mask": torch.ones_like(mask_1S),
            "loss_mask": mask_1S,
            "target": file["hidden_state"],
            "hidden_state": file["aux_hidden_state"],
            "input_ids": ids_1S,
        }

    def _usable(self) -> NDArray[np.bool_] | None:
        if self.algorithm == "eagle3":
            return None
        return supervised_pairs(self.dataset, self.max_length)
