"""A folder of speculators: an arrow set and ``hidden_states/hs_{row}.safetensors``, read without torch or datasets.

Legend: S tokens of a sample, K + 1 slots of which the last is the final state, H hidden size.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from swathe import codec
from swathe.errors import FormatError, PlanError

_FLOATS: Final = ("bfloat16", "float16", "float32", "float8_e4m3fn")
SCALES: Final = "hidden_states_scales"


class BadSampleError(Exception):
    """Raised for a sample that cannot be imported; its message is the reason that stands in rejected.jsonl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the arrow set: input_ids int32 [S], loss_mask uint8 [S]."""

    row: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """The header of one sample's file, found right for its row."""

    path: Path
    states: codec.TensorInfo
    scales: codec.TensorInfo | None

    @property
    def dtype(self) -> str:
        """Of the states."""
        return self.states.dtype

    def read_states(self) -> NDArray[Any]:
        """[S, K + 1, H]; bfloat16 and float8 as raw unsigned integers."""
        return _read(self.path, self.states)

    def read_scales(self) -> NDArray[Any]:
        """float32 [S, K + 1]: the one scale of a token, for each of its slots."""
        if self.scales is None:
            msg = f"{self.path}: float8 without {SCALES}"
            raise FormatError(msg)
        scales: NDArray[Any] = _read(self.path, self.scales).reshape(-1, 1)
        return np.ascontiguousarray(np.repeat(scales, self.states.shape[1], axis=1))


def data_files(source: Path) -> list[Path]:
    """The arrow streams of a ``save_to_disk`` folder. Raises PlanError when it is none."""
    try:
        state = json.loads((source / "state.json").read_text(encoding="utf-8"))
        return [source / entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"{source}: no folder of speculators ({error}); state.json, data-*.arrow and hidden_states/ are expected"
        raise PlanError(msg) from error


def read_rows(files: list[Path]) -> Iterator[Row]:
    """All rows in order. Raises PlanError for a file that cannot be read or lacks a column."""
    row = 0
    for path in files:
        try:
            with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
                for batch in stream:
                    ids, masks = _lists(batch, "input_ids", "<i4"), _lists(batch, "loss_mask", "u1")
                    for input_ids, loss_mask in zip(ids, masks, strict=True):
                        yield Row(row=row, input_ids=input_ids, loss_mask=loss_mask)
                        row += 1
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            msg = f"{path}: cannot be read at row {row} ({error}); nothing was imported"
            raise PlanError(msg) from error


def state_file(source: Path, row: Row, slots: int, hidden_size: int) -> StateFile:
    """The header of a row's file, checked against the row. Raises BadSampleError with the reason."""
    path = source / "hidden_states" / f"hs_{row.row}.safetensors"
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            header = codec.read_header(partial(_read_range, file), origin=path.name)
    except FileNotFoundError as error:
        msg = "no hidden states file"
        raise BadSampleError(msg) from error
    except (OSError, FormatError, ValueError) as error:
        msg = f"hidden states file cannot be read: {error}"
        raise BadSampleError(msg) from error
    if header.size_bytes != size_bytes:
        msg = f"hidden states file is cut short: {size_bytes} bytes, {header.size_bytes} expected"
        raise BadSampleError(msg)
    states, ids = header.tensors.get("hidden_states"), header.tensors.get("token_ids")
    if states is None or ids is None or states.dtype not in _FLOATS:
        msg = "hidden states file lacks token_ids or hidden_states of a float type"
        raise BadSampleError(msg)
    shape = (len(row.input_ids), slots, hidden_size)
    if states.shape != shape:
        msg = f"hidden states have shape {list(states.shape)}, {list(shape)} expected"
        raise BadSampleError(msg)
    if _read(path, ids).tolist() != row.input_ids.tolist():
        msg = "token ids of the hidden states file are not the row's"
        raise BadSampleError(msg)
    scales = header.tensors.get(SCALES)
    one_a_token = (
        scales is not None and scales.dtype == "float32" and math.prod(scales.shape) == shape[0]
    )
    if states.dtype == "float8_e4m3fn" and not one_a_token:
        msg = "float8 hidden states without one float32 scale per token"
        raise BadSampleError(msg)
    return StateFile(path=path, states=states, scales=scales)


def require_finite(states: NDArray[Any], dtype: str) -> None:
    """Raises BadSampleError for NaN or infinity, found in the raw bits."""
    if dtype == "bfloat16":
        bad = (states & 0x7F80) == 0x7F80
    elif dtype == "float8_e4m3fn":
        bad = (states & 0x7F) == 0x7F
    else:
        bad = ~np.isfinite(states)
    if bool(bad.any()):
        msg = f"{int(bad.sum())} values are not finite"
        raise BadSampleError(msg)


def _lists(batch: pa.RecordBatch, name: str, dtype: str) -> list[NDArray[Any]]:
    column = batch.column(name)
    values = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    return [values[first:stop].astype(dtype) for first, stop in pairwise(offsets)]


def _read_range(file: BinaryIO, offset: int, size_bytes: int) -> bytes:
    file.seek(offset)
    data = file.read(size_bytes)
    if len(data) < size_bytes:
        msg = "cut short"
        raise FormatError(msg)
    return data


def _read(path: Path, info: codec.TensorInfo) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            return codec.to_array(info, _read_range(file, info.offset, info.size_bytes))
    except (OSError, FormatError) as error:
        msg = f"{path.name}: {error}"
        raise BadSampleError(msg) from error
