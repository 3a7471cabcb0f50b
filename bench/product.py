"""The whole product: plan, embedded server, submit, a supervisor with one worker per GPU, shards on a file system.

Where the disk is small the sink rolls: a shard is deleted as soon as its record is durable. All else is what a user
runs. Throughput is read off the records' file times.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from bench.gauges import watching
from bench.shapes import SHAPES, chat_lengths, random_ids, write_dataset
from producer.embedded import embedded_server
from swathe import names
from swathe.queue import connect
from swathe.records import read_record, read_run
from swathe.spec import RangeId, RangeRecord, RunSpec
from swathe.store.local import LocalStore
from swathe.tokens import TokenReader

_LOOK_EVERY_S: Final = 0.1
_STEADY_AFTER_S: Final = 12.0
_START_BOUND_S: Final = 240.0


class Watched:
    """Records in the order of their commit, with the wall clock's time of each."""

    def __init__(self, store: LocalStore, run_spec: RunSpec, *, rolling: bool) -> None:
        self._store, self._run_spec, self._rolling = store, run_spec, rolling
        self._found: dict[RangeId, tuple[float, RangeRecord]] = {}
        self.padding_ratio: float | None = None

    def look(self) -> None:
        """Read the records that came since; a rolling sink loses its shards here."""
        states = Path(self._store.url) / names.STATES
        for entry in os.scandir(states) if states.is_dir() else ():
            range_id = names.record_range(f"{names.STATES}{entry.name}")
            if range_id is None or range_id in self._found:
                continue
            record = read_record(self._store, self._run_spec, range_id)
            self._found[range_id] = (entry.stat().st_mtime, record)
            if self._rolling and record.shard:
                self._store.delete(record.shard)

    @property
    def at(self) -> list[float]:
        """When each record was committed, ascending."""
        return sorted(at for at, _ in self._found.values())

    @property
    def complete(self) -> bool:
        """Whether every range has its record."""
        return len(self._found) >= self._run_spec.totals.ranges

    @property
    def records(self) -> dict[RangeId, RangeRecord]:
        """All of them."""
        return {range_id: record for range_id, (_, record) in self._found.items()}

    def between(self, start: float, stop: float) -> list[RangeRecord]:
        """Ranges committed after ``start``, up to ``stop``."""
        return [record for at, record in self._found.values() if start < at <= stop]


def run(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Run until ``seconds`` after the model was loaded, or until the run is complete; a row for each phase."""
    folder = Path(spec["folder"])
    store, run_spec = planned(spec, folder)
    state_dir = folder / "state"
    log_path = folder / f"worker-{spec['name']}-{spec['model']}-{spec['kernel_cache']}.log"
    gpus = len(spec["devices"].split(","))
    with embedded_server(state_dir, run_spec.run_id) as url:
        environment = environment_of(spec, folder, url)
        run_swathe(["submit", store.url], environment)
        with watching(gpus) as gauges, _workers(spec, environment, log_path) as workers:
            watched, loaded = _watch(store, run_spec, spec, log_path, workers)
            watched.padding_ratio = _padding(url)
    rows = []
    for phase, start, stop in _phases(watched, loaded, spec):
        found = watched.between(start, stop)
        rows.append({
            "name": spec["name"],
            "model": spec["model"],
            "phase": phase,
            "seconds": stop - start,
            "lengths": lengths_of(store, run_spec, found),
            "gpu_busy": sum(r.stage_seconds["forward"] for r in found) / (stop - start) / gpus,
            "padding_ratio": watched.padding_ratio,
            "written_bytes_s": sum(r.size_bytes for r in found) / (stop - start),
            "kernel_cache": spec["kernel_cache"],
            "gpus": gpus,
            **gauges.between(start, stop),
            "detail": _detail(found, loaded, watched, spec),
        })  # fmt: skip
    return rows


def planned(spec: dict[str, Any], folder: Path) -> tuple[LocalStore, RunSpec]:
    """Write the data set and plan its run; ``layers`` is the shape's own unless the spec has some."""
    shape = SHAPES[spec["model"]]
    data = folder / f"{spec['model']}.parquet"
    lengths = chat_lengths(spec["samples"], longest=spec["longest"], seed=2)
    write_dataset(data, random_ids(lengths, shape.config["vocab_size"]))
    store = LocalStore(folder / f"run-{spec['name']}-{spec['model']}-{spec['kernel_cache']}")
    model = f"random:{shape.write(folder)}"
    layers = ",".join(map(str, spec.get("layers", shape.layers)))
    run_swathe(
        [
            *("plan", str(data), "--model", model, "--layers", layers, "--out", store.url),
            *("--range-tokens", str(spec["range_tokens"]), "--allow-low-space"),
        ],
        dict(os.environ),
    )
    return store, read_run(store)


def environment_of(spec: dict[str, Any], folder: Path, url: str) -> dict[str, str]:
    """What the commands of a benchmark see."""
    return os.environ | {
        "REDIS_URL": url,
        "SWATHE_STORE_ROOTS": str(folder.absolute()),
        "SWATHE_KERNEL_CACHE": spec["cache_folder"],
        "SWATHE_LOG_FORMAT": "json",
        "SWATHE_DRAIN_S": "8",
    }


def run_swathe(command: list[str], environment: dict[str, str]) -> str:
    """Run a command of the producer; what it printed."""
    full = [sys.executable, "-m", "producer.cli", *command]
    return subprocess.run(
        full, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@contextlib.contextmanager
def _workers(
    spec: dict[str, Any], environment: dict[str, str], log_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "worker.cli", "--devices", spec["devices"]]
    with log_path.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(
    store: LocalStore,
    run_spec: RunSpec,
    spec: dict[str, Any],
    log_path: Path,
    workers: subprocess.Popen[bytes],
) -> tuple[Watched, float]:
    watched, loaded = Watched(store, run_spec, rolling=spec["rolling"]), 0.0
    end = time.time() + _START_BOUND_S
    while time.time() < end and not watched.complete:
        if workers.poll() is not None:
            msg = f"the workers ended with {workers.returncode}:\n{log_path.read_text()[-4000:]}"
            raise RuntimeError(msg)
        if not loaded:
            loaded = max(_loads(log_path), default=0.0)
            end = loaded + spec["seconds"] if loaded else end
        watched.look()
        time.sleep(_LOOK_EVERY_S)
    return watched, loaded


def _loads(log_path: Path) -> list[float]:
    """When each worker's weights were on its device."""
    return [event["at"] for event in _events(log_path) if event["event"] == "model loaded"]


def _events(log_path: Path) -> Iterator[dict[str, Any]]:
    for line in log_path.read_text(errors="replace").splitlines():
        if line.startswith("{") and line.endswith("}"):
            event = json.loads(line)
            yield event | {"at": datetime.fromisoformat(event["timestamp"]).timestamp()}


def _padding(url: str) -> float | None:
    connection = connect(url)
    try:
        told = [
            json.loads(connection.get(key) or b"{}")
            for key in connection.keys(names.worker_key("*"))
        ]
    finally:
        connection.close()
    tokens = sum(one.get("tokens", 0) for one in told)
    return sum(one.get("padding_tokens", 0) for one in told) / tokens if tokens else None


def _phases(
    watched: Watched, loaded: float, spec: dict[str, Any]
) -> Iterator[tuple[str, float, float]]:
    if not watched.at:
        msg = "no range was finished"
        raise RuntimeError(msg)
    last = watched.at[-1]
    yield "first", loaded, min(loaded + spec["first_s"], last)
    ready = max(watched.at[0], loaded) + min(_STEADY_AFTER_S, (last - watched.at[0]) / 3)
    start = max(at for at in watched.at if at <= ready)
    if last > start:
        yield "steady", start, last


def lengths_of(store: LocalStore, run_spec: RunSpec, found: list[RangeRecord]) -> list[int]:
    """Tokens of every sample of some ranges."""
    reader = TokenReader(store, run_spec)
    lengths: list[int] = []
    for record in found:
        offsets = reader.read_range(RangeId(record.range_id)).offsets
        lengths += (offsets[1:] - offsets[:-1]).tolist()
    return lengths


def _detail(
    found: list[RangeRecord], loaded: float, watched: Watched, spec: dict[str, Any]
) -> dict[str, Any]:
    stages = sorted({name for record in found for name in record.stage_seconds})
    return {
        "sink": "rolling: shards deleted after their record" if spec["rolling"] else "kept",
        "file_system": spec["file_system"],
        "first_range_s": round(watched.at[0] - loaded, 2),
        "ranges": len(found),
        "forward_us_per_token": _spread(
            [1e6 * r.stage_seconds["forward"] / r.tokens for r in found if r.tokens]
        ),
        "stage_seconds": {
            stage: round(sum(r.stage_seconds.get(stage, 0.0) for r in found), 2) for stage in stages
        },
        "kernels": dict(found[0].kernels) if found else {},
    }


def _spread(values: list[float]) -> list[float]:
    """Smallest, median and largest."""
    ordered = sorted(values)
    picked = (ordered[0], ordered[len(ordered) // 2], ordered[-1]) if ordered else ()
    return [round(value, 2) for value in picked]
