"""A run in a local folder (or any file system with atomic rename and hard links).

A write goes to a hidden temporary beside its target, is flushed to the device, renamed, and then the folder is
flushed: a crash leaves the old object or the new one, and at worst a temporary that ``collect`` removes.
Exclusive creation is ``link()``: it fails when the name is taken, on every POSIX file system, NFS included.
"""

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from swathe.errors import NoSpaceError, ObjectMissingError, StoreError
from swathe.store.base import Buffer, ObjectInfo, Written

_TEMPORARY = ".tmp-"
_FULL = {errno.ENOSPC, errno.EDQUOT}


class LocalStore:
    """A folder; keys are relative paths in it."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return str(self._root)

    def read(self, key: str) -> bytes:
        """All bytes of a file."""
        with self._errors("read", key):
            return self._path(key).read_bytes()

    def read_range(self, key: str, offset: int, size_bytes: int) -> bytes:
        """A slice of a file."""
        with self._errors("read", key), self._path(key).open("rb", buffering=0) as file:
            data = os.pread(file.fileno(), size_bytes, offset)
            while len(data) < size_bytes:
                # One pread returns at most 2 GiB on Linux; an empty one is the end of the file.
                more = os.pread(file.fileno(), size_bytes - len(data), offset + len(data))
                if not more:
                    msg = f"{self.url}/{key}: ends at byte {offset + len(data)}, {offset + size_bytes} wanted"
                    raise StoreError(msg)
                data += more
            return data

    def write(self, key: str, chunks: Iterable[Buffer]) -> Written:
        """Write, flush, rename, flush the folder."""
        path = self._path(key)
        with self._errors("write", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._temporary(path) as temporary:
                written = _write_durably(temporary, chunks)
                temporary.replace(path)
                _flush_folder(path.parent)
            return written

    def create(self, key: str, data: bytes) -> bool:
        """Write a temporary and link it under the name, which fails when the name is taken."""
        path = self._path(key)
        with self._errors("create", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._temporary(path) as temporary:
                _write_durably(temporary, [data])
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return False
                _flush_folder(path.parent)
            return True

    def stat(self, key: str) -> ObjectInfo | None:
        """Size and time of a file."""
        with self._errors("stat", key):
            try:
                info = self._path(key).stat()
            except FileNotFoundError:
                return None
            return ObjectInfo(key=key, size_bytes=info.st_size, modified_s=info.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Walk the folder of the prefix."""
        folder = (
            self._path(prefix) if prefix.endswith("/") or not prefix else self._path(prefix).parent
        )
        for path, info in self._walk(folder):
            key = path.relative_to(self._root).as_posix()
            if key.startswith(prefix) and not path.name.startswith(_TEMPORARY):
                yield ObjectInfo(key=key, size_bytes=info.st_size, modified_s=info.st_mtime)

    def delete(self, key: str) -> None:
        """Unlink a file."""
        with self._errors("delete", key):
            self._path(key).unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        """Room on the file system that holds the folder (or will hold it)."""
        folder = self._root
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def local_path(self, key: str) -> Path | None:
        """The file itself."""
        return self._path(key)

    def collect(self, *, older_than_s: float) -> int:
        """Remove temporaries that a dead process left; returns how many."""
        removed = 0
        for path, info in self._walk(self._root):
            if path.name.startswith(_TEMPORARY) and time.time() - info.st_mtime > older_than_s:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _path(self, key: str) -> Path:
        return self._root / key

    def _walk(self, folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(Path(entry.path))
                continue
            with contextlib.suppress(FileNotFoundError):  # removed since the listing
                yield Path(entry.path), entry.stat()

    @contextlib.contextmanager
    def _temporary(self, path: Path) -> Iterator[Path]:
        temporary = path.with_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(4)}")
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """Turn the operating system's errors into the store's."""
        try:
            yield
        except FileNotFoundError as error:
            msg = f"{self.url}/{key}: not there, cannot {verb} it"
            raise ObjectMissingError(msg) from error
        except OSError as error:
            if error.errno in _FULL:
                msg = f"{self.url}: no space left to {verb} {key}; free some, the work waits"
                raise NoSpaceError(msg) from error
            msg = f"{self.url}/{key}: cannot {verb}: {error.strerror or error}"
            raise StoreError(msg) from error


def _write_durably(path: Path, chunks: Iterable[Buffer]) -> Written:
    """Write to a new file and flush it to the device. Mode 0666 less the umask, as any program's file."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            digest.update(rest)
            size_bytes += rest.nbytes
            while rest.nbytes:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Written(size_bytes=size_bytes, xxh3=digest.hexdigest())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
