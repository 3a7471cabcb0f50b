"""Canaries: what a failed one says about the ranges around it.

A device that computed one sample wrong is not to be trusted since its last good canary, nor until its next good one.
Everything it recorded in between is suspect: not sealed, counted as damaged, done again by ``verify --repair``.
"""

from collections.abc import Iterable, Mapping

from swathe import names
from swathe.spec import CanaryRecord, RangeId, RangeRecord, RunSpec, from_json
from swathe.store import Store


def read_canaries(
    store: Store, spec: RunSpec, known: Mapping[str, CanaryRecord]
) -> dict[str, CanaryRecord]:
    """Every canary of the run by key; those that are ``known`` are not read again.

    Raises FormatError for a damaged one: it might be the one that failed.
    """
    found = {}
    for item in store.list(names.CANARIES):
        canary = known.get(item.key) or from_json(
            CanaryRecord, store.read(item.key), origin=f"{store.url}/{item.key}"
        )
        if canary.run_id == spec.run_id:
            found[item.key] = canary
    return found


def suspects(
    records: Iterable[RangeRecord], canaries: Iterable[CanaryRecord]
) -> dict[RangeId, CanaryRecord]:
    """The ranges that a failed canary casts doubt on, each with that canary.

    Times are compared as text: both are UTC to the second, written by the same host. Ties are suspect.
    """
    by_device: dict[str, list[CanaryRecord]] = {}
    for canary in canaries:
        by_device.setdefault(canary.device, []).append(canary)
    failed = [
        (canary, *_doubtful_time(canary, by_device[canary.device]))
        for device_canaries in by_device.values()
        for canary in device_canaries
        if not canary.passed
    ]
    if not failed:
        return {}
    return {
        record.range_id: canary
        for record in records
        for canary, first, last in failed
        if record.device == canary.device and first <= record.finished_at <= last
    }


def _doubtful_time(failed: CanaryRecord, of_device: list[CanaryRecord]) -> tuple[str, str]:
    good = [canary.taken_at for canary in of_device if canary.passed]
    before = [at for at in good if at < failed.taken_at]
    after = [at for at in good if at > failed.taken_at]
    return max(before, default=""), min(after, default="9999")
