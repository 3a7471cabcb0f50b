"""One range of an import: its samples' files read, every value looked at, one shard and its record committed."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swathe import codec, names
from swathe.errors import IntegrityError
from swathe.importing.folder import BadSampleError, Row, StateFile, require_finite, state_file
from swathe.importing.normed import NormCheck, to_float
from swathe.samples import offsets_of
from swathe.spec import FLOAT8, Quarantined, RangeId, RangeRecord, RunSpec, to_json
from swathe.store import Store
from swathe.tokens import RangeTokens, TokenReader

_FILES_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    row: Row
    file: StateFile
    states_SKH: NDArray[Any]

    def last_SH(self) -> NDArray[np.float32]:  # noqa: N802 - a tensor's name carries its shape
        """Values of the last slot."""
        last_SH = to_float(self.states_SKH[:, -1], self.file.dtype)
        return last_SH * self.file.read_scales()[:, -1:] if self.file.scales else last_SH


class RangeImporter:
    """Commits ranges of one import."""

    def __init__(self, source: Path, store: Store, spec: RunSpec, norm: NormCheck | None) -> None:
        self._source = source
        self._store = store
        self._spec = spec
        self._norm = norm
        self._tokens = TokenReader(store, spec)

    def check(self, range_id: RangeId) -> tuple[list[_Sample], tuple[Quarantined, ...]]:
        """Read a range: samples that can be stored, and those that cannot. Raises as ``commit`` does."""
        rows = _rows(self._tokens.read_range(range_id))
        with ThreadPoolExecutor(_FILES_AT_ONCE, "import") as pool:
            found = list(pool.map(self._load, rows))
        good = [one for one in found if isinstance(one, _Sample)]
        self._require_before_norm(good)
        return good, tuple(one for one in found if isinstance(one, Quarantined))

    def commit(self, range_id: RangeId) -> None:
        """Read, check and store a range; samples that turn out bad are quarantined in its record.

        Raises IntegrityError when the last slot is after the final norm: then the whole folder is.
        """
        good, bad = self.check(range_id)
        key, size_bytes, digest = None, 0, ""
        if good:
            key = names.shard(range_id, names.new_attempt())
            written = self._store.write(
                key, codec.encode(self._tensors(good), self._metadata(range_id))
            )
            size_bytes, digest = written.size_bytes, written.xxh3
        record = RangeRecord(
            run_id=self._spec.run_id,
            range_id=range_id,
            shard=key,
            size_bytes=size_bytes,
            xxh3=digest,
            samples=len(good),
            tokens=sum(len(one.row.input_ids) for one in good),
            quarantined=bad,
            worker=names.IMPORTER,
            device="none",
            finished_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        if not self._store.create(names.record(range_id), to_json(record)) and key is not None:
            self._store.delete(key)  # another import of the same folder was first

    def _load(self, row: Row) -> _Sample | Quarantined:
        spec = self._spec
        try:
            file = state_file(self._source, row, len(spec.layers), spec.model.hidden_size)
            if file.dtype != spec.stored_dtype:
                return Quarantined(row=row.row, reason=f"states are {file.dtype} now")
            states_SKH = file.read_states()
            require_finite(states_SKH, file.dtype)
        except BadSampleError as error:
            return Quarantined(row=row.row, reason=str(error))
        return _Sample(row=row, file=file, states_SKH=states_SKH)

    def _require_before_norm(self, samples: Sequence[_Sample]) -> None:
        if self._norm is None or not samples:
            return
        normed = [one for one in samples if self._norm.is_normed(one.last_SH())]
        if 2 * len(normed) > len(samples):
            path = normed[0].file.path
            msg = (
                f"{path}: the last slot was stored AFTER the model's final norm, and so were {len(normed)} of "
                f"{len(samples)} samples beside it; speculators wants it before, and the way back is not exact. "
                "Nothing more is imported; compute the states again"
            )
            raise IntegrityError(msg, key=path.name)

    def _tensors(self, samples: Sequence[_Sample]) -> dict[str, codec.TensorView]:
        lengths = np.array([len(one.row.input_ids) for one in samples])
        joined_TKH = np.concatenate([one.states_SKH for one in samples])
        tensors = {
            "hidden_states": codec.TensorView(
                dtype=self._spec.stored_dtype,
                shape=joined_TKH.shape,
                data=joined_TKH.reshape(-1).view("u1").data,
            ),
            "input_ids": codec.view(np.concatenate([one.row.input_ids for one in samples])),
            "loss_mask": codec.view(np.concatenate([one.row.loss_mask for one in samples])),
            "offsets": codec.view(offsets_of(lengths)),
            "row": codec.view(np.array([one.row.row for one in samples], np.int64)),
        }
        if self._spec.stored_dtype == FLOAT8:
            scales_TK = np.concatenate([one.file.read_scales() for one in samples])
            tensors[names.SCALES_TENSOR] = codec.view(scales_TK.astype(np.float32))
        return tensors

    def _metadata(self, range_id: RangeId) -> dict[str, str]:
        spec = self._spec
        return {
            "format": "swathe",
            "format_version": str(spec.format_version),
            "run_id": spec.run_id,
            "fingerprint": spec.fingerprint,
            "range_id": str(range_id),
            "model": spec.model.source,
            "layers": "; ".join(f"{slot.slot}: {slot.meaning}" for slot in spec.layers),
        }


def _rows(tokens: RangeTokens) -> list[Row]:
    bounds = zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)
    return [
        Row(row=int(row), input_ids=tokens.input_ids[a:b], loss_mask=tokens.loss_mask[a:b])
        for row, (a, b) in zip(tokens.rows, bounds, strict=True)
    ]
