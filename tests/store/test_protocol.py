"""What every store promises: objects are replaced whole, created exclusively, never half; the same tests for each."""

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import xxhash

from swathe.errors import ConfigError, ObjectMissingError, StoreError
from swathe.store import Store, open_store
from swathe.store.local import LocalStore
from swathe.store.memory import MemoryStore


@pytest.fixture(params=["local", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        made: Store = request.getfixturevalue("s3")(part_bytes=5 << 20)
        return made
    return LocalStore(tmp_path / "run") if request.param == "local" else MemoryStore()


def test_write_joins_chunks_and_reports_size_and_hash(store: Store) -> None:
    written = store.write("states/a.bin", [b"abc", memoryview(b"defg"), bytearray(b"")])
    assert store.read("states/a.bin") == b"abcdefg"
    assert written.size_bytes == 7
    assert written.xxh3 == xxhash.xxh3_128_hexdigest(b"abcdefg")


def test_write_replaces_the_whole_object(store: Store) -> None:
    store.write("k", [b"a long first content"])
    store.write("k", [b"short"])
    assert store.read("k") == b"short"


def test_read_range_gives_exactly_the_slice_or_fails(store: Store) -> None:
    store.write("k", [b"0123456789"])
    assert store.read_range("k", 3, 4) == b"3456"
    assert store.read_range("k", 10, 0) == b""
    with pytest.raises(StoreError, match="ends at byte 10"):
        store.read_range("k", 8, 5)


def test_an_object_of_other_content_is_told_by_its_tag_or_its_time(store: Store) -> None:
    found = []
    for data in (b"one", b"two"):
        store.write("k", [data])
        info = store.stat("k")
        assert info is not None
        assert [info] == list(store.list("k"))
        found.append(info.tag or info.modified_s)
    assert found[0] != found[1]


def test_create_gives_a_name_to_one_of_many(store: Store) -> None:
    barrier, won = threading.Barrier(8), []

    def race(number: int) -> None:
        barrier.wait()
        if store.create("states/000001.json", b"%d" % number):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("states/000001.json") == b"%d" % won[0]


def test_missing_objects_are_named_and_not_worth_a_retry(store: Store) -> None:
    assert store.stat("nothing") is None
    store.delete("nothing")
    with pytest.raises(ObjectMissingError, match="nothing") as caught:
        store.read("nothing")
    assert not caught.value.retryable


def test_list_shows_objects_below_a_prefix(store: Store) -> None:
    for key in ("run.json", "states/000001.json", "states/000002.json", "tokens/00000.safetensors"):
        store.write(key, [key.encode()])
    assert {item.key for item in store.list("states/")} == {
        "states/000001.json",
        "states/000002.json",
    }
    assert {item.key for item in store.list("")} >= {"run.json", "tokens/00000.safetensors"}
    assert {item.key for item in store.list("states/000001")} == {"states/000001.json"}
    assert list(store.list("nowhere/")) == []


def test_a_large_object_of_many_buffers_comes_back_as_it_went(store: Store) -> None:
    data = os.urandom(17 << 20)
    view = memoryview(data)
    sizes = [1, 100, 6 << 20, 0, 3 << 20, 7_777_777]
    chunks, at = [], 0
    for size in sizes:
        chunks.append(view[at : at + size])
        at += size
    written = store.write("states/big", iter([*chunks, view[at:]]))
    assert (written.size_bytes, written.xxh3) == (len(data), xxhash.xxh3_128_hexdigest(data))
    info = store.stat("states/big")
    assert info is not None
    assert info.size_bytes == len(data)
    assert store.read("states/big") == data
    assert store.read_range("states/big", 5_000_000, 9_000_000) == data[5_000_000:14_000_000]
    assert [item.key for item in store.list("")] == ["states/big"]


def test_buffers_of_any_shape_are_written_as_bytes(store: Store) -> None:
    grid = memoryview(bytearray(range(24))).cast("B", (2, 3, 4))
    assert store.write("k", [grid]).size_bytes == 24
    assert store.read("k") == bytes(range(24))


def test_an_empty_object_is_an_object(store: Store) -> None:
    assert store.write("empty", []).size_bytes == 0
    assert store.read("empty") == b""
    info = store.stat("empty")
    assert info is not None
    assert info.size_bytes == 0


def test_many_tiny_chunks_make_one_object(store: Store) -> None:
    store.write("k", (b"%05d" % number for number in range(3000)))
    assert store.read("k") == b"".join(b"%05d" % number for number in range(3000))


def test_a_source_that_breaks_leaves_the_old_object(store: Store) -> None:
    store.write("states/a", [b"old"])

    def chunks() -> Any:
        for _ in range(3):
            yield b"half of the new" * 400_000
        raise RuntimeError("source broke")

    with pytest.raises(RuntimeError, match="source broke"):
        store.write("states/a", chunks())
    assert store.read("states/a") == b"old"
    assert [item.key for item in store.list("")] == ["states/a"]
    assert store.collect(older_than_s=-1) == 0


def test_many_writers_in_one_process_do_not_mix(store: Store) -> None:
    blobs = {f"states/{number}": os.urandom(6 << 20) for number in range(6)}
    errors: list[Exception] = []

    def work(key: str) -> None:
        try:
            store.write(key, [memoryview(blobs[key])])
        except Exception as error:  # noqa: BLE001 - told below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(key,)) for key in blobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(store.read(key) == blob for key, blob in blobs.items())


def test_deleted_objects_are_gone(store: Store) -> None:
    store.write("k", [b"x"])
    store.delete("k")
    assert store.stat("k") is None
    assert list(store.list("")) == []
    assert store.create("k", b"again")


def test_keys_may_hold_more_than_ascii(store: Store) -> None:
    key = "states/a b+c&ü=1.json"
    store.write(key, [b"x"])
    assert store.read(key) == b"x"
    assert [item.key for item in store.list("states/")] == [key]


def test_stores_on_disk_and_s3_can_be_pickled_for_another_process(s3: Any, tmp_path: Path) -> None:
    for store in (LocalStore(tmp_path), s3()):
        store.write("k", [b"x"])
        assert pickle.loads(pickle.dumps(store)).read("k") == b"x"  # noqa: S301 - our own


def test_open_store_refuses_an_unknown_scheme(tmp_path: Path) -> None:
    assert open_store(tmp_path).url == str(tmp_path)
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)
    assert open_store("s3://bucket/a/b/").url == "s3://bucket/a/b"
    assert open_store("s3://bucket").url == "s3://bucket"
    with pytest.raises(ConfigError, match="names no bucket"):
        open_store("s3:///a")
    with pytest.raises(ConfigError, match="gopher"):
        open_store("gopher://bucket/run")
