"""Load the part of a checkpoint that hidden states need, straight to the device, and refuse half a model.

Only the text backbone is built, with the blocks up to the deepest wanted one: no vision tower, no language model
head (4.9 % of the FLOPs of a 27B model with a 248k vocabulary), no deeper blocks. transformers fills weights that a
checkpoint lacks with random values and only warns, so missing and mismatched names are errors here.

The deeper blocks are left out of a model that was laid out in its full depth. A config with fewer layers would be
another model: MiniCPM3 scales its residuals by the depth, Gemma 4 counts the layers that share keys from the last one.
"""

import copy
import json
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.utils import logging as transformers_logging

from swathe.checkpoint import require_plain_weights
from swathe.errors import ModelError
from swathe.spec import ComputeDtype
from worker.model.device_errors import breaks_device

RANDOM_PREFIX: Final = "random:"
_RANDOM_SEED: Final = 0
_NAMES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """A loaded text backbone. ``num_layers`` counts the full model, ``blocks`` are those that were loaded."""

    module: Any
    """The transformers model; typed Any because torch types every attribute of a module as a tensor."""
    config: Any
    blocks: tuple[nn.Module, ...]
    num_layers: int
    load_s: float
    peak_host_bytes: int
    """Largest resident size of this process so far; about the code's own when weights went straight to a device."""


def load_text_config(checkpoint: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The config of a checkpoint's text model; ``checkpoint`` is a folder or ``random:CONFIG.json``."""
    name = str(checkpoint)
    try:
        if name.startswith(RANDOM_PREFIX):
            raw = json.loads(Path(name.removeprefix(RANDOM_PREFIX)).read_text(encoding="utf-8"))
            config = AutoConfig.for_model(raw.pop("model_type"), **raw)
        else:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        msg = f"{name}: no readable model config ({_first_line(error)})"
        raise ModelError(msg) from error
    text = config.get_text_config()
    quantized = next(
        (q for part in (text, config) if (q := getattr(part, "quantization_config", None))), None
    )
    require_plain_weights(Path(name), quantized)
    if quantized is not None:
        # A multimodal config says it for all its parts; without it the codes would pass for weights. On every device
        # the weights are what the codes mean, whatever kernels for codes it has.
        text.quantization_config = quantized | {"dequantize": True}
    if getattr(text, "is_encoder_decoder", False):
        msg = f"{name}: {text.model_type} is an encoder-decoder; only causal decoders have the states wanted here"
        raise ModelError(msg)
    return text


def load_backbone(
    checkpoint: str | Path,
    *,
    depth: int,
    dtype: ComputeDtype,
    device: torch.device,
    trust_remote_code: bool = False,
) -> Backbone:
    """Load the first ``depth`` blocks with embeddings and final norm.

    Raises ModelError when the checkpoint cannot be read or lacks a weight, naming the weights.
    """
    started = time.monotonic()
    config = load_text_config(checkpoint, trust_remote_code=trust_remote_code)
    num_layers = int(config.num_hidden_layers)
    with _quiet():
        if str(checkpoint).startswith(RANDOM_PREFIX):
            cut_depth(config, depth)
            module = _random_module(config, dtype=dtype, device=device)
        else:
            module = _stored_module(
                str(checkpoint),
                config,
                depth=depth,
                dtype=dtype,
                device=device,
                trust_remote_code=trust_remote_code,
            )
    module.eval().requires_grad_(False)
    return Backbone(
        module=module,
        config=module.config,
        blocks=tuple(find_blocks(module, depth)),
        num_layers=num_layers,
        load_s=time.monotonic() - started,
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def cut_depth(config: Any, depth: int) -> None:
    """Shorten the config of a random model to ``depth`` blocks, the per-layer lists (``layer_types``...) too."""
    full = int(config.num_hidden_layers)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and "layer" in name and len(value) == full:
            setattr(config, name, value[:depth])
    config.num_hidden_layers = depth


def find_blocks(module: nn.Module, count: int) -> nn.ModuleList:
    """The decoder blocks: the one list of ``count`` modules that the backbone itself holds."""
    lists = [
        child
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]
    if len(lists) != 1:
        msg = f"{type(module).__name__}: {len(lists)} lists of {count} blocks; its decoder blocks cannot be told"
        raise ModelError(msg)
    return lists[0]


def laid_out(config: Any, *, trust_remote_code: bool) -> Any:
    """The whole model without any memory for its weights."""
    with torch.device("meta"):
        return AutoModel.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def _shortened(whole: Any, *, depth: int) -> Any:
    """The class of a model, whose instances lose all but the first ``depth`` blocks when they are made."""
    original: Any = type(whole)
    full = int(whole.config.num_hidden_layers)

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, *args, **kwargs)
        del find_blocks(self, full)[depth:]

    # transformers looks some things up by the class's name.
    members = {"__init__": make, "__module__": original.__module__}
    return type(original.__name__, (original,), members)


def text_key_mapping(checkpoint: str | Path, whole: Any) -> dict[str, str]:
    """Renames weights of a multimodal checkpoint to what its text model calls them, found by the embedding's name.

    transformers does so for some architectures only; of Gemma 3, Mistral 3 or Qwen3-VL it would find no weight at all.
    """
    table = whole.get_input_embeddings()
    suffix = next(name for name, child in whole.named_modules() if child is table) + ".weight"
    base = f"{whole.base_model_prefix}."
    found = [
        name.removesuffix(suffix)
        for name in _stored_names(Path(checkpoint))
        if name == suffix or name.endswith(f".{suffix}")
    ]
    if len(found) != 1 or found[0] in ("", base):
        return {}
    return {f"^{re.escape(found[0])}": base}


def _stored_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def _stored_module(
    checkpoint: str,
    config: Any,
    *,
    depth: int,
    dtype: ComputeDtype,
    device: torch.device,
    trust_remote_code: bool,
) -> Any:
    try:
        whole = laid_out(config, trust_remote_code=trust_remote_code)
        module, info = _shortened(whole, depth=depth).from_pretrained(
            checkpoint,
            config=config,
            key_mapping=text_key_mapping(checkpoint, whole),
            dtype=getattr(torch, dtype),
            device_map={"": device},
            output_loading_info=True,
            # Without it transformers raises at the first wrong shape; all of them are named below instead.
            ignore_mismatched_sizes=True,
        )
    except ModelError:
        raise
    except Exception as error:
        if breaks_device(error):
            raise
        msg = f"{checkpoint}: the model does not load: {_first_line(error)}"
        raise ModelError(msg) from error
    prefixes = ("", f"{module.base_model_prefix}.")
    kept = {id(block) for block in find_blocks(module, depth)}
    starts = tuple(
        f"{prefix}{name}."
        for name, child in module.named_modules()
        if id(child) in kept
        for prefix in prefixes
    )
    problems = {
        "lacks": sorted(info["missing_keys"]),
        "has the wrong shape for": sorted(str(entry[0]) for entry in info["mismatched_keys"]),
        # Biases that the config denies, scales of a quantization that it does not mention.
        "has more than the model uses, namely": sorted(
            name for name in info["unexpected_keys"] if name.startswith(starts)
        ),
    }
    for what, names in problems.items():
        if names:
            shown = ", ".join(names[:_NAMES_SHOWN])
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            msg = f"{checkpoint}: the checkpoint {what} {shown}{more}; not running on other weights than its own"
            raise ModelError(msg)
    return module


def _random_module(config: Any, *, dtype: ComputeDtype, device: torch.device) -> Any:
    """A model of the config's shape, the same weights at every call on one kind of device."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(_RANDOM_SEED)
        return AutoModel.from_config(config, dtype=getattr(torch, dtype))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from drawing bars and tables of the weights that are left out on purpose."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
