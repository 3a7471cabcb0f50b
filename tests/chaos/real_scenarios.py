"""What may happen to real workers; the same faults as ``scenarios``, with true states at the end."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

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
    long: bool = False
    """Only in `make chaos`."""


def kill_one(fleet: RealFleet) -> None:
    fleet.signal(fleet.any_worker(), signal.SIGKILL)


def stop_one(fleet: RealFleet) -> None:
    victim = fleet.any_worker()
    fleet.signal(victim, signal.SIGSTOP)
    fleet.pause(1.5 * fleet.lease_s, 2 * fleet.lease_s)
    fleet.signal(victim, signal.SIGCONT)


def outage(fleet: RealFleet, outage_s: float = 2.0) -> None:
    fleet.server.stop(kill=True)
    time.sleep(outage_s)
    fleet.server.start()


def flush(fleet: RealFleet) -> None:
    client = connect(fleet.server.url)
    client.flushall()
    client.close()


def full_disk(fleet: RealFleet) -> None:
    fleet.full.touch()
    fleet.pause(10, 10)
    fleet.full.unlink()


def kill_workers(fleet: RealFleet) -> None:
    fleet.start()
    for count in (3, 8, 13):
        fleet.wait(fleet.stored(count), 120)
        fleet.pause(0.0, 0.4)
        kill_one(fleet)


def under_way(fault: Callable[[RealFleet], None]) -> Callable[[RealFleet], None]:
    """The fault at a random moment after the third range."""

    def run(fleet: RealFleet) -> None:
        fleet.start()
        fleet.wait(fleet.stored(3), 120)
        fleet.pause(0.0, 0.4)
        fault(fleet)

    return run


def redis_killed(outage_s: float) -> Callable[[RealFleet], None]:
    def run(fleet: RealFleet) -> None:
        pids = dict(fleet.workers)
        outage(fleet, outage_s)
        fleet.pause(0.5, 0.5)
        assert fleet.workers == pids, "an outage ended a worker"

    return under_way(run)


def only_work(fleet: RealFleet) -> None:
    fleet.start()


def producer_killed(fleet: RealFleet) -> None:
    for _ in range(2):
        fleet.add()
    producer = fleet.producer()
    time.sleep(fleet.random.uniform(0.5, 3.0))
    producer.kill()
    producer.wait()
    fleet.submit()


def two_producers(fleet: RealFleet) -> None:
    producers = [fleet.producer(), fleet.producer()]
    for _ in range(2):
        fleet.add()
    for producer in producers:
        assert producer.wait(60) == 0


def network(mode: str) -> Callable[[RealFleet], None]:
    """The line of one worker with leases in hand is gone for two leases."""

    def run(fleet: RealFleet) -> None:
        fleet.start(1)
        name, proxy = fleet.add_behind_proxy()
        fleet.wait(lambda: fleet.holds(name), 120)
        fleet.pause(0.0, 0.4)
        proxy.set_mode(mode)
        pid = fleet.workers[name]
        fleet.pause(1.5 * fleet.lease_s, 2 * fleet.lease_s)
        proxy.set_mode("pass")
        assert fleet.workers.get(name) == pid, "a cut line ended a worker"

    return run


def clock_off(fleet: RealFleet) -> None:
    fleet.start(1)
    fleet.add(clock_skew_s=60)
    fleet.add(clock_skew_s=-60)


def mixture(fleet: RealFleet) -> None:
    """Three faults, each while the one before is still felt."""
    fleet.start(3)
    fleet.wait(fleet.stored(3), 120)
    faults: list[Callable[[RealFleet], None]] = [kill_one, stop_one, outage, flush, full_disk]
    for fault in fleet.random.sample(faults, 3):
        fault(fleet)
        fleet.pause(0.0, 1.0)


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
    "real: worker stopped past its lease": RealScenario(run=under_way(stop_one)),
    "real: redis killed for 2 s": RealScenario(run=redis_killed(2)),
    "real: redis killed for 20 s": RealScenario(run=redis_killed(20), long=True),
    "real: redis killed for 60 s": RealScenario(run=redis_killed(60), long=True),
    "real: redis killed for 2 s, no persistence": RealScenario(run=redis_killed(2), persistent=False),
    "real: redis killed for 20 s, no persistence": RealScenario(
        run=redis_killed(20), persistent=False, long=True
    ),
    "real: flushall": RealScenario(run=under_way(flush)),
    "real: network cut": RealScenario(run=network("cut")),
    "real: network half open": RealScenario(run=network("stall")),
    "real: disk full for 10 s": RealScenario(run=under_way(full_disk)),
    "real: run moved, mover killed": RealScenario(run=moved),
    "real: producer killed while enqueueing": RealScenario(run=producer_killed),
    "real: two producers at once": RealScenario(run=two_producers),
    "real: clocks 60 s off": RealScenario(run=clock_off),
    "real: a sample raises": RealScenario(run=only_work, bad={50: BAD_SAMPLES["raises"]}),
    "real: a sample segfaults its process": RealScenario(
        run=only_work, bad={50: BAD_SAMPLES["kills"], 120: BAD_SAMPLES["kills in company"]}
    ),
    "real: mixture": RealScenario(run=mixture),
}  # fmt: skip
