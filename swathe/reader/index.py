"""What a reader must know of a run before it reads a tensor: where each stored sample lies.

Everything is columns: row int64 [n], id arrow [n], shard int32 [n] (range id), offset int64 [n] and length int32 [n] in
tokens, n the stored samples in the order of the user's rows. A million samples are 25 MB and open in a second.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from swathe import names
from swathe.errors import IncompleteRunError, IntegrityError, ObjectMissingError
from swathe.manifest import Manifest, index_rows, read_manifest
from swathe.records import RunWatcher, read_run
from swathe.spec import RangeId, RunSpec
from swathe.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A committed shard: ``key`` in the run's store and the size that it must have."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIndex:
    """A run's spec, its committed shards and its samples."""

    spec: RunSpec
    shards: dict[int, Shard]
    rows: NDArray[Any]
    ids: pa.Array
    shard_of: NDArray[Any]
    offsets: NDArray[Any]
    lengths: NDArray[Any]

    def __len__(self) -> int:
        return len(self.rows)


def open_index(store: Store, *, unsealed: bool) -> RunIndex:
    """Read the index of a sealed run; with ``unsealed`` also of one that is still being written.

    Raises IncompleteRunError for an unsealed run, FormatError for a damaged or newer one, IntegrityError when manifest
    and spec are of two runs.
    """
    spec = read_run(store)
    if store.stat(names.MANIFEST) is not None:
        manifest = _own_manifest(store, spec)
        table = _read_rows(store)
        shards = {e.range_id: _shard(e.key, e.size_bytes) for e in manifest.shards}
    elif unsealed:
        state = RunWatcher(store, spec).read()
        table = index_rows(store, state)
        shards = {i: _shard(r.shard, r.size_bytes) for i, r in state.records.items()}
    else:
        msg = (
            f"{store.url}: the run is not sealed; finish it with swathe run or swathe wait, "
            "or read what is there with unsealed=True"
        )
        raise IncompleteRunError(msg)
    return _index(spec, shards, table)


def _index(spec: RunSpec, shards: dict[RangeId, Shard | None], table: pa.Table) -> RunIndex:
    return RunIndex(
        spec=spec,
        shards={int(range_id): shard for range_id, shard in shards.items() if shard is not None},
        rows=table["row"].to_numpy(),
        ids=table["id"].combine_chunks(),
        shard_of=table["shard"].to_numpy(),
        offsets=table["offset"].to_numpy(),
        lengths=table["length"].to_numpy(),
    )


def _shard(key: str | None, size_bytes: int) -> Shard | None:
    return None if key is None else Shard(key=key, size_bytes=size_bytes)


def _own_manifest(store: Store, spec: RunSpec) -> Manifest:
    manifest = read_manifest(store)
    if manifest.run_id != spec.run_id:
        msg = f"{store.url}: manifest.json is of run {manifest.run_id}, run.json of {spec.run_id}"
        raise IntegrityError(msg, key=names.MANIFEST)
    return manifest


def _read_rows(store: Store) -> pa.Table:
    path = store.local_path(names.ROWS)
    try:
        if path is not None:
            # The pages are plain, so the columns are the file itself and processes share them.
            return pq.read_table(str(path), memory_map=True)
        return pq.read_table(pa.BufferReader(store.read(names.ROWS)))
    except (pa.ArrowException, OSError, ObjectMissingError) as error:
        why = next(iter(str(error).splitlines()), "")
        msg = (
            f"{store.url}/{names.ROWS}: missing or damaged ({why}); write it anew with: swathe verify --full "
            f"--repair {store.url}"
        )
        raise IntegrityError(msg, key=names.ROWS) from error
