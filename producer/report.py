"""A plan in words and a small picture, for a person who is about to spend GPU hours on it."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final

from producer.display import size_text
from producer.plan import PlanReport

_BAR: Final = 40
_REASONS_SHOWN: Final = 8


def plan_lines(report: PlanReport) -> Iterator[str]:
    """What the plan found and what the run will cost."""
    spec, totals = report.spec, report.spec.totals
    yield f"{'plan reused' if report.reused else 'planned'}: run {spec.run_id}, fingerprint {spec.fingerprint[:12]}"
    if spec.model.random_weights:
        yield "  RANDOM WEIGHTS: for rehearsals and benchmarks; never train on these states"
    slots = ", ".join(str(slot.layer) for slot in spec.layers)
    yield f"  model    {spec.model.source} ({spec.model.model_type}, {spec.model.num_layers} blocks)"
    computed = (
        "" if spec.stored_dtype == spec.compute_dtype else f", computed in {spec.compute_dtype}"
    )
    yield f"  layers   {slots}, stored as {spec.stored_dtype}{computed}"
    yield f"  rows     {totals.rows:,}: {totals.samples:,} samples, {totals.rejected:,} rejected"
    mean = totals.tokens / max(totals.samples, 1)
    yield f"  tokens   {totals.tokens:,}, {mean:.0f} a sample, longest {totals.longest:,}"
    batching = spec.batching
    order = (
        "in your order"
        if batching.order == "user"
        else f"by length in windows of {batching.window_rows:,} rows"
    )
    yield f"  ranges   {totals.ranges:,} of up to {batching.range_tokens:,} tokens, {batching.form}, {order}"
    yield f"  padding  {report.padding_ratio:.1%} of the tokens computed and thrown away"
    free = "" if report.free_bytes is None else f", {size_text(report.free_bytes)} free"
    yield f"  bytes    {size_text(report.bytes_to_come)} to come{free}"
    if not report.fits:
        yield "  WARNING  the states do not fit into the space that is free now"
    for reason, rows in list(report.rejected.items())[:_REASONS_SHOWN]:
        yield f"  rejected {rows:>8,}  {reason}"
    yield from _histogram(report)
    for warning in report.warnings:
        yield f"  warning  {warning}"


def _histogram(report: PlanReport) -> Iterator[str]:
    most = max((samples for _, _, samples in report.length_histogram), default=0)
    for shortest, longest, samples in report.length_histogram:
        bar = "█" * math.ceil(_BAR * samples / most) if samples else ""
        yield f"  {shortest:>6,} to {longest:>6,} tokens {samples:>9,} {bar}"


def plan_json(report: PlanReport) -> dict[str, Any]:
    """The same as plain values."""
    spec = report.spec
    return {
        "run_id": spec.run_id,
        "fingerprint": spec.fingerprint,
        "reused": report.reused,
        "totals": dataclasses.asdict(spec.totals),
        "padding_ratio": report.padding_ratio,
        "state_bytes": report.state_bytes,
        "free_bytes": report.free_bytes,
        "rejected": report.rejected,
        "length_histogram": [list(entry) for entry in report.length_histogram],
        "warnings": list(report.warnings),
        "seconds": report.seconds,
    }
