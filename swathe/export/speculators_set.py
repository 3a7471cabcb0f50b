"""What speculators wants beside the states: an arrow set as ``datasets.save_to_disk`` writes it, and token counts.

Written with pyarrow alone and in parts of about 30 million tokens, so that memory stays flat and an interrupted export
finds its finished parts. Format: datasets 5 ``Dataset.save_to_disk`` (state.json, dataset_info.json, arrow streams).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from swathe.adapters import Adapter
from swathe.export.files import write_atomically, write_json

PART_TOKENS: Final = 30_000_000
_BATCH_SAMPLES: Final = 1000
_TOKEN_FREQ: Final = "token_freq.pt"  # noqa: S105 - a file's name
_INT64: Final = {"dtype": "int64", "_type": "Value"}
_FEATURES: Final[dict[str, Any]] = {
    "input_ids": {"feature": _INT64, "_type": "List"},
    "loss_mask": {"feature": _INT64, "_type": "List"},
    "seq_len": _INT64,
    "row": _INT64,
}
_SCHEMA: Final = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
        ("row", pa.int64()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


def write_set(adapter: Adapter, dest: Path) -> int:
    """Write the parts and files that are not there yet; returns the bytes written."""
    ends = _part_ends(adapter.lengths)
    written, names = 0, []
    for place, (first, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        name = f"data-{place:05d}-of-{len(ends):05d}.arrow"
        names.append(name)
        if not (dest / name).exists():
            written += _write_part(adapter, dest / name, first, stop)
    if not (dest / _TOKEN_FREQ).exists():
        counts = token_counts(adapter)
        written += write_atomically(dest / _TOKEN_FREQ, lambda file: torch.save(counts, file))
    write_json(
        dest / "dataset_info.json",
        {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""},
    )
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": adapter.spec.fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    write_json(dest / "state.json", state)
    return written


def token_counts(adapter: Adapter) -> dict[int, int]:
    """How often each token id is supervised, for the drafter's smaller vocabulary."""
    counts: NDArray[np.int64] = np.zeros(adapter.spec.model.vocab_rows, dtype=np.int64)
    dataset, limit = adapter.dataset, adapter.max_length
    pairs = zip(dataset.shard_tokens("input_ids"), dataset.shard_tokens("loss_mask"), strict=True)
    for (members, ids_T), (_, mask_T) in pairs:
        supervised_T = mask_T.astype(bool)
        if limit is not None:
            lengths = dataset.lengths[members]
            place_T = np.arange(lengths.sum()) - np.repeat(dataset.offsets[members], lengths)
            supervised_T &= place_T < limit
        counts += np.bincount(ids_T[supervised_T], minlength=len(counts))
    return {int(token): int(counts[token]) for token in counts.nonzero()[0]}


def _part_ends(lengths: NDArray[Any]) -> list[int]:
    """Where the parts end, in samples: whenever another ``PART_TOKENS`` are full."""
    part_of = (np.cumsum(lengths, dtype=np.int64) - 1) // PART_TOKENS
    return [*(np.flatnonzero(np.diff(part_of)) + 1).tolist(), len(lengths)]


def _write_part(adapter: Adapter, path: Path, first: int, stop: int) -> int:
    def write(file: Any) -> None:
        with pa.ipc.new_stream(file, _SCHEMA) as stream:
            for batch in _batches(adapter, first, stop):
                stream.write_batch(batch)

    return write_atomically(path, write)


def _batches(adapter: Adapter, first: int, stop: int) -> Iterator[pa.RecordBatch]:
    for start in range(first, stop, _BATCH_SAMPLES):
        samples = [adapter.tokens(i) for i in range(start, min(stop, start + _BATCH_SAMPLES))]
        lengths = np.array([len(sample["input_ids"]) for sample in samples])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        columns = [
            pa.ListArray.from_arrays(
                offsets, torch.cat([sample[name] for sample in samples]).numpy()
            )
            for name in ("input_ids", "loss_mask")
        ]
        rows = pa.array([sample["row"] for sample in samples], pa.int64())
        columns += [pa.array(lengths.astype(np.int64)), rows]
        yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
