"""Verification of a float8 run: right ones pass, and each way for one to be wrong is named."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from producer.verify import verify, withdraw
from swathe import codec, names
from swathe.manifest import seal
from swathe.records import RunWatcher, read_record, read_run
from swathe.spec import RangeId
from swathe.store.local import LocalStore
from tests.support.runs import Recipe, make_run

RANGE = RangeId(2)
Arrays = dict[str, NDArray]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return make_run(tmp_path, Recipe(dtype="float8_e4m3fn"))


def rewrite(
    store: LocalStore, change: Callable[[Arrays], dict[str, codec.TensorView | None] | None]
):
    """Change a shard as a faulty writer would: its record has the size and hash of the changed one."""
    record = read_record(store, read_run(store), RANGE)
    data = store.read(record.shard)
    header = codec.read_header(lambda at, size: data[at : at + size], origin=record.shard)
    arrays = {
        name: codec.to_array(info, data[info.offset : info.offset + info.size_bytes]).copy()
        for name, info in header.tensors.items()
    }
    changed = change(arrays) or {}
    views = {name: codec.view(array) for name, array in arrays.items()} | changed
    codes = arrays["hidden_states"]
    if "hidden_states" not in changed:
        views["hidden_states"] = codec.TensorView(
            dtype="float8_e4m3fn", shape=codes.shape, data=codes.reshape(-1).data
        )
    views = {name: view for name, view in views.items() if view is not None}
    written = store.write(record.shard, codec.encode(views, header.metadata))
    text = json.loads(store.read(names.record(RANGE)))
    text |= {"size_bytes": written.size_bytes, "xxh3": written.xxh3}
    store.write(names.record(RANGE), [json.dumps(text).encode()])
    store.delete(names.MANIFEST)
    seal(store)


def put(name: str, place: tuple[int, ...], value: float) -> Callable[[Arrays], None]:
    def change(arrays: Arrays) -> None:
        arrays[name][place] = value

    return change


def zero_row(arrays: Arrays) -> None:
    arrays["hidden_states"][3, 1] = [0, 128] * 8  # -0 is no value either


def zero_sample(arrays: Arrays) -> None:
    first, stop = arrays["offsets"][1:3]
    arrays["hidden_states"][first:stop, 1] = [0, 128] * 8


def test_a_right_run_passes(store: LocalStore) -> None:
    assert verify(store, full=True).ok
    rewrite(store, lambda _arrays: None)
    assert verify(store, full=True).ok


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (put("hidden_states", (3, 1, 5), 0x7F), "token 3 slot 1 holds NaN or infinity"),
        (put("hidden_states", (3, 1, 5), 0xFF), "token 3 slot 1 holds NaN"),
        (zero_sample, "slot 1 is zero at every token"),
        (put("hidden_states_scales", (4, 2), 0.75), "slot 2 has scale 0.75, not a power of two"),
        (put("hidden_states_scales", (4, 2), 0.0), "token 4 slot 2 has scale 0.0"),
        (put("hidden_states_scales", (4, 2), -0.5), "token 4 slot 2 has scale -0.5"),
        (put("hidden_states_scales", (4, 2), np.nan), "token 4 slot 2 has scale nan"),
        (put("hidden_states_scales", (4, 2), np.inf), "token 4 slot 2 has scale inf"),
    ],
)
def test_values_that_cannot_be_are_named(
    store: LocalStore, change: Callable[[Arrays], None], says: str
) -> None:
    rewrite(store, change)
    assert verify(store).ok
    found = verify(store, full=True)
    assert list(found.damaged) == [RANGE]
    assert says in found.damaged[RANGE]


def test_one_vector_may_be_zero(store: LocalStore) -> None:
    rewrite(store, zero_row)
    assert verify(store, full=True).ok


def test_the_largest_codes_are_values(store: LocalStore) -> None:
    rewrite(store, put("hidden_states", (3, 1, 5), 0x7E))
    assert verify(store, full=True).ok


@pytest.mark.parametrize("damage", ["missing", "short", "one slot", "float16"])
def test_missing_or_misshapen_scales_are_found_without_reading_the_states(
    store: LocalStore, damage: str
) -> None:
    def change(arrays: Arrays) -> dict[str, codec.TensorView | None]:
        scales = arrays["hidden_states_scales"]
        wrong = {
            "short": scales[:-1],
            "one slot": scales[:, :1],
            "float16": scales.astype("f2"),
        }.get(damage)
        return {"hidden_states_scales": None if wrong is None else codec.view(wrong)}

    rewrite(store, change)
    assert "hidden_states_scales is not float32" in verify(store).damaged[RANGE]


def test_states_of_another_dtype_are_found(store: LocalStore) -> None:
    rewrite(store, lambda arrays: {"hidden_states": codec.view(arrays["hidden_states"])})  # uint8
    assert "hidden_states is not float8_e4m3fn" in verify(store).damaged[RANGE]


def test_damaged_bytes_are_found_and_only_their_range_is_withdrawn(store: LocalStore) -> None:
    record = read_record(store, read_run(store), RANGE)
    data = bytearray(store.read(record.shard))
    data[-200] ^= 1
    store.write(record.shard, [bytes(data)])
    found = verify(store, full=True)
    assert found.damaged == {RANGE: "content does not have the recorded hash"}
    withdraw(store, RunWatcher(store, read_run(store)).read(), list(found.damaged))
    after = verify(store, full=True)
    assert after.missing == (RANGE,)
    assert not after.damaged
