"""From a run's URL to its store."""

from pathlib import Path

from swathe.errors import ConfigError
from swathe.store.base import Store
from swathe.store.local import LocalStore


def open_store(url: str | Path) -> Store:
    """The store behind a local path, ``file://`` URL or ``s3://`` prefix; nothing is read or created.

    Raises ConfigError for a scheme that no store serves.
    """
    text = str(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStore(Path(text))
    if scheme == "file":
        return LocalStore(Path(rest))
    msg = f"{text}: no store serves {scheme}:// yet; use a local folder"
    raise ConfigError(msg)
