"""A failed canary casts doubt on what its device recorded around it, and on nothing else."""

from swathe.canaries import suspects
from swathe.spec import CanaryRecord, RangeId, RangeRecord, RunId

RUN = RunId("r")


def record(range_id: int, device: str, second: int) -> RangeRecord:
    return RangeRecord(
        run_id=RUN,
        range_id=RangeId(range_id),
        shard="s",
        size_bytes=1,
        xxh3="",
        samples=1,
        tokens=1,
        worker="w",
        device=device,
        finished_at=at(second),
    )


def canary(device: str, second: int, *, passed: bool) -> CanaryRecord:
    return CanaryRecord(
        run_id=RUN,
        range_id=RangeId(second),
        row=0,
        tokens=1,
        errors={},
        bounds={},
        passed=passed,
        worker="w",
        device=device,
        taken_at=at(second),
    )


def at(second: int) -> str:
    return f"2026-01-01T00:00:{second:02d}Z"


RECORDS = [record(second, device, second) for second in range(0, 50, 2) for device in ("A",)] + [
    record(100 + second, "B", second) for second in range(0, 50, 2)
]


def test_good_canaries_cast_no_doubt() -> None:
    assert suspects(RECORDS, [canary("A", 10, passed=True), canary("B", 20, passed=True)]) == {}


def test_doubt_reaches_from_the_last_good_canary_to_the_next_good_one_of_the_same_device() -> None:
    canaries = [
        canary("A", 9, passed=True),
        canary("A", 19, passed=True),
        canary("A", 29, passed=False),
        canary("A", 39, passed=True),
        canary("B", 25, passed=True),
    ]
    assert sorted(suspects(RECORDS, canaries)) == [20, 22, 24, 26, 28, 30, 32, 34, 36, 38]


def test_without_a_good_canary_everything_of_the_device_is_suspect() -> None:
    found = suspects(RECORDS, [canary("B", 29, passed=False)])
    assert sorted(found) == [100 + second for second in range(0, 50, 2)]
    assert {one.device for one in found.values()} == {"B"}
