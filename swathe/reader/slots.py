"""Layers to places in the K axis, and the cheapest way to take some of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from swathe.errors import ConfigError
from swathe.spec import Layer, RunSpec

if TYPE_CHECKING:
    import torch


def canonical(spec: RunSpec, layer: Layer) -> Layer:
    """``final`` for the last block too: both name the same tensor."""
    return "final" if layer == spec.model.num_layers - 1 else layer


def find_slot(spec: RunSpec, layers: Sequence[Layer], layer: Layer, *, run: str) -> int:
    """Place of ``layer`` among ``layers``. Raises ConfigError naming what there is."""
    have = [canonical(spec, one) for one in layers]
    if canonical(spec, layer) in have:
        return have.index(canonical(spec, layer))
    msg = f"{run}: layer {layer} is not stored; there are {', '.join(map(str, layers))}"
    raise ConfigError(msg)


def slots_of(spec: RunSpec, wanted: Sequence[Layer], *, run: str) -> list[int]:
    """Slots of the wanted layers. Raises ConfigError for one that is not stored, or is asked for twice."""
    stored = [slot.layer for slot in spec.layers]
    slots = [find_slot(spec, stored, layer, run=run) for layer in wanted]
    if not slots or len(set(wanted)) != len(wanted):
        msg = f"{run}: layers {list(wanted)} must be one or more different layers"
        raise ConfigError(msg)
    return slots


def select_slots(tensor: "torch.Tensor", slots: Sequence[int]) -> "torch.Tensor":
    """Slots of axis 1: a view where they stand at equal distances, otherwise a copy of just these."""
    step = slots[1] - slots[0] if len(slots) > 1 else 1
    if step > 0 and list(slots) == list(range(slots[0], slots[-1] + 1, step)):
        return tensor[:, slots[0] : slots[-1] + 1 : step]
    return tensor[:, list(slots)]
