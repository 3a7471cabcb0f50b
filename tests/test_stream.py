"""The iterable reader: every sample once, the same for any number of workers, unbiased by sorted shards, resumable."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from swathe import HiddenStates
from swathe.errors import ConfigError
from swathe.reader import collate_padded
from tests.support.runs import Recipe, make_run, stored_states
from tests.test_reader import RemoteStore

# A machine of two cores runs four workers well enough for a test.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

RECIPE = Recipe(samples=101, sort=True, rejected=(3,))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, RECIPE)
    return folder


def batches(stream: object, workers: int = 0) -> list[list[int]]:
    loader = DataLoader(
        stream,
        batch_size=stream.batch_size,
        num_workers=workers,
        collate_fn=collate_padded,
    )
    return [batch["row"].tolist() for batch in loader]


def flat(lists: list[list[int]]) -> list[int]:
    return [row for rows in lists for row in rows]


@pytest.mark.parametrize("workers", [1, 4])
def test_four_workers_and_two_ranks_give_every_sample_once_per_epoch(
    run: Path, workers: int
) -> None:
    ds = HiddenStates(run)
    parts = []
    for rank in range(2):
        stream = ds.stream(batch_size=4, seed=5, rank=rank, world=2, window_shards=6)
        stream.set_epoch(3)
        found = batches(stream, workers)
        assert found == batches(stream)  # the same batches, in the same order, without workers
        parts.append(flat(found))
    assert len(parts[0]) == len(parts[1]) == len(ds) // 2
    assert sorted(parts[0] + parts[1]) == ds.rows.tolist()


def test_the_order_depends_on_seed_and_epoch_only(run: Path) -> None:
    ds = HiddenStates(run)
    stream = ds.stream(batch_size=4, seed=1)
    first = batches(stream)
    assert first == batches(HiddenStates(run).stream(batch_size=4, seed=1))
    stream.set_epoch(1)
    assert flat(batches(stream)) != flat(first)
    assert flat(batches(ds.stream(seed=2))) != flat(first)
    assert flat(batches(ds.stream(shuffle=False))) == ds.rows.tolist()


def test_values_are_those_of_the_map_style_reader(run: Path) -> None:
    for sample in HiddenStates(run).stream():
        assert torch.equal(sample["hidden_states"].float(), stored_states(sample["row"], RECIPE))


def test_length_sorted_shards_do_not_bias_batches(tmp_path: Path) -> None:
    """Batches mix lengths as an even shuffle does; reading shard by shard would not."""
    recipe = Recipe(samples=6000, sort=True, range_tokens=400, hidden=2, layers=("final",))
    ds = HiddenStates(make_run(tmp_path, recipe).url)

    def spread(order: np.ndarray) -> float:
        """Mean standard deviation of the lengths inside a batch of 8."""
        kept = order[: len(order) // 8 * 8].reshape(-1, 8)
        return float(ds.lengths[kept].std(axis=1).mean())

    even = spread(np.random.default_rng(0).permutation(len(ds)))
    assert spread(ds.stream().order()) > 0.95 * even
    assert spread(ds.stream(window_shards=None).order()) > 0.95 * even
    assert spread(ds.stream(window_shards=1).order()) < 0.3 * even


def test_a_window_bounds_how_many_shards_are_in_use(run: Path) -> None:
    ds = HiddenStates(run)
    order = ds.stream(window_shards=3).order()
    shards = ds.shard_of[order]
    last_use = {int(shard): place for place, shard in enumerate(shards)}
    first_use = {int(shard): place for place, shard in reversed(list(enumerate(shards)))}
    in_use = [
        sum(first_use[s] <= place <= last_use[s] for s in first_use) for place in range(len(order))
    ]
    assert max(in_use) <= 3


@pytest.mark.parametrize("world", [1, 2])
def test_it_resumes_in_the_middle_of_an_epoch_with_any_number_of_workers(
    run: Path, world: int
) -> None:
    ds = HiddenStates(run)
    for rank in range(world):
        stream = ds.stream(batch_size=4, seed=9, rank=rank, world=world)
        stream.set_epoch(2)
        whole = batches(stream, 2)
        state = stream.state_dict(batches=5)
        again = HiddenStates(run).stream(batch_size=4, seed=9, rank=rank, world=world)
        again.load_state_dict(state)
        assert batches(again, 3) == whole[5:]
        assert again.state_dict(batches=2)["samples"] == state["samples"] + 2 * 4 * world
        for other in ({"seed": 1}, {"shuffle": False}, {"window_shards": None}):
            with pytest.raises(ConfigError, match=f"the state is of {next(iter(other))} "):
                ds.stream(**{"seed": 9} | other).load_state_dict(state)


def test_persistent_workers_see_a_new_epoch(run: Path) -> None:
    stream = HiddenStates(run).stream(batch_size=4)
    loader = DataLoader(
        stream, batch_size=4, num_workers=2, persistent_workers=True, collate_fn=collate_padded
    )
    first = [batch["row"].tolist() for batch in loader]
    stream.set_epoch(1)
    second = [batch["row"].tolist() for batch in loader]
    assert first != second
    assert sorted(flat(first)) == sorted(flat(second))


def test_equal_ranks_make_equally_many_steps(run: Path) -> None:
    ds = HiddenStates(run)
    parts = [flat(batches(ds.stream(rank=r, world=3, equal=True))) for r in range(3)]
    assert {len(part) for part in parts} == {len(ds) // 3}
    assert len(set(flat(parts))) == len(ds) // 3 * 3
    assert [len(ds.stream(rank=r, world=3)) for r in range(3)] == [34, 33, 33]
    with pytest.raises(ConfigError, match="rank"):
        ds.stream(rank=2, world=2)


@pytest.mark.parametrize("readahead_bytes", [1, 10_000, 2**30])
def test_a_remote_run_is_read_ahead(run: Path, readahead_bytes: int) -> None:
    ds = HiddenStates(RemoteStore(run))
    stream = ds.stream(seed=4, readahead_bytes=readahead_bytes)
    rows = [sample["row"] for sample in stream]
    assert rows == flat(batches(HiddenStates(run).stream(seed=4)))
    taken = iter(stream)
    next(taken)
    taken.close()  # threads end with the iteration


@pytest.mark.parametrize("readahead_bytes", [0, 1])
def test_a_local_run_without_read_ahead_gives_every_sample(run: Path, readahead_bytes: int) -> None:
    ds = HiddenStates(run)
    rows = [sample["row"] for sample in ds.stream(seed=4, readahead_bytes=readahead_bytes)]
    assert rows == [sample["row"] for sample in ds.stream(seed=4)]
    assert len(rows) == len(ds)


def test_a_fp8_run_streams_too(tmp_path: Path) -> None:
    recipe = replace(RECIPE, dtype="float8_e4m3fn")
    make_run(tmp_path, recipe)
    assert len(list(HiddenStates(tmp_path).stream())) == 100
