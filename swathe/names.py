"""The one place where keys of the store and names in Redis are spelled.

Keys are relative to a run's root, with ``/`` between parts, in every kind of store.
"""

import re
import secrets
from typing import Final

from swathe.spec import RangeId, RunId

RUN: Final = "run.json"
PROVENANCE: Final = "provenance.json"
REJECTED: Final = "rejected.jsonl"
TOKENS: Final = "tokens/"
TOKEN_ROWS: Final = "tokens/rows.parquet"
STATES: Final = "states/"
CANARIES: Final = "canaries/"
FINAL_NORM: Final = "final_norm.safetensors"
MANIFEST: Final = "manifest.json"
ROWS: Final = "rows.parquet"
MOVED: Final = "moved.json"
MOVING: Final = "moving.json"

STATES_TENSOR: Final = "hidden_states"
"""In a shard: [T, K, H] of the stored dtype."""
SCALES_TENSOR: Final = "hidden_states_scales"
"""In a shard of a float8 run: float32 [T, K]; code times scale is the value."""
IMPORTER: Final = "import"
"""The worker that stands in the records of imported ranges."""

JOB_FUNCTION: Final = "swathe.extract_range"
"""The only function a worker executes. A name for the allow list, never imported."""

_RECORD = re.compile(r"states/(\d{6,})\.json")
_FAILED = re.compile(r"states/(\d{6,})\.failed\.json")
_SHARD = re.compile(r"states/(\d{6,})-([0-9a-f]{12})\.safetensors")
_IN_FOLDERS = re.compile(
    rf"{_RECORD.pattern}|{_FAILED.pattern}|{_SHARD.pattern}|canaries/\d{{6,}}\.json"
    r"|tokens/\d{5,}\.safetensors|tokens/rows\.parquet"
)


def token_file(index: int) -> str:
    """Key of the ``index``-th file of planned tokens."""
    return f"{TOKENS}{index:05d}.safetensors"


def new_attempt() -> str:
    """A fresh attempt id: 12 hex digits, so that two attempts at one range never share a shard's name."""
    return secrets.token_hex(6)


def shard(range_id: RangeId, attempt: str) -> str:
    """Key of the shard that one attempt at a range writes."""
    return f"{STATES}{range_id:06d}-{attempt}.safetensors"


def record(range_id: RangeId) -> str:
    """Key of the record whose existence commits a range."""
    return f"{STATES}{range_id:06d}.json"


def failed(range_id: RangeId) -> str:
    """Key of the durable marker of a range that was set aside."""
    return f"{STATES}{range_id:06d}.failed.json"


def canary(range_id: RangeId) -> str:
    """Key of the result of a canary taken on a range."""
    return f"{CANARIES}{range_id:06d}.json"


def record_range(key: str) -> RangeId | None:
    """The range whose record this key is, or None."""
    match = _RECORD.fullmatch(key)
    return RangeId(int(match[1])) if match else None


def failed_range(key: str) -> RangeId | None:
    """The range whose failure marker this key is, or None."""
    match = _FAILED.fullmatch(key)
    return RangeId(int(match[1])) if match else None


def shard_range(key: str) -> RangeId | None:
    """The range whose shard (of any attempt) this key is, or None."""
    match = _SHARD.fullmatch(key)
    return RangeId(int(match[1])) if match else None


def is_of_run(key: str) -> bool:
    """Whether a run writes under this key of its folders; whatever else lies there is somebody's, and stays."""
    return _IN_FOLDERS.fullmatch(key) is not None


def queue(model_key: str) -> str:
    """Name of the rq queue of one model."""
    return f"swathe-{model_key}"


def job(run_id: RunId, range_id: RangeId) -> str:
    """Rq job id of a range; the same range always has the same id, so it cannot be queued twice."""
    return f"{run_id}-{range_id:06d}"


def job_range(job_id: str) -> tuple[RunId, RangeId] | None:
    """The run and range of a job id, or None when it is not one of ours."""
    run_id, _, digits = job_id.rpartition("-")
    if not run_id or not digits.isdecimal():
        return None
    return RunId(run_id), RangeId(int(digits))


def runs_key() -> str:
    """Redis hash of the runs the fleet knows: run_id -> run URL."""
    return "swathe:runs"


def worker_key(worker: str) -> str:
    """Redis key (with a time to live) of what a live worker says about itself, as JSON."""
    return f"swathe:worker:{worker}"


def node_key(node: str) -> str:
    """Redis key (with a time to live) of the metrics that a node hands to the exporter."""
    return f"swathe:node:{node}"


def leases_key(queue_name: str) -> str:
    """Redis sorted set of a queue's leases: ``job:execution`` scored by its expiry, in Redis' time."""
    return f"swathe:leases:{queue_name}"


def parked_key(queue_name: str) -> str:
    """Redis list of job ids that belong to paused runs, in their old order."""
    return f"swathe:parked:{queue_name}"


def strays_key(queue_name: str) -> str:
    """Redis sorted set of ids seen in rq's intermediate list, scored by when they were first seen."""
    return f"swathe:strays:{queue_name}"


def clock_key() -> str:
    """Redis hash: when a worker was last here (``seen``) and until when nothing is reaped (``hold``)."""
    return "swathe:clock"


def requeued_key() -> str:
    """Redis hash of counters: how many ranges went back to a queue, by reason."""
    return "swathe:requeued"


def cancelled_key() -> str:
    """Redis set of the run ids that were cancelled and not submitted since."""
    return "swathe:cancelled"


def paused_key() -> str:
    """Redis set of the run ids that are paused."""
    return "swathe:paused"


def queues_key() -> str:
    """Redis sorted set of queue names, scored by when they last became non-empty."""
    return "swathe:queues"


def rebuild_key(run_id: RunId) -> str:
    """Redis key (with a time to live) held by the one worker that compares a run's queue with its store."""
    return f"swathe:rebuild:{run_id}"
