"""The models and the data that the GPU benchmarks run on: real shapes, random weights, chat-like lengths."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

MEAN: Final = 335
SIGMA: Final = 0.9
SHORTEST: Final = 20
LONGEST: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's config as JSON, and the layers whose outputs are wanted."""

    name: str
    layers: tuple[int, ...]
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the config; ``random:PATH`` is then a model."""
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.config, indent=1))
        return path


SHAPES: Final = {
    # Qwen3.6-27B's text backbone: three GatedDeltaNet layers to one of full attention.
    "27b": Shape(
        name="27b",
        layers=(1, 16, 31, 46, 61),
        config={
            "model_type": "qwen3_5_text",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_value_heads": 48,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "vocab_size": 248_320,
            "dtype": "bfloat16",
        },
    ),
    # Qwen3-8B.
    "8b": Shape(
        name="8b",
        layers=(1, 9, 17, 25, 33),
        config={
            "model_type": "qwen3",
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000.0,
            "dtype": "bfloat16",
        },
    ),
    # The hybrid small enough for a CPU test.
    "tiny": Shape(
        name="tiny",
        layers=(0, 2),
        config={
            "model_type": "qwen3_5_text",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "vocab_size": 512,
            "dtype": "float32",
        },
    ),
}


def chat_lengths(count: int, *, longest: int = LONGEST, seed: int = 0) -> NDArray[np.int64]:
    """Tokens of chat-like samples in a file's order: lognormal, mean 335, sigma 0.9, cut at both ends."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(drawn, SHORTEST, longest).astype(np.int64)


def random_ids(
    lengths: NDArray[np.int64], vocab_rows: int, seed: int = 1
) -> list[NDArray[np.int32]]:
    """Random ids of samples of these lengths."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_rows, int(lengths.sum()), dtype=np.int32)
    return np.split(ids, np.cumsum(lengths)[:-1])


def write_dataset(path: Path, samples: list[NDArray[np.int32]]) -> None:
    """A parquet file of ``input_ids``, as a user would hand one in."""
    offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])])
    column = pa.ListArray.from_arrays(offsets.astype(np.int32), np.concatenate(samples))
    pq.write_table(pa.table({"input_ids": column}), path)
