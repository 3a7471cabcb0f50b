"""A fleet of real workers on a tiny random model, and the whole truth about its run afterwards."""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from chaos.nursery import KILLS, KILLS_IN_COMPANY, RAISES, Birth
from chaos.proxy import Proxy
from conftest import RedisServer
from rq.defaults import RQ_KEY_PREFIX

from producer import verify
from producer.plan import PlanOptions, plan
from swathe import HiddenStates, manifest, names, orphans, queue
from swathe.errors import QueueError
from swathe.queue import RangeQueue, connect
from swathe.records import RunState, RunWatcher, read_run
from swathe.settings import Settings
from swathe.spec import RangeId, RangeJob, fingerprint, to_json
from swathe.store.local import LocalStore
from swathe.submission import submit
from worker.extraction.extraction import Extraction
from worker.telemetry.totals import Telemetry

ROWS = 160
_CALM = threading.Lock()
"""Random weights come from torch's one generator: fleets that are made at once would disturb each other's."""
CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def write_inputs(folder: Path, bad: dict[int, int]) -> PlanOptions:
    """A data set of ROWS samples; ``bad`` names the rows that end with a bad token."""
    rng = random.Random(7)
    config, data = folder / "config.json", folder / "rows.jsonl"
    config.write_text(json.dumps(CONFIG))
    with data.open("w") as file:
        for row in range(ROWS):
            ids = [rng.randrange(90) for _ in range(rng.randrange(4, 40))]
            ids += [bad[row]] * 3 if row in bad else []
            file.write(json.dumps({"id": f"chat-{row}", "input_ids": ids}) + "\n")
    return PlanOptions(
        dataset=str(data), model=f"random:{config}", layers=(0,), final=True, range_tokens=128, dtype="fp32",
    )  # fmt: skip


def calm_states(store: LocalStore) -> dict[int, torch.Tensor]:
    """What a calm worker without a queue computes, by row. Bad tokens do nothing here."""
    spec = read_run(store)
    work = Extraction(
        name="calm",
        device=torch.device("cpu"),
        device_id="cpu",
        settings=Settings(),
        telemetry=Telemetry(),
    )
    out: dict[int, torch.Tensor] = {}
    for range_id in spec.range_ids:
        job = job_of(store, RangeId(range_id))
        states = work.finish(work.compute(work.prepare(job))).states
        view = states.hidden_states
        tensor = torch.frombuffer(bytearray(view.data), dtype=torch.float32).view(view.shape)
        parts = torch.split(tensor, states.samples.lengths)
        out |= dict(zip(states.samples.rows.tolist(), parts, strict=True))
        states.release()
    (store._root / names.FINAL_NORM).unlink(missing_ok=True)
    return out


def job_of(store: LocalStore, range_id: RangeId) -> RangeJob:
    spec = read_run(store)
    return RangeJob(
        run_url=store.url, run_id=spec.run_id, fingerprint=spec.fingerprint, range_id=range_id
    )


class RealFleet:
    """Workers forked by a nursery; dead ones are replaced, and told to Redis as by a supervisor."""

    def __init__(
        self, folder: Path, seed: int, *, lease_s: float, persistent: bool = True, bad=None
    ):
        self.folder, self.random, self.lease_s = folder, random.Random(seed), lease_s
        self.bad: dict[int, int] = bad or {}
        self.full = folder / "FULL"
        self.guilty = {row for row, token in self.bad.items() if token in (RAISES, KILLS)}
        self.store = LocalStore(folder / "run")
        spec = plan(self.store, write_inputs(folder, self.bad)).spec
        policies = dataclasses.replace(spec.policies, max_quarantined_ratio=0.1)
        spec = dataclasses.replace(spec, policies=policies)
        self.spec = dataclasses.replace(spec, fingerprint=fingerprint(spec))
        self.store.write(names.RUN, [to_json(self.spec, indent=1)])
        with _CALM:
            self.calm = calm_states(self.store)
        self.watcher = RunWatcher(self.store, self.spec)
        self._redis_folder = Path(tempfile.mkdtemp(prefix="swathe-"))
        self.server = RedisServer(self._redis_folder, "--appendonly", "yes" if persistent else "no")
        self.server.start()
        self.workers: dict[str, int] = {}
        self._count = 0
        self._proxies: list[Proxy] = []
        self._nursery = self._open_nursery()

    def _open_nursery(self) -> "subprocess.Popen[str]":
        here = Path(__file__)
        environment = os.environ | {
            "REDIS_URL": self.server.url, "SWATHE_STORE_ROOTS": str(self.folder), "SWATHE_LEASE_S": str(self.lease_s),
            "SWATHE_HEARTBEAT_S": str(self.lease_s / 5), "SWATHE_DRAIN_S": "10", "SWATHE_CANARY_EVERY": "5",
            "SWATHE_TEST_FULL": str(self.full), "SWATHE_TEST_SLOW_S": "0.1", "SWATHE_LOG_FORMAT": "json",
            "PYTHONPATH": str(here.parents[2]),
        }  # fmt: skip
        with (self.folder / "nursery.log").open("ab") as file:
            return subprocess.Popen(
                [sys.executable, str(here.parent / "nursery.py")], env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
            )  # fmt: skip

    def start(self, workers: int = 2) -> None:
        self.submit()
        for _ in range(workers):
            self.add()

    def submit(self) -> None:
        client = connect(self.server.url)
        submit(client, self.store, self.watcher.read())
        client.close()

    def add(self, *, url: str | None = None, clock_skew_s: float = 0.0) -> str:
        self._count += 1
        name = f"w{self._count}"
        birth = Birth(name, f"{self.folder / name}.log", url or self.server.url, clock_skew_s)
        self._nursery.stdin.write(json.dumps(dataclasses.asdict(birth)) + "\n")
        self._nursery.stdin.flush()
        self.workers[name] = int(self._nursery.stdout.readline())
        return name

    def add_behind_proxy(self) -> tuple[str, Proxy]:
        proxy = Proxy(self._redis_folder, self.server.socket)
        self._proxies.append(proxy)
        return self.add(url=proxy.url), proxy

    def holds(self, name: str) -> bool:
        """Whether the worker has a lease."""
        client = connect(self.server.url)
        held = client.exists(f"{RQ_KEY_PREFIX}:worker:{name}:executions")
        client.close()
        return bool(held)

    def producer(self) -> "subprocess.Popen[bytes]":
        """A process that submits the run."""
        environment = os.environ | {
            "REDIS_URL": self.server.url,
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        command = [sys.executable, "-m", "producer.cli", "submit", self.store.url]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def signal(self, name: str, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.workers[name], number)

    def any_worker(self) -> str:
        return self.random.choice(list(self.workers))

    def tend(self) -> None:
        for name, pid in list(self.workers.items()):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                del self.workers[name]
                with contextlib.suppress(QueueError):
                    queue.release_dead_worker(connect(self.server.url, retries=0), name)
                self.add()

    def wait(self, condition: Callable[[], Any], bound_s: float) -> None:
        end = time.monotonic() + bound_s
        while not condition():
            self.tend()
            if time.monotonic() > end:
                state = self.watcher.read()
                msg = f"not within {bound_s} s: {len(state.records)} of {self.spec.totals.ranges} stored, {state.failed} aside"
                raise AssertionError(msg)
            time.sleep(0.05)

    def pause(self, low_s: float, high_s: float) -> None:
        end = time.monotonic() + self.random.uniform(low_s, high_s)
        self.wait(lambda: time.monotonic() > end, 300)

    def stored(self, count: int) -> Callable[[], bool]:
        return lambda: len(self.watcher.read().records) >= count

    def finish(self, bound_s: float) -> RunState:
        """The run ends without a human, and all that it left is true."""
        self.wait(lambda: not self.watcher.read().missing, bound_s)
        client = connect(self.server.url)
        ranges = RangeQueue.of_model(client, self.spec.model.key)
        self.wait(lambda: ranges.counts().work == 0, bound_s)
        left = [key for key in client.scan_iter() if b":job:" in key or b"execution:" in key]
        assert left == []
        client.close()
        state = RunWatcher(self.store, self.spec).read()
        assert state.failed == frozenset()
        self._check(state)
        return state

    def _check(self, state: RunState) -> None:
        assert {q.row for r in state.records.values() for q in r.quarantined} == self.guilty
        manifest.seal(self.store, state)
        orphans.collect(self.store, state, now_s=time.time() + 1e6, grace_s=0.0)
        known = {record.shard for record in state.records.values()}
        shards = {
            item.key for item in self.store.list(names.STATES) if item.key.endswith("safetensors")
        }
        assert shards == known
        assert [str(path) for path in self.store._root.rglob(".*")] == []
        assert verify.verify(self.store, full=True).ok
        stored = HiddenStates(self.store._root)
        rows = [stored[index]["row"] for index in range(len(stored))]
        assert rows == [row for row in range(ROWS) if row not in self.guilty]
        for index, row in enumerate(rows):
            assert (stored[index]["hidden_states"] - self.calm[row]).abs().max() < 1e-4, row

    def close(self) -> None:
        for name in self.workers:
            self.signal(name, signal.SIGCONT)
            self.signal(name, signal.SIGKILL)
        self._nursery.stdin.close()
        self._nursery.kill()
        self._nursery.wait()
        self._nursery.stdout.close()
        for proxy in self._proxies:
            proxy.close()
        self.server.stop(kill=True)
        shutil.rmtree(self._redis_folder, ignore_errors=True)


@contextlib.contextmanager
def real_fleet(folder: Path, seed: int, **options: Any) -> Iterator[RealFleet]:
    fleet = RealFleet(folder, seed, **options)
    try:
        yield fleet
    finally:
        fleet.close()


BAD_SAMPLES = {"raises": RAISES, "kills": KILLS, "kills in company": KILLS_IN_COMPANY}
