"""Reading a run: a map-style data set of hidden states, from a local folder or an s3:// prefix.

Index i is the i-th stored sample in the order of the user's rows. One sample with all its layers is one contiguous
piece of a shard: a view of a memory-mapped file, or one ranged GET.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from swathe import names
from swathe.errors import IncompleteRunError, IntegrityError
from swathe.manifest import Manifest, index_rows, read_manifest
from swathe.records import RunWatcher, read_run
from swathe.shards import Slice, shard_reader
from swathe.spec import Layer, RangeId
from swathe.store import open_store


class HiddenStates:
    """A run's samples for a PyTorch ``DataLoader``; picklable, each process opens files or connections of its own.

    ``ds[i]`` is a dict: ``row`` int, ``id`` int or str, ``input_ids`` int64 [S], ``loss_mask`` uint8 [S],
    ``hidden_states`` [S, K, H] in the stored dtype. Ids, mask and states are unshifted and of equal length: position
    t of the states is what the model computed at token t. Local tensors are private views of mapped files.
    """

    def __init__(self, run: str | Path, *, unsealed: bool = False) -> None:
        """Open a sealed run; with ``unsealed`` also one that is still being written, as far as it has come.

        Raises IncompleteRunError for an unsealed run, FormatError for a damaged or newer one.
        """
        self._url = str(run)
        self._store = open_store(run)
        self.spec = read_run(self._store)
        self._shards = shard_reader(self._store)
        manifest = self._manifest()
        if manifest is not None:
            table = self._read_index()
            shards = {entry.range_id: (entry.key, entry.size_bytes) for entry in manifest.shards}
        elif unsealed:
            state = RunWatcher(self._store, self.spec).read()
            table = index_rows(self._store, state)
            shards = {
                range_id: (record.shard, record.size_bytes)
                for range_id, record in state.records.items()
            }
        else:
            msg = f"{run}: the run is not sealed; finish it with swathe run or swathe wait, or pass unsealed=True"
            raise IncompleteRunError(msg)
        self._shard_files: dict[RangeId, tuple[str | None, int]] = shards
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
        key, size_bytes = self._shard_files[RangeId(int(self._shard_of[index]))]
        ids, mask, states = self._shards.read(
            Slice(key or "", size_bytes, first, stop), ("input_ids", "loss_mask", "hidden_states")
        )
        return {
            "row": int(self._rows[index]),
            "id": self._ids[index].as_py(),
            "input_ids": ids.to(torch.int64),
            "loss_mask": mask,
            "hidden_states": states,
        }

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
