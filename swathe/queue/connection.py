"""From REDIS_URL to a client that survives outages, and what of it may be shown.

A client retries a command a few times with growing pauses; who must outlast a longer outage (the worker's outbox, its
heartbeat) loops around that itself, so that a signal is never stuck behind a minute of retries.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import redis
from pydantic import SecretStr
from redis import Redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from swathe.errors import ConfigError, QueueError

_SCHEMES: Final = ("redis", "rediss", "unix")
_PATIENCE_S: Final = 30.0
"""No new attempt at a command after this long, however many are left: each may wait for its own timeout."""

_CLUSTER: Final = "REDIS_URL names a Redis Cluster, which cannot run the fleet's scripts; use one server, with cluster mode off"

_Value = TypeVar("_Value")
_QUOTE_HINT: Final = (
    "REDIS_URL cannot be read as an address. In a password or user name, write characters such as"
    " # / ? @ : % [ ] in percent form (# is %23, / is %2F, ? is %3F, @ is %40)"
)


def _parse(redis_url: str) -> SplitResult:
    """Split the URL. Raises ConfigError, without any part of the URL in its text."""
    try:
        parts = urlsplit(redis_url)
        port = parts.port
    except ValueError:
        raise ConfigError(_QUOTE_HINT) from None
    if parts.scheme not in _SCHEMES:
        msg = "REDIS_URL must start with redis://, rediss:// (TLS) or unix://"
        raise ConfigError(msg)
    # An unquoted # or ? or / ends the host early; the rest of the password and the real host are behind it.
    behind = parts.fragment + parts.query + (parts.path if parts.scheme != "unix" else "")
    if parts.fragment or "@" in behind or port == 0:
        raise ConfigError(_QUOTE_HINT)
    if parts.scheme == "unix" and not parts.path:
        msg = "REDIS_URL: unix:// needs the absolute path of a socket, unix:///path/to/socket"
        raise ConfigError(msg)
    if parts.scheme != "unix" and parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        msg = (
            "REDIS_URL: what follows the port must be a database number, as in redis://host:6379/0"
        )
        raise ConfigError(msg)
    return parts


def describe(redis_url: str | SecretStr) -> str:
    """The address without password and options, for logs and messages."""
    try:
        parts = _parse(_reveal(redis_url))
    except ConfigError:
        return "(a REDIS_URL that cannot be read)"
    if parts.scheme == "unix":
        return f"unix://{unquote(parts.path)}"
    user = f"{parts.username}@" if parts.username else ""
    host = parts.hostname or "localhost"
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{user}{host}:{parts.port or 6379}{parts.path.rstrip('/')}"


def connect(
    redis_url: str | SecretStr, *, retries: int = 20, socket_timeout_s: float = 5.0
) -> Redis:
    """A client; nothing is sent before its first command. Raises ConfigError for a URL that makes no sense.

    ``retries`` counts attempts after the first, with pauses that grow to 2 s: 20 for a command line that may wait half
    a minute, 1 or 2 inside a loop that tries again anyway. A refused login is final.
    """
    url = _reveal(redis_url)
    parts = _parse(url)
    options: dict[str, Any] = {} if parts.scheme == "unix" else {"socket_keepalive": True}
    try:
        return Redis.from_url(
            url,
            retry=_Patience(ExponentialWithJitterBackoff(cap=2.0, base=0.05), retries),
            retry_on_error=[
                redis.exceptions.ConnectionError,
                redis.exceptions.TimeoutError,
                redis.exceptions.BusyLoadingError,
                # After a fail-over the old master may stay connected to us as a replica: the address leads to the new one.
                redis.exceptions.ReadOnlyError,
            ],
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            health_check_interval=15,
            **options,
        )
    except ValueError:
        # An option of the query string with a wrong value; the text could repeat a password option.
        msg = (
            "REDIS_URL: an option after ? is not understood; see redis-py's from_url for the names"
        )
        raise ConfigError(msg) from None


class _Patience(Retry):
    """One round of attempts for a command.

    redis-py connects inside of it by the same policy, which by itself would make rounds of rounds: ten minutes of
    silence for a missing password.
    """

    _busy = False

    def call_with_retry(
        self,
        do: Callable[[], _Value],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,  # noqa: FBT001, FBT002 - redis-py's signature
    ) -> _Value:
        """As redis-py's; each connection has a copy of its own, so that no other thread is in here."""
        if self._busy:
            return do()
        end_s = time.monotonic() + _PATIENCE_S

        def worth_it(error: Exception) -> bool:
            refused = isinstance(error, redis.exceptions.AuthenticationError)
            asked = is_retryable is None or is_retryable(error)
            return asked and not refused and time.monotonic() < end_s

        self._busy = True
        try:
            return super().call_with_retry(do, fail, worth_it, with_failure_count)
        finally:
            self._busy = False


@contextlib.contextmanager
def redis_errors(what: str) -> Iterator[None]:
    """Turn redis-py's errors into QueueError that says what was being done and what to do."""
    try:
        yield
    except redis.exceptions.AuthenticationError as error:
        msg = f"{what}: Redis refused the login ({error}); check user and password in REDIS_URL"
        raise QueueError(msg) from error
    except redis.exceptions.OutOfMemoryError as error:
        msg = (
            f"{what}: Redis is full ({error}); give it more memory, then repeat: nothing is doubled"
        )
        raise QueueError(msg) from error
    except redis.exceptions.ReadOnlyError as error:
        msg = f"{what}: Redis is a read-only replica ({error}); REDIS_URL must name the master"
        raise QueueError(msg) from error
    except (redis.exceptions.ClusterCrossSlotError, redis.exceptions.MovedError) as error:
        msg = f"{what}: {_CLUSTER} ({error})"
        raise QueueError(msg) from error
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        msg = (
            f"{what}: Redis cannot be reached ({error}); repeat when it is back, nothing is doubled"
        )
        raise QueueError(msg) from error
    except redis.exceptions.RedisError as error:
        msg = f"{what}: Redis answered with an error ({error}); repeat when that is mended"
        raise QueueError(msg) from error


def policy_warnings(connection: Redis) -> list[str]:
    """What in the server's configuration could lose the queue, one sentence each; empty when it is safe.

    Raises QueueError when the server cannot be asked.
    """
    with redis_errors("check of the server's policy"):
        info: Any = connection.info()
    warnings = []
    if int(info.get("cluster_enabled", 0)):
        warnings.append(_CLUSTER)
    if info.get("role") == "slave":
        warnings.append("Redis is a read-only replica; REDIS_URL must name the master")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        warnings.append(
            f"maxmemory-policy is {policy}: under memory pressure Redis drops queued ranges silently;"
            " set maxmemory-policy noeviction"
        )
    if not int(info.get("aof_enabled", 0)):
        warnings.append(
            "appendonly is off: a restart of Redis loses queue and leases (submit rebuilds them from"
            " the store); set appendonly yes and appendfsync everysec"
        )
    if str(info.get("aof_last_write_status", "ok")) != "ok":
        warnings.append("Redis cannot write its append-only file; is its disk full?")
    return warnings


def _reveal(redis_url: str | SecretStr) -> str:
    return redis_url.get_secret_value() if isinstance(redis_url, SecretStr) else redis_url
