"""The story that ``bench.fleet`` tells: a fleet grows on one run, loses half of its devices on another, and finishes it."""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench import gpu
from bench.gauges import watching
from bench.product import Watched, environment_of, lengths_of, planned, run_swathe
from bench.result import Row, Strict
from bench.shapes import SHAPES
from producer.embedded import embedded_server
from swathe import names, stages
from swathe.parent import die_with_me
from swathe.queue import RangeQueue, connect, live_workers, requeued_counts
from swathe.records import RunWatcher
from swathe.spec import RangeId
from swathe.stages import Spent
from swathe.tokens import TokenReader

_LOOK_EVERY_S: Final = 0.1
_JOIN_BOUND_S: Final = 240.0
_HEARTBEATS_S: Final = 7.0
"""Two of a worker's, and some."""
_RANGES_BEFORE: Final = 3
"""A worker that has stored so many is past loading, warming up and its first, slower passes."""


class Kill(Strict):
    """What became of the ranges that the killed workers held."""

    workers: int
    ranges_held: int
    seconds_to_elsewhere: list[float]
    """Of each, until another worker held or had stored it; a survivor takes no more than it can have in flight."""
    median_s: float
    worst_s: float
    stored_before_death: int
    """Held when the kill was sent, and committed by its own worker all the same."""


class Accounting(Strict):
    """What the store says after the end, and what was told meanwhile."""

    rows: int
    stored: int
    rejected: int
    quarantined: int
    rows_twice: int
    rows_missing: int
    ranges: int
    ranges_by_worker: dict[str, int]
    samples_told: int
    """By the workers' own totals, the killed ones' as last heard: up to a heartbeat behind."""
    requeued: dict[str, int]
    verify: dict[str, Any]
    orphan_shards: int


@dataclass(slots=True)
class Instance:
    """Some devices that live and die together: one supervisor, or one for each CPU worker."""

    devices: list[int]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    workers: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a window begins: what the workers had told by then, and Redis (commands, CPU seconds, bytes)."""

    at: float
    told: dict[str, Mapping[str, Any]]
    redis: tuple[int, float, int]


class Story:
    """The run, the fleet that works on it, and what is seen of both."""

    kill: Kill
    accounting: Accounting

    def __init__(
        self, options: argparse.Namespace, folder: Path, cache: str, matmul_tflops: float
    ) -> None:
        self._options, self._folder, self._matmul_tflops = options, folder, matmul_tflops
        self._spec = {
            "model": options.model,
            "kernel_cache": "warm",
            "longest": options.longest,
            "range_tokens": options.range_tokens,
            "cache_folder": cache,
            "layers": SHAPES[options.model].layers[-options.slots :],
        }
        self._instances: list[Instance] = []
        self._told: dict[str, Mapping[str, Any]] = {}
        """The last that each worker said, the dead included."""
        self.rows: list[Row] = []

    def play(self) -> None:
        """From the plan to the accounting after the end."""
        options = self._options
        self._begin("scaling", samples=options.scaling_samples, rolling=True)
        with (
            embedded_server(self._folder / "state", self._run.run_id) as url,
            contextlib.closing(connect(url)) as self._redis,
            watching(options.gpus) as self._gauges,
            self._ending(),
        ):
            self._environment = environment_of(self._spec, self._folder, url)
            self._environment["SWATHE_LEASE_S"] = str(options.lease)
            self._environment["SWATHE_HEARTBEAT_S"] = str(options.lease / 5)
            run_swathe(["submit", self._store.url], self._environment)
            for devices in _instances(options.gpus):
                self._join(devices)
                self._window()
            run_swathe(["cancel", self._store.url], self._environment)
            told = self._samples_told()
            self._begin("story", samples=options.samples * options.gpus, rolling=False)
            run_swathe(["submit", self._store.url], self._environment)
            third = self._run.totals.ranges // 3
            self._until(
                lambda: len(self._watched.records) >= third, options.bound, "a third is stored"
            )
            since = self._mark()
            self._kill_last()
            self._until(lambda: self._watched.complete, options.bound, "the run is complete")
            self._measure("fleet, after the kill", since, self._watched.at[-1])
            self._account(told)

    def _begin(self, name: str, *, samples: int, rolling: bool) -> None:
        spec = {**self._spec, "name": name, "samples": samples}
        self._store, self._run = planned(spec, self._folder)
        self._watched = Watched(self._store, self._run, rolling=rolling)

    def _samples_told(self) -> int:
        """Sum of all workers' own totals, the dead ones' as last heard, once every live one has spoken again."""
        quiet_s = time.monotonic() + _HEARTBEATS_S
        self._until(lambda: time.monotonic() > quiet_s, 2 * _HEARTBEATS_S)
        self._live()
        return sum(int(said.get("samples", 0)) for said in self._told.values())

    @property
    def _size(self) -> int:
        return sum(len(one.devices) for one in self._instances)

    def _join(self, devices: list[int]) -> None:
        instance, others = Instance(devices), set(self._live())
        self._instances.append(instance)
        groups = [["cpu"]] * len(devices) if self._options.device == "cpu" else [devices]
        for group in groups:
            number = sum(len(one.processes) for one in self._instances)
            environment = {
                **self._environment,
                "SWATHE_METRICS_ADDRESS": f"127.0.0.1:{_free_port()}",
            }
            command = [
                *(sys.executable, "-m", "worker.cli", "--devices", ",".join(map(str, group))),
            ]
            with (self._folder / f"instance-{number}.log").open("wb") as output:
                instance.processes.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        stdout=output,
                        stderr=output,
                        preexec_fn=die_with_me(),  # noqa: PLW1509 - no lock is taken there
                    )
                )
        started = time.monotonic()
        self._until(self._all_are_busy, _JOIN_BOUND_S, f"{self._size} devices work")
        instance.workers = set(self._live()) - others
        _say(f"{self._size} devices work after {time.monotonic() - started:.1f} s")

    def _all_are_busy(self) -> bool:
        ranges = self._ranges_by_worker()
        busy = [name for name in self._live() if ranges.get(name, 0) >= _RANGES_BEFORE]
        return len(busy) >= self._size

    def _mark(self) -> Mark:
        return Mark(at=time.time(), told=self._live(), redis=self._redis_totals())

    def _window(self) -> None:
        """A row of the whole fleet, for a while from now on."""
        since = self._mark()
        end = since.at + max(self._options.seconds, _HEARTBEATS_S)
        self._until(lambda: time.time() >= end, self._options.bound, "the window's end")
        if self._watched.complete:
            msg = f"the run ended while {self._size} devices were measured: plan more --scaling-samples"
            raise RuntimeError(msg)
        self._measure("fleet", since, time.time())

    def _measure(self, name: str, since: Mark, stop: float) -> None:
        # The workers' last word is up to a heartbeat old, at both ends.
        now, start = self._mark(), since.at
        before, after, redis_before, redis_after = since.told, now.told, since.redis, now.redis
        found = self._watched.between(start, stop)
        spent = Spent.of(_spent(after[name]).since(_spent(before.get(name, {}))) for name in after)
        lengths = lengths_of(self._store, self._run, found)
        seconds = stop - start
        flops = gpu.flops(self._options.model, lengths, depth=max(self._spec["layers"]) + 1)
        self.rows.append(
            Row(
                name=name,
                model=self._options.model,
                phase="steady",
                seconds=round(seconds, 2),
                samples_s=round(len(lengths) / seconds, 3),
                tokens_s=round(sum(lengths) / seconds, 1),
                useful_tflops=round(flops / seconds / 1e12, 4),
                useful_mfu=round(flops / seconds / 1e12 / self._matmul_tflops / self._size, 4),
                gpu_busy=round(
                    sum(r.stage_seconds["forward"] for r in found) / seconds / self._size, 4
                ),
                written_bytes_s=round(sum(r.size_bytes for r in found) / seconds),
                gpus=self._size,
                detail={
                    "limited_by": stages.WORDS[limit] if (limit := stages.limiting(spent)) else "",
                    "shares": {k: round(v, 4) for k, v in stages.shares(spent).items()},
                    "ranges": len(found),
                    "redis": {
                        "commands_s": round((redis_after[0] - redis_before[0]) / seconds, 1),
                        "cpu_share": round((redis_after[1] - redis_before[1]) / seconds, 5),
                        "memory_bytes": redis_after[2],
                    },
                    "slots": self._options.slots,
                },
                **self._gauges.between(start, stop, self._size),
            )
        )
        _say(self.rows[-1].model_dump_json())

    def _kill_last(self) -> None:
        victim = self._instances.pop()
        survivors = self._size
        owners = self._owners()
        dead = victim.workers
        held = {range_id: name for range_id, name in owners.items() if name in dead}
        sent = time.time()
        for process in victim.processes:
            os.kill(process.pid, signal.SIGKILL)
        _say(
            f"killed {len(victim.devices)} of {survivors + len(victim.devices)} devices with {len(held)} ranges held"
        )
        elsewhere: dict[RangeId, float] = {}
        own: set[RangeId] = set()

        def all_elsewhere() -> bool:
            now, owners = time.time() - sent, self._owners()
            records = self._watched.records
            for range_id in held.keys() - elsewhere.keys() - own:
                if range_id in records:
                    if records[range_id].worker in dead:
                        own.add(range_id)
                        continue
                elif owners.get(range_id, held[range_id]) in dead:
                    continue
                elsewhere[range_id] = round(now, 2)
            return len(elsewhere) + len(own) == len(held)

        self._until(all_elsewhere, 4 * self._options.lease + 60, "the ranges run elsewhere")
        for process in victim.processes:
            process.wait(10)
        times = sorted(elsewhere.values())
        self.kill = Kill(
            workers=len(victim.devices),
            ranges_held=len(held),
            seconds_to_elsewhere=times,
            median_s=statistics.median(times) if times else 0.0,
            worst_s=max(times, default=0.0),
            stored_before_death=len(own),
        )
        _say(str(self.kill))

    def _account(self, told_before: int) -> None:
        # Whoever sees the last record seals; the worker may still be at it.
        self._until(lambda: self._store.stat(names.MANIFEST) is not None, 60, "the run is sealed")
        verified = json.loads(
            run_swathe(["verify", self._store.url, "--full", "--json"], self._environment)
        )
        state = RunWatcher(self._store, self._run).read()
        reader = TokenReader(self._store, self._run)
        seen: dict[int, int] = {}
        shards = set()
        for range_id, record in self._watched.records.items():
            bad = {sample.row for sample in record.quarantined}
            for row in reader.read_range(range_id).rows.tolist():
                if row not in bad:
                    seen[row] = seen.get(row, 0) + 1
            shards.add(record.shard)
        found = {info.key for info in self._store.list(names.STATES)}
        lying = {key for key in found if key.endswith(".safetensors")}
        totals = self._run.totals
        self.accounting = Accounting(
            rows=totals.rows,
            stored=state.stored_samples,
            rejected=totals.rejected,
            quarantined=state.quarantined_samples,
            rows_twice=sum(times > 1 for times in seen.values()),
            rows_missing=totals.rows - totals.rejected - len(seen) - state.quarantined_samples,
            ranges=len(self._watched.records),
            ranges_by_worker=self._ranges_by_worker(),
            samples_told=self._samples_told() - told_before,
            requeued=requeued_counts(self._redis),
            verify=verified,
            orphan_shards=len(lying - shards),
        )

    def _live(self) -> dict[str, Mapping[str, Any]]:
        found = live_workers(self._redis)
        self._told |= found
        return {name: said for name, said in found.items() if not self._is_dead(name)}

    def _is_dead(self, name: str) -> bool:
        """A killed worker's word outlives it by some seconds."""
        return name in self._told and not any(
            name in one.workers or not one.workers for one in self._instances
        )

    def _owners(self) -> dict[RangeId, str]:
        """Which worker holds each range that is held."""
        queue = RangeQueue.of_model(self._redis, self._run.model.key)
        held = sorted(queue.known_ranges(self._run.run_id).running)
        with self._redis.pipeline(transaction=False) as pipe:
            for range_id in held:
                pipe.hget(f"rq:job:{names.job(self._run.run_id, range_id)}", "worker_name")
            said = pipe.execute()
        return {range_id: name.decode() for range_id, name in zip(held, said, strict=True) if name}

    def _ranges_by_worker(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for record in self._watched.records.values():
            counts[record.worker] = counts.get(record.worker, 0) + 1
        return counts

    def _redis_totals(self) -> tuple[int, float, int]:
        """Commands so far, CPU seconds so far, bytes in use."""
        info: Any = self._redis.info()
        cpu_s = info["used_cpu_sys"] + info["used_cpu_user"]
        return info["total_commands_processed"], cpu_s, info["used_memory"]

    def _until(self, done: Callable[[], bool], bound_s: float, what: str = "") -> None:
        """Look at the run until something is so. Raises RuntimeError after ``bound_s`` or when workers end."""
        end = time.monotonic() + bound_s
        while not done():
            self._watched.look()
            for instance in self._instances:
                for process in instance.processes:
                    if process.poll() is not None:
                        msg = f"a supervisor ended with {process.returncode}"
                        raise RuntimeError(msg)
            if time.monotonic() > end:
                msg = f"not within {bound_s:.0f} s: {what}"
                raise RuntimeError(msg)
            time.sleep(_LOOK_EVERY_S)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Stop what still runs, whatever happened."""
        try:
            yield
        finally:
            left = [process for one in self._instances for process in one.processes]
            for process in left:
                process.send_signal(signal.SIGTERM)
            for process in left:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _instances(devices: int) -> list[list[int]]:
    """Devices of instances that double the fleet: [0], [1], [2, 3], [4, 5, 6, 7]."""
    found, first = [], 0
    while first < devices:
        stop = min(devices, max(1, 2 * first))
        found.append(list(range(first, stop)))
        first = stop
    return found


def _spent(said: Mapping[str, Any]) -> Spent:
    return Spent(states=said.get("state_seconds") or {}, stages=said.get("stage_seconds") or {})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _say(text: str) -> None:
    print(text, flush=True)
