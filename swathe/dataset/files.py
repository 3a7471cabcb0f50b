"""One file of a data set, wherever it lies: found through a store, read as an Arrow file."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from swathe.errors import PlanError
from swathe.store import ObjectInfo, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """``name`` is relative to the data set's folder, which is the root of ``store``."""

    name: str
    store: Store
    size_bytes: int
    version: str
    """Another one after each write: the time of it."""

    @classmethod
    def of(cls, store: Store, info: ObjectInfo) -> "InputFile":
        """A file as its store shows it."""
        return cls(
            name=info.key, store=store, size_bytes=info.size_bytes, version=repr(info.modified_s)
        )

    @property
    def location(self) -> str:
        """Path or URL, for messages."""
        return f"{self.store.url}/{self.name}"

    @property
    def is_unchanged(self) -> bool:
        """Whether the file is still the one that was found."""
        info = self.store.stat(self.name)
        return info is not None and InputFile.of(self.store, info) == self

    def open(self) -> Any:
        """The file as a pyarrow.NativeFile, to be closed by the caller. Raises OSError."""
        return pa.OSFile(str(self.store.local_path(self.name)))


def unreadable(file: InputFile, error: Exception, *, place: str = "") -> PlanError:
    """The error for a file that cannot be read; ``place`` says how far it could."""
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return PlanError(
        f"{file.location}: unreadable{place and f' {place}'} ({first_line}); nothing was planned; replace the file"
    )
