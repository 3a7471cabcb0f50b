"""What every judge holds against what the trainer's own code loaded.

``truth.pt`` is a direct forward of the model by transformers alone: for each sample its ids, mask, the tuple
``hidden_states`` (entry 0 the embedding, the last after the final norm), the state before the norm, and the logits; and the
head. A trainer's layer id means a place in that tuple, so a wrong id or a state on the wrong side of the norm shows.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor


class Verdict:
    """Collects what is wrong; ``close`` ends the judge with 0 (right) or 1."""

    def __init__(self, export: Path) -> None:
        self.truth: dict[str, Any] = torch.load(export.parent / "truth.pt", weights_only=True)
        self.marker = json.loads((export / "swathe-export.json").read_text())
        self.ids: list[int] = self.marker["trainer_layer_ids"]
        self.run = export.parent / "run"
        self.wrong: dict[str, int] = {}
        self.right = 0

    def same(self, what: str, found: Tensor, expected: Tensor) -> None:
        equal = found.shape == expected.shape and torch.equal(found.float(), expected.float())
        self._count(what, ok=equal)

    def close_to(self, what: str, found: Tensor, expected: Tensor, limit: float = 1e-2) -> None:
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        self._count(what, ok=bool(error < limit))

    def logits(self, sample: dict[str, Tensor], normed: Tensor) -> None:
        """What the trainer's teacher would be."""
        logits = normed.float() @ self.truth["head"].float().T
        self.close_to("teacher logits", logits, sample["logits"])

    def aux(self, sample: dict[str, Any], found: Tensor, offset: int) -> None:
        """``found`` [S, K * H]: slot j must be ``hidden_states[ids[j] + offset]``."""
        expected = torch.cat([sample["hidden_states"][i + offset] for i in self.ids], dim=-1)
        self.same("layers", found, expected.bfloat16())

    def same_item(self, what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        self._count(f"{what}: keys", ok=ours.keys() == theirs.keys())
        for name, value in theirs.items():
            if torch.is_tensor(value):
                self._count(f"{what}: dtype of {name}", ok=ours[name].dtype == value.dtype)
                self.same(f"{what}: {name}", ours[name], value)
            else:
                self._count(f"{what}: {name}", ok=ours[name] == value)

    def close(self) -> None:
        for what, times in self.wrong.items():
            print(f"WRONG {what} ({times} times)")  # noqa: T201
        print(f"{self.right} comparisons right")  # noqa: T201
        sys.exit(1 if self.wrong or not self.right else 0)

    def _count(self, what: str, *, ok: bool) -> None:
        if ok:
            self.right += 1
        else:
            self.wrong[what] = self.wrong.get(what, 0) + 1


def norm_of(truth: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The verifier's norm, by transformers' own class."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm  # noqa: PLC0415
    from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: PLC0415

    kind = {"rms": LlamaRMSNorm, "rms_1p": GemmaRMSNorm}[truth["kind"]]
    norm = kind(len(truth["norm"]), eps=truth["eps"]).bfloat16()
    with torch.no_grad():
        norm.weight.copy_(truth["norm"])
    return norm
