"""A small complete run, written through the Store protocol alone: random ids and states, no model."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from swathe import codec, names
from swathe.manifest import seal
from swathe.samples import SampleBlock
from swathe.spec import (
    Batching,
    DatasetSpec,
    LayerSlot,
    ModelSpec,
    Policies,
    RangeId,
    RangeRecord,
    RunId,
    RunSpec,
    Totals,
    to_json,
)
from swathe.store import Store
from swathe.tokens import TokenReader, TokenWriter

LAYERS = (1, "final")
HIDDEN = 16
RANGES, SAMPLES = 4, 5


@dataclass(frozen=True)
class SyntheticRun:
    """What was written: by row, ids [S] and the bits of bf16 states [S, K, H]."""

    spec: RunSpec
    ids: dict[int, np.ndarray]
    states: dict[int, np.ndarray]


def write_run(store: Store, *, sealed: bool = True) -> SyntheticRun:
    """Plan, all shards and records, and the seal."""
    rng = np.random.default_rng(7)
    count = RANGES * SAMPLES
    lengths = rng.integers(1, 40, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    block = SampleBlock(
        row=np.arange(count),
        ids=pa.array([f"chat-{row}" for row in range(count)]),
        input_ids=rng.integers(0, 1000, offsets[-1], dtype=np.int32),
        loss_mask=rng.integers(0, 2, offsets[-1], dtype=np.uint8),
        offsets=offsets,
    )
    writer = TokenWriter(store)
    writer.add(block, np.arange(RANGES) * SAMPLES)
    spec = _spec(writer, count, int(offsets[-1]), int(lengths.max()))
    store.write(names.RUN, [to_json(spec, indent=1)])
    states = {}
    tokens = TokenReader(store, spec)
    for range_id in map(RangeId, spec.range_ids):
        planned = tokens.read_range(range_id)
        # Finite and nowhere zero: bf16 between 0.5 and 2, of either sign.
        shape = (len(planned.input_ids), len(LAYERS), HIDDEN)
        bits = rng.integers(0x3F00, 0x3FFF, shape, dtype=np.uint16) | (
            rng.integers(0, 2, shape, dtype=np.uint16) << 15
        )
        _store_range(store, spec, range_id, planned, bits)
        for row, first, stop in zip(
            planned.rows, planned.offsets[:-1], planned.offsets[1:], strict=True
        ):
            states[int(row)] = bits[first:stop]
    if sealed:
        seal(store)
    ids = {row: block.input_ids[offsets[row] : offsets[row + 1]] for row in range(count)}
    return SyntheticRun(spec, ids, states)


def _spec(writer: TokenWriter, count: int, tokens: int, longest: int) -> RunSpec:
    slots = tuple(
        LayerSlot(slot=slot, layer=layer, meaning=f"layer {layer}")
        for slot, layer in enumerate(LAYERS)
    )
    return RunSpec(
        run_id=RunId("synthetic"),
        fingerprint="f" * 64,
        dataset=DatasetSpec(location="nowhere", format="jsonl", content="input_ids"),
        model=ModelSpec(
            source="none",
            model_type="llama",
            hidden_size=HIDDEN,
            num_layers=4,
            vocab_rows=1000,
            checkpoint_dtype="bfloat16",
            config_sha256="c" * 64,
            random_weights=True,
        ),
        layers=slots,
        compute_dtype="bfloat16",
        stored_dtype="bfloat16",
        batching=Batching(form="packed", order="user", window_rows=16_384, range_tokens=200),
        policies=Policies(),
        totals=Totals(
            rows=count, samples=count, tokens=tokens, rejected=0, ranges=RANGES, longest=longest
        ),
        token_files=writer.close(),
    )


def _store_range(store, spec, range_id, planned, bits) -> None:
    key = names.shard(range_id, names.new_attempt())
    tensors = {
        "hidden_states": codec.TensorView(
            dtype="bfloat16", shape=bits.shape, data=bits.reshape(-1).view("u1").data
        ),
        "input_ids": codec.view(planned.input_ids),
        "loss_mask": codec.view(planned.loss_mask),
        "offsets": codec.view(planned.offsets),
        "row": codec.view(planned.rows),
    }
    metadata = {"format": "swathe", "run_id": spec.run_id, "fingerprint": spec.fingerprint}
    written = store.write(key, codec.encode(tensors, metadata))
    record = RangeRecord(
        run_id=spec.run_id,
        range_id=range_id,
        shard=key,
        size_bytes=written.size_bytes,
        xxh3=written.xxh3,
        samples=len(planned.rows),
        tokens=len(planned.input_ids),
        worker="test",
        device="none",
        finished_at="2026-01-01T00:00:00Z",
    )
    assert store.create(names.record(range_id), to_json(record))
