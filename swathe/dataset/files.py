"""One file of a data set, wherever it lies: found through a store, read as an Arrow file."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa

from swathe.dataset.remote import ReadAhead, RemoteFile
from swathe.errors import PlanError
from swathe.store import ObjectInfo, Store

_Result = TypeVar("_Result")
_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """``name`` is relative to the data set's folder, which is the root of ``store``."""

    name: str
    store: Store
    size_bytes: int
    version: str
    """Another one after each write: the store's tag (an ETag), or the time."""

    @classmethod
    def of(cls, store: Store, info: ObjectInfo) -> "InputFile":
        """A file as its store shows it."""
        version = info.tag or repr(info.modified_s)
        return cls(name=info.key, store=store, size_bytes=info.size_bytes, version=version)

    @property
    def location(self) -> str:
        """Path or URL, for messages."""
        return f"{self.store.url}/{self.name}"

    @property
    def is_unchanged(self) -> bool:
        """Whether the file is still the one that was found."""
        info = self.store.stat(self.name)
        return info is not None and InputFile.of(self.store, info) == self

    def open(self, *, whole: bool = True, edges: Sequence[int] = ()) -> Any:
        """The file as a pyarrow.NativeFile, to be closed by the caller.

        ``whole`` says that most of it will be read; for ``edges`` see ReadAhead. Reading raises OSError, or
        StoreError where the store is a remote one.
        """
        path = self.store.local_path(self.name)
        if path is not None:
            return pa.OSFile(str(path))
        about = (self.store, self.name, self.size_bytes)
        return pa.PythonFile(ReadAhead(*about, edges) if whole else RemoteFile(*about), mode="r")


def for_each(
    files: Sequence[InputFile], look: Callable[[InputFile], _Result]
) -> list[tuple[InputFile, _Result]]:
    """What ``look`` finds in each file, eight at once: a bucket answers after 20 ms, and there may be 10,000 files."""
    with ThreadPoolExecutor(_AT_ONCE, "files") as pool:
        return list(zip(files, pool.map(look, files), strict=True))


def unreadable(file: InputFile, error: Exception, *, place: str = "") -> PlanError:
    """The error for a file that cannot be read; ``place`` says how far it could."""
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return PlanError(
        f"{file.location}: unreadable{place and f' {place}'} ({first_line}); nothing was planned; replace the file"
    )
