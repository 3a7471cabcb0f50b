"""A small fleet that scenarios may hurt, and the truth that must hold afterwards."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from chaos.proxy import Proxy
from conftest import RedisServer
from fleet import QUEUE, FakeWork, job, spawn

from swathe import queue
from swathe.errors import QueueError
from swathe.queue import RangeQueue, connect

TIMES = {"read_s": 0.02, "compute_s": 0.08, "publish_s": 0.05}


class ChaosFleet:
    """Workers as processes on a server of their own; dead ones are replaced as a supervisor would."""

    def __init__(
        self, folder: Path, seed: int, *, ranges: int, lease_s: float, persistent: bool = True
    ):
        self.folder = folder
        self.random = random.Random(seed)
        self.total = ranges
        self.lease_s = lease_s
        self.work = FakeWork(folder)
        self.bystanders_told = False
        """Whether a death is reported, as by a supervisor; otherwise leases have to run out."""
        self._redis_folder = Path(tempfile.mkdtemp(prefix="swathe-"))
        self.server = RedisServer(self._redis_folder, "--appendonly", "yes" if persistent else "no")
        self.server.start()
        self.workers: dict[str, Any] = {}
        self.faults: dict[str, str] = {}
        self.times = dict(TIMES)
        self.killed: list[tuple[int, float]] = []
        self._count = 0
        self._proxies: list[Proxy] = []
        (folder / "total").write_text(str(ranges))

    def start(self, workers: int = 3) -> None:
        self.submit()
        for _ in range(workers):
            self.add()

    def submit(self) -> None:
        client = connect(self.server.url)
        known = {*self.work.records(), *self.work.failed()}
        RangeQueue(client, QUEUE).enqueue_if_absent(
            job(index) for index in range(self.total) if index not in known
        )
        client.close()

    def add(self, url: str | None = None, **work: Any) -> str:
        self._count += 1
        name = f"w{self._count}"
        self.workers[name] = spawn(
            url or self.server.url, self.folder, name,
            work={**self.times, "faults": self.faults, **work},
            lease_s=self.lease_s, heartbeat_s=self.lease_s / 5, max_bystander_deaths=1000,
        )  # fmt: skip
        return name

    def add_behind_proxy(self) -> tuple[str, Proxy]:
        proxy = Proxy(self._redis_folder, self.server.socket)
        self._proxies.append(proxy)
        return self.add(proxy.url), proxy

    def kill(self, name: str) -> None:
        process = self.workers[name]
        self.killed.append((process.pid, time.time()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def tend(self) -> None:
        """Replace the dead."""
        for name, process in list(self.workers.items()):
            if process.poll() is not None:
                del self.workers[name]
                if self.bystanders_told:
                    with contextlib.suppress(QueueError):
                        queue.release_dead_worker(connect(self.server.url, retries=0), name)
                self.add()

    def wait(self, condition: Callable[[], Any], bound_s: float) -> None:
        end = time.monotonic() + bound_s
        while not condition():
            self.tend()
            if time.monotonic() > end:
                msg = f"not within {bound_s} s: {len(self.work.records())} of {self.total} stored"
                raise AssertionError(msg)
            time.sleep(0.05)

    def started(self, name: str) -> bool:
        """Whether this worker has begun a computation."""
        pid = self.workers[name].pid
        return any(owner == pid for starts in self.work.starts().values() for owner, _at in starts)

    def stored(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.work.records()) >= count

    def finish(self, bound_s: float) -> None:
        """The run ends without a human: every range stored or set aside, nothing left in Redis."""
        self.wait(lambda: len(self.work.records()) + len(self.work.failed()) >= self.total, bound_s)
        client = connect(self.server.url)
        ranges = RangeQueue(client, QUEUE)
        self.wait(lambda: ranges.counts().work == 0, bound_s)
        assert sorted({*self.work.records(), *self.work.failed()}) == list(range(self.total))
        assert not set(self.work.records()) & set(self.work.failed())
        left = [key for key in client.scan_iter() if b"job:run1" in key or b"execution:" in key]
        assert left == []
        client.close()

    def recoveries(self) -> list[float]:
        """For each range that was on the device of a killed process: seconds until it ran elsewhere."""
        out = []
        starts = self.work.starts()
        for pid, killed_at in self.killed:
            for attempts in starts.values():
                for (owner, _at), (other, again_at) in itertools.pairwise(attempts):
                    if owner == pid and other != pid and again_at > killed_at:
                        out.append(again_at - killed_at)
        return out

    def recomputed(self) -> int:
        return sum(count - 1 for count in self.work.computed().values())

    def close(self) -> None:
        for process in self.workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGCONT)
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for proxy in self._proxies:
            proxy.close()
        self.server.stop(kill=True)
        shutil.rmtree(self._redis_folder, ignore_errors=True)


@contextlib.contextmanager
def chaos_fleet(folder: Path, seed: int, **options: Any) -> Iterator[ChaosFleet]:
    fleet = ChaosFleet(folder, seed, **options)
    try:
        yield fleet
    finally:
        fleet.close()
