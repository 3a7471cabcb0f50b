"""Reading a run: a map-style data set of hidden states, from a local folder.

Index i is the i-th stored sample in the order of the user's rows. One sample with all its layers is one contiguous
piece of a shard, so local reads are views of a memory-mapped file, not copies.
"""

import mmap
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from swathe import codec, names
from swathe.errors import IncompleteRunError, IntegrityError
from swathe.manifest import Manifest, index_rows, read_manifest
from swathe.records import RunWatcher, read_run
from swathe.spec import Layer, RangeId
from swathe.store import open_store

if TYPE_CHECKING:
    import torch

_OPEN_SHARDS: Final = 128
"""Mapped shards kept at once by each process: far below any limit of open files or mappings."""


class HiddenStates:
    """A run's samples for a PyTorch ``DataLoader``; picklable, each process maps files of its own.

    ``ds[i]`` is a dict: ``row`` int, ``id`` int or str, ``input_ids`` int64 [S], ``loss_mask`` uint8 [S],
    ``hidden_states`` [S, K, H] in the stored dtype. Ids, mask and states are unshifted and of equal length: position
    t of the states is what the model computed at token t. Tensors are private views of mapped files.
    """

    def __init__(self, run: str | Path, *, unsealed: bool = False) -> None:
        """Open a sealed run; with ``unsealed`` also one that is still being written, as far as it has come.

        Raises IncompleteRunError for an unsealed run, FormatError for a damaged or newer one.
        """
        self._url = str(run)
        self._store = open_store(run)
        self.spec = read_run(self._store)
        self._shards: dict[int, codec.Header] = {}
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        manifest = self._manifest()
        if manifest is not None:
            table = self._read_index()
            keys = {entry.range_id: entry.key for entry in manifest.shards}
        elif unsealed:
            state = RunWatcher(self._store, self.spec).read()
            table = index_rows(self._store, state)
            keys = {range_id: record.shard for range_id, record in state.records.items()}
        else:
            msg = f"{run}: the run is not sealed; finish it with swathe run or swathe wait, or pass unsealed=True"
            raise IncompleteRunError(msg)
        self._keys: dict[RangeId, str | None] = keys
        self._rows = table["row"].to_numpy()
        self._ids = table["id"].combine_chunks()
        self._shard_of = table["shard"].to_numpy()
        self._offsets = table["offset"].to_numpy()
        self._lengths = table["length"].to_numpy()

    @property
    def layers(self) -> list[Layer]:
        """Meaning of the K axis: block numbers (outputs, 0-based) and ``final`` (before the final norm)."""
        return [slot.layer for slot in self.spec.layers]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample. Raises IndexError, and IntegrityError naming the file when a shard is missing or damaged."""
        import torch  # noqa: PLC0415 - torch is needed only where a tensor is asked for

        if not -len(self) <= index < len(self):
            msg = f"sample {index} of {len(self)}"
            raise IndexError(msg)
        index %= len(self)
        first = int(self._offsets[index])
        stop = first + int(self._lengths[index])
        shard = int(self._shard_of[index])
        return {
            "row": int(self._rows[index]),
            "id": self._ids[index].as_py(),
            "input_ids": self._tensor(shard, "input_ids", first, stop).to(torch.int64),
            "loss_mask": self._tensor(shard, "loss_mask", first, stop),
            "hidden_states": self._tensor(shard, "hidden_states", first, stop),
        }

    def __getstate__(self) -> dict[str, Any]:
        """Mappings belong to a process and are opened again where the copy is used."""
        return self.__dict__ | {"_maps": OrderedDict()}

    def _tensor(self, shard: int, name: str, first: int, stop: int) -> "torch.Tensor":
        import torch  # noqa: PLC0415

        mapped = self._map(shard)
        info = codec.slice_rows(self._shards[shard].tensors[name], first, stop)
        dtype: torch.dtype = getattr(torch, info.dtype)
        count = info.size_bytes // dtype.itemsize
        if count == 0:
            return torch.empty(info.shape, dtype=dtype)
        flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=info.offset)
        return flat.reshape(info.shape)

    def _map(self, shard: int) -> mmap.mmap:
        if shard in self._maps:
            self._maps.move_to_end(shard)
            return self._maps[shard]
        key = self._keys[RangeId(shard)] or ""
        path = self._store.local_path(key)
        if path is None or not path.is_file():
            msg = f"{self._url}/{key}: shard is missing; find all damage with: swathe verify"
            raise IntegrityError(msg, key=key)
        with path.open("rb") as file:
            # Copy-on-write: torch wants writable memory, and no write of a trainer may reach the file.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        header = codec.read_header(lambda at, size: mapped[at : at + size], origin=str(path))
        if header.size_bytes != len(mapped):
            msg = f"{path}: {len(mapped)} bytes, {header.size_bytes} expected; run: swathe verify --repair"
            raise IntegrityError(msg, key=key)
        self._shards[shard] = header
        self._maps[shard] = mapped
        if len(self._maps) > _OPEN_SHARDS:
            self._maps.popitem(last=False)  # unmapped once the last tensor on it is gone
        return mapped

    def _manifest(self) -> Manifest | None:
        if self._store.stat(names.MANIFEST) is None:
            return None
        manifest = read_manifest(self._store)
        if manifest.run_id != self.spec.run_id:
            msg = f"{self._url}: manifest.json is of run {manifest.run_id}, run.json of {self.spec.run_id}"
            raise IntegrityError(msg, key=names.MANIFEST)
        return manifest

    def _read_index(self) -> pa.Table:
        path = self._store.local_path(names.ROWS)
        source = str(path) if path is not None else pa.BufferReader(self._store.read(names.ROWS))
        return pq.read_table(source, memory_map=path is not None)
