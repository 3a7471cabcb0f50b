"""Where a worker's time goes, in two ways, and what limits it.

*Stages* are pieces of work, some of them beside each other: their seconds may add up to more than the clock's.
*States* answer one question at every moment: what is this worker's device waiting for? Their seconds add up to the
clock's, so the largest share is what limits the worker. Recording rules say the same in Prometheus.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Stage = Literal[
    "read", "input_wait", "forward", "copy", "canary", "buffer_wait", "write", "record", "load"
]
State = Literal["compute", "input", "write", "queue_empty", "space", "store_away", "load"]
Limit = Literal["compute", "copy", "input", "write", "queue_empty", "space", "store_away", "load"]

STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
STATES: Final[tuple[State, ...]] = get_args(State)
LIMITS: Final[tuple[Limit, ...]] = get_args(Limit)

WORDS: Final[Mapping[Limit, str]] = {
    "compute": "computing",
    "copy": "copying from the device",
    "input": "reading the plan's tokens",
    "write": "writing to the store",
    "queue_empty": "an empty queue",
    "space": "a full store (paused for space)",
    "store_away": "a store or network that does not work",
    "load": "loading the model",
}
"""Each reads well after "limited by"."""

IDLE: Final[frozenset[Limit]] = frozenset({"queue_empty"})
"""Limits that are nobody's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds by state and by stage, over some stretch of time."""

    states: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, float] = field(default_factory=dict)

    def since(self, earlier: "Spent") -> "Spent":
        """What was added since; a total that fell belongs to a process started anew, and counts whole."""
        return Spent(
            states=_grown(self.states, earlier.states), stages=_grown(self.stages, earlier.stages)
        )

    @classmethod
    def of(cls, parts: "Iterable[Spent]") -> "Spent":
        """The sum over several workers."""
        states: dict[str, float] = {}
        stages: dict[str, float] = {}
        for part in parts:
            for total, more in ((states, part.states), (stages, part.stages)):
                for name, seconds in more.items():
                    total[name] = total.get(name, 0.0) + seconds
        return cls(states=states, stages=stages)


def shares(spent: Spent) -> dict[Limit, float]:
    """The share of time that each limit held the device, largest first; empty when no time passed.

    Time on the device is the copies' where copying takes longer than computing: they run side by side.
    """
    total = sum(spent.states.get(state, 0.0) for state in STATES)
    if total <= 0:
        return {}
    copy_bound = spent.stages.get("copy", 0.0) > spent.stages.get("forward", 0.0)
    found: dict[Limit, float] = {}
    for state in STATES:
        limit: Limit = "copy" if state == "compute" and copy_bound else state
        if (seconds := spent.states.get(state, 0.0)) > 0:
            found[limit] = seconds / total
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def limiting(spent: Spent) -> Limit | None:
    """What held the device longest, or None when no time passed."""
    return next(iter(shares(spent)), None)


def _grown(now: Mapping[str, float], then: Mapping[str, float]) -> dict[str, float]:
    return {
        name: seconds - then.get(name, 0.0) if seconds >= then.get(name, 0.0) else seconds
        for name, seconds in now.items()
    }
