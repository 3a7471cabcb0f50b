"""Settings that would make live workers count as dead are refused."""

import pytest

from swathe.errors import ConfigError
from swathe.settings import Settings
from worker.loop.contract import WorkerOptions


def test_a_lease_takes_two_heartbeats():
    assert WorkerOptions.from_settings(Settings()).lease_s == 15
    assert WorkerOptions.from_settings(Settings(lease_s=1, heartbeat_s=0.5)).lease_s == 1
    with pytest.raises(ConfigError, match="SWATHE_LEASE_S=5 is too short"):
        WorkerOptions.from_settings(Settings(lease_s=5))
