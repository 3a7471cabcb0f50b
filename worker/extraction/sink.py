"""From computed states to a committed range: encode, store the shard, create the record.

The record is the commit point. The shard is written under the name of this attempt, durable, before the record is
created exclusively; whoever comes second deletes their own shard, so that a range never has two.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from swathe import codec, log, names
from swathe.clock import utc_now
from swathe.errors import IntegrityError, NoSpaceError, ObjectMissingError, SwatheError
from swathe.records import read_record
from swathe.spec import Quarantined, RangeId, RangeRecord, RunSpec, to_json
from swathe.store import Store
from swathe.tokens import RangeTokens
from worker.extraction.store_watch import StoreWatch
from worker.telemetry.totals import Telemetry

_STEP_BYTES: Final = 32 << 20

logger = log.get("sink")


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who writes records: stands in each of them."""

    worker: str
    device: str
    software: Mapping[str, str]
    kernels: Mapping[str, str]


class Sink:
    """Commits ranges of one run; safe to call from several threads."""

    def __init__(
        self,
        store: Store,
        spec: RunSpec,
        telemetry: Telemetry,
        watch: StoreWatch,
        min_free_bytes: int = 0,
    ) -> None:
        self._store = store
        self._spec = spec
        self._telemetry = telemetry
        self._watch = watch
        self._min_free_bytes = min_free_bytes

    def committed(self, range_id: RangeId) -> bool:
        """Whether the range has a record whose shard is there in full.

        Raises IntegrityError when a record exists and does not hold: only ``verify --repair`` may withdraw it.
        """
        try:
            record = read_record(self._store, self._spec, range_id)
        except ObjectMissingError:
            return False
        except SwatheError as error:
            if error.retryable:
                raise
            raise self._damaged(range_id, str(error)) from error
        info = self._store.stat(record.shard) if record.shard else None
        if record.shard and (info is None or info.size_bytes != record.size_bytes):
            raise self._damaged(range_id, f"its shard {record.shard} is missing or cut short")
        return True

    def commit(
        self,
        tokens: RangeTokens,
        states: Mapping[str, codec.TensorView] | None,
        quarantined: tuple[Quarantined, ...],
        author: Author,
        stage_seconds: Mapping[str, float],
    ) -> RangeRecord | None:
        """Make a range durable; returns its record, or None when another worker had committed it first.

        ``tokens`` are the samples that were computed, ``states`` the tensors of their hidden states (None when
        every sample is quarantined). Raises StoreError or NoSpaceError; then nothing of this attempt counts.
        """
        range_id, attempt = tokens.range_id, names.new_attempt()
        shard, size_bytes, digest = None, 0, ""
        if states is not None:
            self._require_room(sum(memoryview(one.data).nbytes for one in states.values()))
            shard = names.shard(range_id, attempt)
            with self._telemetry.stage("write"):
                written = self._store.write(shard, self._steps(self._encode(tokens, states)))
            size_bytes, digest = written.size_bytes, written.xxh3
        record = RangeRecord(
            run_id=self._spec.run_id,
            range_id=range_id,
            shard=shard,
            size_bytes=size_bytes,
            xxh3=digest,
            samples=len(tokens.rows),
            tokens=int(tokens.offsets[-1]),
            quarantined=quarantined,
            worker=author.worker,
            device=author.device,
            finished_at=utc_now(),
            stage_seconds={name: round(seconds, 4) for name, seconds in stage_seconds.items()},
            software=dict(author.software),
            kernels=dict(author.kernels),
        )
        with self._telemetry.stage("record"):
            won = self._store.create(names.record(range_id), to_json(record))
        if not won:
            logger.info("another worker committed the range first", range_id=range_id)
            self._telemetry.outcome("duplicate")
            if shard is not None:
                self._store.delete(shard)
            return None
        return record

    def withdraw(self, record: RangeRecord) -> None:
        """Take back a range that this worker recorded."""
        self._store.delete(names.record(record.range_id))
        if record.shard is not None:
            self._store.delete(record.shard)

    def _require_room(self, size_bytes: int) -> None:
        """Stop before the disk is full: an operator has time, and the rest of the node a disk that works."""
        free_bytes = self._store.free_bytes()
        if free_bytes is not None and free_bytes - size_bytes < self._min_free_bytes:
            msg = (
                f"{self._store.url}: {free_bytes:,} bytes are free, a shard of {size_bytes:,} would leave less than "
                f"SWATHE_MIN_FREE_BYTES ({self._min_free_bytes:,}); make room"
            )
            raise NoSpaceError(msg)

    def _steps(self, buffers: Iterable[codec.Buffer]) -> Iterator[memoryview]:
        """The same bytes in pieces, not copied, so that it can be seen how the writing gets on."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            for at in range(0, view.nbytes, _STEP_BYTES):
                self._watch.moved()
                yield view[at : at + _STEP_BYTES]

    def _encode(
        self, tokens: RangeTokens, states: Mapping[str, codec.TensorView]
    ) -> list[codec.Buffer]:
        spec = self._spec
        tensors = {
            **states,
            "input_ids": codec.view(tokens.input_ids.astype("i4", copy=False)),
            "loss_mask": codec.view(tokens.loss_mask.astype("u1", copy=False)),
            "offsets": codec.view(tokens.offsets.astype(np.int64, copy=False)),
            "row": codec.view(tokens.rows.astype(np.int64, copy=False)),
        }
        metadata = {
            "format": "swathe",
            "format_version": str(spec.format_version),
            "run_id": spec.run_id,
            "fingerprint": spec.fingerprint,
            "range_id": str(tokens.range_id),
            "model": spec.model.source,
            "model_identity": spec.model.identity,
            "random_weights": str(spec.model.random_weights).lower(),
            "layers": "; ".join(f"{slot.slot}: {slot.meaning}" for slot in spec.layers),
        }
        return list(codec.encode(tensors, metadata))

    def _damaged(self, range_id: RangeId, why: str) -> IntegrityError:
        key = names.record(range_id)
        msg = (
            f"{self._store.url}/{key}: the record does not hold ({why}); the range is left alone, withdraw it with: "
            "swathe verify --repair"
        )
        return IntegrityError(msg, key=key)
