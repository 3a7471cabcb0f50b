"""GPUs by UUID: reordered, lost, cut into instances, with a driver that dies and comes back."""

# ruff: noqa: N802 - the fake has NVML's own names

import sys
import threading
from types import SimpleNamespace

import pynvml
import pytest
from fleet import wait_for

from worker.telemetry import nvml
from worker.telemetry.nvml import GpuMonitor, GpuReader


class Error(Exception):
    pass


class FakeNvml:
    """Two cards whose order changes, and a MIG instance that has memory only."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self):
        for name in dir(pynvml):
            if name.startswith("nvmlClocksThrottleReason"):
                setattr(self, name, getattr(pynvml, name))
        self.order = ["GPU-aa", "GPU-bb", "MIG-cc"]
        self.utilization = {"GPU-aa": 11, "GPU-bb": 88}
        self.events = []
        self.dead = False
        self.hang = None
        self.inits = self.shutdowns = 0

    def nvmlInit(self):
        self._check()
        self.inits += 1

    def nvmlShutdown(self):
        self.shutdowns += 1

    def _check(self):
        if self.hang is not None:
            self.hang.wait(20)
        if self.dead:
            raise Error

    def nvmlDeviceGetHandleByIndex(self, _index):
        raise AssertionError("an index says nothing about which card it is")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self._check()
        if uuid not in self.order:
            raise Error
        return uuid

    def nvmlDeviceGetUUID(self, handle):
        return handle.encode()

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._check()
        return SimpleNamespace(gpu=self._of_card(handle, self.utilization[handle]))

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._check()
        return SimpleNamespace(used=(1 + self.order.index(handle)) << 30, total=96 << 30)

    def _of_card(self, handle, value):
        self._check()
        if handle.startswith("MIG"):
            raise Error
        return value

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._of_card(handle, 432_100)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._of_card(handle, 600_000)

    def nvmlDeviceGetTemperature(self, handle, _sensor):
        return self._of_card(handle, 61)

    def nvmlDeviceGetClockInfo(self, handle, _clock):
        return self._of_card(handle, 1980)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self._of_card(handle, self.nvmlClocksThrottleReasonSwPowerCap)

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, _counter):
        return self._of_card(handle, (7, 1)[kind])

    def nvmlEventSetCreate(self):
        return object()

    def nvmlEventSetFree(self, _events):
        pass

    def nvmlDeviceRegisterEvents(self, handle, _kind, _events):
        self._of_card(handle, None)

    def nvmlEventSetWait_v2(self, _events, _timeout):
        self._check()
        if not self.events:
            raise Error
        return SimpleNamespace(device=self.events.pop(0), eventData=79)


@pytest.fixture
def driver(monkeypatch):
    fake = FakeNvml()
    fake.utilization["MIG-cc"] = None
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_each_value_belongs_to_its_uuid_whatever_the_order(driver):
    reader = GpuReader(["GPU-bb", "GPU-aa", "cpu"])
    first = reader.read()
    assert {uuid: gpu.utilization for uuid, gpu in first.items()} == {
        "GPU-bb": 0.88,
        "GPU-aa": 0.11,
    }
    driver.order.reverse()
    again = reader.read()
    assert {uuid: gpu.utilization for uuid, gpu in again.items()} == {
        "GPU-bb": 0.88,
        "GPU-aa": 0.11,
    }


@pytest.mark.usefixtures("driver")
def test_values_are_in_base_units():
    gpu = GpuReader(["GPU-aa"]).read()["GPU-aa"]
    assert gpu.memory_used_bytes == 1 << 30
    assert gpu.power_w == pytest.approx(432.1)
    assert gpu.power_limit_w == pytest.approx(600)
    assert gpu.temperature_c == 61
    assert gpu.sm_clock_hz == pytest.approx(1.98e9)
    assert gpu.throttled == {
        "power_cap": True,
        "power_brake": False,
        "thermal_software": False,
        "thermal_hardware": False,
        "slowdown": False,
    }
    assert gpu.ecc_errors == {"corrected": 7, "uncorrected": 1}
    assert gpu.xid_errors == 0


@pytest.mark.usefixtures("driver")
def test_an_instance_has_what_it_has_and_nothing_is_zero():
    reader = GpuReader(["MIG-cc"])
    gpu = reader.read()["MIG-cc"]
    assert gpu.memory_used_bytes == 3 << 30
    assert (gpu.utilization, gpu.power_w, gpu.throttled, gpu.xid_errors) == (None,) * 4
    assert gpu.ecc_errors == {}
    assert reader.errors == 0


def test_critical_errors_are_counted_for_their_card(driver):
    reader = GpuReader(["GPU-aa", "GPU-bb"])
    reader.read()
    driver.events += ["GPU-bb", "GPU-bb"]
    found = reader.read()
    assert (found["GPU-aa"].xid_errors, found["GPU-bb"].xid_errors) == (0, 2)


@pytest.mark.usefixtures("driver")
def test_a_lost_card_is_absent_and_its_neighbour_stays():
    reader = GpuReader(["GPU-aa", "GPU-zz"])
    assert list(reader.read()) == ["GPU-aa"]
    assert reader.errors == 1


def test_a_driver_that_dies_gives_nothing_and_is_asked_again(driver, monkeypatch):
    monkeypatch.setattr(nvml, "_AGAIN_S", 0.05)
    reader = GpuReader(["GPU-aa"])
    assert reader.read()
    driver.dead = True
    assert reader.read() == {}
    assert reader.errors == 2
    reader.watch(["GPU-bb"])
    assert reader.read() == {}
    driver.dead = False
    wait_for(lambda: reader.read().get("GPU-bb"))
    assert driver.inits - driver.shutdowns == 1


def test_a_driver_that_hangs_gives_nothing(driver):
    monitor = GpuMonitor(GpuReader([]), every_s=0.02, stale_s=0.3)
    monitor.watch(["GPU-aa"])
    monitor.start()
    wait_for(monitor.latest)
    driver.hang = threading.Event()
    wait_for(lambda: monitor.latest() == {})
    driver.hang.set()
    wait_for(monitor.latest)
    monitor.close()


def test_without_the_package_there_is_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    reader = GpuReader(["GPU-aa"])
    assert reader.read() == {}
    assert reader.errors == 0
