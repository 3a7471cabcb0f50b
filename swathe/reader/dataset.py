"""``HiddenStates``: a run as a map-style data set.

Index i is the i-th stored sample in the order of the user's rows. Legend: S tokens of a sample, K layer slots, H hidden
size.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from swathe.errors import ConfigError, IntegrityError, ObjectMissingError
from swathe.location import at_home, moved, open_home
from swathe.reader.cache import ShardCache
from swathe.reader.float8 import dequantize
from swathe.reader.index import Shard, open_index
from swathe.reader.shards import SCALES, STATES, MappedShards, RemoteShards, ShardSource
from swathe.reader.slots import find_slot, select_slots, slots_of
from swathe.spec import FLOAT8, Layer, RunSpec
from swathe.store import Store

if TYPE_CHECKING:
    import torch

    from swathe.reader.stream import HiddenStatesStream

_REQUESTS_AT_ONCE: Final = 16
_CACHED_MAPS: Final = 8
"""A cached shard that is mapped keeps its place on the disk even when it was evicted."""
_CACHE_BYTES: Final = 64 * 2**30

_Answer = TypeVar("_Answer")


class HiddenStates:
    """A run's samples for a PyTorch ``DataLoader``; picklable, each process maps files of its own.

    ``ds[i]`` is a dict: ``row`` int, ``id`` int or str, ``input_ids`` int64 [S], ``loss_mask`` uint8 [S],
    ``hidden_states`` [S, K, H]. Ids, mask and states are unshifted and of equal length: position t of the states is
    what the model computed at token t. States are private views of mapped files in the stored dtype: what is written into
    one never reaches the file, but the next read of the sample in this process may find it: clone before you change one. A
    run stored as float8 gives its states in the dtype they were computed in (exact: its scales are powers of two), or,
    with ``dequantize=False``, as stored and with ``hidden_states_scales`` float32 [S, K].

    ``layers`` picks slots, in the order asked for. ``cache_dir`` keeps whole shards of a remote run on this machine,
    at most ``cache_bytes`` of them; without it each sample is one ranged read.
    """

    def __init__(
        self,
        run: str | Path | Store,
        *,
        layers: Sequence[Layer] | None = None,
        unsealed: bool = False,
        dequantize: bool = True,
        cache_dir: str | Path | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        """Open a sealed run; with ``unsealed`` also one that is still being written, as far as it has come.

        Raises IncompleteRunError for an unsealed run, FormatError for a damaged or newer one, ConfigError for a layer
        that the run does not hold.
        """
        self.store, self._index = at_home(
            open_home(run), lambda store: (store, open_index(store, unsealed=unsealed))
        )
        self._slots = None if layers is None else slots_of(self.spec, layers, run=self.url)
        self._float8 = self.spec.stored_dtype == FLOAT8
        self.gives_codes = self._float8 and not dequantize
        """Whether ``ds[i]`` holds float8 codes and scales instead of values."""
        self._cache = cache_dir, cache_bytes
        self._source = _source(self.store, cache_dir, self.spec.run_id, cache_bytes)

    @property
    def url(self) -> str:
        """Where the run is, as far as this data set knows: a run that is moved meanwhile is followed."""
        return self.store.url

    @property
    def remote(self) -> bool:
        """Whether each sample is a request."""
        return self.store.local_path("") is None and self._cache[0] is None

    @property
    def spec(self) -> RunSpec:
        """run.json."""
        return self._index.spec

    @property
    def layers(self) -> list[Layer]:
        """Meaning of the K axis: block numbers (outputs, 0-based) and ``final`` (before the final norm)."""
        layers = [slot.layer for slot in self.spec.layers]
        return layers if self._slots is None else [layers[slot] for slot in self._slots]

    @property
    def rows(self) -> NDArray[Any]:
        """The user's row of each sample: int64 [n], ascending."""
        return self._index.rows

    @property
    def lengths(self) -> NDArray[Any]:
        """Tokens of each sample: int32 [n]."""
        return self._index.lengths

    @property
    def shard_of(self) -> NDArray[Any]:
        """The range that holds each sample: int32 [n]."""
        return self._index.shard_of

    @property
    def shard_keys(self) -> dict[int, str]:
        """The shard of each range; a range that is done again gets another."""
        return {range_id: shard.key for range_id, shard in self._index.shards.items()}

    @property
    def offsets(self) -> NDArray[Any]:
        """Each sample's first token in its shard: int64 [n]."""
        return self._index.offsets

    def slot(self, layer: Layer) -> int:
        """Place of a layer in the K axis: ``sample["hidden_states"][:, ds.slot("final")]``.

        Raises ConfigError, naming what there is, when this data set does not hold the layer.
        """
        return find_slot(self.spec, self.layers, layer, run=self.url)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample. Raises IndexError, and IntegrityError naming the file when a shard is missing or damaged."""
        sample = self.as_stored(index)
        if self._float8 and not self.gives_codes:
            import torch  # noqa: PLC0415

            dtype: torch.dtype = getattr(torch, self.spec.compute_dtype)
            sample[STATES] = dequantize(sample[STATES], sample.pop(SCALES), dtype)
        return sample

    def as_stored(self, index: int) -> dict[str, Any]:
        """One sample in the stored dtype; of a float8 run with ``hidden_states_scales``, whatever ``dequantize`` says."""
        shard, first, stop = self._place(index)
        sample = self.tokens(index)
        for name in (STATES, SCALES) if self._float8 else (STATES,):
            tensor = self._read(shard, name, first, stop)
            sample[name] = tensor if self._slots is None else select_slots(tensor, self._slots)
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """A whole batch, as DataLoader asks for it; the samples of a remote run are fetched at the same time."""
        if not self.remote or len(indices) < 2:
            return [self[index] for index in indices]
        with ThreadPoolExecutor(min(_REQUESTS_AT_ONCE, len(indices)), "samples") as pool:
            return list(pool.map(self.__getitem__, indices))

    def tokens(self, index: int) -> dict[str, Any]:
        """A sample without its states: ``row``, ``id``, ``input_ids``, ``loss_mask``."""
        import torch  # noqa: PLC0415 - torch is needed only where a tensor is asked for

        shard, first, stop = self._place(index)
        return {
            "row": int(self._index.rows[index]),
            "id": self._index.ids[index % len(self)].as_py(),
            "input_ids": self._read(shard, "input_ids", first, stop).to(torch.int64),
            # A copy, as the ids are: trainers clear the last token's, and a view would still be cleared in another use.
            "loss_mask": self._read(shard, "loss_mask", first, stop).clone(),
        }

    def shard_tokens(
        self, name: Literal["input_ids", "loss_mask"]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[Any]]]:
        """For each shard, which samples it holds (int64 [n]) and one of its small tensors whole ([T], raw)."""
        order = shard_order(self)
        shard_of = self.shard_of[order]
        for members in np.split(order, np.flatnonzero(np.diff(shard_of)) + 1):
            if len(members):
                shard, _, stop = self._place(int(members[-1]))
                yield members, self._read(shard, name, 0, stop).numpy()

    def with_layers(self, layers: Sequence[Layer]) -> "HiddenStates":
        """The same run, mappings shared, with other layers. Raises ConfigError for one that is not stored."""
        other = copy.copy(self)
        other._slots = slots_of(self.spec, layers, run=self.url)  # noqa: SLF001 - its own kind
        return other

    def will_need(self, index: int) -> None:
        """A hint that a sample is read soon: starts the kernel's read-ahead for local shards."""
        place = self._place(index)
        self._ask(lambda source: source.will_need(*place))

    def stream(self, **options: Any) -> "HiddenStatesStream":
        """The run as an iterable data set; see ``swathe.reader.stream.HiddenStatesStream`` for the options."""
        from swathe.reader.stream import HiddenStatesStream  # noqa: PLC0415 - imports torch

        return HiddenStatesStream(self, **options)

    def _read(self, shard: Shard, name: str, first: int, stop: int) -> "torch.Tensor":
        """Tokens [first, stop) of a tensor."""
        return self._ask(lambda source: source.read(shard, name, first, stop))

    def _ask(self, question: Callable[[ShardSource], _Answer]) -> _Answer:
        """Ask the run's shards; once more, where the run is now, when it was moved away meanwhile."""
        store, source = self.store, self._source
        try:
            return question(source)
        except (IntegrityError, ObjectMissingError):
            home = moved(store)
            if home is None:
                raise
            source = _source(home, self._cache[0], self.spec.run_id, self._cache[1])
            answer = question(source)
            self.store, self._source = home, source
            return answer

    def _place(self, index: int) -> tuple[Shard, int, int]:
        if not -len(self) <= index < len(self):
            msg = f"sample {index} of {len(self)}"
            raise IndexError(msg)
        first = int(self._index.offsets[index])
        stop = first + int(self._index.lengths[index])
        return self._index.shards[int(self._index.shard_of[index])], first, stop


def _source(
    store: Store, cache_dir: str | Path | None, run_id: str, cache_bytes: int
) -> ShardSource:
    if store.local_path("") is not None:
        return MappedShards(partial(_open_local, store))
    if cache_dir is None:
        return RemoteShards(store)
    if cache_bytes < 1:
        msg = f"a cache of {cache_bytes} bytes holds no shard; give cache_bytes or leave cache_dir out"
        raise ConfigError(msg)
    cache = ShardCache(store, Path(cache_dir), run_id=run_id, limit_bytes=cache_bytes)
    return MappedShards(cache.open, _CACHED_MAPS)


def _open_local(store: Store, shard: Shard) -> BinaryIO:
    path = store.local_path(shard.key)
    if path is None:
        msg = f"{store.url} has no local files"
        raise ConfigError(msg)
    return path.open("rb")


def shard_order(dataset: HiddenStates) -> NDArray[Any]:
    """Samples in the order they lie on the disk, for whoever reads all of them: int64 [n]."""
    return np.lexsort((dataset.offsets, dataset.shard_of))
