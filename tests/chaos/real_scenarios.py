"""What may happen to real workers; the same faults as ``scenarios``, with true states at the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from chaos.real import BAD_SAMPLES, RealFleet

from swathe import names
from swathe.queue import connect
from swathe.store.local import LocalStore
from tests.support.killed_move import killed_move


@dataclass(frozen=True, kw_only=True)
class RealScenario:
    """``bound_s`` from the last fault to the end of the run."""

    run: Callable[[RealFleet], None]
    persistent: bool = True
    bad: dict[int, int] = field(default_factory=dict)
    bound_s: float = 240.0


def kill_workers(fleet: RealFleet) -> None:
    fleet.start()
    for count in (3, 8, 13):
        fleet.wait(fleet.stored(count), 120)
        fleet.pause(0.0, 0.4)
        fleet.signal(fleet.any_worker(), signal.SIGKILL)


def stop_and_continue(fleet: RealFleet) -> None:
    fleet.start()
    fleet.wait(fleet.stored(3), 120)
    victim = fleet.any_worker()
    fleet.signal(victim, signal.SIGSTOP)
    fleet.pause(1.5 * fleet.lease_s, 2 * fleet.lease_s)
    fleet.signal(victim, signal.SIGCONT)


def redis_killed(outage_s: float) -> Callable[[RealFleet], None]:
    def run(fleet: RealFleet) -> None:
        fleet.start()
        fleet.wait(fleet.stored(3), 120)
        fleet.pause(0.0, 0.4)
        pids = dict(fleet.workers)
        fleet.server.stop(kill=True)
        time.sleep(outage_s)
        fleet.server.start()
        fleet.pause(0.5, 0.5)
        assert fleet.workers == pids, "an outage ended a worker"

    return run


def flushall(fleet: RealFleet) -> None:
    fleet.start()
    fleet.wait(fleet.stored(3), 120)
    fleet.pause(0.0, 0.4)
    client = connect(fleet.server.url)
    client.flushall()
    client.close()


def disk_full(fleet: RealFleet) -> None:
    fleet.start()
    fleet.wait(fleet.stored(3), 120)
    fleet.full.touch()
    fleet.pause(4, 5)
    fleet.full.unlink()


def only_work(fleet: RealFleet) -> None:
    fleet.start()


def producer_killed(fleet: RealFleet) -> None:
    for _ in range(2):
        fleet.add()
    command = [sys.executable, "-m", "producer.cli", "submit", fleet.store.url]
    environment = os.environ | {
        "REDIS_URL": fleet.server.url,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    producer = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    time.sleep(fleet.random.uniform(0.5, 3.0))
    producer.kill()
    producer.wait()
    fleet.submit()


def moved(fleet: RealFleet) -> None:
    """The run leaves its folder under the workers' hands; its mover is killed again and again, and a worker too."""
    source, dest = fleet.store, fleet.folder / "elsewhere"
    fleet.start()
    fleet.wait(fleet.stored(3), 120)
    at = 5
    while killed_move(source.url, str(dest), at=at):
        at += fleet.random.randrange(10, 30)
        fleet.pause(0.0, 0.3)
        if fleet.random.random() < 0.2:
            fleet.signal(fleet.any_worker(), signal.SIGKILL)
    fleet.store = LocalStore(dest)
    left = {item.key for item in source.list("")}
    assert left == {names.MOVED}, "the source is empty"


REAL_SCENARIOS = {
    "real: calm": RealScenario(run=only_work),
    "real: worker killed": RealScenario(run=kill_workers),
    "real: worker stopped past its lease": RealScenario(run=stop_and_continue),
    "real: redis killed for 2 s": RealScenario(run=redis_killed(2)),
    "real: redis killed for 2 s, no persistence": RealScenario(run=redis_killed(2), persistent=False),
    "real: flushall": RealScenario(run=flushall),
    "real: disk full for 5 s": RealScenario(run=disk_full),
    "real: run moved, mover killed": RealScenario(run=moved),
    "real: producer killed while enqueueing": RealScenario(run=producer_killed),
    "real: a sample raises": RealScenario(run=only_work, bad={50: BAD_SAMPLES["raises"]}),
    "real: a sample segfaults its process": RealScenario(
        run=only_work, bad={50: BAD_SAMPLES["kills"], 120: BAD_SAMPLES["kills in company"]}
    ),
}  # fmt: skip
