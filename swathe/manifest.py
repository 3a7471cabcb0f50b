"""Sealing: from records to manifest.json and rows.parquet.

Both files are derived from run.json, tokens/ and the records alone, so sealing twice, or on two nodes at once, writes
the same bytes. rows.parquet is in the order of the user's rows; manifest.json is written last and its existence
says that the run is complete.
"""

import io
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from swathe import codec, names
from swathe.errors import FormatError, IncompleteRunError, IntegrityError, ObjectMissingError
from swathe.location import at_home
from swathe.orphans import collect
from swathe.records import RunState, RunWatcher, open_run, read_failed
from swathe.spec import (
    FORMAT_VERSION,
    LayerSlot,
    RangeId,
    RunId,
    RunSpec,
    StoredDtype,
    from_json,
    to_json,
)
from swathe.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardEntry:
    """A committed shard. ``key`` is None for a range whose samples are all quarantined."""

    range_id: RangeId
    key: str | None
    size_bytes: int
    xxh3: str
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """stored + rejected + quarantined = rows."""

    rows: int
    stored: int
    rejected: int
    quarantined: int
    tokens: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """manifest.json. ``software`` and ``kernels`` list the distinct sets that wrote the shards."""

    format_version: int = FORMAT_VERSION
    run_id: RunId
    fingerprint: str
    layers: tuple[LayerSlot, ...]
    stored_dtype: StoredDtype
    hidden_size: int
    random_weights: bool
    accounts: Accounts
    software: tuple[dict[str, str], ...]
    kernels: tuple[dict[str, str], ...]
    shards: tuple[ShardEntry, ...]


def seal(store: Store, state: RunState | None = None) -> Manifest:
    """Write rows.parquet and manifest.json of a complete run; an already sealed run is returned as it is.

    Raises IncompleteRunError when ranges are open or set aside, too many samples are quarantined or rows are
    unaccounted for, and IntegrityError when a record contradicts the plan.
    """
    if state is None:
        store, spec = open_run(store)
        state = RunWatcher(store, spec).read()
    return at_home(store, partial(_seal_there, state, store.url))


def _seal_there(state: RunState, read_at: str, home: Store) -> Manifest:
    """Seal where the run is; after a move a range may have another shard there, by a worker that came first."""
    if home.url != read_at:
        state = RunWatcher(home, state.spec).read()
    return _seal(home, state)


def _seal(store: Store, state: RunState) -> Manifest:
    now_s, spec = time.time(), state.spec
    _require_complete(store, state)
    if state.sealed:
        manifest = read_manifest(store)
        if manifest.run_id == spec.run_id and manifest.shards == tuple(_entries(state)):
            return manifest
    table = index_rows(store, state)
    buffer = io.BytesIO()
    # Plain pages: the reader maps the file and takes the columns as they lie.
    pq.write_table(table, buffer, compression="NONE", use_dictionary=False)
    store.write(names.ROWS, [buffer.getbuffer()])
    manifest = _manifest(state)
    store.write(names.MANIFEST, [to_json(manifest, indent=1)])
    # Only what is certainly of the dead: a late attempt may still be on its way to losing.
    collect(store, state, now_s=now_s)
    return manifest


def read_manifest(store: Store) -> Manifest:
    """The manifest of a sealed run. Raises ObjectMissingError when the run is not sealed."""
    return from_json(Manifest, store.read(names.MANIFEST), origin=f"{store.url}/{names.MANIFEST}")


def index_rows(store: Store, state: RunState) -> pa.Table:
    """Where each stored sample lies: row, id, shard (range id), offset and length in tokens, by user's row.

    Ranges without a record are left out, so the index of a run that goes on can be had too.
    Raises IntegrityError when a record's counts are not what the plan says, or the ids are those of other rows.
    """
    starts, rows, lengths = _planned(store, state.spec)
    ids = _planned_ids(store, rows)
    shard = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    kept = np.isin(shard, np.fromiter(state.records, dtype="i8", count=len(state.records)))
    bad = [sample.row for record in state.records.values() for sample in record.quarantined]
    kept &= ~np.isin(rows, np.array(bad, dtype="i8"))
    weights = np.where(kept, lengths, 0)
    ends = np.concatenate([[0], np.cumsum(weights)])
    offsets = ends[:-1] - ends[starts[shard]]
    _check_counts(store, state, starts, np.concatenate([[0], np.cumsum(kept)]), ends)
    order = np.flatnonzero(kept)
    order = order[np.argsort(rows[order], kind="stable")]
    return pa.table({
        "row": rows[order],
        "id": ids.take(pa.array(order)),
        "shard": shard[order].astype("i4"),
        "offset": offsets[order],
        "length": lengths[order].astype("i4"),
    })  # fmt: skip


def _planned(
    store: Store, spec: RunSpec
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of the plan: place of each range's first sample, and the end [ranges + 1]; row and length of each sample [n]."""
    starts, rows, lengths = [], [], []
    for file in spec.token_files:
        header = codec.read_header(
            lambda offset, size, name=file.name: store.read_range(name, offset, size),  # type: ignore[misc]
            origin=f"{store.url}/{file.name}",
        )
        # The three lie side by side: one request.
        infos = [header.tensors[name] for name in ("offsets", "range_starts", "row")]
        first = min(info.offset for info in infos)
        size_bytes = max(info.offset + info.size_bytes for info in infos) - first
        data = memoryview(store.read_range(file.name, first, size_bytes))
        offsets, range_starts, row = (
            codec.to_array(info, data[info.offset - first :][: info.size_bytes]) for info in infos
        )
        starts.append(range_starts[:-1] + file.first_sample)
        rows.append(row)
        lengths.append(np.diff(offsets))
    starts.append(np.array([spec.totals.samples]))
    return np.concatenate(starts), np.concatenate(rows), np.concatenate(lengths)


def _planned_ids(store: Store, rows: NDArray[np.int64]) -> pa.ChunkedArray:
    """The id of each sample of the plan. Raises IntegrityError when the table of ids is not of these rows."""
    try:
        table = pq.read_table(io.BytesIO(store.read(names.TOKEN_ROWS)))
    except (pa.ArrowException, OSError) as error:
        problem = f"cannot be read ({next(iter(str(error).splitlines()), '')})"
    else:
        if np.array_equal(table["row"], rows):
            return table["id"]
        problem = "its rows are not those of the planned tokens"
    msg = (
        f"{store.url}/{names.TOKEN_ROWS}: {problem}; it is damaged, and the ids of samples stand there only: copy it back, "
        "or plan the run again in another folder"
    )
    raise IntegrityError(msg, key=names.TOKEN_ROWS)


def _check_counts(
    store: Store,
    state: RunState,
    starts: NDArray[np.int64],
    kept_before: NDArray[np.int64],
    tokens_before: NDArray[np.int64],
) -> None:
    for range_id, record in state.records.items():
        first, stop = starts[range_id], starts[range_id + 1]
        samples = int(kept_before[stop] - kept_before[first])
        tokens = int(tokens_before[stop] - tokens_before[first])
        if (samples, tokens) != (record.samples, record.tokens):
            key = names.record(range_id)
            msg = (
                f"{store.url}/{key}: {record.samples} samples and {record.tokens} tokens recorded, the plan has "
                f"{samples} and {tokens}; withdraw it with: swathe verify --repair"
            )
            raise IntegrityError(msg, key=key)


def index_problem(store: Store, state: RunState) -> str | None:
    """What is wrong with the two files of a sealed run's index, in words; None when they are what sealing would write."""
    try:
        if read_manifest(store) != _manifest(state):
            return f"{names.MANIFEST} is not what the records say"
        written = pq.read_table(io.BytesIO(store.read(names.ROWS)))
        derived = index_rows(store, state)
    except (FormatError, IntegrityError) as error:
        return str(error)
    except (pa.ArrowException, OSError, ObjectMissingError) as error:
        return f"{names.ROWS} cannot be read ({next(iter(str(error).splitlines()), '')})"
    if not written.equals(derived):
        return f"{names.ROWS} is not what the plan and the records say"
    return None


def _require_complete(store: Store, state: RunState) -> None:
    if state.invalid:
        key = names.record(min(state.invalid))
        msg = f"{store.url}: {len(state.invalid)} records are unreadable, first {key}; run: swathe verify --repair"
        raise IntegrityError(msg, key=key)
    if state.failed:
        first = min(state.failed)
        reason = read_failed(store, first).reason
        msg = (
            f"{store.url}: {len(state.failed)} ranges are set aside, first {first} ({reason}); "
            "bring them back with: swathe retry"
        )
        raise IncompleteRunError(msg)
    if missing := state.missing:
        msg = f"{store.url}: {len(missing)} of {state.spec.totals.ranges} ranges are not stored yet"
        raise IncompleteRunError(msg)
    if state.suspect:
        range_id, canary = next(iter(state.suspect.items()))
        msg = (
            f"{store.url}: {len(state.suspect)} ranges are suspect, first {range_id}: a sample of range "
            f"{canary.range_id} was computed wrong on device {canary.device} at {canary.taken_at}; have them done again "
            "with: swathe verify --repair"
        )
        raise IncompleteRunError(msg)
    if state.too_many_quarantined:
        msg = (
            f"{store.url}: {state.quarantined_samples} samples are quarantined, more than "
            f"{state.spec.policies.max_quarantined_ratio:g} of {state.spec.totals.rows} rows; look at the reasons in "
            "states/*.json before anything is trained on this run"
        )
        raise IncompleteRunError(msg)
    if not state.accounted:
        msg = (
            f"{store.url}: stored {state.stored_samples} + rejected {state.spec.totals.rejected} + quarantined "
            f"{state.quarantined_samples} are not the {state.spec.totals.rows} rows of the data set"
        )
        raise IntegrityError(msg, key=names.RUN)


def _entries(state: RunState) -> Iterable[ShardEntry]:
    for range_id, record in state.records.items():
        yield ShardEntry(
            range_id=range_id,
            key=record.shard,
            size_bytes=record.size_bytes,
            xxh3=record.xxh3,
            samples=record.samples,
            tokens=record.tokens,
        )


def _manifest(state: RunState) -> Manifest:
    spec, records = state.spec, state.records.values()
    return Manifest(
        run_id=spec.run_id,
        fingerprint=spec.fingerprint,
        layers=spec.layers,
        stored_dtype=spec.stored_dtype,
        hidden_size=spec.model.hidden_size,
        random_weights=spec.model.random_weights,
        accounts=Accounts(
            rows=spec.totals.rows,
            stored=state.stored_samples,
            rejected=spec.totals.rejected,
            quarantined=state.quarantined_samples,
            tokens=state.stored_tokens,
            size_bytes=state.stored_bytes,
        ),
        software=_distinct(record.software for record in records),
        kernels=_distinct(record.kernels for record in records),
        shards=tuple(_entries(state)),
    )


def _distinct(sets: Iterable[dict[str, str]]) -> tuple[dict[str, str], ...]:
    return tuple(dict(items) for items in sorted({tuple(sorted(one.items())) for one in sets}))
