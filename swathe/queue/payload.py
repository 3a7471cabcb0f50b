"""A range's job as rq stores it, and the strict way back: whoever can write to Redis must not be able to run code.

The body is rq's own shape under its JSON serializer, ``[function, instance, args, kwargs]``, compressed. Reading it never
goes through rq: rq would import the function and, in its clean-ups, callbacks by name.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rq.utils import now, utcformat

from swathe import names
from swathe.errors import FormatError, OutOfBoundsJobError, RefusedJobError
from swathe.queue.scripts import ALLOWED_FIELDS
from swathe.spec import PAYLOAD_VERSION, RangeJob, from_json, to_json

MAX_BODY_BYTES: Final = 64 * 1024
"""A body larger than this, compressed or not, is none of ours."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_LOCAL = ("", "file")


def iso_now() -> str:
    """Now, as rq writes times into hashes; for display only, never compared."""
    return utcformat(now())


def absolute_run_url(run_url: str) -> str:
    """A run's URL as it can stand in a payload: local paths absolute, since a worker has another current folder."""
    scheme, rest = _split_url(run_url)
    return os.path.abspath(rest) if scheme in _LOCAL else run_url  # noqa: PTH100 - resolve() would follow links


def encode(job: RangeJob) -> bytes:
    """The ``data`` field of the job's hash."""
    payload = json.loads(to_json(job))
    payload["run_url"] = absolute_run_url(job.run_url)
    body = [names.JOB_FUNCTION, None, [], payload]
    return zlib.compress(json.dumps(body, separators=(",", ":")).encode())


def parse(job_id: str, fields: Mapping[str, bytes], roots: Sequence[str]) -> RangeJob:
    """The job behind a hash; its ``run_url`` is the resolved one.

    Raises RefusedJobError, with the reason, for anything but a plain job of ours on a run below one of ``roots``.
    """
    for field, value in fields.items():
        if value and field not in ALLOWED_FIELDS:
            raise _refused(job_id, f"the job has a {field}, swathe jobs have none")
    payload = _payload(job_id, fields.get("data", b""))
    if payload.get("version") != PAYLOAD_VERSION:
        raise _refused(
            job_id,
            f"payload version {payload.get('version')!r}, this worker knows {PAYLOAD_VERSION};"
            " run the same swathe on producer and workers",
            OutOfBoundsJobError,
        )
    try:
        job = from_json(RangeJob, json.dumps(payload), origin=f"job {job_id}")
    except FormatError as error:
        raise _refused(job_id, str(error)) from error
    if not _RUN_ID.fullmatch(job.run_id) or job.range_id < 0:
        raise _refused(job_id, "run_id or range_id is not one that swathe makes")
    if names.job(job.run_id, job.range_id) != job_id:
        raise _refused(job_id, f"its body is about range {job.range_id} of run {job.run_id}")
    return RangeJob(
        version=job.version,
        run_url=allowed_run_url(job_id, job.run_url, roots),
        run_id=job.run_id,
        fingerprint=job.fingerprint,
        range_id=job.range_id,
    )


def allowed_run_url(job_id: str, run_url: str, roots: Sequence[str]) -> str:
    """The URL, resolved (links and ``..`` followed), when it lies at or below a root. Raises RefusedJobError."""
    place = _resolve(run_url)
    if place is None:
        raise _refused(
            job_id, f"the run's URL {run_url!r} is not an absolute path or a plain prefix"
        )
    for root in roots:
        allowed = _resolve(absolute_run_url(root))
        if allowed and place[: len(allowed)] == allowed:
            return _join(place)
    listed = ", ".join(roots) or "none are set"
    raise _refused(
        job_id,
        f"the run's URL {run_url!r} is outside SWATHE_STORE_ROOTS ({listed}); add its folder there",
        OutOfBoundsJobError,
    )


def _payload(job_id: str, data: bytes) -> dict[str, Any]:
    """The keyword arguments of the one allowed call."""
    if len(data) > MAX_BODY_BYTES:
        raise _refused(job_id, f"its body has {len(data)} bytes")
    text = data
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data, MAX_BODY_BYTES)
        if unpacker.unconsumed_tail:
            raise _refused(job_id, f"its body unpacks to more than {MAX_BODY_BYTES} bytes")
    except zlib.error:
        pass  # rq stores an uncompressed body where it was asked to; JSON decides
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise _refused(job_id, "its body is not JSON (a pickled job?)") from None
    if not isinstance(body, list) or len(body) != 4:
        raise _refused(job_id, "its body is not rq's call of four parts")
    function, instance, args, kwargs = body
    if function != names.JOB_FUNCTION:
        raise _refused(
            job_id, f"it asks for the function {function!r}; only {names.JOB_FUNCTION} is executed"
        )
    if instance is not None:
        raise _refused(job_id, "it carries an instance")
    if args != [] or not isinstance(kwargs, dict):
        raise _refused(job_id, "its arguments are not a swathe payload")
    return kwargs


def _split_url(url: str) -> tuple[str, str]:
    scheme, separator, rest = url.partition("://")
    return (scheme, rest) if separator else ("", url)


def _resolve(url: str) -> tuple[str, ...] | None:
    """Scheme and path components, so that /data/runs-evil is not below /data/runs; None for what is no place."""
    scheme, rest = _split_url(url)
    if "\0" in rest:
        return None
    if scheme in _LOCAL:
        if not rest.startswith("/"):
            return None
        return ("", *Path(os.path.realpath(rest)).parts)
    parts = rest.rstrip("/").split("/")
    if any(part in ("", ".", "..") for part in parts):
        return None
    return (scheme, *parts)


def _join(place: tuple[str, ...]) -> str:
    scheme, *parts = place
    return f"{scheme}://{'/'.join(parts)}" if scheme else str(Path(*parts))


def _refused(
    job_id: str, why: str, kind: type[RefusedJobError] = RefusedJobError
) -> RefusedJobError:
    return kind(f"job {job_id} refused, nothing of it was executed: {why}")
