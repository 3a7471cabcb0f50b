"""What may happen to a fleet. Each scenario starts workers, hurts them, and leaves the end to ``finish``."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from chaos.harness import ChaosFleet

from swathe.queue import connect


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``bound_s`` from the last fault to the end of the run, at the lease given, beside the work itself."""

    run: Callable[[ChaosFleet], None]
    ranges: int = 60
    persistent: bool = True
    leases: float = 3.0
    """Bound in leases (detection, hold-off, a second try) ..."""
    extra_s: float = 30.0
    """... and in seconds (the work, process starts on a busy machine)."""
    long: bool = False
    """Only in `make chaos`."""


def pause(fleet: ChaosFleet, low_s: float, high_s: float) -> None:
    end_s = time.monotonic() + fleet.random.uniform(low_s, high_s)
    fleet.wait(lambda: time.monotonic() > end_s, 120)


def kill_workers(fleet: ChaosFleet) -> None:
    fleet.start()
    fleet.wait(fleet.stored(5), 60)
    for _ in range(3):
        pause(fleet, 0.0, 0.5)
        fleet.kill(fleet.random.choice(list(fleet.workers)))


def kill_supervised(fleet: ChaosFleet) -> None:
    fleet.bystanders_told = True
    kill_workers(fleet)


def kill_all_workers(fleet: ChaosFleet) -> None:
    fleet.start()
    fleet.wait(fleet.stored(5), 60)
    for name in list(fleet.workers):
        fleet.kill(name)


def stop_and_continue(fleet: ChaosFleet) -> None:
    fleet.start()
    fleet.wait(fleet.stored(5), 60)
    victim = fleet.workers[fleet.random.choice(list(fleet.workers))]
    os.killpg(victim.pid, signal.SIGSTOP)
    fleet.killed.append((victim.pid, time.time()))
    pause(fleet, 1.5 * fleet.lease_s, 2 * fleet.lease_s)
    os.killpg(victim.pid, signal.SIGCONT)


def redis_outage(outage_s: float) -> Callable[[ChaosFleet], None]:
    def run(fleet: ChaosFleet) -> None:
        fleet.start()
        fleet.wait(fleet.stored(5), 60)
        pause(fleet, 0.0, 0.5)
        pids = {worker.pid for worker in fleet.workers.values()}
        fleet.server.stop(kill=True)
        time.sleep(outage_s)
        fleet.server.start()
        pause(fleet, 0.5, 0.5)
        assert {worker.pid for worker in fleet.workers.values()} == pids, "an outage ended a worker"

    return run


def flushall(fleet: ChaosFleet) -> None:
    fleet.start()
    fleet.wait(fleet.stored(5), 60)
    pause(fleet, 0.0, 0.5)
    client = connect(fleet.server.url)
    client.flushall()
    client.close()


def network(mode: str) -> Callable[[ChaosFleet], None]:
    def run(fleet: ChaosFleet) -> None:
        fleet.start(2)
        name, proxy = fleet.add_behind_proxy()
        fleet.wait(lambda: fleet.stored(5)() and fleet.started(name), 60)
        pause(fleet, 0.0, 0.5)
        proxy.set_mode(mode)
        fleet.killed.append((fleet.workers[name].pid, time.time()))
        pause(fleet, 1.5 * fleet.lease_s, 2 * fleet.lease_s)
        proxy.set_mode("pass")

    return run


_PRODUCER = (
    "import sys\nfrom pathlib import Path\nimport fleet\nfrom swathe.queue import *\n"
    "client = connect(sys.argv[1])\n"
    "for i in range(int(sys.argv[2])):\n"
    "    RangeQueue(client, fleet.QUEUE).enqueue_if_absent([fleet.job(i)])\n"
)


def _producer(fleet: ChaosFleet) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(["tests", "."])
    return subprocess.Popen(
        [sys.executable, "-c", _PRODUCER, fleet.server.url, str(fleet.total)],
        env={**os.environ, "PYTHONPATH": path},
    )


def producer_killed(fleet: ChaosFleet) -> None:
    for _ in range(2):
        fleet.add()
    producer = _producer(fleet)
    time.sleep(fleet.random.uniform(0.3, 0.8))
    producer.kill()
    producer.wait()
    fleet.submit()


def two_producers(fleet: ChaosFleet) -> None:
    producers = [_producer(fleet), _producer(fleet)]
    for _ in range(2):
        fleet.add()
    for producer in producers:
        assert producer.wait(60) == 0


def clock_off(fleet: ChaosFleet) -> None:
    fleet.submit()
    fleet.add()
    fleet.add(clock_skew_s=60)
    fleet.add(clock_skew_s=-60)
    fleet.wait(fleet.stored(fleet.total), 60)
    assert fleet.recomputed() == 0


def disk_full(fleet: ChaosFleet) -> None:
    fleet.start()
    fleet.wait(fleet.stored(5), 60)
    (fleet.folder / "full").touch()
    pause(fleet, 10, 10)
    (fleet.folder / "full").unlink()
    assert fleet.work.failed() == {}


def poison_process(fleet: ChaosFleet) -> None:
    fleet.faults = {f"compute:{fleet.random.randrange(fleet.total)}": "die"}
    fleet.start()
    fleet.wait(
        lambda: len(fleet.work.records()) == fleet.total - 1 and fleet.work.failed(),
        60 + 9 * fleet.lease_s,
    )


def poison_sample(fleet: ChaosFleet) -> None:
    fleet.faults = {f"compute:{fleet.random.randrange(fleet.total)}": "value"}
    fleet.start()
    fleet.wait(lambda: len(fleet.work.records()) == fleet.total - 1 and fleet.work.failed(), 60)


def mixture(seconds: float, compute_s: float = 0.08) -> Callable[[ChaosFleet], None]:
    """Faults of all kinds, one after another, on one run."""

    def run(fleet: ChaosFleet) -> None:
        fleet.times["compute_s"] = compute_s
        fleet.start()
        # A run that no worker has seen when Redis is flushed is known to nobody but its producer.
        fleet.wait(fleet.stored(5), 60)
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(fleet.work.records()) < fleet.total - 10:
            pause(fleet, 0.5, 2.0)
            fault = fleet.random.choice(["kill", "stop", "outage", "flush", "full"])
            if fault == "kill":
                fleet.kill(fleet.random.choice(list(fleet.workers)))
            elif fault == "stop":
                victim = fleet.workers[fleet.random.choice(list(fleet.workers))]
                os.killpg(victim.pid, signal.SIGSTOP)
                pause(fleet, 0.0, 2 * fleet.lease_s)
                os.killpg(victim.pid, signal.SIGCONT)
            elif fault == "outage":
                fleet.server.stop(kill=fleet.random.random() < 0.5)
                time.sleep(fleet.random.uniform(0, 2 * fleet.lease_s))
                fleet.server.start()
            elif fault == "flush":
                client = connect(fleet.server.url)
                client.flushall()
                client.close()
            else:
                (fleet.folder / "full").touch()
                pause(fleet, 0.5, 3.0)
                (fleet.folder / "full").unlink()

    return run


SCENARIOS = {
    "worker killed, leases run out": Scenario(run=kill_workers),
    "worker killed, supervisor tells": Scenario(run=kill_supervised, leases=1.0),
    "all workers killed at once": Scenario(run=kill_all_workers),
    "worker stopped past its lease": Scenario(run=stop_and_continue, ranges=900),
    "redis killed for 2 s": Scenario(run=redis_outage(2)),
    "redis killed for 20 s": Scenario(run=redis_outage(20), long=True),
    "redis killed for 60 s": Scenario(run=redis_outage(60), long=True),
    "redis killed for 2 s, no persistence": Scenario(run=redis_outage(2), persistent=False),
    "redis killed for 20 s, no persistence": Scenario(run=redis_outage(20), persistent=False, long=True),
    "flushall": Scenario(run=flushall),
    "network cut": Scenario(run=network("cut"), ranges=900),
    "network half open": Scenario(run=network("stall"), ranges=900),
    "producer killed while enqueueing": Scenario(run=producer_killed),
    "two producers at once": Scenario(run=two_producers),
    "clocks 60 s off": Scenario(run=clock_off),
    "disk full for 10 s": Scenario(run=disk_full, extra_s=45),
    "range kills its process": Scenario(run=poison_process),
    "range always raises": Scenario(run=poison_sample),
    "mixture": Scenario(run=mixture(20), ranges=400, extra_s=60),
    "mixture for 20 minutes": Scenario(
        run=mixture(1200, compute_s=0.4), ranges=6000, extra_s=1200, long=True
    ),
}  # fmt: skip
