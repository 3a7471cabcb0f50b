"""What the end of a range, a canary or a look at the store adds to a worker's totals."""

import math
import time

from swathe.errors import SwatheError
from swathe.spec import CanaryRecord, RangeRecord
from swathe.store import Store
from worker.engine.ranges import RangeStates
from worker.telemetry.totals import Telemetry


def note_states(telemetry: Telemetry, states: RangeStates) -> None:
    """A range was computed; its bytes wait for the store until ``let_go``."""
    stats = states.stats
    for stage, seconds in stats.stage_seconds.items():
        telemetry.add_seconds(stage, seconds)
    telemetry.add(
        {
            "padding_tokens": stats.padding_tokens,
            "flops": stats.flops,
            "recomputed": stats.recomputed,
            "out_of_memory": stats.out_of_memory,
        }
    )
    telemetry.adjust("backlog_bytes", states.size_bytes)


def let_go(telemetry: Telemetry, states: RangeStates) -> None:
    """The range was stored or dropped: its buffer is free."""
    telemetry.adjust("backlog_bytes", -states.size_bytes)
    states.release()


def note_record(telemetry: Telemetry, record: RangeRecord) -> None:
    """A range was committed by this worker."""
    telemetry.add(
        {
            "samples": record.samples,
            "tokens": record.tokens,
            "written_bytes": record.size_bytes,
            "quarantined": len(record.quarantined),
        }
    )
    telemetry.set("last_range_s", time.time())
    telemetry.outcome("stored")


def note_canary(telemetry: Telemetry, canary: CanaryRecord) -> None:
    """A sample was computed twice; NaN, and bytes that are not those computed, are beyond every bound."""
    found = [error / canary.bounds[layer] for layer, error in canary.errors.items()]
    found += [] if canary.stored_as_computed else [math.inf]
    worst = max((ratio if math.isfinite(ratio) else math.inf for ratio in found), default=0.0)
    telemetry.set("canary_error", worst)
    telemetry.count(f"canary:{'passed' if canary.passed else 'failed'}")


def note_free_space(telemetry: Telemetry, store: Store | None) -> None:
    """Look how much room a store has; cheap, and never raises."""
    try:
        telemetry.set("store_free_bytes", store.free_bytes() if store else None)
    except (SwatheError, OSError):
        telemetry.set("store_free_bytes", None)
