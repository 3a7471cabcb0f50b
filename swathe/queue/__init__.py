"""The fleet's queue on Redis, through rq 3.0's own keys: jobs, leases, and what may stand in a job.

``rq info`` tells the truth about it, but no swathe process reads or cleans up through rq: see ``scripts.py``.
"""

from swathe.queue.connection import connect, describe, policy_warnings, redis_errors
from swathe.queue.leases import (
    Back,
    Claim,
    Failed,
    Lease,
    Leases,
    Reaped,
    Stage,
    acknowledged_by,
    new_execution,
    release_dead_worker,
)
from swathe.queue.nodes import hand_over_metrics, new_author, relayed_metrics, relayed_nodes
from swathe.queue.payload import absolute_run_url, allowed_run_url, encode, iso_now, parse
from swathe.queue.ranges import (
    Enqueued,
    KnownRanges,
    QueueCounts,
    RangeQueue,
    cancelled_runs,
    known_runs,
    live_workers,
    paused_runs,
    queue_names,
    requeued_counts,
)

__all__ = [
    "Back",
    "Claim",
    "Enqueued",
    "Failed",
    "KnownRanges",
    "Lease",
    "Leases",
    "QueueCounts",
    "RangeQueue",
    "Reaped",
    "Stage",
    "absolute_run_url",
    "acknowledged_by",
    "allowed_run_url",
    "cancelled_runs",
    "connect",
    "describe",
    "encode",
    "hand_over_metrics",
    "iso_now",
    "known_runs",
    "live_workers",
    "new_author",
    "new_execution",
    "parse",
    "paused_runs",
    "policy_warnings",
    "queue_names",
    "redis_errors",
    "relayed_metrics",
    "relayed_nodes",
    "release_dead_worker",
    "requeued_counts",
]
