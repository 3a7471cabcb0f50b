"""Small sealed runs without a model: states are a known function of row, token, slot and channel."""

import io
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from swathe import codec, names
from swathe.manifest import seal
from swathe.spec import (
    Batching,
    ComputeDtype,
    DatasetSpec,
    Layer,
    LayerSlot,
    ModelSpec,
    Policies,
    RangeId,
    RangeRecord,
    RunId,
    RunSpec,
    StoredDtype,
    TokenFile,
    Totals,
    fingerprint,
    to_json,
)
from swathe.store import Store
from swathe.store.local import LocalStore

NUM_LAYERS = 8
VOCAB = 97


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run is made of. Rows in ``rejected`` are not in the plan."""

    samples: int = 40
    layers: tuple[Layer, ...] = (1, 3, 5, "final")
    hidden: int = 16
    dtype: StoredDtype = "bfloat16"
    range_tokens: int = 64
    sort: bool = False
    rejected: tuple[int, ...] = (3,)
    longest: int = 40
    norm: str | None = "rms"
    random_weights: bool = False
    num_layers: int = NUM_LAYERS
    vocab: int = VOCAB
    states: Callable[[int], torch.Tensor] | None = None
    """[S, K, H] of a row; default a function of row, token, slot and channel."""


def length_of(row: int, recipe: Recipe) -> int:
    return random.Random(row).randrange(3, recipe.longest)


def ids_of(row: int, recipe: Recipe) -> np.ndarray:
    rng = np.random.default_rng(row)
    return rng.integers(0, recipe.vocab, length_of(row, recipe)).astype(np.int32)


def mask_of(row: int, recipe: Recipe) -> np.ndarray:
    """The first third is a prompt; every seventh row has single supervised tokens only."""
    length = length_of(row, recipe)
    mask = (np.arange(length) >= length // 3).astype(np.uint8)
    if row % 7 == 6:
        mask &= (np.arange(length) % 2).astype(np.uint8)
    return mask


def states_of(row: int, length: int, slots: int, hidden: int) -> torch.Tensor:
    """[S, K, H] float32, every value exact in bfloat16, float16 and (after scaling) told apart by its place."""
    token = torch.arange(length)[:, None, None]
    slot = torch.arange(slots)[None, :, None]
    channel = torch.arange(hidden)[None, None, :]
    return ((row * 7 + token * 3 + slot * 53 + channel * 5) % 251 - 125).float() / 16


def stored_states(row: int, recipe: Recipe) -> torch.Tensor:
    if recipe.states is not None:
        return recipe.states(row)
    return states_of(row, length_of(row, recipe), len(recipe.layers), recipe.hidden)


def make_run(folder: Path, recipe: Recipe | None = None, *, sealed: bool = True) -> LocalStore:
    recipe = recipe or Recipe()
    store = LocalStore(folder)
    rows = [row for row in range(recipe.samples) if row not in recipe.rejected]
    if recipe.sort:
        rows.sort(key=lambda row: length_of(row, recipe))
    ranges = _cut(rows, recipe)
    spec = _write_tokens(store, ranges, recipe)
    for place, members in enumerate(ranges):
        write_range(store, spec, RangeId(place), members, recipe)
    if recipe.norm:
        write_norm(store, recipe.norm, recipe.hidden)
    if sealed:
        seal(store)
    return store


def write_norm(store: Store, kind: str, hidden: int, weight: torch.Tensor | None = None) -> None:
    if weight is None:
        weight = torch.linspace(-0.5, 1.5, hidden).bfloat16()
    tensors = {"weight": weight} | ({"bias": weight.flip(0)} if kind == "layernorm" else {})
    views = {name: view_of(tensor) for name, tensor in tensors.items()}
    store.write(names.FINAL_NORM, codec.encode(views, {"kind": kind, "eps": repr(1e-6)}))


def write_range(
    store: Store, spec: RunSpec, range_id: RangeId, members: list[int], recipe: Recipe
) -> None:
    tensors = _token_tensors(members, recipe)
    states = torch.cat([stored_states(row, recipe) for row in members])
    if recipe.dtype == "float8_e4m3fn":
        scales = scales_of(states)
        tensors["hidden_states_scales"] = view_of(scales)
        states = states / scales[..., None]
    tensors["hidden_states"] = view_of(states.to(getattr(torch, recipe.dtype)))
    key = names.shard(range_id, names.new_attempt())
    metadata = {"run_id": spec.run_id, "fingerprint": spec.fingerprint}
    written = store.write(key, codec.encode(tensors, metadata))
    record = RangeRecord(
        run_id=spec.run_id,
        range_id=range_id,
        shard=key,
        size_bytes=written.size_bytes,
        xxh3=written.xxh3,
        samples=len(members),
        tokens=len(states),
        worker="test",
        device="cpu",
        finished_at="2026-01-01T00:00:00Z",
    )
    store.create(names.record(range_id), to_json(record))


def scales_of(states: torch.Tensor) -> torch.Tensor:
    """Float8 scales [S, K]: the smallest powers of two that bring each row to 448 or below, 1 for zeros."""
    amax = states.abs().double().amax(2)
    scales = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    scales = torch.where(amax > 0, scales, 1).float()
    assert (states.abs().amax(2) <= 448 * scales).all()
    return scales


def _cut(rows: list[int], recipe: Recipe) -> list[list[int]]:
    ranges: list[list[int]] = [[]]
    room = recipe.range_tokens
    for row in rows:
        length = length_of(row, recipe)
        if ranges[-1] and length > room:
            ranges.append([])
            room = recipe.range_tokens
        ranges[-1].append(row)
        room -= length
    return ranges


def _token_tensors(members: list[int], recipe: Recipe) -> dict[str, codec.TensorView]:
    ids = [ids_of(row, recipe) for row in members]
    return {
        "input_ids": codec.view(np.concatenate(ids)),
        "loss_mask": codec.view(np.concatenate([mask_of(row, recipe) for row in members])),
        "offsets": codec.view(np.cumsum([0, *map(len, ids)]).astype(np.int64)),
        "row": codec.view(np.array(members, np.int64)),
    }


def _write_tokens(store: Store, ranges: list[list[int]], recipe: Recipe) -> RunSpec:
    members = [row for one in ranges for row in one]
    lengths = np.array([length_of(row, recipe) for row in members], np.int32)
    starts = np.cumsum([0, *map(len, ranges)]).astype(np.int64)
    tensors = _token_tensors(members, recipe) | {"range_starts": codec.view(starts)}
    written = store.write(names.token_file(0), codec.encode(tensors, {}))
    table = pa.table({
        "row": np.array(members, np.int64),
        "id": [f"chat-{row}" for row in members],
        "length": lengths,
    })  # fmt: skip
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    store.write(names.TOKEN_ROWS, [buffer.getvalue()])
    file = TokenFile(
        name=names.token_file(0),
        size_bytes=written.size_bytes,
        xxh3=written.xxh3,
        first_sample=0,
        samples=len(members),
        tokens=int(lengths.sum()),
        first_range=0,
        ranges=len(ranges),
    )
    spec = _spec(recipe, file, int(lengths.max()))
    store.write(names.RUN, [to_json(spec, indent=1)])
    return spec


def _spec(recipe: Recipe, file: TokenFile, longest: int) -> RunSpec:
    computed: ComputeDtype = "bfloat16" if recipe.dtype == "float8_e4m3fn" else recipe.dtype
    spec = RunSpec(
        run_id=RunId("run-of-a-test"),
        fingerprint="",
        dataset=DatasetSpec(location="rows.jsonl", format="jsonl", content="input_ids"),
        model=ModelSpec(
            source="tiny",
            model_type="llama",
            hidden_size=recipe.hidden,
            num_layers=recipe.num_layers,
            vocab_rows=recipe.vocab,
            checkpoint_dtype=computed,
            config_sha256="0" * 64,
            random_weights=recipe.random_weights,
        ),
        layers=tuple(
            LayerSlot(slot=slot, layer=layer, meaning=f"layer {layer}")
            for slot, layer in enumerate(recipe.layers)
        ),
        compute_dtype=computed,
        stored_dtype=recipe.dtype,
        batching=Batching(
            form="padded" if recipe.sort else "packed",
            order="length" if recipe.sort else "user",
            window_rows=16384,
            range_tokens=recipe.range_tokens,
        ),
        policies=Policies(),
        totals=Totals(
            rows=recipe.samples,
            samples=file.samples,
            tokens=file.tokens,
            rejected=recipe.samples - file.samples,
            ranges=file.ranges,
            longest=longest,
        ),
        token_files=(file,),
    )
    return replace(spec, fingerprint=fingerprint(spec))


def view_of(tensor: torch.Tensor) -> codec.TensorView:
    return codec.TensorView(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        data=tensor.contiguous().view(torch.uint8).numpy().data,
    )
