"""A long calm run: real worker loops with trivial work on a real server, the queue's whole path and what it leaves.

python -m bench.calm [--ranges 30000] [--workers 8] [--server redis-server] [--out bench/results/calm.json]

Every range is one row, so the plan, `swathe submit` and `swathe status` are those of a run with so many ranges; the
work only writes the record, without a shard and without waiting for the disk.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from producer.plan import PlanOptions, plan
from swathe import log, names
from swathe.clock import utc_now
from swathe.queue import RangeQueue, connect, requeued_counts
from swathe.records import read_run
from swathe.spec import RangeJob, RangeRecord, RunSpec, to_json
from swathe.store.local import LocalStore
from worker.loop.contract import STORED, WorkerOptions
from worker.loop.jobs import RangeWorker

CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


class TrivialWork:
    """Does nothing but write a range's record."""

    overlaps = False

    def __init__(self, store: LocalStore, spec: RunSpec) -> None:
        self._states = Path(store.url) / names.STATES
        self._spec = spec

    def prepare(self, job: RangeJob) -> object:
        """Say whether the record is there."""
        return STORED if (self._states / f"{job.range_id:06d}.json").exists() else job

    def compute(self, prepared: object) -> object:
        """Nothing."""
        return prepared

    def finish(self, started: object) -> object:
        """Nothing."""
        return started

    def publish(self, computed: object) -> None:
        """Write the record."""
        assert isinstance(computed, RangeJob)
        record = RangeRecord(
            run_id=computed.run_id,
            range_id=computed.range_id,
            shard=None,
            size_bytes=0,
            xxh3="",
            samples=1,
            tokens=self._spec.totals.tokens // self._spec.totals.ranges,
            worker="bench",
            device="cpu",
            finished_at=utc_now(),
        )
        with (self._states / f"{computed.range_id:06d}.json").open("xb") as file:
            file.write(to_json(record))

    def compute_alone(self, prepared: object) -> object:
        """Nothing."""
        return prepared

    def compute_apart(self, job: RangeJob) -> None:
        """Nothing."""

    def set_aside(self, job: RangeJob, reason: str, history: Sequence[str]) -> None:
        """Never in a calm run."""
        raise NotImplementedError


def work(url: str, run: str, name: str) -> int:
    """Be one worker, until a signal."""
    log.setup(form="json", level="warning")
    store = LocalStore(Path(run))
    worker = RangeWorker(
        url, TrivialWork(store, read_run(store)), name=name, roots=[run], options=WorkerOptions()
    )
    return worker.serve()


def plan_run(folder: Path, ranges: int) -> LocalStore:
    """A run of so many ranges of one row each."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    data = folder / "rows.jsonl"
    with data.open("w") as file:
        for row in range(ranges):
            file.write(json.dumps({"input_ids": [row % 90, 1, 2, 3]}) + "\n")
    store = LocalStore(folder / "run")
    model = f"random:{folder / 'config.json'}"
    plan(
        store,
        PlanOptions(dataset=str(data), model=model, final=True, range_tokens=4, dtype="fp32"),
    )
    (folder / "run" / names.STATES).mkdir(exist_ok=True)
    return store


@contextmanager
def server(program: str, folder: Path) -> Iterator[str]:
    """A server with an append-only file, on a unix socket."""
    socket = folder / "s"
    options = ("--appendonly", "yes", "--appendfsync", "everysec", "--save", "")
    process = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), *options],
        stdout=subprocess.DEVNULL,
    )
    client = connect(f"unix://{socket}", retries=0)
    while True:
        try:
            client.ping()
            break
        except Exception:  # noqa: BLE001 - it starts
            time.sleep(0.05)
    client.close()
    try:
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait()


def command_s(url: str, *arguments: str) -> dict[str, float]:
    """Seconds of one `swathe` command, by the clock and of its processor, the start of Python included."""
    used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "producer.cli", *arguments],
        env=os.environ | {"REDIS_URL": url},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - started
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return {"seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2)}


def stats(client: Redis) -> dict[str, int]:
    """What Redis counts: calls from clients, commands inside scripts included, bytes, keys."""
    info: Any = client.info("all")
    return {
        "scripts": int(info.get("cmdstat_evalsha", {}).get("calls", 0)),
        "commands": int(info["total_commands_processed"]),
        "used_memory_bytes": int(info["used_memory"]),
        "keys": int(client.dbsize()),
        "clients": int(info["connected_clients"]),
    }


def work_it_off(url: str, run: str, client: Redis, options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers until the queue is empty."""
    spec = read_run(LocalStore(Path(run)))
    ranges = RangeQueue.of_model(client, spec.model.key)
    before = stats(client)
    workers = [
        subprocess.Popen([sys.executable, "-m", "bench.calm", "worker", url, run, f"w{number}"])
        for number in range(options.workers)
    ]
    try:
        while ranges.counts().queued == options.ranges:
            time.sleep(0.02)
        started = time.perf_counter()
        samples = []
        while (work := ranges.counts().work) > 0:
            samples.append({"left": work, **stats(client)})
            time.sleep(0.5)
        seconds = time.perf_counter() - started
        after = stats(client)
        time.sleep(3)  # heartbeats of idle workers
        idle = stats(client)
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        codes = [worker.wait(30) for worker in workers]
    return {
        "seconds": round(seconds, 1),
        "ranges_s": round(options.ranges / seconds),
        "scripts_a_range": round((after["scripts"] - before["scripts"]) / options.ranges, 2),
        "commands_a_range": round((after["commands"] - before["commands"]) / options.ranges, 1),
        "memory_full_bytes": before["used_memory_bytes"],
        "memory_end_bytes": idle["used_memory_bytes"],
        "most_keys_beside_jobs": max(s["keys"] - s["left"] for s in samples),
        "keys_at_end": idle["keys"],
        "clients": max(s["clients"] for s in samples),
        "worker_exits": codes,
        "requeued": requeued_counts(client),
        "samples": samples[:: max(1, len(samples) // 10)],
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole run."""
    store = plan_run(folder, options.ranges)
    with server(options.server, folder) as url:
        client = connect(url)
        empty = stats(client)
        row: dict[str, Any] = {
            "name": "calm", "ranges": options.ranges, "workers": options.workers,
            "memory_empty_bytes": empty["used_memory_bytes"],
            "submit": command_s(url, "submit", store.url),
            "submit_again": command_s(url, "submit", store.url),
            "status_full_queue": command_s(url, "status", store.url, "--json"),
        }  # fmt: skip
        row |= work_it_off(url, store.url, client, options)
        row["keys_left"] = sorted(
            key.decode() for key in client.scan_iter() if client.ttl(key) == -1
        )
        client.close()
        row["status_all_stored"] = command_s(url, "status", store.url, "--json")
    records = sum(1 for _ in (folder / "run" / names.STATES).iterdir())
    assert records == options.ranges, f"{records} records"
    return row


def main() -> int:
    """Measure, print, keep."""
    if sys.argv[1:2] == ["worker"]:
        return work(*sys.argv[2:5])
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranges", type=int, default=30_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--server", default=shutil.which("redis-server"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swathe-") as folder:
        row = measure(options, Path(folder))
    said = subprocess.run(
        [options.server, "--version"], capture_output=True, text=True, check=False
    )
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "bench": "calm",
        "device": f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "versions": {
            "python": platform.python_version(),
            "server": said.stdout.strip(),
            "rq": importlib.metadata.version("rq"),
        },
        "git": git.stdout.strip(),
        "command": " ".join(["python", "-m", "bench.calm", *sys.argv[1:]]),
        "rows": [row],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
