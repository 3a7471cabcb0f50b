"""``HiddenStatesStream``: a run as an iterable data set, shuffled, split over ranks and workers, resumable.

How it shuffles. Shards of a padded run hold samples of nearly one length, because the plan sorts by length, so reading
shard after shard would make every batch all short or all long. Therefore the shards are put in random order, taken
``window_shards`` at a time, and the samples of a window are shuffled together: a window is a random draw of the whole
run, and a batch a random draw of the window. One sample is one contiguous piece of megabytes, so jumping between the
shards of a window costs a local disk or an object store nothing; the window only bounds how many shards a cache must
hold at once. ``window_shards=None`` is one window, an even shuffle of everything.

How it splits. All ranks compute the same order of the epoch from ``seed`` and ``epoch``; rank r takes samples r,
r + world, ... of it: disjoint, complete, and equally many up to one. The workers of a rank take turns of
``batch_size`` samples, so the batches that leave the DataLoader are the same ones, in the same order, whatever the
number of workers.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from swathe.errors import ConfigError
from swathe.reader.dataset import HiddenStates

_REQUESTS_AT_ONCE: Final = 8
_EPOCH, _START = 0, 1


class HiddenStatesStream(IterableDataset[dict[str, Any]]):
    """Samples of ``HiddenStates`` in random order, for ``DataLoader(stream, batch_size=stream.batch_size)``.

    ``rank`` and ``world`` come from ``torch.distributed`` where it is initialized. ``equal=True`` leaves out the last
    samples of an epoch (fewer than ``world``), so that all ranks make equally many steps; otherwise every sample comes
    once per epoch. ``readahead_bytes`` bounds what is fetched before it is asked for, in each worker.
    """

    def __init__(  # noqa: PLR0913 - a user's options, all by name
        self,
        dataset: HiddenStates,
        *,
        batch_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        window_shards: int | None = 64,
        rank: int | None = None,
        world: int | None = None,
        equal: bool = False,
        readahead_bytes: int = 256 * 2**20,
    ) -> None:
        if batch_size < 1 or (window_shards is not None and window_shards < 1):
            msg = f"batch_size {batch_size} and window_shards {window_shards} must be 1 or more"
            raise ConfigError(msg)
        self.dataset = dataset
        self.batch_size = batch_size
        self.rank, self.world = _place_in_world(rank, world)
        self._shuffle = shuffle
        self._seed = seed
        self._window = window_shards
        self._equal = equal
        self._readahead_bytes = readahead_bytes
        # Shared memory: persistent workers must see a new epoch too.
        self._state = torch.zeros(2, dtype=torch.int64)
        self._state.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """The epoch whose order is used."""
        return int(self._state[_EPOCH])

    def set_epoch(self, epoch: int) -> None:
        """Choose another order, from its beginning; call it before each epoch, with the same number on all ranks."""
        self._state[_EPOCH], self._state[_START] = epoch, 0

    def state_dict(self, batches: int) -> dict[str, int]:
        """Where this epoch stands after ``batches`` batches of ``batch_size`` were taken on each rank."""
        start = int(self._state[_START]) + batches * self.batch_size * self.world
        return self._ordered_by() | {"epoch": self.epoch, "samples": start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where ``state_dict`` stood; the number of workers, and even of ranks, may have changed.

        Raises ConfigError for a state of another seed, window or data set: its samples were in another order, so some would
        come twice and others never.
        """
        for name, mine in self._ordered_by().items():
            if state.get(name, mine) != mine:
                msg = f"the state is of {name} {state[name]}, this stream has {mine}; give the same, or begin the epoch anew"
                raise ConfigError(msg)
        self._state[_EPOCH], self._state[_START] = state["epoch"], state["samples"]

    def _ordered_by(self) -> dict[str, int]:
        """What fixes the order of an epoch; a window of 0 shards is one over all."""
        return {
            "seed": self._seed,
            "shuffle": int(self._shuffle),
            "window_shards": self._window or 0,
            "dataset_samples": len(self.dataset),
        }

    def order(self) -> NDArray[np.int64]:
        """The whole epoch's samples, of all ranks, in order: int64 [n]."""
        n = len(self.dataset)
        if not self._shuffle:
            return np.arange(n)
        rng = np.random.default_rng([self._seed, self.epoch])
        shard_of = self.dataset.shard_of
        shards = int(shard_of.max()) + 1 if n else 0
        # A shard's place in the random order, then its window; within a window by a random key.
        window = rng.permutation(shards) // (self._window or max(shards, 1))
        return np.lexsort((rng.random(n), window[shard_of]))

    def __len__(self) -> int:
        """Samples that this rank has yet to give in this epoch."""
        return len(self._mine())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        mine, worker = self._mine(), get_worker_info()
        if worker is not None:
            turn = np.arange(len(mine)) // self.batch_size
            mine = mine[turn % worker.num_workers == worker.id]
        if self.dataset.remote:
            return self._fetched(mine)
        return self._mapped(mine)

    def _mine(self) -> NDArray[np.int64]:
        rest = self.order()[int(self._state[_START]) :]
        if self._equal:
            rest = rest[: len(rest) // self.world * self.world]
        return rest[self.rank :: self.world]

    def _mapped(self, mine: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """Local: the kernel reads ahead."""
        ahead, held = iter(mine.tolist()), 0
        queue: deque[int] = deque()
        while True:
            while held < self._readahead_bytes or not queue:
                if (new := next(ahead, None)) is None:
                    break
                self.dataset.will_need(new)
                queue.append(new)
                held += self._bytes_of(new)
            if not queue:
                return
            index = queue.popleft()
            held -= self._bytes_of(index)
            yield self.dataset[index]

    def _fetched(self, mine: NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """Remote: threads fetch the next samples while the trainer works."""
        ahead, held = iter(mine.tolist()), 0
        queue: deque[tuple[int, Future[dict[str, Any]]]] = deque()
        pool = ThreadPoolExecutor(_REQUESTS_AT_ONCE, "read-ahead")
        try:
            while True:
                while held < self._readahead_bytes or not queue:
                    if (new := next(ahead, None)) is None:
                        break
                    queue.append((new, pool.submit(self.dataset.__getitem__, new)))
                    held += self._bytes_of(new)
                if not queue:
                    return
                index, future = queue.popleft()
                held -= self._bytes_of(index)
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _bytes_of(self, index: int) -> int:
        return int(self.dataset.lengths[index]) * self.dataset.spec.bytes_per_token


def _place_in_world(rank: int | None, world: int | None) -> tuple[int, int]:
    if rank is None and world is None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return 0, 1
    if rank is None or world is None or not 0 <= rank < world:
        msg = f"rank {rank} of {world} ranks does not make sense; give both, rank from 0"
        raise ConfigError(msg)
    return rank, world
