"""What adds up while rows stream through a plan, and what is said about it in the end."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from swathe.samples import Int64, Rejected
from swathe.spec import RunSpec

_NUMBER: Final = re.compile(r"(?<![\w.])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w.])")
_DOUBLINGS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProgress:
    """How far a plan is; ``fraction`` of the data set's bytes that are hashed, then of what is read."""

    step: Literal["hashing", "planning"]
    fraction: float
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What there is to say about a plan. All counts are in ``spec.totals``."""

    spec: RunSpec
    reused: bool
    """The run was there already, of the same inputs; nothing was read or written."""
    padding_ratio: float
    """Tokens computed beyond the samples' own, relative to these, if each range is one batch."""
    rejected: dict[str, int]
    """Rows by reason, most frequent first; numbers in a reason are shown as N."""
    length_histogram: tuple[tuple[int, int, int], ...]
    """(shortest, longest, samples) for each doubling of the length, without gaps."""
    free_bytes: int | None
    stored_bytes: int = 0
    """Of states, by an earlier call of a run that was there already."""
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def samples(self) -> int:
        """Samples that will be stored."""
        return self.spec.totals.samples

    @property
    def tokens(self) -> int:
        """Their tokens."""
        return self.spec.totals.tokens

    @property
    def ranges(self) -> int:
        """Pieces of work."""
        return self.spec.totals.ranges

    @property
    def state_bytes(self) -> int:
        """Bytes of states of the whole run."""
        return self.spec.state_bytes

    @property
    def bytes_to_come(self) -> int:
        """Bytes of states that are not stored yet."""
        return self.state_bytes - self.stored_bytes

    @property
    def fits(self) -> bool:
        """Whether the states to come fit into the space that was free."""
        return self.free_bytes is None or self.bytes_to_come <= self.free_bytes


@dataclass(slots=True)
class Tally:
    """Running totals of one plan."""

    rows: int = 0
    read_samples: int = 0
    read_tokens: int = 0
    samples: int = 0
    tokens: int = 0
    computed: int = 0
    longest: int = 0
    doublings: Int64 = field(default_factory=lambda: np.zeros(_DOUBLINGS, np.int64))
    rejected: list[Rejected] = field(default_factory=list)

    def add_planned(self, lengths: Int64, computed: int) -> None:
        """Count arranged samples by their lengths; ``computed`` tokens with padding."""
        self.samples += len(lengths)
        self.tokens += int(lengths.sum())
        self.computed += computed
        self.longest = max(self.longest, int(lengths.max()))
        # frexp is exact where a logarithm rounds 2**k the wrong way.
        doublings = np.frexp(lengths.astype(np.float64))[1] - 1
        self.doublings += np.bincount(doublings, minlength=_DOUBLINGS)

    def progress(self, fraction: float) -> PlanProgress:
        """How far the reading is."""
        return PlanProgress(
            step="planning",
            rows=self.rows,
            samples=self.read_samples,
            tokens=self.read_tokens,
            rejected=len(self.rejected),
            fraction=fraction,
        )

    def summary(self) -> dict[str, Any]:
        """The part of a report that cannot be read off run.json; JSON, kept in provenance.json."""
        used = np.flatnonzero(self.doublings)
        low, high = (int(used[0]), int(used[-1])) if len(used) else (0, -1)
        return {
            "padding_ratio": self.computed / self.tokens - 1 if self.tokens else 0.0,
            "rejected": count_reasons(self.rejected),
            "length_histogram": [
                [1 << k, (2 << k) - 1, int(self.doublings[k])] for k in range(low, high + 1)
            ],
        }


def count_reasons(rejected: Sequence[Rejected]) -> dict[str, int]:
    """Rows by reason, most frequent first."""
    return dict(Counter(_NUMBER.sub("N", one.reason) for one in rejected).most_common())
