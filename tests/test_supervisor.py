"""One process for each device: started, pinned, restarted, given up, stopped. Children are small scripts."""

# ruff: noqa: N801, N802, N818 - the fake has NVML's own names

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fleet import wait_for

from swathe.errors import ConfigError
from worker.host import devices
from worker.host.devices import CPU, Device, choose, visible
from worker.host.supervisor import Supervisor, SupervisorOptions

GPUS = [
    Device(uuid=f"GPU-{letter}{letter}", label=f"gpu{index}") for index, letter in enumerate("abc")
]
MIG = Device(uuid="MIG-1234", label="gpu0mig0")
QUICK = {"first_pause_s": 0.05, "rescan_s": 0.1, "poll_s": 0.02, "stop_s": 5.0}


class Supervised:
    def __init__(self, script, found, *, stored=False, **options):
        self.found, self.stored = found, stored
        self.dead = []
        command = [sys.executable, "-c", script]
        self.supervisor = Supervisor(
            lambda _device, name: [*command, name],
            lambda: self.found,
            SupervisorOptions(**(QUICK | options)),
            on_death=self._bury,
        )
        self.code = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _bury(self, name):
        self.dead.append(name)
        return self.stored

    def _run(self):
        self.code = self.supervisor.run()

    def wait(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.code

    def stop(self):
        self.supervisor.stop()
        return self.wait()

    def states(self):
        return {uuid: state for uuid, (_device, state, _pid) in self.supervisor.states().items()}


def script(folder: Path, body: str) -> str:
    """A child that notes its device and start, then runs ``body``."""
    return (
        "import os, signal, sys, time\n"
        f"folder = {str(folder)!r}\n"
        "device = os.environ['CUDA_VISIBLE_DEVICES'] or 'cpu'\n"
        "with open(f'{folder}/{device}', 'a') as f: f.write(f'{os.getpid()}\\n')\n" + body
    )


FOREVER = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nopen(f'{folder}/{device}.up','w')\nwhile True: time.sleep(0.05)"


def starts(folder, device):
    path = folder / device
    return len(path.read_text().split()) if path.exists() else 0


def test_each_device_gets_one_pinned_process_and_sigterm_reaches_all(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    body = (
        "assert os.environ['CUDA_DEVICE_ORDER'] == 'PCI_BUS_ID'\n"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE'\n" + FOREVER
    )
    run = Supervised(script(tmp_path, body), [*GPUS[:2], MIG])
    wait_for(lambda: len(list(tmp_path.glob("*.up"))) == 3)
    assert run.states() == {"GPU-aa": "running", "GPU-bb": "running", "MIG-1234": "running"}
    assert run.stop() == 0
    assert [starts(tmp_path, d.uuid) for d in (*GPUS[:2], MIG)] == [1, 1, 1]


def test_the_cpu_worker_sees_no_gpu(tmp_path):
    run = Supervised(script(tmp_path, "sys.exit(0)"), [CPU], restart_finished=False)
    assert run.wait() == 0
    assert starts(tmp_path, "cpu") == 1


def test_a_dead_worker_is_started_again(tmp_path):
    body = f"if len(open(f'{{folder}}/{{device}}').read().split()) < 3: os.kill(os.getpid(), 9)\n{FOREVER}"
    run = Supervised(script(tmp_path, body), GPUS[:1])
    wait_for((tmp_path / "GPU-aa.up").exists)
    assert starts(tmp_path, "GPU-aa") == 3
    assert len(set(run.dead)) == len(run.dead) == 2
    assert all("-gpu0-" in name for name in run.dead)
    assert run.stop() == 0


def test_a_device_that_keeps_failing_is_given_up_and_the_others_go_on(tmp_path):
    body = f"if device == 'GPU-bb': sys.exit(3)\n{FOREVER}"
    run = Supervised(script(tmp_path, body), GPUS[:2], max_failures=3)
    wait_for(lambda: run.states().get("GPU-bb") == "given up")
    time.sleep(0.3)
    assert starts(tmp_path, "GPU-bb") == 3
    assert run.states()["GPU-aa"] == "running"
    assert run.stop() == 1


def test_pauses_between_restarts_grow(tmp_path):
    times = "with open(f'{folder}/times','a') as f: f.write(f'{time.monotonic()}\\n')\nsys.exit(1)"
    run = Supervised(script(tmp_path, times), GPUS[:1], max_failures=4, first_pause_s=0.2)
    assert run.wait() == 1
    at = [float(line) for line in (tmp_path / "times").read_text().split()]
    assert at[1] - at[0] >= 0.2
    assert at[3] - at[2] >= 0.8


def test_a_long_life_forgives_earlier_failures(tmp_path):
    run = Supervised(
        script(tmp_path, "time.sleep(0.2); sys.exit(1)"), GPUS[:1], max_failures=2, healthy_s=0.1
    )
    wait_for(lambda: starts(tmp_path, "GPU-aa") >= 4)
    run.stop()


def test_a_device_whose_workers_store_ranges_before_they_die_is_not_given_up(tmp_path):
    run = Supervised(script(tmp_path, "sys.exit(1)"), GPUS[:1], stored=True, max_failures=2)
    wait_for(lambda: starts(tmp_path, "GPU-aa") >= 4)
    assert run.states()["GPU-aa"] != "given up"
    run.stop()


def test_a_configuration_error_is_not_repeated(tmp_path):
    run = Supervised(script(tmp_path, "sys.exit(2)"), GPUS[:2])
    assert run.wait() == 2
    assert starts(tmp_path, "GPU-aa") == 1


def test_finished_workers_end_the_supervisor(tmp_path):
    run = Supervised(script(tmp_path, "sys.exit(0)"), GPUS, restart_finished=False)
    assert run.wait() == 0


def test_a_worker_that_cannot_be_started_costs_no_other(tmp_path):
    run = Supervised(script(tmp_path, FOREVER), GPUS[:1])
    wait_for((tmp_path / "GPU-aa.up").exists)
    started = run.supervisor._command
    run.supervisor._command = lambda device, name: (
        ["/nothing/here"] if device == GPUS[1] else started(device, name)
    )
    run.found = GPUS[:2]
    wait_for(lambda: run.states().get("GPU-bb") == "given up")
    assert run.states()["GPU-aa"] == "running"
    assert run.stop() == 1


def test_devices_that_appear_and_vanish(tmp_path):
    run = Supervised(script(tmp_path, FOREVER), GPUS[:1])
    wait_for((tmp_path / "GPU-aa.up").exists)
    run.found = GPUS[:2]
    wait_for((tmp_path / "GPU-bb.up").exists)
    run.found = GPUS[1:2]
    wait_for(lambda: run.states()["GPU-aa"] == "waiting")
    assert run.states()["GPU-bb"] == "running"
    run.found = None  # the driver does not answer: nothing changes
    time.sleep(0.3)
    assert run.states()["GPU-bb"] == "running"
    run.found = GPUS[:2]
    wait_for(lambda: starts(tmp_path, "GPU-aa") == 2)
    assert run.stop() == 0


def test_the_worker_of_a_vanished_device_is_killed_when_it_does_not_stop(tmp_path):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'{folder}/{device}.up','w')\ntime.sleep(60)"
    run = Supervised(script(tmp_path, body), GPUS[:2], stop_s=0.5)
    wait_for(lambda: len(list(tmp_path.glob("*.up"))) == 2)
    run.found = GPUS[1:2]
    wait_for(lambda: run.states()["GPU-aa"] == "waiting")
    wait_for(lambda: len(run.dead) == 1)
    assert run.states()["GPU-bb"] == "running"
    run.stop()


def test_a_worker_that_does_not_stop_is_killed_at_the_bound(tmp_path):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen(f'{folder}/{device}.up','w')\ntime.sleep(60)"
    run = Supervised(script(tmp_path, body), GPUS[:1], stop_s=0.5)
    wait_for((tmp_path / "GPU-aa.up").exists)
    assert run.stop() == 1


def test_a_second_signal_is_passed_on(tmp_path):
    body = (
        "def stop(*_):\n    if os.path.exists(f'{folder}/once'): os._exit(1)\n    open(f'{folder}/once','w')\n"
        "signal.signal(signal.SIGTERM, stop)\nopen(f'{folder}/{device}.up','w')\nwhile True: time.sleep(0.05)"
    )
    run = Supervised(script(tmp_path, body), GPUS[:1])
    wait_for((tmp_path / "GPU-aa.up").exists)
    run.supervisor.stop()
    wait_for((tmp_path / "once").exists)
    assert run.thread.is_alive()
    assert run.stop() == 1


def test_nothing_outlives_a_supervisor_that_was_killed(tmp_path):
    child = script(tmp_path, FOREVER)
    parent = (
        "import sys\nfrom worker.host.devices import CPU\nfrom worker.host.supervisor import *\n"
        f"Supervisor(lambda d, n: [sys.executable, '-c', {child!r}], lambda: [CPU],"
        " SupervisorOptions(die_with_parent=True)).run()"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stderr=subprocess.DEVNULL)
    wait_for((tmp_path / "cpu.up").exists)
    pid = int((tmp_path / "cpu").read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: _gone(pid))


def _gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["GPU-aa", "GPU-bb", "GPU-cc"]),
        ("", []),
        ("2,0", ["GPU-cc", "GPU-aa"]),
        ("GPU-bb", ["GPU-bb"]),
        ("GPU-b, 0", ["GPU-bb", "GPU-aa"]),
        ("0,-1,1", ["GPU-aa"]),
        ("7", []),
    ],
)
def test_cuda_visible_devices_keeps_its_meaning(setting, expected):
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert [device.uuid for device in visible(GPUS, environment)] == expected


def test_choice_of_devices():
    assert choose("all", GPUS) == GPUS
    assert choose("all", []) == [CPU]
    assert choose("cpu", GPUS) == [CPU]
    assert choose("1,gpu-aa,1", GPUS) == [GPUS[1], GPUS[0]]
    assert choose("MIG-12", [*GPUS, MIG]) == [MIG]
    for wanted in ("3", "GPU-zz", "GPU-", "", ","):
        with pytest.raises(ConfigError, match="--devices"):
            choose(wanted, GPUS)


@pytest.mark.parametrize(
    ("wanted", "environment", "left"),
    [
        ("0,1", {}, ["GPU-bb"]),
        ("GPU-aa,GPU-bb", {}, ["GPU-bb"]),
        ("all", {}, ["GPU-bb", "GPU-cc"]),
        ("all", {"CUDA_VISIBLE_DEVICES": "0,1"}, ["GPU-bb"]),
        ("all", {"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, ["GPU-bb"]),
        ("0", {}, []),
    ],
)
def test_a_device_that_fails_costs_no_other_and_none_takes_its_place(
    monkeypatch, wanted, environment, left
):
    present = list(GPUS)
    monkeypatch.setattr(devices, "present_devices", lambda: list(present))
    chosen = devices.Wanted(wanted, environment)
    before = chosen()
    present.remove(GPUS[0])
    assert [device.uuid for device in chosen()] == left
    present.clear()
    assert chosen() == []  # and not the CPU
    present.extend(GPUS)
    assert chosen() == before


def test_a_node_without_gpus_takes_those_that_come(monkeypatch):
    present = []
    monkeypatch.setattr(devices, "present_devices", lambda: list(present))
    chosen = devices.Wanted("all", {})
    assert chosen() == [CPU]
    present.extend(GPUS)
    assert chosen() == GPUS


class FakeNvml:
    """As much of pynvml as is asked: two cards, the second cut into MIG instances, a third lost."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    class NVMLError_GpuIsLost(NVMLError):
        pass

    def __init__(self, error=None):
        self.error = error

    def nvmlInit(self):
        if self.error:
            raise self.error

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return 3

    def nvmlDeviceGetHandleByIndex(self, index):
        if index == 2:
            raise self.NVMLError_GpuIsLost
        return index

    def nvmlDeviceGetMigMode(self, handle):
        if handle == 0:
            raise self.NVMLError
        return 1, 1

    def nvmlDeviceGetMaxMigDeviceCount(self, _handle):
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, place):
        if place == 2:
            raise self.NVMLError
        return 10 * handle + place

    def nvmlDeviceGetUUID(self, handle):
        return b"GPU-aa" if handle == 0 else f"MIG-{handle}"

    def nvmlDeviceGetName(self, _handle):
        return "card"


def test_gpus_and_mig_instances_are_listed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    found = devices.present_devices()
    assert found is not None
    assert [(device.uuid, device.label) for device in found] == [
        ("GPU-aa", "gpu0"), ("MIG-10", "gpu1mig0"), ("MIG-11", "gpu1mig1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "expected"),
    [(FakeNvml.NVMLError_LibraryNotFound(), []), (FakeNvml.NVMLError("unknown"), None)],
)
def test_no_driver_is_a_cpu_node_and_a_broken_one_is_no_news(monkeypatch, error, expected):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(error))
    assert devices.present_devices() == expected


def test_gpus_that_a_container_was_not_given_are_no_cpu_node(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeNvml.NVMLError_LibraryNotFound()))
    assert devices.out_of_reach(tmp_path / "none") is None
    for address in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / address).mkdir()
    advice = devices.out_of_reach(tmp_path)
    assert advice is not None
    assert "2 NVIDIA GPUs" in advice
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    assert devices.out_of_reach(tmp_path) is None, "they can be used"


def test_all_devices_does_not_mean_the_cpu_on_a_machine_with_gpus(tmp_path):
    (tmp_path / "0000:01:00.0").mkdir()
    code = (
        "from pathlib import Path; from worker import cli; from worker.host import devices\n"
        "inner = devices.out_of_reach\n"
        f"devices.out_of_reach = lambda: inner(Path({str(tmp_path)!r}))\n"
        "devices.present_devices = lambda: []\n"
        "cli.main()"
    )
    environment = os.environ | {"REDIS_URL": "redis://127.0.0.1:1/0", "SWATHE_STORE_ROOTS": "/x"}
    done = subprocess.run(
        [sys.executable, "-c", code, "--devices", "all"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "1 NVIDIA GPUs" in done.stderr
