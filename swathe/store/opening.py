"""From a run's URL to its store."""

from pathlib import Path

from swathe.errors import ConfigError
from swathe.settings import Settings, read_settings
from swathe.store.base import Store
from swathe.store.local import LocalStore


def open_store(url: str | Path, settings: Settings | None = None) -> Store:
    """The store behind a local path, ``file://`` URL or ``s3://`` prefix; nothing is read or created.

    ``settings`` default to the environment's, for libraries that are handed nothing but a URL.
    Raises ConfigError for a scheme that no store serves and for settings that make no sense.
    """
    text = str(url)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStore(Path(text).expanduser())
    if scheme == "file":
        return LocalStore(Path(rest))
    if scheme == "s3":
        # boto3 costs 0.3 s and 30 MB: only who uses it pays.
        from swathe.store.s3 import S3Store  # noqa: PLC0415

        return S3Store(text, (settings or read_settings()).s3)
    msg = f"{text}: no store serves {scheme}://; use a local folder or an s3:// prefix"
    raise ConfigError(msg)
