"""What a user asks a plan for, and the part of it that needs nothing but arithmetic to check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from swathe.errors import ConfigError, PlanError
from swathe.spec import FLOAT8, ComputeDtype, Layer, LayerSlot, Overlong, StoredDtype

_DTYPES: Final[Mapping[str, ComputeDtype]] = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of ``swathe plan``, by the same names."""

    dataset: str
    split: str | None = None
    """SPLIT or SUBSET/SPLIT of a data set that has several."""
    model: str
    layers: tuple[int, ...] = ()
    final: bool = False
    limit: int | None = None
    max_length: int | None = None
    overlong: Overlong = "reject"
    range_tokens: int = 32_768
    dtype: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    min_length: int = 1
    min_supervised: int = 1
    min_supervised_ratio: float = 0.0
    trust_remote_code: bool = False
    allow_low_space: bool = False
    """Plan even when the states will not fit into the space that is free now."""


def layer_slots(layers: Sequence[int], *, final: bool, num_layers: int) -> tuple[LayerSlot, ...]:
    """The K axis in the user's order, ``final`` last. Raises PlanError for a layer the model does not have."""
    wanted: list[Layer] = [*layers, "final"] if final else [*layers]
    if not wanted:
        msg = "no layers: give --layers 1,16,31 or --final"
        raise ConfigError(msg)
    unknown = [layer for layer in layers if not 0 <= layer < num_layers]
    if unknown:
        msg = f"layer {unknown[0]}: the model has layers 0 to {num_layers - 1}; --final is the last one's output"
        raise PlanError(msg)
    twice = {layer for layer in layers if layers.count(layer) > 1}
    if twice:
        msg = f"layer {min(twice)} is asked for twice; name each layer once"
        raise PlanError(msg)
    if final and num_layers - 1 in layers:
        msg = f"layer {num_layers - 1} and final are the same tensor (the last block's output); drop one"
        raise PlanError(msg)
    return tuple(
        LayerSlot(slot=slot, layer=layer, meaning=_meaning(layer))
        for slot, layer in enumerate(wanted)
    )


def _meaning(layer: Layer) -> str:
    if layer == "final":
        return "output of the last decoder block, before the model's final norm"
    return f"output of decoder block {layer} (0-based)"


def dtypes(asked: str, checkpoint: ComputeDtype) -> tuple[ComputeDtype, StoredDtype]:
    """What states are computed in, and what they are stored in. Raises ConfigError for a dtype that is not known."""
    if asked == "fp8":
        return checkpoint, FLOAT8
    if asked != "auto" and asked not in _DTYPES:
        msg = f"dtype {asked}: use auto, bf16, fp16, fp32 or fp8"
        raise ConfigError(msg)
    dtype = _DTYPES.get(asked, checkpoint)
    return dtype, dtype
