"""A folder: durable before it is visible, never half, with a clear word when the file system cannot."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import xxhash

from swathe.errors import ConfigError, NoSpaceError, StoreError, SwatheError
from swathe.store import open_store
from swathe.store.local import LocalStore


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


def test_writers_killed_at_any_moment_leave_the_old_object_or_the_new_one(tmp_path: Path) -> None:
    program = """
import os, random, signal, sys, time
from pathlib import Path
from swathe.store.local import LocalStore
root = Path(sys.argv[1])
old, new = b"o" * 3_000_000, b"n" * 5_000_000
seen = set()
for number in range(40):
    store = LocalStore(root / str(number))
    store.write("states/a", [old])
    child = os.fork()
    if child == 0:
        def chunks():
            for at in range(0, len(new), 100_000):
                yield new[at : at + 100_000]
        while True:
            store.write("states/a", chunks())
            store.write("states/a", [old])
    time.sleep(random.uniform(0.001, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    content = store.read("states/a")
    assert content in {old, new}, len(content)
    assert [item.key for item in store.list("")] == ["states/a"]
    store.collect(older_than_s=-60)
    assert os.listdir(root / str(number) / "states") == ["a"]
    seen.add(content[:1])
print(seen)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


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


def refuse(number: int) -> Any:
    def call(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("missing", [("replace",), ("link",), ("replace", "link")])
def test_mounts_without_rename_or_hard_links_are_written_in_place(
    missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in missing:
        number = errno.ENOSYS if name == "replace" else errno.EPERM
        monkeypatch.setattr(os, name, refuse(number))
    store = LocalStore(tmp_path)
    with structlog.testing.capture_logs() as logs:
        store.write("states/a", [b"first ", b"and second"])
        store.write("states/a", [b"short"])
        assert store.create("states/a.json", b"record")
        assert not store.create("states/a.json", b"another's")
    assert store.read("states/a") == b"short"
    assert store.read("states/a.json") == b"record"
    assert {path.name for path in tmp_path.rglob("*")} == {"states", "a", "a.json"}
    told = [one for one in logs if "cannot rename" in one["event"]]
    assert len(told) == ("replace" in missing)


def test_in_place_a_source_that_breaks_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("source broke")

    monkeypatch.setattr(os, "replace", refuse(errno.ENOSYS))
    store = LocalStore(tmp_path)
    with pytest.raises(RuntimeError, match="source broke"):
        store.write("states/a", chunks())
    assert store.stat("states/a") is None


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO, errno.ESTALE, errno.ENOSPC])
def test_in_place_an_object_that_cannot_be_opened_again_stays(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object-store mounts refuse to open what is there already; a stale handle says nothing about the file."""
    monkeypatch.setattr(os, "replace", refuse(errno.ENOSYS))
    monkeypatch.setattr(os, "link", refuse(errno.ENOSYS))
    store = LocalStore(tmp_path)
    store.write("states/a", [b"old"])
    assert store.create("states/a.json", b"another's")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse(number))
        with pytest.raises(SwatheError):
            store.write("states/a", [b"new"])
        with pytest.raises(SwatheError):
            store.create("states/a.json", b"mine")
    assert (store.read("states/a"), store.read("states/a.json")) == (b"old", b"another's")


@pytest.mark.parametrize(
    ("function", "number", "error"),
    [
        ("fsync", errno.EIO, StoreError),
        ("fsync", errno.ENOSPC, NoSpaceError),
        ("write", errno.EDQUOT, NoSpaceError),
        ("replace", errno.EIO, StoreError),
        ("replace", errno.ESTALE, StoreError),
        ("replace", errno.EACCES, ConfigError),
        ("open", errno.EROFS, ConfigError),
    ],
)
def test_what_the_system_refuses_leaves_the_old_object_and_no_temporary(
    function: str,
    number: int,
    error: type[SwatheError],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = LocalStore(tmp_path)
    store.write("states/a", [b"old"])
    actions = (lambda: store.write("states/a", [b"new"]), lambda: store.create("states/b", b"new"))
    for action in actions:
        with monkeypatch.context() as patch:
            patch.setattr(os, function, refuse(number))
            if function == "replace":
                patch.setattr(os, "link", refuse(number))
            with pytest.raises(error) as caught:
                action()
        assert type(caught.value) is error
        assert caught.value.exit_code == (2 if error is ConfigError else 1)
    assert store.read("states/a") == b"old"
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["a"]


def test_space_that_is_missed_only_at_close_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.write("states/a", [b"old"])
    close = os.close

    def full(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", full)
        with pytest.raises(NoSpaceError):
            store.write("states/a", [b"new"])
    assert store.read("states/a") == b"old"
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["a"]


def test_file_systems_that_know_no_flush_are_used_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    store = LocalStore(tmp_path)
    store.write("a", [b"x"])
    assert store.create("b", b"y")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1000]))
    store = LocalStore(tmp_path)
    data = os.urandom(123_456)
    assert store.write("a", [data]).xxh3 == xxhash.xxh3_128_hexdigest(data)
    assert store.read("a") == data


def test_a_link_that_nfs_repeats_is_known_as_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def repeated(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    store = LocalStore(tmp_path)
    store.write("first", [b"x"])
    monkeypatch.setattr(os, "link", repeated)
    assert store.create("k", b"mine")
    assert not store.create("k", b"another's")
    assert store.read("k") == b"mine"


def test_temporaries_are_collected_by_age(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("states/a", [b"x"])
    left = tmp_path / "states" / ".tmp-b-0123"
    left.write_bytes(b"half")
    assert [item.key for item in store.list("")] == ["states/a"]
    assert store.collect(older_than_s=3600) == 0
    assert store.collect(older_than_s=-60) == 1
    assert not left.exists()
    assert store.read("states/a") == b"x"


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        LocalStore(tmp_path).write("a", [b"x"])
        LocalStore(tmp_path).create("b", b"x")
    finally:
        os.umask(old)
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in "ab"} == {0o640}


def test_a_path_from_the_home_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--out=~/run`` reaches the program as it is written."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_store("~/run").url == str(tmp_path / "run")


def test_temporaries_behind_a_link_are_somebody_elses(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs" / ".tmp-x", tmp_path / "run" / ".tmp-y"
    for path in (theirs, mine):
        path.parent.mkdir()
        path.write_bytes(b"x")
    (tmp_path / "run" / "link").symlink_to(theirs.parent)
    assert LocalStore(tmp_path / "run").collect(older_than_s=-1) == 1
    assert theirs.exists()
    assert not mine.exists()
