"""Stores keep whole objects: replaced at once, created exclusively, never half."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import xxhash

from swathe.errors import ConfigError, NoSpaceError, ObjectMissingError, StoreError
from swathe.store import Store, open_store
from swathe.store.local import LocalStore
from swathe.store.memory import MemoryStore


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
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


def test_a_failed_write_leaves_the_old_object_and_no_temporary(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("states/a", [b"old"])

    def chunks():
        yield b"half of the new"
        raise RuntimeError("source broke")

    with pytest.raises(RuntimeError, match="source broke"):
        store.write("states/a", chunks())
    assert store.read("states/a") == b"old"
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["a"]


def test_a_killed_writer_leaves_no_object_under_the_final_name(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from swathe.store.local import LocalStore
def chunks():
    yield b"x" * 100_000
    os.kill(os.getpid(), signal.SIGKILL)
LocalStore(Path(sys.argv[1])).write("states/a", chunks())
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    store = LocalStore(tmp_path)
    assert store.stat("states/a") is None
    assert list(store.list("")) == []  # the temporary is not shown
    assert store.collect(older_than_s=-1) == 1
    assert list((tmp_path / "states").iterdir()) == []


def test_a_full_disk_is_told_apart_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int, _data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(NoSpaceError, match="no space left") as caught:
            store.write("states/a", [b"x"])
    assert caught.value.retryable
    assert list((tmp_path / "states").iterdir()) == []


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        LocalStore(tmp_path).write("a", [b"x"])
        LocalStore(tmp_path).create("b", b"x")
    finally:
        os.umask(old)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "ab"} == {0o640}


def test_open_store_refuses_an_unknown_scheme(tmp_path: Path) -> None:
    assert open_store(tmp_path).url == str(tmp_path)
    assert open_store(f"file://{tmp_path}").url == str(tmp_path)
    with pytest.raises(ConfigError, match="gopher"):
        open_store("gopher://bucket/run")
