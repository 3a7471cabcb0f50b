"""Reading a run, shuffled, against raw reads of the same bytes and one file per sample; exporters and verify too.

The run is in the shape of Qwen3.6-27B with six slots (5120 channels, bfloat16: 61,440 bytes a token), 335 tokens a sample in the
mean, lengths even from 3 to 666. Every row ends with a sample's states in the same buffer, so that no way of reading gets
by without touching the bytes; the order is the same shuffled one. ``cold`` asks the kernel to forget the files before
each turn, ``warm`` reads what it holds. Turns alternate, and a ratio is the median of the turns' ratios: the machine's mood
falls on all alike. For S3 see ``bench.reader_s3``.

    python -m bench.reader [--samples N] [--turns N] [--folder DIR]
"""

import argparse
import gc
import json
import os
import pickle
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from bench.plan import cpu_model
from producer.provenance import git_revision, versions
from producer.verify import verify
from swathe import HiddenStates, codec
from swathe.export import ExportOptions, export
from swathe.reader import collate_packed
from swathe.reader.shards import STATES
from swathe.store.local import LocalStore
from tests.support.runs import Recipe, length_of, make_run

RESULTS: Final = Path(__file__).parent / "results"
HIDDEN: Final = 5120
LAYERS: Final = (1, 16, 31, 46, 61, "final")
LONGEST: Final = 667
TOKEN_BYTES: Final = HIDDEN * len(LAYERS) * 2
Read = Callable[[], Iterator[torch.Tensor]]


def make(folder: Path, samples: int) -> HiddenStates:
    """A sealed run of random states."""
    noise = torch.randn(LONGEST, len(LAYERS), HIDDEN).bfloat16()
    recipe = Recipe(
        samples=samples,
        layers=LAYERS,
        hidden=HIDDEN,
        num_layers=64,
        vocab=1000,
        longest=LONGEST,
        range_tokens=8192,
        rejected=(),
        states=lambda row: noise[: length_of(row, recipe)],
    )
    make_run(folder, recipe)
    return HiddenStates(folder)


class Bench:
    """Times ways of reading the same samples in the same order."""

    def __init__(self, dataset: HiddenStates) -> None:
        self.dataset = dataset
        self.order = dataset.stream(seed=1).order().tolist()
        self.size_bytes = int(dataset.lengths.sum()) * TOKEN_BYTES
        self.buffer = torch.empty(LONGEST, len(LAYERS), HIDDEN, dtype=torch.bfloat16)

    def seconds(self, read: Read, cold: list[Path]) -> float:
        """How long one pass takes; ``cold`` files are forgotten first."""
        # What is mapped cannot be forgotten: each pass opens the files anew.
        self.dataset = pickle.loads(pickle.dumps(self.dataset))  # noqa: S301
        gc.collect()
        for path in cold:
            forget(path)
        started_s, tokens = time.perf_counter(), 0
        for states in read():
            flat = states.view(-1, len(LAYERS), HIDDEN)
            for first in range(0, len(flat), LONGEST):
                part = flat[first : first + LONGEST]
                if part.data_ptr() != self.buffer.data_ptr():
                    self.buffer[: len(part)].copy_(part)
            tokens += len(flat)
        assert tokens * TOKEN_BYTES == self.size_bytes
        return time.perf_counter() - started_s

    def raw(self) -> Iterator[torch.Tensor]:
        """Each sample's bytes by pread, no more: what the disk and the kernel can do."""
        target = self.buffer.view(-1).view(torch.uint8).numpy().data
        files: dict[int, tuple[int, int]] = {}
        for index in self.order:
            shard, first, stop = self.dataset._place(index)  # noqa: SLF001 - a bench may
            number = int(self.dataset.shard_of[index])
            if number not in files:
                store = self.dataset.store
                header = codec.read_header(partial(store.read_range, shard.key), origin=shard.key)
                path = store.local_path(shard.key)
                files[number] = os.open(str(path), os.O_RDONLY), header.tensors[STATES].offset
            descriptor, start = files[number]
            size, offset = (stop - first) * TOKEN_BYTES, start + first * TOKEN_BYTES
            done = 0
            while done < size:
                done += os.preadv(descriptor, [target[done:size]], offset + done)
            yield self.buffer[: stop - first]
        for descriptor, _ in files.values():
            os.close(descriptor)

    def stream(self) -> Iterator[torch.Tensor]:
        """The iterable reader."""
        return (sample["hidden_states"] for sample in self.dataset.stream(seed=1))

    def mapped(self) -> Iterator[torch.Tensor]:
        """The map-style reader."""
        return (self.dataset[index]["hidden_states"] for index in self.order)

    def loader(self, workers: int) -> Iterator[torch.Tensor]:
        """Packed batches of four through a DataLoader."""
        stream = self.dataset.stream(seed=1, batch_size=4)
        loader = DataLoader(stream, batch_size=4, num_workers=workers, collate_fn=collate_packed)
        return (batch["hidden_states"] for batch in loader)

    def safetensors_files(self, folder: Path) -> Iterator[torch.Tensor]:
        """One safetensors file per sample, as speculators reads them."""
        for index in self.order:
            yield load_file(folder / "hidden_states" / f"hs_{index}.safetensors")["hidden_states"]

    def torch_files(self, folder: Path) -> Iterator[torch.Tensor]:
        """One torch.save file per sample, as ModelOpt reads them (final state apart: joined, as there)."""
        for index in self.order:
            file = torch.load(folder / "rows_0-2000" / f"data_{index}.pt", weights_only=True)
            parts = [file["aux_hidden_states"], file["hidden_states"]]
            yield torch.cat(parts, dim=-1)


def forget(path: Path) -> None:
    """Ask the kernel to drop what it holds of a file; it must be on the disk first."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def row(bench: Bench, name: str, times: list[float], raw: list[float] | None) -> dict[str, Any]:
    """One line of the result."""
    median = statistics.median(times)
    found: dict[str, Any] = {
        "name": name,
        "samples_s": round(len(bench.order) / median, 1),
        "mb_s": round(bench.size_bytes / median / 1e6, 1),
        "seconds": round(median, 3),
    }
    if raw is not None:
        ratios = [base / mine for base, mine in zip(raw, times, strict=True)]
        found["ratio_to_raw"] = round(statistics.median(ratios), 3)
    return found


def reading(bench: Bench, exports: Path, turns: int) -> list[dict[str, Any]]:
    """All local ways, cold and warm, in turns."""
    run_files = sorted(Path(bench.dataset.url).glob("states/*.safetensors"))
    hs, pt = exports / "speculators", exports / "modelopt"
    ways: dict[str, tuple[Read, list[Path]]] = {
        "raw_pread": (bench.raw, run_files),
        "stream": (bench.stream, run_files),
        "map_style": (bench.mapped, run_files),
        "stream_loader_2_workers": (lambda: bench.loader(2), run_files),
        "file_per_sample_safetensors": (
            lambda: bench.safetensors_files(hs),
            sorted(hs.glob("hidden_states/*")),
        ),
        "file_per_sample_torch": (lambda: bench.torch_files(pt), sorted(pt.glob("rows_*/*"))),
    }
    rows = []
    for state in ("cold", "warm"):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, (read, files) in ways.items():
                if state == "warm":
                    for path in files:
                        with path.open("rb") as file:
                            while file.read(16 << 20):
                                pass
                times[name].append(bench.seconds(read, files if state == "cold" else []))
        for name in ways:
            base = None if name == "raw_pread" else times["raw_pread"]
            rows.append(row(bench, f"{name}_{state}", times[name], base))
    return rows


def verifying(bench: Bench, turns: int) -> list[dict[str, Any]]:
    """``swathe verify``, quick and full, against reading every shard once from its first byte to its last."""
    run = Path(bench.dataset.url)
    shards = sorted(run.glob("states/*.safetensors"))
    block = bytearray(16 << 20)

    def raw() -> None:
        for path in shards:
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass

    def verified(*, full: bool) -> None:
        assert verify(LocalStore(run), full=full).ok

    ways: dict[str, Callable[[], None]] = {
        "raw_sequential": raw,
        "verify_quick": partial(verified, full=False),
        "verify_full": partial(verified, full=True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            for path in shards:
                forget(path)
            started_s = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - started_s)
    base = times["raw_sequential"]
    return [row(bench, f"{name}_cold", times[name], base) for name in ways]


def exporting(run: str, exports: Path, size_bytes: int, samples: int) -> list[dict[str, Any]]:
    """Each exporter once; what it leaves is read afterwards."""
    rows = []
    for name, options in {
        "speculators": ExportOptions(format="speculators"),
        "modelopt": ExportOptions(format="modelopt", layers=(1, 16, 31, 46, 61)),
        "specforge_eagle3": ExportOptions(format="specforge", layers=(1, 31, 61)),
        "speculators_fp8": ExportOptions(format="speculators", fp8=True),
    }.items():
        report = export(run, exports / name, options)
        rows.append({
            "name": f"export_{name}",
            "samples_s": round(samples / report.seconds, 1),
            "mb_s": round(report.written_bytes / report.seconds / 1e6, 1),
            "read_mb_s": round(size_bytes / report.seconds / 1e6, 1),
            "seconds": round(report.seconds, 3),
        })  # fmt: skip
        if name in ("specforge_eagle3", "speculators_fp8"):
            shutil.rmtree(exports / name)
    return rows


def write_result(name: str, bench: Bench, turns: int, rows: list[dict[str, Any]]) -> None:
    """Write the JSON, print its rows."""
    samples = len(bench.order)
    result = {
        "bench": name,
        "device": f"{cpu_model()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions()},
        "git": git_revision(),
        "command": f"python -m bench.{name} --samples {samples} --turns {turns}",
        "load": round(os.getloadavg()[0], 1),
        "bytes": bench.size_bytes,
        "samples": samples,
        "mean_tokens": round(float(np.mean(bench.dataset.lengths)), 1),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    for line in rows:
        print(json.dumps(line))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description="Read a run, shuffled, against the raw limit.")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", help="where to put a few GB (default: the temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        dataset = make(folder / "run", options.samples)
        bench = Bench(dataset)
        exports = folder / "exports"
        rows = exporting(dataset.url, exports, bench.size_bytes, options.samples)
        os.sync()
        rows += verifying(bench, options.turns)
        rows += reading(bench, exports, options.turns)
    write_result("reader", bench, options.turns, rows)


if __name__ == "__main__":
    main()
