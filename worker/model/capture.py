"""Take the outputs of decoder blocks while a forward pass runs, wanted layers and real tokens only.

Layer k is the output of block k; ``final`` is the output of the last block, before the final norm. A hook writes its
block's output straight into the slot of one ``[T, K, H]`` tensor, so the other layers' states are never kept: all 65
states of 32k tokens of a 64-layer model are 21.8 GB, five are 1.7 GB.

Shapes: T real tokens, K slots, H hidden size, B rows, L tokens of a row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swathe.errors import ModelError
from swathe.spec import Layer


def block_index(layer: Layer, num_layers: int) -> int:
    """The block whose output a layer is. Raises ModelError for a layer that the model does not have."""
    if layer == "final":
        return num_layers - 1
    if not 0 <= layer < num_layers:
        msg = f"layer {layer} does not exist: the model has blocks 0 to {num_layers - 1}"
        raise ModelError(msg)
    return layer


def block_indices(layers: Sequence[Layer], num_layers: int) -> tuple[int, ...]:
    """The block of each slot. Raises ModelError when two slots would hold the same tensor, or there is none."""
    if not layers:
        msg = "no layers are wanted; name at least one"
        raise ModelError(msg)
    blocks = tuple(block_index(layer, num_layers) for layer in layers)
    for slot, block in enumerate(blocks):
        if block in blocks[:slot]:
            twin = layers[blocks.index(block)]
            msg = f"layers {twin} and {layers[slot]} are the same tensor, the output of block {block}; ask for one"
            raise ModelError(msg)
    return blocks


@dataclass(slots=True)
class _Target:
    out_TKH: torch.Tensor
    tokens_T: torch.Tensor | None
    missing: set[int] = field(default_factory=set)


class Capture:
    """Hooks on the wanted blocks; outside of ``into`` they do nothing."""

    def __init__(self, blocks: Sequence[nn.Module], slots: Sequence[int]) -> None:
        """``slots[j]`` is the index of the block whose output goes to slot j."""
        self._slots = tuple(slots)
        self._target: _Target | None = None
        self._handles = [
            blocks[block].register_forward_hook(self._hook(slot))
            for slot, block in enumerate(self._slots)
        ]

    @contextmanager
    def into(self, out_TKH: torch.Tensor, tokens_T: torch.Tensor | None = None) -> Iterator[None]:
        """Write the outputs of the one forward pass inside this context into ``out_TKH``.

        ``tokens_T`` gives the place of each real token in the flattened ``B * L`` tokens of the pass; without it
        the real tokens are the first T. Raises ModelError when a block was not executed.
        """
        self._target = _Target(out_TKH, tokens_T, set(range(len(self._slots))))
        try:
            yield
            missing = self._target.missing
        finally:
            self._target = None
        if missing:
            blocks = sorted(self._slots[slot] for slot in missing)
            msg = f"blocks {blocks} were not executed by the forward pass; their states are unknown"
            raise ModelError(msg)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, slot: int) -> Any:
        def hook(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            target = self._target
            if target is None:
                return
            if slot not in target.missing:
                msg = f"block {self._slots[slot]} ran twice in one pass (a looped model): its output is not one tensor"
                raise ModelError(msg)
            hidden_NH = block_output(output).flatten(0, 1)
            if target.tokens_T is None:
                target.out_TKH[:, slot].copy_(hidden_NH[: target.out_TKH.shape[0]])
            else:
                target.out_TKH[:, slot].copy_(hidden_NH.index_select(0, target.tokens_T))
            target.missing.discard(slot)

        return hook


def block_output(output: Any) -> torch.Tensor:
    """The hidden states ``[B, L, H]`` out of what a block returned.

    Blocks return a tensor, older ones a tuple that starts with it. ``output[0]`` of a tensor would silently be the
    batch's first row, so anything else is refused with ModelError.
    """
    hidden_BLH = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(hidden_BLH, torch.Tensor) or hidden_BLH.ndim != 3:
        shape = getattr(hidden_BLH, "shape", None)
        msg = f"a decoder block returned {type(output).__name__} ({shape}), not hidden states [B, L, H]"
        raise ModelError(msg)
    return hidden_BLH
