"""Counters that go on over restarts, gauges that end with their process, and a number of series that never grows."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from fleet import wait_for

from swathe.settings import Settings
from tests.seeing.test_metrics import parse
from worker.host.devices import Device
from worker.host.node import Node
from worker.host.supervisor import Supervisor, SupervisorOptions
from worker.telemetry.nvml import GpuMonitor, GpuReader
from worker.telemetry.reporter import Utilization
from worker.telemetry.reports import Inbox, Outlet, Report, Totals

CHILD = """
import os, signal, sys, time
from worker.telemetry.reports import Outlet, Report, Totals
fd = int(sys.argv[sys.argv.index("--report-fd") + 1])
outlet = Outlet(fd)
folder = sys.argv[1]
for n in range(1, 51):
    totals = Totals(counts={"samples": n, "outcome:stored": n}, stages={"read": n / 10},
                    buckets={"read": [n, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]}, states={"compute": n})
    outlet.send(Report(totals=totals, gauges={"busy": 0.5}, ready=True))
open(f"{folder}/said-{os.getpid()}", "w").close()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while True:
    time.sleep(0.05)
"""


class Watched:
    """A supervisor with small children, seen through its node."""

    def __init__(self, folder, **options):
        self.folder = folder
        inbox = Inbox()
        self.node = Node(inbox, GpuMonitor(GpuReader([])))
        quick = {
            "first_pause_s": 0.02,
            "longest_pause_s": 0.05,
            "rescan_s": 0.1,
            "poll_s": 0.02,
            "stop_s": 5.0,
        }
        self.supervisor = Supervisor(
            lambda _device, _name: [sys.executable, "-c", CHILD, str(folder)],
            lambda: [Device(uuid="GPU-aa", label="gpu0", name="card")],
            SupervisorOptions(**quick, max_failures=100, **options),
            inbox=inbox,
            environment=os.environ | {"PYTHONPATH": str(Path.cwd())},
        )
        self.node.follow(self.supervisor.views, lambda: self.supervisor.ticked_s)
        self.thread = threading.Thread(target=self.supervisor.run, daemon=True)
        self.thread.start()

    def said(self):
        return {int(path.name.removeprefix("said-")) for path in self.folder.glob("said-*")}

    def values(self):
        return parse(self.node.metrics().body)

    def pid(self):
        return self.supervisor.states()["GPU-aa"][2]

    def stop(self):
        self.supervisor.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def watched(tmp_path):
    run = Watched(tmp_path)
    yield run
    run.stop()


def test_counters_go_on_over_kills_and_no_series_is_added(watched):
    wait_for(watched.said)
    series = set(watched.values())
    samples = "swathe_samples_total", "GPU-aa"
    for restarts in range(1, 21):  # 1,050 ranges in all
        pid = watched.pid()
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda restarts=restarts: len(watched.said()) > restarts)
        found = watched.values()
        assert found[samples] == 50 * (restarts + 1)
        assert found["swathe_worker_deaths_total", "GPU-aa"] == restarts
        assert found["swathe_ranges_total", "GPU-aa", "stored"] == 50 * (restarts + 1)
        assert found["swathe_stage_duration_seconds_count", "GPU-aa", "read"] == 50 * (restarts + 1)
        assert set(found) == series


def test_a_dead_workers_gauges_vanish_at_once_and_its_counters_stay(tmp_path):
    run = Watched(tmp_path)
    wait_for(run.said)
    assert run.values()["swathe_gpu_busy_ratio", "GPU-aa"] == 0.5
    stopped = run.pid()
    os.kill(stopped, signal.SIGSTOP)
    run.supervisor._start = lambda _child: None  # nothing takes its place
    os.kill(stopped, signal.SIGKILL)
    wait_for(lambda: run.pid() is None)
    found = run.values()
    assert ("swathe_gpu_busy_ratio", "GPU-aa") not in found
    assert ("swathe_worker_ready", "GPU-aa") not in found
    assert found["swathe_worker_up", "GPU-aa"] == 0
    assert found["swathe_samples_total", "GPU-aa"] == 50
    assert run.node.readyz().status == 503
    run.stop()


def test_health_and_readiness(watched):
    wait_for(watched.said)
    answer = watched.node.readyz()
    assert (answer.status, json.loads(answer.body)["devices"]) == (200, {"GPU-aa": "ready"})
    assert watched.node.healthz().status == 200
    watched.node.follow(watched.supervisor.views, lambda: time.monotonic() - 61)
    answer = watched.node.healthz()
    assert answer.status == 503
    assert json.loads(answer.body)["stuck_s"]["supervisor"] >= 61


@pytest.fixture
def inbox():
    inbox = Inbox()
    yield inbox
    inbox.close()


@pytest.fixture
def outlet(inbox):
    """The line of a worker w1 on the CPU."""
    outlet = Outlet(os.dup(inbox.open("w1", "cpu")))
    yield outlet
    outlet.close()


def test_a_loop_that_does_not_come_round_is_unhealthy_and_one_that_loads_not_ready(inbox, outlet):
    node = Node(inbox, GpuMonitor(GpuReader([])))
    outlet.send(Report(loop_age_s=1.0, ready=False))
    assert node.healthz().status == 200
    outlet.send(Report(loop_age_s=90.0, ready=False))
    assert json.loads(node.healthz().body)["stuck_s"] == {"w1": pytest.approx(90, abs=5)}
    assert node.readyz().status == 503, "no devices yet"


def test_what_was_said_long_ago_is_not_shown(monkeypatch, inbox, outlet):
    outlet.send(Report(totals=Totals(counts={"samples": 3}), gauges={"busy": 1.0}))
    inbox.drain()
    (heard,) = inbox.live()
    assert heard.report is not None
    monkeypatch.setattr("worker.telemetry.reports.STALE_S", -1.0)
    (heard,) = inbox.live()
    assert heard.report is None
    assert inbox.totals()["cpu"].counts == {"samples": 3}


def test_the_last_words_of_a_dead_process_count_and_a_full_line_does_not_block(inbox, outlet):
    inbox.started("w1")
    for samples in range(5000):  # far more than the socket holds
        outlet.send(Report(totals=Totals(counts={"samples": samples})))
    inbox.drain()
    outlet.send(Report(totals=Totals(counts={"samples": 5000})))
    outlet.close()
    inbox.ended("w1")
    assert list(inbox.live()) == []
    assert inbox.totals()["cpu"].counts == {"samples": 5000}


def test_an_address_that_is_taken_is_no_reason_to_stop():
    nodes = [Node(Inbox(), GpuMonitor(GpuReader([]))) for _ in range(4)]
    first, second, third, fourth = nodes
    address = first.serve(Settings(metrics_address="127.0.0.1:0"))
    assert address is not None
    assert second.serve(Settings(metrics_address=address)) is None
    assert third.serve(Settings(metrics_address="off")) is None
    told = Settings(metrics_address="127.0.0.1:0", metrics_advertise="gateway:1234")
    assert fourth.serve(told) == "gateway:1234"
    for node in nodes:
        node.close()


def test_utilization_is_of_the_last_minute_and_unknown_in_the_first_seconds():
    utilization = Utilization()
    utilization.add(0.0, 0.0, 0.0)
    utilization.add(3.0, 3.0, 3e12)
    assert utilization.shares(1e12) == {}
    utilization.add(10.0, 5.0, 4e12)
    assert utilization.shares(1e12) == {"busy": 0.5, "mfu": pytest.approx(0.4)}
    assert utilization.shares(None) == {"busy": 0.5}
    utilization.add(62.0, 5.0, 4e12)
    assert utilization.shares(1e12)["busy"] == pytest.approx(2 / 59)
