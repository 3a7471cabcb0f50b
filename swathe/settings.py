"""Settings from the environment, read once by a command line and passed down."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from swathe.errors import ConfigError


def _split(value: Any) -> Any:
    return (
        [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else value
    )


class Settings(BaseSettings):
    """Every ``SWATHE_*`` variable, plus REDIS_URL under its usual name."""

    model_config = SettingsConfigDict(
        env_prefix="SWATHE_", env_nested_delimiter="__", frozen=True, extra="ignore"
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
    """The address under which Prometheus reaches that server, if it is another (a load balancer, a mapped port)."""
    exporter_address: str = "127.0.0.1:9411"
    """Where ``swathe exporter`` serves the fleet's metrics and the list of its workers."""
    max_batch_tokens: int | None = Field(default=None, ge=1)
    """Tokens a worker puts through the model at once; unset: the range's own size, or what memory allows."""


def read_settings() -> Settings:
    """Read the environment. Raises ConfigError naming the variable."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        name = name if name == "REDIS_URL" else f"SWATHE_{name}"
        msg = f"{name}: {first['msg']}"
        raise ConfigError(msg) from None
