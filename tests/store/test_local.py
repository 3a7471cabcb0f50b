"""A folder: durable before it is visible, never half, with a clear word when the file system cannot."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from swathe.errors import NoSpaceError
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
