"""``swathe doctor``: what this node has, and whether it can work.

Devices and rates come from a process of the worker's package, because this one never loads torch.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from producer.display import duration_text, size_text
from swathe import queue
from swathe.errors import RefusedJobError, SwatheError
from swathe.records import RunWatcher, open_run
from swathe.settings import Settings, read_settings
from swathe.store import open_store

_PROBE_BYTES: Final = 256 << 20
_WORKER_TIMEOUT_S: Final = 300.0
_SMALL_SHM_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Facts by topic; ``problems`` keep the node from working, ``warnings`` do not."""

    facts: dict[str, Any]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def doctor_command(
    run: Annotated[str | None, typer.Argument(help="Also estimate this run on this node.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what this node has and whether it can work; 1 with reasons when it cannot."""
    found = examine(read_settings(), run)
    if json_:
        print(
            json.dumps(
                {**found.facts, "problems": found.problems, "warnings": found.warnings}, indent=1
            )
        )
    else:
        for line in _lines(found):
            print(line)
    if found.problems:
        raise typer.Exit(1)


def examine(settings: Settings, run: str | None) -> Diagnosis:
    """Look at devices, software, host, Redis and stores."""
    facts: dict[str, Any] = {"host": _host(settings.state_dir)}
    problems: list[str] = []
    warnings: list[str] = []
    _devices(facts, problems, warnings)
    _redis(settings, facts, problems, warnings)
    _roots(settings, run, warnings)
    for root in dict.fromkeys([*settings.store_roots, *([run] if run else [])]):
        facts.setdefault("stores", {})[root] = _store(root, problems)
    if run is not None:
        facts["run"] = _estimate(run, facts, problems)
    shm = facts["host"]["shm_bytes"]
    if shm is not None and shm < _SMALL_SHM_BYTES:
        warnings.append(
            f"/dev/shm has {size_text(shm)}: DataLoader workers may need more (docker: shm_size)"  # noqa: S108
        )
    return Diagnosis(facts=facts, problems=tuple(problems), warnings=tuple(warnings))


def _host(state_dir: Path) -> dict[str, Any]:
    folder = state_dir
    while not folder.exists():
        folder = folder.parent
    shm = Path("/dev/shm")  # noqa: S108 - looked at, not written to
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        # Some machines show little at first and grow as memory is used: a fact, not a limit.
        "memory_bytes_now": pages * page_bytes,
        "memory_limit_bytes": _memory_limit(),
        "state_dir_free_bytes": shutil.disk_usage(folder).free,
        "shm_bytes": shutil.disk_usage(shm).total if shm.exists() else None,
    }


def _memory_limit() -> int | None:
    path = Path("/sys/fs/cgroup/memory.max")
    text = path.read_text().strip() if path.exists() else "max"
    return int(text) if text.isdecimal() else None


def _devices(facts: dict[str, Any], problems: list[str], warnings: list[str]) -> None:
    command = [sys.executable, "-P", "-m", "worker.cli", "doctor"]
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_WORKER_TIMEOUT_S
        )
        said = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        stderr = (getattr(error, "stderr", "") or "").strip().splitlines()
        problems.append(f"no worker can start here: {stderr[-1] if stderr else error}")
        return
    facts["software"], facts["devices"] = said["software"], said["devices"]
    warnings += said["problems"]
    for device in said["devices"]:
        problems += [f"{device['uuid']}: {problem}" for problem in device["problems"]]
    if all(device["uuid"] == "cpu" for device in said["devices"]):
        warnings.append("no GPU is visible: workers would run on the CPU, good for rehearsals only")


def _redis(
    settings: Settings, facts: dict[str, Any], problems: list[str], warnings: list[str]
) -> None:
    if settings.redis_url is None:
        warnings.append(
            "REDIS_URL is not set: only swathe run, with its embedded server, works here"
        )
        return
    facts["redis"] = {"address": queue.describe(settings.redis_url)}
    try:
        connection = queue.connect(settings.redis_url, retries=1)
        # A queue that can vanish silently is no place for a fleet's work.
        problems += queue.policy_warnings(connection)
        facts["redis"]["workers"] = len(queue.live_workers(connection))
    except SwatheError as error:
        problems.append(str(error))


def _roots(settings: Settings, run: str | None, warnings: list[str]) -> None:
    """Whether a worker started here may open the run, or any."""
    if settings.redis_url is None:
        return
    if not settings.store_roots:
        warnings.append("SWATHE_STORE_ROOTS is not set: swathe-worker does not start without it")
    elif run is not None:
        url = open_store(run).url
        try:
            queue.allowed_run_url(run, url, settings.store_roots)
        except RefusedJobError:
            roots = ", ".join(settings.store_roots)
            warnings.append(
                f"{url} is outside SWATHE_STORE_ROOTS ({roots}): workers here refuse it"
            )


def _store(root: str, problems: list[str]) -> dict[str, Any]:
    """Write, read back and delete an object of a shard's kind of size; nothing else is touched."""
    store, key = open_store(root), f"doctor-{secrets.token_hex(6)}"
    block = os.urandom(1 << 20)
    try:
        started = time.monotonic()
        written = store.write(key, [block] * (_PROBE_BYTES >> 20))
        write_s = time.monotonic() - started
        same = store.read_range(key, 1 << 20, 1 << 20) == block
        exclusive = not store.create(key, b"")
        store.delete(key)
    except SwatheError as error:
        problems.append(f"{root}: {error}")
        return {"works": False}
    if not same or not exclusive:
        problems.append(
            f"{root}: what was written is not what is read, or a taken name can be taken again"
        )
    return {
        "works": same and exclusive,
        "write_bytes_s": written.size_bytes / write_s,
        "free_bytes": store.free_bytes(),
    }


def _estimate(run: str, facts: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """How long a run's rest takes here at the matrix rate measured, and whether it fits."""
    store, spec = open_run(run)
    state = RunWatcher(store, spec).read()
    left = spec.totals.tokens - state.stored_tokens
    left_bytes = left * spec.bytes_per_token
    free = store.free_bytes()
    if free is not None and left_bytes > free:
        problems.append(
            f"{run}: {size_text(left_bytes)} are still to come, {size_text(free)} are free"
        )
    weight_bytes = sum(file.size_bytes for file in spec.model.weights)
    item_bytes = {"float32": 4}.get(spec.model.checkpoint_dtype, 2)
    depth = max(
        spec.model.num_layers if slot.layer == "final" else slot.layer + 1 for slot in spec.layers
    )
    flops = 2 * weight_bytes / item_bytes * depth / spec.model.num_layers * left
    rate = sum(device["matmul_flops"] or 0 for device in facts.get("devices", []))
    return {
        "tokens_left": left,
        "bytes_left": left_bytes,
        "seconds_at_70_percent": flops / rate / 0.7 if rate and weight_bytes else None,
    }


def _lines(found: Diagnosis) -> list[str]:
    facts = found.facts
    host = facts["host"]
    lines = [
        (
            f"host      {host['cpus']} CPUs, {size_text(host['memory_bytes_now'])} memory now, "
            f"{size_text(host['state_dir_free_bytes'])} free for state"
        )
    ]
    for device in facts.get("devices", []):
        lines.append(f"device    {device['uuid']}  {device['name']}")
        if device["memory_free_bytes"] is not None:
            lines.append(
                f"          {size_text(device['memory_free_bytes'])} of {size_text(device['memory_total_bytes'])} "
                f"free, compute capability {device['capability']}"
            )
        if device["matmul_flops"] is not None:
            lines.append(
                f"          {device['matmul_flops'] / 1e12:.2f} TFLOP/s in matrix products, "
                f"{size_text(device['host_copy_bytes_s'] or 0)}/s to the host, attention: {device['attention']}"
            )
    if "software" in facts:
        versions = ", ".join(
            f"{name} {found}" for name, found in facts["software"].items() if found
        )
        lines.append(f"software  {versions}")
    if "redis" in facts:
        lines.append(
            f"redis     {facts['redis']['address']}, {facts['redis'].get('workers', 0)} workers"
        )
    for root, store in facts.get("stores", {}).items():
        rate = (
            f"writes {size_text(store['write_bytes_s'])}/s" if store["works"] else "does not work"
        )
        free = f", {size_text(store['free_bytes'])} free" if store.get("free_bytes") else ""
        lines.append(f"store     {root}: {rate}{free}")
    if "run" in facts:
        seconds = facts["run"]["seconds_at_70_percent"]
        time_text = (
            f", about {duration_text(seconds)} here at 70 % of the matrix rate" if seconds else ""
        )
        lines.append(
            f"run       {facts['run']['tokens_left']:,} tokens and {size_text(facts['run']['bytes_left'])} "
            f"to come{time_text}"
        )
    lines += [f"warning   {text}" for text in found.warnings]
    lines += [f"PROBLEM   {text}" for text in found.problems]
    return [*lines, "this node can work" if not found.problems else "this node cannot work"]
