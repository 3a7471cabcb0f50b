"""The fleet's story in small, on the CPU: an instance joins, is killed, and the accounts are whole."""

import pytest

from bench import fleet


@pytest.mark.timeout(600)
def test_half_of_the_fleet_is_killed_and_every_sample_is_stored_once(tmp_path):
    out = tmp_path / "fleet.json"
    small = ["--samples", "80", "--longest", "48", "--range-tokens", "128", "--seconds", "2"]
    where = ["--device", "cpu", "--model", "tiny", "--work", str(tmp_path), "--out", str(out)]
    assert (
        fleet.main(["--gpus", "2", "--lease", "4", "--scaling-samples", "80000", *small, *where])
        == 0
    )
    result = fleet.FleetResult.model_validate_json(out.read_text())
    assert [(row.name, row.gpus) for row in result.rows] == [
        ("fleet", 1),
        ("fleet", 2),
        ("fleet, after the kill", 1),
    ]
    assert all(row.samples_s > 0 for row in result.rows)
    assert all(row.detail["limited_by"] for row in result.rows[:2])  # the last may end too soon
    accounting = result.accounting
    assert accounting.stored + accounting.rejected == accounting.rows == 160
    assert (accounting.rows_twice, accounting.rows_missing) == (0, 0)
    assert accounting.verify["ok"] is True
    assert accounting.verify["sealed"] is True
    assert len(accounting.ranges_by_worker) == 2
    assert sum(accounting.ranges_by_worker.values()) == accounting.ranges
    kill = result.kill
    assert kill.ranges_held > 0
    assert len(kill.seconds_to_elsewhere) + kill.stored_before_death == kill.ranges_held
    assert kill.worst_s > 0
