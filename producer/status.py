"""A run's state as a person and as a program read it: from the store alone, richer with Redis."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from producer.display import size_text
from swathe.records import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """What Redis adds. ``lost`` ranges are neither stored, set aside nor known to the queue."""

    queued: int
    started: int
    lost: tuple[int, ...]
    paused: bool
    parked: int = 0
    """Of a paused run, those that wait for its end."""
    refused: tuple[int, ...] = ()
    refusal: str = ""
    """Why the first of them was."""
    cancelled: bool = False
    workers: tuple[dict[str, Any], ...]
    warnings: tuple[str, ...] = ()


def as_json(state: RunState, view: QueueView | None) -> dict[str, Any]:
    """The state as plain values; the keys are a public interface."""
    spec, totals = state.spec, state.spec.totals
    value: dict[str, Any] = {
        "run_id": spec.run_id,
        "fingerprint": spec.fingerprint,
        "model": spec.model.source,
        "complete": state.complete,
        "sealed": state.sealed,
        "rows": totals.rows,
        "stored": state.stored_samples,
        "rejected": totals.rejected,
        "quarantined": state.quarantined_samples,
        "tokens": {"planned": totals.tokens, "stored": state.stored_tokens},
        "bytes": {"planned": spec.state_bytes, "stored": state.stored_bytes},
        "ranges": {
            "total": totals.ranges,
            "stored": len(state.records),
            "set_aside": len(state.failed),
            "open": len(state.missing),
            "invalid_records": len(state.invalid),
            "suspect": len(state.suspect),
        },
    }
    if view is not None:
        value["queue"] = {
            "queued": view.queued,
            "started": view.started,
            "lost": list(view.lost),
            "refused": list(view.refused),
            "paused": view.paused,
            "cancelled": view.cancelled,
            "workers": list(view.workers),
            "warnings": list(view.warnings),
        }
    return value


def as_lines(state: RunState, view: QueueView | None) -> Iterator[str]:
    """The state in a few lines."""
    totals = state.spec.totals
    done = "complete and sealed" if state.sealed else "complete, not sealed yet"
    yield f"run {state.spec.run_id}: {done if state.complete else 'not complete'}"
    yield (
        f"  ranges   {len(state.records)} of {totals.ranges} stored, {len(state.missing)} open, "
        f"{len(state.failed)} set aside"
    )
    yield (
        f"  samples  {state.stored_samples} stored + {totals.rejected} rejected + "
        f"{state.quarantined_samples} quarantined of {totals.rows} rows"
    )
    yield (
        f"  bytes    {size_text(state.stored_bytes)} of {size_text(state.spec.state_bytes)}, "
        f"{state.stored_tokens:,} of {totals.tokens:,} tokens"
    )
    if state.invalid:
        yield f"  damaged  {len(state.invalid)} unreadable records; run: swathe verify --repair"
    if state.suspect:
        yield f"  suspect  {len(state.suspect)} ranges of a device whose canary failed; run: swathe verify --repair"
    if view is None:
        return
    paused = f", {view.parked} paused (swathe resume)" if view.paused else ""
    yield f"  queue    {view.queued} queued, {view.started} being worked on{paused}"
    yield f"  workers  {len(view.workers)}"
    for worker in view.workers:
        if why := dict(worker.get("not_serving") or {}).get(state.spec.run_id):
            yield f"  warning  worker {worker['name']} does not serve this run: {why}"
    if view.refused:
        yield f"  refused  {len(view.refused)} ranges, run: swathe submit, when this is mended: {view.refusal}"
    if view.lost:
        gone = "were cancelled" if view.cancelled else "are in no queue"
        yield f"  lost     {len(view.lost)} ranges {gone}; run: swathe submit"
    for warning in view.warnings:
        yield f"  warning  {warning}"
