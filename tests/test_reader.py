"""The map-style reader: values, slots, dtypes, errors, remote runs, the cache."""

import multiprocessing
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from swathe import HiddenStates, names
from swathe.errors import ConfigError, IncompleteRunError, IntegrityError, ObjectMissingError
from swathe.reader import collate_packed, collate_padded, shards
from swathe.reader.float8 import rounding
from swathe.store.local import LocalStore
from tests.support.runs import Recipe, ids_of, length_of, make_run, mask_of, stored_states

RECIPE = Recipe()


class RemoteStore(LocalStore):
    """A store without files, which counts what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []

    def local_path(self, key: str) -> None:
        del key

    def read_range(self, key: str, offset: int, size_bytes: int) -> bytes:
        self.reads.append((key, offset, size_bytes))
        return super().read_range(key, offset, size_bytes)


def assert_right(ds: HiddenStates, recipe: Recipe = RECIPE) -> None:
    kept = [row for row in range(recipe.samples) if row not in recipe.rejected]
    assert ds.rows.tolist() == kept
    for index, row in enumerate(kept):
        sample = ds[index]
        assert (sample["row"], sample["id"]) == (row, f"chat-{row}")
        assert sample["input_ids"].tolist() == ids_of(row, recipe).tolist()
        assert sample["loss_mask"].tolist() == mask_of(row, recipe).tolist()
        assert torch.equal(sample["hidden_states"].float(), stored_states(row, recipe))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("order", ["user", "length"])
def test_samples_come_in_the_users_order_with_the_stored_values(
    tmp_path: Path, dtype: str, order: str
) -> None:
    recipe = replace(RECIPE, dtype=dtype, sort=order == "length")
    ds = HiddenStates(make_run(tmp_path, recipe).url)
    assert_right(ds, recipe)
    assert ds[0]["hidden_states"].dtype == getattr(torch, dtype)
    assert ds[-1]["row"] == ds.rows[-1]
    with pytest.raises(IndexError):
        ds[len(ds)]


def test_float8_comes_back_in_the_computed_dtype_or_raw_with_its_scales(tmp_path: Path) -> None:
    recipe = replace(RECIPE, dtype="float8_e4m3fn")
    store = make_run(tmp_path, recipe)
    sample = HiddenStates(store.url)[5]
    raw = HiddenStates(store.url, dequantize=False, layers=["final", 1])[5]
    assert sample["hidden_states"].dtype == torch.bfloat16
    assert raw["hidden_states"].dtype == torch.float8_e4m3fn
    assert raw["hidden_states_scales"].shape == raw["hidden_states"].shape[:2]
    again = raw["hidden_states"].float() * raw["hidden_states_scales"][..., None]
    assert torch.equal(sample["hidden_states"][:, [3, 0]].float(), again)
    expected = stored_states(sample["row"], recipe)
    assert (sample["hidden_states"].float() - expected).abs().max() <= expected.abs().max() / 16


def test_a_sample_as_stored_and_how_far_its_codes_may_be_off(tmp_path: Path) -> None:
    recipe = replace(RECIPE, dtype="float8_e4m3fn")
    store = make_run(tmp_path, recipe)
    ds = HiddenStates(store.url)
    for index in (0, 7, 20):
        raw, expected = ds.as_stored(index), stored_states(ds[index]["row"], recipe)
        codes, scales = raw["hidden_states"], raw["hidden_states_scales"]
        off = (codes.float() * scales[..., None] - expected).abs()
        half_steps = rounding(codes, scales)
        assert (off <= half_steps).all()
        assert (off > half_steps / 2).any()
        # A step is the distance to the next code; half of one more than it has no room.
        next_code = (codes.view(torch.uint8) + 1).view(torch.float8_e4m3fn).float()
        finite = next_code.isfinite() & (codes.float() != 0)
        steps = (next_code - codes.float()).abs() * scales[..., None]
        assert torch.equal(half_steps[finite] * 2, steps[finite])
    assert "hidden_states_scales" not in HiddenStates(make_run(tmp_path / "plain").url).as_stored(0)


def test_a_remote_float8_sample_is_one_request_once_its_shard_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE, dtype="float8_e4m3fn", range_tokens=100_000)
    make_run(tmp_path, recipe)
    monkeypatch.setattr(
        shards, "_FIRST_READ_BYTES", 2048
    )  # a shard whose scales do not fit into it
    store = RemoteStore(tmp_path)
    ds, local = HiddenStates(store), HiddenStates(tmp_path)
    store.reads.clear()
    for index in range(len(ds)):
        assert torch.equal(ds[index]["hidden_states"], local[index]["hidden_states"])
    # Header, the rest of what lies before the states, the mask behind them.
    assert len(store.reads) == 3 + len(ds)


def test_slots_have_names_and_a_subset_comes_in_the_order_asked_for(tmp_path: Path) -> None:
    url = make_run(tmp_path).url
    whole = HiddenStates(url)
    assert whole.layers == [1, 3, 5, "final"]
    assert [whole.slot(layer) for layer in (1, 3, 5, "final", 7)] == [0, 1, 2, 3, 3]
    for layers, slots in (([5], [2]), ([1, 5], [0, 2]), (["final", 1], [3, 0]), ([7], [3])):
        part = HiddenStates(url, layers=layers)
        states = part[4]["hidden_states"]
        assert torch.equal(states, whole[4]["hidden_states"][:, slots])
        assert part.slot(layers[-1]) == len(layers) - 1
    view = HiddenStates(url, layers=[3, 5])[4]["hidden_states"]
    assert view._is_view()
    assert not view.is_contiguous()
    for layers in ([2], [1, 1], []):
        with pytest.raises(ConfigError, match="layer"):
            HiddenStates(url, layers=layers)


def test_local_reads_are_views_that_never_write_to_the_file(tmp_path: Path) -> None:
    ds = HiddenStates(make_run(tmp_path).url)
    states = ds[4]["hidden_states"]
    states.fill_(7)
    assert_right(HiddenStates(tmp_path))


@pytest.mark.parametrize("kind", [LocalStore, RemoteStore])
def test_a_trainer_that_clears_a_mask_finds_it_whole_next_time(
    tmp_path: Path, kind: type[LocalStore]
) -> None:
    make_run(tmp_path)
    ds = HiddenStates(kind(tmp_path))
    for sample in ds:
        sample["loss_mask"].zero_()
        sample["input_ids"].zero_()
    assert_right(ds)


def test_a_remote_sample_is_one_ranged_read(tmp_path: Path) -> None:
    make_run(tmp_path)
    store = RemoteStore(tmp_path)
    ds = HiddenStates(store)
    assert_right(ds)
    store.reads.clear()
    big = Recipe(samples=30, hidden=4096, range_tokens=300, dtype="float32", rejected=())
    make_run(tmp_path / "big", big)
    store = RemoteStore(tmp_path / "big")
    ds = HiddenStates(store)
    first = np.flatnonzero(ds.shard_of == 0).tolist()
    ds[first[0]]
    store.reads.clear()
    assert torch.equal(ds[first[1]]["hidden_states"], stored_states(first[1], big))
    ((_, _, size_bytes),) = store.reads
    assert size_bytes == length_of(first[1], big) * 4 * 4096 * 4
    batch = ds.__getitems__(list(range(10)))
    assert [sample["row"] for sample in batch] == list(range(10))


def test_a_cache_fetches_each_shard_once_and_stays_within_its_bound(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    store, cache = RemoteStore(tmp_path / "run"), tmp_path / "cache"
    ds = HiddenStates(store, cache_dir=cache)
    assert_right(ds)
    reads = len(store.reads)
    assert_right(ds)
    assert_right(pickle.loads(pickle.dumps(ds)))  # noqa: S301
    assert len(store.reads) == reads
    limit = 20_000
    small = HiddenStates(store, cache_dir=tmp_path / "small", cache_bytes=limit)
    assert_right(small)
    held = sum(path.stat().st_size for path in (tmp_path / "small").rglob("*.safetensors"))
    assert 0 < held <= limit
    with pytest.raises(ConfigError, match="cache"):
        HiddenStates(store, cache_dir=cache, cache_bytes=0)


def test_readers_that_share_a_small_cache_do_not_take_each_others_shards(tmp_path: Path) -> None:
    """Each as a process of its own has them: its own mappings, and locks on files that it opened itself."""
    make_run(tmp_path / "run", RECIPE)
    one_shard = {"cache_dir": tmp_path / "cache", "cache_bytes": 1}

    def read_all(_: int) -> None:
        ds = HiddenStates(RemoteStore(tmp_path / "run"), **one_shard)
        for _ in range(3):
            assert_right(ds)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read_all, range(6)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_it_works_in_worker_processes(tmp_path: Path, method: str) -> None:
    ds = HiddenStates(make_run(tmp_path).url)
    ds[0]
    loader = DataLoader(
        ds,
        batch_size=4,
        shuffle=True,
        num_workers=2,
        collate_fn=collate_padded,
        multiprocessing_context=multiprocessing.get_context(method),
    )
    rows = torch.cat([batch["row"] for batch in loader])
    assert sorted(rows.tolist()) == ds.rows.tolist()


def damaged_shard(tmp_path: Path) -> Path:
    make_run(tmp_path)
    return min(tmp_path.glob("states/*.safetensors"))


@pytest.mark.parametrize("harm", ["gone", "short", "empty", "garbage"])
@pytest.mark.parametrize("kind", [LocalStore, RemoteStore])
def test_errors_name_the_file(tmp_path: Path, harm: str, kind: type[LocalStore]) -> None:
    victim = damaged_shard(tmp_path)
    data = victim.read_bytes()
    if harm == "gone":
        victim.unlink()
    else:
        bad = {"short": data[:100], "empty": b"", "garbage": b"\xff" * len(data)}
        victim.write_bytes(bad[harm])
    ds = HiddenStates(kind(tmp_path))
    with pytest.raises(Exception, match=victim.name) as caught:
        ds[int(np.flatnonzero(ds.shard_of == 0)[0])]
    if not (kind is RemoteStore and harm in ("short", "empty")):
        assert isinstance(caught.value, IntegrityError)


@pytest.mark.parametrize("kind", [LocalStore, RemoteStore])
@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_damaged_index_says_how_to_write_it_anew(
    tmp_path: Path, harm: str, kind: type[LocalStore]
) -> None:
    rows = make_run(tmp_path).local_path(names.ROWS)
    data = rows.read_bytes()
    rows.unlink() if harm == "missing" else rows.write_bytes(data[:200])
    with pytest.raises(IntegrityError, match=r"rows\.parquet: missing or damaged .*--repair"):
        HiddenStates(kind(tmp_path))


def test_a_file_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path)
    with pytest.raises(ObjectMissingError, match="no run here"):
        HiddenStates(tmp_path / "run.json")
    with pytest.raises(ConfigError, match="cannot write"):
        LocalStore(tmp_path / "run.json").write("states/x", [b"x"])


def test_an_error_in_a_worker_process_keeps_its_class_and_names_the_file(tmp_path: Path) -> None:
    victim = damaged_shard(tmp_path)
    victim.unlink()
    with pytest.raises(IntegrityError, match=victim.name):
        list(DataLoader(HiddenStates(tmp_path), batch_size=None, num_workers=1))


def test_an_unsealed_run_opens_only_when_asked(tmp_path: Path) -> None:
    store = make_run(tmp_path, sealed=False)
    with pytest.raises(IncompleteRunError, match="unsealed=True"):
        HiddenStates(tmp_path)
    assert_right(HiddenStates(tmp_path, unsealed=True))
    store.delete(names.record(0))
    part = HiddenStates(tmp_path, unsealed=True)
    assert 0 < len(part) < RECIPE.samples - 1


def test_padded_batches_are_rectangles_with_nothing_on_the_padding(tmp_path: Path) -> None:
    ds = HiddenStates(make_run(tmp_path).url)
    samples = [ds[i] for i in (2, 5, 9)]
    batch = partial(collate_padded, pad_id=96, multiple_of=8)(samples)
    longest = batch["input_ids"].shape[1]
    assert longest % 8 == 0
    assert batch["hidden_states"].shape == (3, longest, 4, 16)
    for place, sample in enumerate(samples):
        length = len(sample["input_ids"])
        assert batch["length"][place] == length == batch["attention_mask"][place].sum()
        for name in ("input_ids", "loss_mask", "hidden_states"):
            assert torch.equal(batch[name][place, :length], sample[name])
        assert (batch["input_ids"][place, length:] == 96).all()
        assert not batch["loss_mask"][place, length:].any()
        assert not batch["hidden_states"][place, length:].any()
    assert collate_padded(samples, max_length=5)["input_ids"].shape == (3, 5)


def test_packed_batches_hold_the_samples_end_to_end(tmp_path: Path) -> None:
    ds = HiddenStates(make_run(tmp_path).url)
    samples = [ds[i] for i in (2, 5, 9)]
    batch = collate_packed(samples)
    assert batch["offsets"].dtype == torch.int32
    for place, sample in enumerate(samples):
        part = slice(*batch["offsets"][place : place + 2].tolist())
        for name in ("input_ids", "loss_mask", "hidden_states"):
            assert torch.equal(batch[name][part], sample[name])
        assert (batch["sample"][part] == place).all()
        assert batch["position_ids"][part].tolist() == list(range(len(sample["input_ids"])))
    first = len(samples[0]["input_ids"])
    cut = collate_packed(samples, max_tokens=first + 2)
    assert cut["row"].tolist() == [2, 6]
    assert cut["offsets"].tolist() == [0, first, first + 2]


def test_batches_of_float8_codes_keep_their_scales(tmp_path: Path) -> None:
    run = make_run(tmp_path, replace(RECIPE, dtype="float8_e4m3fn")).url
    codes, values = HiddenStates(run, dequantize=False), HiddenStates(run)
    for collate in (collate_padded, collate_packed):
        raw, wanted = (collate([ds[i] for i in (2, 5, 9)]) for ds in (codes, values))
        assert raw["hidden_states"].dtype == torch.float8_e4m3fn
        found = raw["hidden_states"].float() * raw["hidden_states_scales"][..., None]
        assert torch.equal(found, wanted["hidden_states"].float())
