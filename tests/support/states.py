"""States of an imaginary run, for displays."""

from swathe.records import RunState
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
)

SPEC = RunSpec(
    run_id=RunId("r"),
    fingerprint="f",
    dataset=DatasetSpec(location="d.jsonl", format="jsonl", content="input_ids"),
    model=ModelSpec(
        source="m",
        model_type="llama",
        hidden_size=8,
        num_layers=4,
        vocab_rows=100,
        checkpoint_dtype="float32",
        config_sha256="c",
    ),
    layers=(LayerSlot(slot=0, layer=1, meaning="output of decoder block 1"),),
    compute_dtype="float32",
    stored_dtype="float32",
    batching=Batching(form="packed", order="user", window_rows=1, range_tokens=100),
    policies=Policies(),
    totals=Totals(rows=1000, samples=1000, tokens=100_000, rejected=0, ranges=1000, longest=100),
    token_files=(),
)


def state_with(*, stored: int) -> RunState:
    """The first ``stored`` of 1,000 ranges committed, one sample of 100 tokens each."""
    records = {
        RangeId(range_id): RangeRecord(
            run_id=SPEC.run_id,
            range_id=RangeId(range_id),
            shard="s",
            size_bytes=3200,
            xxh3="",
            samples=1,
            tokens=100,
            worker="w",
            device="cpu",
            finished_at="",
        )
        for range_id in range(stored)
    }
    return RunState(
        spec=SPEC,
        records=records,
        failed=frozenset(),
        invalid=frozenset(),
        sealed=False,
        canaries={},
        suspect={},
    )
