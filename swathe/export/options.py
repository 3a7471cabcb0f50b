"""What a user asks of an export, and what comes back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from swathe.errors import ConfigError

Format = Literal["speculators", "specforge", "modelopt"]
FORMATS: Final[tuple[str, ...]] = get_args(Format)
ALGORITHMS: Final = ("eagle3", "dflash", "domino", "dspark")
"""SpecForge's; the other formats are the same for all of theirs."""
DTYPES: Final = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """``layers`` are the run's block numbers (default all); ``workers`` threads write files at the same time."""

    format: Format
    algorithm: Literal["eagle3", "dflash", "domino", "dspark"] = "eagle3"
    layers: tuple[int, ...] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    fp8: bool = False
    max_length: int | None = None
    allow_random: bool = False
    workers: int = 4

    def check(self) -> None:
        """Raises ConfigError for options that do not make sense."""
        for value, allowed in (
            (self.format, FORMATS),
            (self.algorithm, ALGORITHMS),
            (self.dtype, DTYPES),
        ):
            if value not in allowed:
                msg = f"{value!r} is none of {', '.join(allowed)}"
                raise ConfigError(msg)
        if self.fp8 and self.format != "speculators":
            msg = f"{self.format} reads no float8; only speculators does"
            raise ConfigError(msg)
        if self.workers < 1 or (self.max_length is not None and self.max_length < 1):
            msg = f"workers {self.workers} and max_length {self.max_length} must be 1 or more"
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportProgress:
    """Samples of the format done (those of an earlier attempt included) of all, and bytes written by this one."""

    done: int
    total: int
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """``left_out`` samples are stored in the run and cannot be used by the trainer; the README says why."""

    dest: Path
    samples: int
    found: int
    """Samples that an earlier attempt had written."""
    left_out: int
    written_bytes: int
    seconds: float


OnProgress = Callable[[ExportProgress], None]
