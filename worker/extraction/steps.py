"""What a range is between the steps of its work: opened, read, on the device, computed."""

from dataclasses import dataclass

from swathe.spec import CanaryRecord, RunSpec
from swathe.store import Store
from swathe.tokens import RangeTokens, TokenReader
from worker.engine.engine import Engine, StartedRange
from worker.engine.ranges import RangeStates
from worker.extraction.sink import Author, Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run that this worker has opened; never created."""

    store: Store
    spec: RunSpec
    tokens: TokenReader
    sink: Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A range ready for the device."""

    run: OpenRun
    tokens: RangeTokens


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Computed:
    """A range ready for the store."""

    run: OpenRun
    states: RangeStates
    canary: CanaryRecord | None
    author: Author
    """Of the model that computed it, which may be gone when the range is stored."""


@dataclass(slots=True, kw_only=True)
class Started:
    """A range on the device, with the engine that put it there, until it is finished; ``computed`` from then on."""

    run: OpenRun
    engine: Engine | None
    started: StartedRange
    computed: Computed | None = None
