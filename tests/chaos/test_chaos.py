"""The chaos suite: `SWATHE_CHAOS_SEEDS=0 pytest tests/chaos`; more seeds and real leases by tests/chaos/run.py."""

import os

import pytest
from chaos.harness import chaos_fleet
from chaos.real import real_fleet
from chaos.real_scenarios import REAL_SCENARIOS
from chaos.scenarios import SCENARIOS

SEEDS = [int(seed) for seed in os.environ.get("SWATHE_CHAOS_SEEDS", "").split(",") if seed]
LEASE_S = float(os.environ.get("SWATHE_CHAOS_LEASE_S", "2"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name", [name for name, scenario in SCENARIOS.items() if not scenario.long]
)
def test_chaos(tmp_path, name, seed):
    scenario = SCENARIOS[name]
    with chaos_fleet(
        tmp_path, seed, ranges=scenario.ranges, lease_s=LEASE_S, persistent=scenario.persistent
    ) as fleet:
        scenario.run(fleet)
        fleet.finish(scenario.leases * LEASE_S + scenario.extra_s)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "name", [name for name, scenario in REAL_SCENARIOS.items() if not scenario.long]
)
def test_real_chaos(tmp_path, name, seed):
    scenario = REAL_SCENARIOS[name]
    with real_fleet(
        tmp_path, seed, lease_s=LEASE_S, persistent=scenario.persistent, bad=scenario.bad
    ) as fleet:
        scenario.run(fleet)
        fleet.finish(scenario.bound_s)
