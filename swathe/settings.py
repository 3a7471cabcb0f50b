"""Settings from the environment, read once by a command line and passed down."""

import socket
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from swathe.errors import ConfigError

RELAY: Final = "relay"
"""As SWATHE_METRICS_ADVERTISE: hand the metrics to the fleet's exporter instead of being scraped."""


def _split(value: Any) -> Any:
    return (
        [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else value
    )


class S3Settings(BaseModel):
    """``SWATHE_S3__*``: how S3 is spoken to. Credentials, region and endpoint come from the usual ``AWS_*`` chain."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint_url: str | None = None
    """Wins over AWS_ENDPOINT_URL_S3, for a process that uses two stores."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """``auto``: the bucket in the host name at AWS, in the path everywhere else."""
    checksum: Literal["crc32", "sha256", "md5", "none"] = "crc32"
    """What the store checks each uploaded part against. ``md5`` (Content-MD5) and ``none`` send none of the newer
    checksum headers, which some S3-compatible stores reject, and ask for none in answers."""
    conditional_create: Literal["auto", "on", "off"] = "auto"
    """If-None-Match: ``auto`` tries once for each process whether the store honours it, ``on`` trusts it blindly."""
    part_bytes: int = Field(default=32 << 20, ge=5 << 20, le=5 << 30)
    """Larger objects go up in parts of this size; S3 allows 10,000 of them."""
    concurrency: int = Field(default=4, ge=1, le=64)
    """Parts of one object on the way at once."""
    attempts: int = Field(default=10, ge=1)
    """Attempts at one request; the work itself is tried again later when they are used up."""
    retry_s: float = Field(default=300.0, gt=0)
    """No new attempt at a request after this long."""
    first_wait_s: float = Field(default=0.2, ge=0)
    """Wait before the second attempt; doubled for each further one, up to 20 s, with jitter."""
    connect_timeout_s: float = Field(default=10.0, gt=0)
    read_timeout_s: float = Field(default=60.0, gt=0)
    """Without a byte for this long, a request counts as failed."""
    acl: str | None = None
    """Canned ACL of every object, such as ``bucket-owner-full-control``."""
    sse: str | None = None
    """Server-side encryption, ``AES256`` or ``aws:kms``; unset: the bucket's default."""
    sse_kms_key_id: str | None = None
    storage_class: str | None = None


class Settings(BaseSettings):
    """Every ``SWATHE_*`` variable, plus REDIS_URL under its usual name."""

    model_config = SettingsConfigDict(
        env_prefix="SWATHE_",
        env_nested_delimiter="__",
        env_ignore_empty=True,  # compose files pass variables on that nobody has set
        frozen=True,
        extra="ignore",
    )

    redis_url: SecretStr | None = Field(default=None, validation_alias="REDIS_URL")
    """A password may stand in it, so it is never logged; ``queue.describe`` gives a safe form."""
    state_dir: Path = Field(default_factory=lambda: Path.home() / ".local" / "state" / "swathe")
    """Where an embedded server keeps its files, one folder for each run_id."""
    store_roots: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = ()
    """Folders or s3:// prefixes, comma separated, below which a worker opens runs; it refuses all others."""
    model_roots: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split)] = ()
    """Folders, comma separated, searched for a run's model on this node before the hub's cache."""
    log_format: Literal["auto", "console", "json"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    kernels: Literal["auto", "reference"] = "auto"
    """``reference`` turns every fast kernel off."""
    kernel_cache: Path = Field(
        default_factory=lambda: Path.home() / ".cache" / "swathe" / "kernels"
    )
    """Where compiled and tuned kernels are kept between processes; a volume there saves every start about a minute."""
    jobs_in_flight: int = Field(default=5, ge=2, le=64)
    """Ranges a worker holds at once: two on the device, one being read, the others being stored."""
    selftest_failure: Literal["fall back", "refuse"] = "fall back"
    """What follows when fast kernels are wrong on a device: the stock ones, or no work at all."""
    canary_every: int = Field(default=200, ge=0)
    """One range in so many has a sample computed again on the reference path; 0 turns canaries off."""
    lease_s: float = Field(default=15.0, gt=0)
    heartbeat_s: float = Field(default=3.0, gt=0)
    drain_s: float = Field(default=60.0, gt=0)
    """Bound of a worker's orderly stop."""
    metrics_address: str = "127.0.0.1:9410"
    """Where a node's supervisor serves /metrics, /healthz and /readyz for all its workers; ``off`` for nowhere."""
    metrics_advertise: str | None = None
    """The address under which Prometheus reaches that server, if it is another (a load balancer, a mapped port);
    ``relay``: under none, the metrics go to the exporter by way of Redis."""
    node: str = Field(default_factory=socket.gethostname)
    """This node's name in metrics and displays; one of its own in the fleet."""
    exporter_address: str = "127.0.0.1:9411"
    """Where ``swathe exporter`` serves the fleet's metrics and the list of its workers."""
    min_free_bytes: ByteSize = Field(default=ByteSize(1 << 30), ge=0)
    """Room that workers leave in a run's store: what is computed waits rather than go below. ``20GB`` is understood."""
    store_stall_s: float = Field(default=60.0, gt=0)
    """A store that has not moved for so long is reported."""
    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens a worker puts through the model at once; unset: the range's own size, or what memory allows."""
    s3: S3Settings = S3Settings()


def read_settings() -> Settings:
    """Read the environment. Raises ConfigError naming the variable."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = "__".join(str(part) for part in first["loc"]).upper()
        name = name if name == "REDIS_URL" else f"SWATHE_{name}"
        msg = f"{name}: {first['msg']}"
        raise ConfigError(msg) from None
