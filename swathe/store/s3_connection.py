"""One way to talk to S3 for a whole process, and the one place where a request is tried again.

boto3's own retries are off: they do not know about expired credentials or clocks, cannot resume a body that broke off,
and hide how often they ran. A client belongs to the process that made it (sockets and refresh locks do not survive a
fork) and is shared by its threads; it is made anew when its credentials expired in spite of the chain's own refresh.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import boto3
import stamina
from botocore.config import Config

from swathe.errors import ConfigError, StoreError
from swathe.settings import S3Settings
from swathe.store.s3_errors import FAILURES, Kind, classify, explain, words

_Result = TypeVar("_Result")

_MAX_WAIT_S: Final = 20.0
_POOL: Final = 64
"""Kept connections; more requests at once open further ones."""


class Connection:
    """Clients by process, and requests with retries. Safe for threads and forks."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        # No lock, which a fork could copy while it is held: two threads may both make a client, one is kept.
        self._clients: dict[int, Any] = {}
        self.conditional: dict[str, bool] = {}
        """Whether a bucket honours If-None-Match, once it is known."""
        self.retries = 0
        """Attempts after the first, of all requests, for metrics."""
        self.sessions = 0
        """Sessions made: more than one says that credentials had expired."""

    @property
    def settings(self) -> S3Settings:
        """As given."""
        return self._settings

    def call(
        self,
        action: Callable[[Any], _Result],
        *,
        what: str,
        url: str,
        bucket: str,
        stop: threading.Event | None = None,
    ) -> _Result:
        """Run ``action(client)`` until it succeeds or its budget is used up; it must bear being repeated.

        ``what`` is a verb for messages; after ``stop`` is set there are no further attempts. Raises StoreError (try
        the whole work later), ObjectMissingError, NoSpaceError, ClockSkewError, AnsweredError, or ConfigError for what
        no attempt can cure.
        """
        attempts = 0
        retries = stamina.retry_context(
            on=lambda error: _worth_another(error) and not (stop and stop.is_set()),
            attempts=self._settings.attempts,
            timeout=self._settings.retry_s,
            wait_initial=self._settings.first_wait_s,
            wait_max=_MAX_WAIT_S,
            wait_jitter=self._settings.first_wait_s * 5,
        ).with_name(f"s3.{what}", args=(url,), kw={})
        try:
            for attempt in retries:
                with attempt:
                    attempts = attempt.num
                    self.retries += attempts > 1
                    return self._once(action, what, url, bucket, attempts)
        except StoreError as error:
            if not _worth_another(error):
                raise
            msg = f"{error}; gave up after {attempts} attempts, the work is tried again later"
            raise StoreError(msg) from error.__cause__
        raise AssertionError  # the iterator either returns or raises

    def client(self) -> Any:
        """The process's client. Raises ConfigError when the environment does not make one."""
        client = self._clients.get(os.getpid())
        return client or self._clients.setdefault(os.getpid(), self._new_client())

    def close(self) -> None:
        """Close the process's idle sockets; the next request opens new ones."""
        if client := self._clients.pop(os.getpid(), None):
            client.close()

    def _once(
        self, action: Callable[[Any], _Result], what: str, url: str, bucket: str, attempt: int
    ) -> _Result:
        client: Any = None
        try:
            client = self.client()
            return action(client)
        except FAILURES as error:
            if classify(error) is Kind.EXPIRED and self._clients.get(os.getpid()) is client:
                self._clients.pop(os.getpid(), None)
            raise explain(error, what=what, url=url, bucket=bucket, attempt=attempt) from error

    def _new_client(self) -> Any:
        """A client of a fresh session: the default chain is asked again from its start."""
        self.sessions += 1
        session = boto3.session.Session()
        endpoint = self._settings.endpoint_url
        known = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3")
        style = self._settings.addressing
        if style == "auto" and known:
            style = _addressing(known)
        try:
            client = session.client("s3", endpoint_url=endpoint, config=self._config(style))
            if style == "auto" and _addressing(client.meta.endpoint_url) == "path":
                # The endpoint stood in AWS_ENDPOINT_URL or a configuration file.
                client = session.client("s3", endpoint_url=endpoint, config=self._config("path"))
        except ValueError as error:
            msg = f"S3 endpoint: {words(error)}; check AWS_ENDPOINT_URL_S3 and SWATHE_S3__ENDPOINT_URL"
            raise ConfigError(msg) from error
        return client

    def _config(self, addressing: str) -> Config:
        settings = self._settings
        newer = settings.checksum in {"crc32", "sha256"}
        return Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=settings.connect_timeout_s,
            read_timeout=settings.read_timeout_s,
            max_pool_connections=_POOL,
            tcp_keepalive=True,
            s3={"addressing_style": addressing},
            # Uploads carry a checksum that we computed ourselves, or none at all.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_supported" if newer else "when_required",
        )


_connections: weakref.WeakValueDictionary[S3Settings, Connection] = weakref.WeakValueDictionary()


def connect(settings: S3Settings) -> Connection:
    """The process's connection for these settings, shared by all stores that are open."""
    found = _connections.get(settings)
    return found or _connections.setdefault(settings, Connection(settings))


def _addressing(endpoint_url: str) -> Literal["auto", "path"]:
    """Botocore's own "auto" puts the bucket into any host name that is not a bare address, which only AWS serves."""
    host = urlsplit(endpoint_url).hostname or ""
    return "auto" if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) else "path"


def _worth_another(error: Exception) -> bool:
    """Subclasses of StoreError say something definite; StoreError itself says that it may work next time."""
    return type(error) is StoreError
