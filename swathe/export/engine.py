"""The export loop: what is missing, in the order it lies on the disk, through a few threads.

Reading a sample is a view of a mapped file, so an export costs one read and one write of its bytes and a few samples of
memory per thread.
"""

import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash

from swathe.errors import ConfigError, NoSpaceError
from swathe.export.files import write_json
from swathe.export.formats import FormatWriter, open_format, sample_bytes
from swathe.export.options import ExportOptions, ExportProgress, ExportReport, OnProgress
from swathe.export.readme import readme
from swathe.reader import HiddenStates
from swathe.reader.dataset import shard_order

MARKER: Final = "swathe-export.json"
_AHEAD: Final = 4
"""Samples in flight per thread."""


def run_export(
    run: str | Path, dest: Path, options: ExportOptions, progress: OnProgress
) -> ExportReport:
    """See ``swathe.export.export``."""
    options.check()
    started = time.monotonic()
    dataset = HiddenStates(run)
    writer = open_format(dataset, options)
    total = len(writer.adapter)
    if total == 0:
        msg = f"{run}: no stored sample can be used by {writer.adapter.needs.trainer}"
        raise ConfigError(msg)
    dest.mkdir(parents=True, exist_ok=True)
    with _claimed(dest, writer, options) as marker:
        todo, needed = _missing(writer, dest)
        _require_space(dest, needed)
        found = total - len(todo)
        written = _write_samples(writer, dest, todo, options.workers, progress)
        written += writer.finish(dest)
        (dest / "README.md").write_text(readme(writer.adapter, options, dataset), encoding="utf-8")
        os.sync()
        write_json(dest / MARKER, marker | {"complete": True})
    return ExportReport(
        dest=dest,
        samples=total,
        found=found,
        left_out=len(dataset) - total,
        written_bytes=written,
        seconds=time.monotonic() - started,
    )


def _write_samples(
    writer: FormatWriter, dest: Path, todo: list[int], workers: int, progress: OnProgress
) -> int:
    total = len(writer.adapter)
    done, written = total - len(todo), 0
    for folder in {(dest / writer.path(index)).parent for index in todo}:
        folder.mkdir(parents=True, exist_ok=True)
    queue: deque[Future[int]] = deque()
    ahead = iter(todo)
    with ThreadPoolExecutor(workers, "export") as pool:
        try:
            while True:
                while len(queue) < workers * _AHEAD and (index := next(ahead, None)) is not None:
                    queue.append(pool.submit(writer.write, index, dest / writer.path(index)))
                if not queue:
                    return written
                written += queue.popleft().result()
                done += 1
                progress(ExportProgress(done=done, total=total, written_bytes=written))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _missing(writer: FormatWriter, dest: Path) -> tuple[list[int], int]:
    """Samples whose file is missing or too short, as they lie on the disk, and the bytes that they need."""
    adapter = writer.adapter
    sizes = sample_bytes(adapter)
    order = shard_order(adapter.dataset)
    place_of = np.full(len(adapter.dataset), -1)
    place_of[adapter.members] = np.arange(len(adapter))
    todo, needed = [], 0
    for index in place_of[order].tolist():
        if index >= 0 and _size(dest / writer.path(index)) < sizes[index]:
            todo.append(index)
            needed += int(sizes[index])
    return todo, needed


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def _require_space(dest: Path, needed: int) -> None:
    free = shutil.disk_usage(dest).free
    if needed > free:
        msg = (
            f"{dest}: {needed / 1e9:.1f} GB are to be written and {free / 1e9:.1f} GB are free; nothing was written. "
            "Export to a larger disk, fewer layers or fp8, or train on the run itself with swathe.adapters"
        )
        raise NoSpaceError(msg)


@contextmanager
def _claimed(dest: Path, writer: FormatWriter, options: ExportOptions) -> Iterator[dict[str, Any]]:
    """Hold the folder alone, and refuse one that holds anything but this same export."""
    spec = writer.adapter.spec
    marker: dict[str, Any] = {
        "run_id": spec.run_id,
        "fingerprint": spec.fingerprint,
        "options": _remembered(options),
        "trainer_layer_ids": writer.adapter.trainer_ids,
        "samples": len(writer.adapter),
        "rows_xxh3": xxhash.xxh3_128_hexdigest(writer.adapter.dataset.rows[writer.adapter.members]),
        "shards": {str(k): key for k, key in writer.adapter.dataset.shard_keys.items()},
        "complete": False,
    }
    descriptor = os.open(dest, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = f"{dest}: another process exports into this folder; wait for it or choose another"
            raise ConfigError(msg) from error
        held = _require_same(dest, marker)
        _forget_changed(dest, writer, held, marker)
        write_json(dest / MARKER, marker)
        yield marker
    finally:
        os.close(descriptor)


def _require_same(dest: Path, marker: dict[str, Any]) -> dict[str, Any]:
    """The marker of an earlier call, or this one's. Raises ConfigError for a folder that holds anything else."""
    path = dest / MARKER
    if not path.exists():
        if any(dest.iterdir()):
            msg = f"{dest}: not empty and not an export of swathe; choose another folder"
            raise ConfigError(msg)
        return marker
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    may_differ = ("shards", "complete")
    differing = [key for key in marker if key not in may_differ and held.get(key) != marker[key]]
    if differing:
        msg = (
            f"{dest}: holds another export ({', '.join(differing)} differ); choose another folder, "
            "or remove this one first"
        )
        raise ConfigError(msg)
    return held


def _forget_changed(
    dest: Path, writer: FormatWriter, held: dict[str, Any], marker: dict[str, Any]
) -> None:
    """Remove the samples of ranges that were done again since (``swathe verify --repair``): their states were damaged."""
    before = held.get("shards", marker["shards"])
    changed = [int(k) for k, key in marker["shards"].items() if before.get(k) != key]
    adapter = writer.adapter
    for index in np.flatnonzero(np.isin(adapter.dataset.shard_of[adapter.members], changed)):
        (dest / writer.path(int(index))).unlink(missing_ok=True)


def _remembered(options: ExportOptions) -> dict[str, Any]:
    value = dataclasses.asdict(options)
    del value["workers"]
    value["layers"] = list(options.layers) if options.layers is not None else None
    return value
