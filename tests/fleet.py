"""A worker with fake work, whose effects are files: also a program, so that tests can kill it.

python tests/fleet.py REDIS_URL FOLDER JSON     JSON: {"name": ..., "options": {...}, "work": {...}}
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swathe import errors, log
from swathe.queue import RangeQueue, connect
from swathe.spec import RangeId, RangeJob, RunId
from worker.loop.contract import STORED, Hooks, WorkerOptions
from worker.loop.jobs import RangeWorker

FAST = {
    "jobs_in_flight": 3,
    "lease_s": 1.0,
    "heartbeat_s": 0.2,
    "drain_s": 10.0,
    "rebuild_every_s": 0.5,
}
QUEUE = "swathe-m"


class FakeWork:
    """Sleeps and writes files. ``faults`` maps a range (or ``*``) to what goes wrong with it and where."""

    overlaps = False

    def __init__(self, folder: Path, *, read_s=0.0, compute_s=0.01, publish_s=0.0, faults=None):
        self.folder = folder
        self.read_s, self.compute_s, self.publish_s = read_s, compute_s, publish_s
        self.faults: dict[str, str] = faults or {}
        for name in ("records", "computed", "failed", "faults"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def prepare(self, job: RangeJob) -> object:
        time.sleep(self.read_s)
        self._fault("prepare", job)
        return STORED if self._record(job).exists() else job

    def compute(self, prepared: object) -> object:
        assert isinstance(prepared, RangeJob)
        with (self.folder / "computed" / f"{prepared.range_id:06d}").open("a") as file:
            file.write(f"{os.getpid()} {time.time():.3f}\n")
        self._fault("compute", prepared)
        time.sleep(self.compute_s)
        return prepared

    def finish(self, started: object) -> object:
        return started

    def publish(self, computed: object) -> None:
        assert isinstance(computed, RangeJob)
        time.sleep(self.publish_s)
        self._fault("publish", computed)
        if (self.folder / "full").exists():
            raise errors.NoSpaceError("disk full")
        try:
            with self._record(computed).open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            with (self.folder / "lost").open("a") as file:
                file.write(f"{computed.range_id}\n")

    def compute_alone(self, prepared: object) -> object:
        assert isinstance(prepared, RangeJob)
        self._note("alone", prepared)
        self._fault("compute", prepared)
        return prepared

    def compute_apart(self, job: RangeJob) -> None:
        self._note("apart", job)
        if f"compute:{job.range_id}" in self.faults:
            raise errors.PoisonRangeError("dies of everything", history=("isolating: died",))
        self.publish(job)

    def _note(self, how: str, job: RangeJob) -> None:
        with (self.folder / how).open("a") as file:
            file.write(f"{job.range_id}\n")

    def set_aside(self, job: RangeJob, reason: str, history: Sequence[str]) -> None:
        self._fault("set_aside", job)
        text = json.dumps({"reason": reason, "history": list(history)})
        (self.folder / "failed" / f"{job.range_id:06d}").write_text(text)

    def _record(self, job: RangeJob) -> Path:
        return self.folder / "records" / f"{job.range_id:06d}"

    def _fault(self, step: str, job: RangeJob) -> None:
        fault = self.faults.get(f"{step}:{job.range_id}") or self.faults.get(f"{step}:*")
        if fault is None:
            return
        kind, _, times = fault.partition("*")
        if times:
            used = self.folder / "faults" / f"{step}-{job.range_id}"
            count = int(used.read_text()) if used.exists() else 0
            if count >= int(times):
                return
            used.write_text(str(count + 1))
        self._raise(kind)

    @staticmethod
    def _raise(kind: str) -> None:
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(3600)
        if kind == "slow":
            time.sleep(1.5)
            return
        raised: dict[str, Callable[[], Exception]] = {
            "value": lambda: ValueError("bad sample"),
            "bytes": lambda: ValueError("bad sample \udcff"),
            "store": lambda: errors.StoreError("store away"),
            "space": lambda: errors.NoSpaceError("disk full"),
            "os": lambda: OSError("stale handle"),
            "mismatch": lambda: errors.RunMismatchError("another run_id"),
            "model": lambda: errors.ModelError("not found"),
            "refused": lambda: errors.RefusedJobError("not mine"),
            "worker": lambda: errors.WorkerError("device lost"),
        }
        error = raised[kind]()
        raise error

    def records(self) -> list[int]:
        return sorted(int(path.name) for path in (self.folder / "records").iterdir())

    def computed(self) -> dict[int, int]:
        """How often each range was computed."""
        return {range_id: len(starts) for range_id, starts in self.starts().items()}

    def starts(self) -> dict[int, list[tuple[int, float]]]:
        """Process and time of every start of a computation, by range."""
        return {
            int(path.name): [
                (int(pid), float(at))
                for pid, at in (line.split() for line in path.read_text().splitlines())
            ]
            for path in (self.folder / "computed").iterdir()
        }

    def failed(self) -> dict[int, Any]:
        return {
            int(path.name): json.loads(path.read_text())
            for path in (self.folder / "failed").iterdir()
        }


def job(range_id: int, run_id: str = "run1") -> RangeJob:
    return RangeJob(
        run_url=f"/fake/{run_id}", run_id=RunId(run_id), fingerprint="f", range_id=RangeId(range_id)
    )


def enqueue(client, count: int, *, queue: str = QUEUE, run_id: str = "run1") -> RangeQueue:
    ranges = RangeQueue(client, queue)
    ranges.enqueue_if_absent(job(index, run_id) for index in range(count))
    return ranges


def new_worker(url, work, name="w1", *, hooks=None, **options) -> RangeWorker:
    return RangeWorker(
        url,
        work,
        name=name,
        roots=["/fake"],
        hooks=hooks,
        options=WorkerOptions(**(FAST | options)),
    )


ALIVE: list[Any] = []
"""Workers of the test that runs now; the fixture ``fleet`` ends those that are left."""


def end_all() -> None:
    """End what a failed test left."""
    while ALIVE:
        left = ALIVE.pop()
        if isinstance(left, Running):
            left.worker.stop()
        elif left.poll() is None:
            os.killpg(left.pid, signal.SIGKILL)
            left.wait()


class Running:
    """A worker on a thread of the test."""

    def __init__(self, worker: RangeWorker) -> None:
        ALIVE.append(self)
        self.worker = worker
        self.code: int | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self.code = self.worker.serve()

    def stop(self, timeout_s: float = 20.0) -> int | None:
        self.worker.stop()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 20.0) -> int | None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the worker does not end"
        return self.code


def spawn(url, folder: Path, name: str, *, work=None, **options) -> "subprocess.Popen[bytes]":
    """A worker as a process of its own group."""
    said = json.dumps({"name": name, "work": work or {}, "options": FAST | options})
    log_file = (folder / f"{name}.log").open("ab")
    with log_file:
        process = subprocess.Popen(
            [sys.executable, __file__, url, str(folder), said],
            stdout=log_file, stderr=log_file, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        )  # fmt: skip
    ALIVE.append(process)
    return process


def wait_for(condition: Callable[[], Any], bound_s: float = 20.0, what: str = "") -> Any:
    end = time.monotonic() + bound_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    msg = f"not within {bound_s} s: {what or condition}"
    raise AssertionError(msg)


def rebuild_from(folder: Path, url: str) -> Callable[[RunId, str], bool]:
    """The hook of a run whose plan is the number in the file ``total``."""
    work = FakeWork(folder)

    def rebuild(_run_id: RunId, _url: str) -> bool:
        if not (folder / "total").exists():
            return False
        known = {*work.records(), *work.failed()}
        missing = [
            index for index in range(int((folder / "total").read_text())) if index not in known
        ]
        client = connect(url)
        RangeQueue(client, QUEUE).enqueue_if_absent(job(index) for index in missing)
        client.close()
        return not missing

    return rebuild


def main() -> int:
    url, folder, said = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    log.setup(form="json")
    skew_s = said["work"].pop("clock_skew_s", 0)
    if skew_s:
        real = time.time
        time.time = lambda: real() + skew_s
    worker = RangeWorker(
        url,
        FakeWork(folder, **said["work"]),
        name=said["name"],
        roots=["/fake"],
        options=WorkerOptions(**said["options"]),
        hooks=Hooks(rebuild=rebuild_from(folder, url)),
    )
    return worker.serve()


if __name__ == "__main__":
    os._exit(main())
