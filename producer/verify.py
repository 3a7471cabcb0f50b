"""Verification of a run's committed shards against their records, the plan and themselves.

Quick: each record's shard is there, of the recorded size, with the header the run promises. Full: all bytes are read
once, 64 MB at a time; the hash is the recorded one, ids, masks and rows are the planned ones, every stored vector
is finite, no sample has a slot of zeros only (a right-length file with a zeroed tail passes weaker tests), and every scale of a float8
run is a power of two. Imported ranges keep the scales that they came with: those must be finite and positive. The index of a sealed
run (manifest.json, rows.parquet) is what sealing would write.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import xxhash

from swathe import codec, names
from swathe.errors import FormatError, StoreError
from swathe.location import at_home
from swathe.manifest import index_problem, seal
from swathe.records import RunState, RunWatcher, open_run
from swathe.spec import FLOAT8, RangeId, RangeRecord, RunSpec
from swathe.store import Store
from swathe.tokens import RangeTokens, TokenReader

_NOT_FINITE: Final = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000, FLOAT8: 0x7F}
"""Bits that are all set in NaN and infinity only; float8_e4m3fn has no infinity, and one NaN of each sign."""
_BITS: Final = {"bfloat16": "u2", "float16": "u2", "float32": "u4", FLOAT8: "u1"}
_CHUNK_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What is wrong, by range. ``missing`` ranges have no record; ``damaged`` have one that does not hold."""

    checked: int
    full: bool
    missing: tuple[RangeId, ...]
    failed: tuple[RangeId, ...]
    damaged: dict[RangeId, str] = field(default_factory=dict)
    index: str | None = None
    """What is wrong with the index of a sealed run; only a full verification looks."""
    sealed: bool

    @property
    def ok(self) -> bool:
        """Complete and undamaged."""
        return not (self.missing or self.failed or self.damaged or self.index)


def verify(
    store: Store, *, full: bool = False, progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Check every record of a run; ``progress(done, all)`` is told after each range."""
    home, spec = open_run(store)
    return at_home(home, lambda home: _verify(home, spec, full=full, progress=progress))


def _verify(
    store: Store, spec: RunSpec, *, full: bool, progress: Callable[[int, int], None] | None
) -> Verification:
    state = RunWatcher(store, spec).read()
    damaged = dict.fromkeys(state.invalid, "unreadable or foreign record")
    for range_id, canary in state.suspect.items():
        damaged[range_id] = (
            f"suspect: device {canary.device} computed row {canary.row} of range {canary.range_id} wrong at "
            f"{canary.taken_at}"
        )
    check = _Checker(store, spec, full=full)
    workers = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, "verify") as pool:
        results = pool.map(check, state.records.values())
        for done, (record, problem) in enumerate(
            zip(state.records.values(), results, strict=True), start=1
        ):
            if problem:
                damaged[record.range_id] = problem
            if progress:
                progress(done, len(state.records))
    whole = full and state.sealed and not damaged and state.complete
    return Verification(
        checked=len(state.records),
        full=full,
        missing=tuple(i for i in state.missing if i not in state.invalid),
        failed=tuple(sorted(state.failed)),
        damaged=dict(sorted(damaged.items())),
        index=index_problem(store, state) if whole else None,
        sealed=state.sealed,
    )


def withdraw(store: Store, state: RunState, range_ids: list[RangeId]) -> None:
    """Take back the records of damaged ranges, so that exactly these are done again.

    The manifest goes first (the run is no longer complete), each record before its shard.
    """
    if range_ids:
        at_home(store, lambda home: _withdraw(home, state, range_ids))


def seal_again(store: Store) -> None:
    """Write the index of a complete run anew."""
    at_home(store, lambda home: home.delete(names.MANIFEST))
    seal(store)


def _withdraw(store: Store, state: RunState, range_ids: list[RangeId]) -> None:
    store.delete(names.MANIFEST)
    for range_id in range_ids:
        record = state.records.get(range_id)
        store.delete(names.record(range_id))
        if record is not None and record.shard is not None:
            store.delete(record.shard)
    if state.suspect.keys() <= set(range_ids):
        # All that these canaries cast doubt on is gone; what the device does from now on is for new ones to judge.
        for key, canary in state.canaries.items():
            if not canary.passed:
                store.delete(key)


class _Checker:
    """Checks one record; called from several threads."""

    def __init__(self, store: Store, spec: RunSpec, *, full: bool) -> None:
        self._store = store
        self._spec = spec
        self._full = full
        self._tokens = TokenReader(store, spec)

    def __call__(self, record: RangeRecord) -> str | None:
        """What is wrong with the range, in words, or None. StoreError passes: it says nothing of the data."""
        if self._full and (problem := self._miscounted(record)):
            return problem
        if record.shard is None:
            return (
                None
                if record.samples == 0
                else f"{record.samples} samples recorded without a shard"
            )
        info = self._store.stat(record.shard)
        if info is None:
            return f"shard {record.shard} is missing"
        if info.size_bytes != record.size_bytes:
            return f"shard has {info.size_bytes} bytes, {record.size_bytes} recorded"
        try:
            header = codec.read_header(
                lambda at, size: self._store.read_range(record.shard or "", at, size),
                origin=record.shard,
            )
        except (FormatError, StoreError) as error:
            return str(error)
        return next(self._problems(record, header), None)

    def _miscounted(self, record: RangeRecord) -> str | None:
        planned = self._tokens.read_range(record.range_id).rows
        quarantined = [one.row for one in record.quarantined]
        stored = int((~np.isin(planned, quarantined)).sum())
        if (stored, len(planned) - stored) == (record.samples, len(quarantined)):
            return None
        return f"{record.samples} samples and {len(quarantined)} quarantined ones recorded, of the plan's {len(planned)}"

    def _problems(self, record: RangeRecord, header: codec.Header) -> Iterator[str]:
        spec = self._spec
        if header.size_bytes != record.size_bytes:
            yield f"header promises {header.size_bytes} bytes, the shard has {record.size_bytes}"
        if header.metadata.get("fingerprint") != spec.fingerprint:
            yield "shard of another run (its header's fingerprint differs)"
        rows = (record.tokens, len(spec.layers))
        promised: dict[str, tuple[str, tuple[int, ...]]] = {
            names.STATES_TENSOR: (spec.stored_dtype, (*rows, spec.model.hidden_size))
        }
        if spec.stored_dtype == FLOAT8:
            promised[names.SCALES_TENSOR] = ("float32", rows)
        wrong = [
            f"{name} is not {dtype} {list(shape)}"
            for name, (dtype, shape) in promised.items()
            if (info := header.tensors.get(name)) is None
            or (info.dtype, info.shape) != (dtype, shape)
        ]
        yield from wrong
        if self._full and not wrong:
            yield from self._content(record, header)

    def _content(self, record: RangeRecord, header: codec.Header) -> Iterator[str]:
        tokens = self._tokens.read_range(record.range_id)
        bad_rows = [bad.row for bad in record.quarantined]
        planned = tokens.keep(np.flatnonzero(~np.isin(tokens.rows, bad_rows)).tolist())
        wanted: dict[str, codec.Array] = {
            "row": planned.rows,
            "offsets": planned.offsets,
            "input_ids": planned.input_ids,
            "loss_mask": planned.loss_mask,
        }
        if absent := sorted(wanted.keys() - header.tensors.keys()):
            yield f"shard has no {', '.join(absent)}"
        digest, found = xxhash.xxh3_128(), list[str]()
        # Which vectors hold anything [T, K]. One may be all zero (a zero embedding at a sample's start stays zero
        # through every block); a slot that is zero at every token of a sample was not computed, as the engine judges too.
        filled: list[codec.Array] = []
        for name, first, info, data in _pieces(self._store, record.shard or "", header):
            digest.update(data)
            if name == names.STATES_TENSOR:
                states = codec.to_array(info, data)
                bits = states.view(_BITS[self._spec.stored_dtype])
                found.extend(_not_finite(bits, _NOT_FINITE[self._spec.stored_dtype], first))
                # The sign bit does not make a zero a value.
                filled.append(np.any(bits << 1, axis=2))
            elif name == names.SCALES_TENSOR:
                imported = record.worker == names.IMPORTER
                found.extend(_bad_scales(codec.to_array(info, data), powers_of_two=not imported))
            elif name in wanted and not np.array_equal(codec.to_array(info, data), wanted[name]):
                found.append(f"{name} is not what the plan says")
        if digest.hexdigest() != record.xxh3:
            yield "content does not have the recorded hash"
        yield from found
        if filled and len(planned.rows):
            yield from _empty_slots(np.concatenate(filled), planned)


def _pieces(
    store: Store, key: str, header: codec.Header
) -> Iterator[tuple[str, int, codec.TensorInfo, bytes]]:
    """All bytes of a shard in order: name, first token, what it is, bytes. States come in chunks, the rest whole."""
    tensors = sorted(header.tensors.items(), key=lambda item: item[1].offset)
    start = tensors[0][1].offset
    head = codec.TensorInfo(dtype="uint8", shape=(start,), offset=0, size_bytes=start)
    for name, whole in [("", head), *tensors]:
        rows = whole.shape[0]
        row_bytes = whole.size_bytes // rows if rows else 0
        step = (
            max(1, _CHUNK_BYTES // row_bytes) if name == names.STATES_TENSOR and row_bytes else rows
        )
        for first in range(0, rows, step or 1):
            info = codec.slice_rows(whole, first, min(first + step, rows))
            yield name, first, info, store.read_range(key, info.offset, info.size_bytes)


def _not_finite(bits_TKH: codec.Array, special: int, first: int) -> Iterator[str]:
    """Name the first vector that is not finite. Works on raw bits: numpy has no bfloat16."""
    infinite = ((bits_TKH & special) == special).any(axis=2)
    if infinite.any():
        token, slot = np.argwhere(infinite)[0]
        yield f"token {first + token} slot {slot} holds NaN or infinity"


def _empty_slots(filled_TK: codec.Array, planned: RangeTokens) -> Iterator[str]:
    """Name the first sample that has a slot of zeros only."""
    empty = ~np.logical_or.reduceat(filled_TK, planned.offsets[:-1], axis=0)
    if empty.any():
        sample, slot = np.argwhere(empty)[0]
        yield f"row {planned.rows[sample]} slot {slot} is zero at every token"


def _bad_scales(scales_TK: codec.Array, *, powers_of_two: bool) -> Iterator[str]:
    """Name the first scale that cannot be one."""
    # Of positive powers of two, and of nothing else, the mantissa is 0.5.
    good = (
        np.frexp(scales_TK)[0] == 0.5 if powers_of_two else np.isfinite(scales_TK) & (scales_TK > 0)
    )
    if not good.all():
        token, slot = np.argwhere(~good)[0]
        kind = "a power of two" if powers_of_two else "a positive number"
        yield f"token {token} slot {slot} has scale {scales_TK[token, slot]}, not {kind}"
