"""A run in a local folder, or on whatever a folder is mounted from.

A write goes to a hidden temporary beside its target, is flushed to the device, renamed, and then the folder is
flushed: a crash leaves the old object or the new one, and at worst a temporary that ``collect`` removes.
Exclusive creation is ``link()``: it fails when the name is taken, on every POSIX file system, NFS included.

Mounts of object stores often know neither. What a file system can do is tried out once; without rename an object is
written under its own name (the record that makes it count comes later), without hard links a name is taken by O_EXCL.
"""

import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from swathe import log
from swathe.errors import ConfigError, NoSpaceError, ObjectMissingError, StoreError
from swathe.store.base import Buffer, ObjectInfo, Written

logger = log.get("store")

_TEMPORARY: Final = ".tmp-"
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_DENIED: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
"""No attempt helps: of the last two, a file stands where a folder is wanted."""
_UNABLE: Final = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP}
_NO_LINK: Final = _UNABLE | {errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EINVAL}
_NO_FLUSH: Final = _UNABLE | {errno.EINVAL, errno.EBADF, errno.EISDIR}
_BLOCK_BYTES: Final = 4 << 20
"""Hashed, then written while it is still in the processor's cache."""


@dataclass(frozen=True, slots=True)
class _Abilities:
    """What the file system can do."""

    rename: bool
    link: bool


class LocalStore:
    """A folder; keys are relative paths in it."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._known: _Abilities | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return LocalStore, (self._root,)

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return str(self._root)

    def read(self, key: str) -> bytes:
        """All bytes of a file."""
        with self._errors("read", key):
            try:
                return self._path(key).read_bytes()
            except NotADirectoryError as error:
                raise FileNotFoundError from error

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
            _make_folder(path.parent)
            if not self._abilities().rename:
                return _write_durably(path, chunks, mode=os.O_TRUNC)
            with self._temporary(path) as temporary:
                written = _write_durably(temporary, chunks)
                temporary.replace(path)
                _flush_folder(path.parent)
            return written

    def create(self, key: str, data: bytes) -> bool:
        """Write a temporary and link it under the name, which fails when the name is taken."""
        path = self._path(key)
        with self._errors("create", key):
            _make_folder(path.parent)
            if not self._abilities().link:
                return _create_in_place(path, data)
            with self._temporary(path) as temporary:
                _write_durably(temporary, [data])
                if not _link(temporary, path):
                    return False
                _flush_folder(path.parent)
            return True

    def stat(self, key: str) -> ObjectInfo | None:
        """Size and time of a file."""
        with self._errors("stat", key):
            try:
                info = self._path(key).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return ObjectInfo(key=key, size_bytes=info.st_size, modified_s=info.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Walk the folder of the prefix."""
        folder = (
            self._path(prefix) if prefix.endswith("/") or not prefix else self._path(prefix).parent
        )
        with self._errors("list", prefix):
            for path, info in self._walk(folder, links=True):
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

    def collect(self, *, older_than_s: float, prefix: str = "") -> int:
        """Remove temporaries that a dead process left; returns how many."""
        removed = 0
        with self._errors("collect", _TEMPORARY):
            # What lies behind links is not ours to clean.
            for path, info in self._walk(self._path(prefix), links=False):
                if path.name.startswith(_TEMPORARY) and time.time() - info.st_mtime > older_than_s:
                    path.unlink(missing_ok=True)
                    removed += 1
        return removed

    def _path(self, key: str) -> Path:
        return self._root / key

    def _walk(
        self, folder: Path, *, links: bool, above: tuple[os.stat_result, ...] = ()
    ) -> Iterator[tuple[Path, os.stat_result]]:
        """All files below a folder; with ``links`` also of linked folders: a data set's may lie on another disk."""
        try:
            here, entries = folder.stat(), list(os.scandir(folder))
        except FileNotFoundError:
            return
        if any(os.path.samestat(here, one) for one in above):
            return  # a link back up
        for entry in entries:
            if entry.is_dir(follow_symlinks=links):
                yield from self._walk(Path(entry.path), links=links, above=(*above, here))
                continue
            with contextlib.suppress(FileNotFoundError):  # removed since the listing
                yield Path(entry.path), entry.stat()

    @contextlib.contextmanager
    def _temporary(self, path: Path) -> Iterator[Path]:
        temporary = path.with_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(4)}")
        try:
            yield temporary
        finally:
            with contextlib.suppress(OSError):  # hidden, and collected later
                temporary.unlink(missing_ok=True)

    def _abilities(self) -> _Abilities:
        """Try rename and link on a throw-away file, once."""
        with self._lock:
            if self._known is None:
                self._root.mkdir(parents=True, exist_ok=True)
                self._known = self._try_out()
                if not self._known.rename:
                    logger.warning(
                        "this file system cannot rename: objects are written in place, and one that a crash cut short "
                        "stays visible until swathe gc",
                        folder=self.url,
                    )
            return self._known

    def _try_out(self) -> _Abilities:
        with self._temporary(self._root / "one") as one, self._temporary(self._root / "two") as two:
            one.touch()
            link = rename = True
            try:
                os.link(one, two)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                link = False
            try:
                one.replace(two)
            except OSError as error:
                if error.errno not in _UNABLE:
                    raise
                rename = False
            return _Abilities(rename=rename, link=link)

    @contextlib.contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        """Turn the operating system's errors into the store's."""
        try:
            yield
        except FileNotFoundError as error:
            msg = f"{self.url}/{key}: not there, cannot {verb} it"
            raise ObjectMissingError(msg) from error
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno in _FULL:
                msg = f"{self.url}: no space left to {verb} {key}; free some, the work waits"
                raise NoSpaceError(msg) from error
            if error.errno in _DENIED:
                msg = f"{self.url}/{key}: cannot {verb}: {reason}; check the folder's owner, mode and mount options"
                raise ConfigError(msg) from error
            msg = f"{self.url}/{key}: cannot {verb}: {reason}; the work is tried again later"
            raise StoreError(msg) from error


def _write_durably(path: Path, chunks: Iterable[Buffer], *, mode: int = os.O_EXCL) -> Written:
    """Write to a file and flush it to the device. Mode 0666 less the umask, as any program's file.

    What was begun and not finished is removed; a file that could not be opened is not ours to remove.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, 0o666)
    try:
        try:
            written = _write_all(descriptor, chunks)
            _flush(descriptor)
        finally:
            # Network file systems tell of a full or lost disk as late as here.
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    return written


def _write_all(descriptor: int, chunks: Iterable[Buffer]) -> Written:
    digest, size_bytes = xxhash.xxh3_128(), 0
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        size_bytes += rest.nbytes
        while rest.nbytes:
            block, rest = rest[:_BLOCK_BYTES], rest[_BLOCK_BYTES:]
            digest.update(block)
            while block.nbytes:
                block = block[os.write(descriptor, block) :]
    return Written(size_bytes=size_bytes, xxh3=digest.hexdigest())


def _create_in_place(path: Path, data: bytes) -> bool:
    """Without hard links: O_EXCL takes the name; the few bytes of a record follow in one write."""
    try:
        _write_durably(path, [data])
    except FileExistsError:
        return False
    _flush_folder(path.parent)
    return True


def _link(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # NFS repeats a request whose answer was lost, and then finds the link that it made itself.
        return temporary.stat().st_nlink == 2
    return True


def _make_folder(folder: Path) -> None:
    """Make a folder that a crash does not take away again."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _flush(descriptor)
    finally:
        os.close(descriptor)


def _flush(descriptor: int) -> None:
    """To the device, where the file system knows what that is; any other error of fsync is one."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
