"""From what a user calls a model to the folder that holds it here, and to what it is.

A source is a folder, a hub id (``org/name`` or ``org/name@revision``) or ``random:CONFIG.json`` for a model of that
shape with random weights. A hub id is looked for in the model roots, then in the hub's cache, then online.
The identity (config, and size and header of every weight file) is what two nodes must agree on, wherever their
folders lie; it is read without opening a tensor, so it costs milliseconds for a checkpoint of any size.
"""

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import xxhash

from swathe.codec import Header, read_header
from swathe.errors import FormatError, ModelError
from swathe.spec import ComputeDtype, ModelSpec, WeightFile, sha256_json

RANDOM: Final = "random:"
_HUB_ID: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py")
_VOLATILE: Final = ("_name_or_path", "transformers_version")
"""Config keys that change when a checkpoint is only copied or saved again."""

_SIZES: Final = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "vocab_rows": ("vocab_size", "n_vocab"),
    "max_positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
}
_EMBEDDINGS: Final = (
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight",
    "tok_embeddings.weight", "embeddings.weight", "embedding.weight",
)  # fmt: skip
_DTYPES: Final = {
    "bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float32": "float32", "float": "float32",
}  # fmt: skip


DEQUANTIZED: Final = ("fp8", "mxfp4")
"""Quantizations whose codes transformers turns into plain weights while it loads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model on this node: ``config_path`` lies in ``folder`` (or is the CONFIG.json of a random model)."""

    spec: ModelSpec
    folder: Path
    config_path: Path


def resolve(
    source: str, *, model_roots: Sequence[Path] = (), trust_remote_code: bool = False
) -> Checkpoint:
    """Find a model and read what it is.

    Raises ModelError when there is no such model, or its config or weight files cannot be read.
    """
    if source.startswith(RANDOM):
        return _random(Path(source.removeprefix(RANDOM)), trust_remote_code=trust_remote_code)
    folder = next(_folders(source, None, model_roots), None)
    if folder is None:
        msg = f"model {source}: neither a folder here nor a hub id such as org/name; check the path"
        raise ModelError(msg)
    return _read(source, folder, trust_remote_code=trust_remote_code)


def resolve_like(spec: ModelSpec, *, model_roots: Sequence[Path] = ()) -> Checkpoint:
    """Find a planned model on this node, in whatever folder it lies.

    Raises ModelError when it is not here, or when what is here has another identity.
    """
    differences = []
    for folder in _places(spec, model_roots):
        try:
            found = _candidate(spec, folder)
        except ModelError as error:
            differences.append(str(error))
            continue
        if found.spec.identity == spec.identity:
            return replace(found, spec=spec)
        differences.append(f"{folder}: {_difference(found.spec, spec)}")
    if differences:
        msg = (
            f"model {spec.source}: not the planned one on this node ({'; '.join(differences)}); this worker does not "
            "work on the run; put the planned checkpoint below a folder of SWATHE_MODEL_ROOTS"
        )
        raise ModelError(msg)
    msg = f"model {spec.source}: not on this node; copy it below a folder of SWATHE_MODEL_ROOTS or into the hub's cache"
    raise ModelError(msg)


def _places(spec: ModelSpec, model_roots: Sequence[Path]) -> Iterator[Path]:
    if not spec.random_weights:
        yield from _folders(spec.source, spec.revision, model_roots)
        return
    path = Path(spec.source.removeprefix(RANDOM))
    for place in (path, *(root / path.name for root in model_roots)):
        if place.is_file():
            yield place


def _candidate(spec: ModelSpec, place: Path) -> Checkpoint:
    if spec.random_weights:
        return _random(place, trust_remote_code=spec.trust_remote_code)
    return _read(str(place), place, trust_remote_code=spec.trust_remote_code)


def _folders(source: str, revision: str | None, model_roots: Sequence[Path]) -> Iterator[Path]:
    """Folders that may be the model, best first; the hub is asked only when nothing before it would do."""
    path = Path(source).expanduser()
    if path.is_dir():
        yield path
    hub_id, _, asked = source.partition("@")
    names = (hub_id, Path(hub_id).name) if not path.is_absolute() else (path.name,)
    for root in model_roots:
        for folder in (root / name for name in dict.fromkeys(names)):
            if (folder / "config.json").is_file():
                yield folder
    if not path.is_absolute() and _HUB_ID.fullmatch(source):
        yield _from_hub(hub_id, revision or asked or None)


def _from_hub(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - slow to import, rarely needed

    try:
        folder = Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
        _weight_names(folder)
    except (OSError, ValueError, ModelError):
        pass  # not in the cache, or only a part of it
    else:
        return folder
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises errors of several libraries
        msg = (
            f"model {hub_id}: not in SWATHE_MODEL_ROOTS nor in the hub's cache, and the hub did not give it "
            f"({_one_line(error)}); give a local folder, or HF_TOKEN for a gated model"
        )
        raise ModelError(msg) from error


def _random(path: Path, *, trust_remote_code: bool) -> Checkpoint:
    config = _read_config(path)
    spec = _describe(config, path, headers={}, trust_remote_code=trust_remote_code)
    spec = replace(spec, source=f"{RANDOM}{path.absolute()}", random_weights=True)
    return Checkpoint(spec=spec, folder=path.absolute().parent, config_path=path.absolute())


def _read(source: str, folder: Path, *, trust_remote_code: bool) -> Checkpoint:
    folder = folder.absolute()
    config_path = folder / "config.json"
    config = _read_config(config_path)
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            require_plain_weights(folder, part.get("quantization_config"))
    weights, headers = [], {}
    for name in _weight_names(folder):
        weight, headers[name] = _read_weight_header(folder / name)
        weights.append(weight)
    spec = _describe(config, config_path, headers, trust_remote_code=trust_remote_code)
    is_folder = Path(source).expanduser().is_dir()
    spec = replace(
        spec,
        source=str(folder) if is_folder else source.partition("@")[0],
        revision=folder.name if _COMMIT.fullmatch(folder.name) else None,
        weights=tuple(weights),
    )
    return Checkpoint(spec=spec, folder=folder, config_path=config_path)


def require_plain_weights(folder: Path, quantization: Mapping[str, Any] | None) -> None:
    """Raise ModelError for a quantized checkpoint whose codes might be taken for weights.

    transformers ignores methods that it does not know, and what ModelOpt wrote beside the config in earlier versions.
    """
    method = quantization and quantization.get("quant_method")
    if method is None and (folder / "hf_quant_config.json").is_file():
        method = "modelopt"
    if method and method not in DEQUANTIZED:
        msg = (
            f"{folder}: its weights are quantized ({method}); swathe computes with plain weights, and with those of "
            f"{' and '.join(DEQUANTIZED)} checkpoints: dequantize it first"
        )
        raise ModelError(msg)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        msg = f"{path}: not there; a model is a folder with config.json and safetensors weights"
        raise ModelError(msg) from None
    except (OSError, ValueError) as error:
        msg = f"{path}: unreadable ({_one_line(error)})"
        raise ModelError(msg) from error
    if not isinstance(config, dict):
        msg = f"{path}: no JSON object; it is no model's config"
        raise ModelError(msg)
    return config


def _weight_names(folder: Path) -> list[str]:
    """Weight files by name, sorted. Raises ModelError when there are none or one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"{index}: unreadable ({_one_line(error)})"
            raise ModelError(msg) from error
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        msg = (
            f"{folder}: {missing[0]} is missing ({len(missing)} of {len(names)} weight files); "
            "download the whole checkpoint, or convert it to safetensors"
        )
        raise ModelError(msg)
    return names


def _read_weight_header(path: Path) -> tuple[WeightFile, Header]:
    with path.open("rb") as file:

        def read_range(offset: int, size_bytes: int) -> bytes:
            file.seek(offset)
            return file.read(size_bytes)

        try:
            header = read_header(read_range, origin=str(path))
        except (FormatError, ValueError, OSError, struct.error) as error:
            msg = f"{path}: no readable safetensors header ({_one_line(error)}); download it again"
            raise ModelError(msg) from error
        size_bytes = path.stat().st_size
        if header.size_bytes != size_bytes:
            msg = f"{path}: {size_bytes} bytes, its header says {header.size_bytes}; download it again"
            raise ModelError(msg)
        length = int.from_bytes(read_range(0, 8), "little")
        digest = xxhash.xxh3_128_hexdigest(read_range(8, length))
    return WeightFile(name=path.name, size_bytes=size_bytes, header_xxh3=digest), header


def _describe(
    config: dict[str, Any], path: Path, headers: dict[str, Header], *, trust_remote_code: bool
) -> ModelSpec:
    """What a config and the headers say; source, revision and weights are the caller's."""
    text = config.get("text_config")
    text = {**text} if isinstance(text, dict) else config
    sizes = {name: _first_int(text, keys) for name, keys in _SIZES.items()}
    if any(value is None for name, value in sizes.items() if name != "max_positions"):
        # A config need not state what its class has as default (Gemma 3's text_config has no vocab_size).
        text = _with_class_defaults(path, trust_remote_code=trust_remote_code)
        sizes = {name: _first_int(text, keys) for name, keys in _SIZES.items()}
    missing = [_SIZES[name][0] for name in ("hidden_size", "num_layers") if sizes[name] is None]
    hidden_size, num_layers = sizes["hidden_size"], sizes["num_layers"]
    table = _embedding(headers, hidden_size)
    vocab_rows = table[0] if table else sizes["vocab_rows"]
    if hidden_size is None or num_layers is None or vocab_rows is None:
        msg = f"{path}: no {', '.join(missing) or 'vocab_size'} in it; is it a language model's config?"
        raise ModelError(msg)
    named = (
        text.get("dtype")
        or text.get("torch_dtype")
        or config.get("dtype")
        or config.get("torch_dtype")
    )
    stored = table[1] if table else "float32"
    dtype = _DTYPES.get(str(named).removeprefix("torch.")) or _DTYPES.get(stored) or "float32"
    return ModelSpec(
        source="",
        model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        vocab_rows=vocab_rows,
        max_positions=sizes["max_positions"],
        checkpoint_dtype=cast("ComputeDtype", dtype),
        config_sha256=sha256_json({k: v for k, v in config.items() if k not in _VOLATILE}),
        trust_remote_code=trust_remote_code,
    )


def _first_int(config: dict[str, Any], keys: Sequence[str]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _with_class_defaults(path: Path, *, trust_remote_code: bool) -> dict[str, Any]:
    from transformers import AutoConfig  # noqa: PLC0415 - takes seconds to import, rarely needed

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        values: dict[str, Any] = config.get_text_config().to_dict()
    except Exception as error:  # a config class is a program of someone else
        msg = f"{path}: transformers cannot read it ({_one_line(error)})"
        raise ModelError(msg) from error
    return values


def _embedding(headers: dict[str, Header], hidden_size: int | None) -> tuple[int, str] | None:
    """Rows and dtype of the table of token embeddings, which may have more rows than the vocabulary has words."""
    for suffix in _EMBEDDINGS:
        for header in headers.values():
            for name, info in header.tensors.items():
                named = name == suffix or name.endswith(f".{suffix}")
                if named and len(info.shape) == 2 and info.shape[1] == hidden_size:
                    return info.shape[0], info.dtype
    return None


def _difference(found: ModelSpec, planned: ModelSpec) -> str:
    if found.config_sha256 != planned.config_sha256:
        return "another config.json"
    theirs = {file.name: file for file in planned.weights}
    for file in found.weights:
        if theirs.get(file.name) != file:
            return f"another {file.name}"
    return "fewer weight files"


def _one_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
