"""A folder seen through a real mount that can do less: no hard links, no rename, new files from front to back only.

python tests/support/limited_mount.py FOLDER MOUNT [--no-link] [--no-rename] [--sequential]

Needs Linux with /dev/fuse, libfuse 2 and the package fusepy; no test depends on it. ``--sequential`` is how object-store
mounts write: an object can be read once its file was closed, cannot be opened for writing again, and is not rewritten.
"""

# ruff: noqa: PTH102, PTH105, PTH106, PTH108, PTH208 - the calls of a file system, one for one

import argparse
import errno
import os
from pathlib import Path
from typing import Any

from fuse import FUSE, FuseOSError, Operations


class Limited(Operations):  # type: ignore[misc]
    """Hands everything on to the folder, but for what is refused."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        self.root, self.options = root, options

    def _at(self, path: str) -> str:
        return f"{self.root}{path}"

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        del fh
        info = os.lstat(self._at(path))
        names = (
            "st_mode",
            "st_size",
            "st_mtime",
            "st_ctime",
            "st_atime",
            "st_nlink",
            "st_uid",
            "st_gid",
        )
        return {name: getattr(info, name) for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        del fh
        return [".", "..", *os.listdir(self._at(path))]

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))

    def link(self, target: str, source: str) -> None:
        if self.options.no_link:
            raise FuseOSError(errno.ENOSYS if self.options.sequential else errno.EPERM)
        os.link(self._at(source), self._at(target))

    def rename(self, old: str, new: str) -> None:
        if self.options.no_rename:
            raise FuseOSError(errno.ENOSYS)
        os.replace(self._at(old), self._at(new))

    def chmod(self, path: str, mode: int) -> None:
        del path, mode
        raise FuseOSError(errno.ENOSYS)

    def utimens(self, path: str, times: Any = None) -> None:
        os.utime(self._at(path), times)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        names = (
            "f_bavail",
            "f_bfree",
            "f_blocks",
            "f_bsize",
            "f_frsize",
            "f_files",
            "f_ffree",
            "f_namemax",
        )
        return {name: getattr(found, name) for name in names}

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        del fi
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if writes and self.options.sequential and not flags & os.O_TRUNC:
            raise FuseOSError(errno.EPERM)
        return os.open(self._at(path), flags & ~(os.O_CREAT | os.O_EXCL))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        del path
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if self.options.sequential and offset != os.fstat(fh).st_size:
            raise FuseOSError(errno.EINVAL)
        del path
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        if self.options.sequential and length:
            raise FuseOSError(errno.ENOSYS)
        del fh
        os.truncate(self._at(path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        del path, datasync
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        del path
        os.close(fh)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("mount", type=Path)
    for refused in ("--no-link", "--no-rename", "--sequential"):
        parser.add_argument(refused, action="store_true")
    options = parser.parse_args()
    FUSE(Limited(options.folder, options), str(options.mount), foreground=True)


if __name__ == "__main__":
    main()
