"""Random samples of a run under s3://, by ranged GETs, against plain boto3 asking for the same ranges.

The run of ``bench.reader``, in a SeaweedFS server on loopback that shares cores and disk; the same shuffled order; every
sample's states end in the same buffer. ``ds[i]`` asks for one sample after the other and stands against boto3 doing that,
``ds.stream()`` has eight requests on the way and stands against eight threads of boto3. Turns alternate, and a ratio is the
median of the turns' ratios. Header and small tensors of a shard are part of our times, not of the raw ones.

    python -m bench.reader_s3 [--samples N] [--turns N] [--folder DIR]
"""

import argparse
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from bench.reader import LAYERS, TOKEN_BYTES, Bench, Read, make, row, write_result
from swathe import HiddenStates, codec
from swathe.reader.shards import STATES
from swathe.settings import S3Settings
from swathe.store.s3 import S3Store
from tests.support import s3_server

AT_ONCE: Final = 8
"""As many as ``ds.stream()`` has on the way."""


class Plain:
    """The same ranges through boto3 alone."""

    def __init__(self, bench: Bench, client: Any) -> None:
        self._bench = bench
        self._client = client
        dataset, starts = bench.dataset, dict[str, int]()
        self._ranges = []
        for index in bench.order:
            shard, first, stop = dataset._place(index)  # noqa: SLF001 - a bench may
            if shard.key not in starts:
                read = partial(dataset.store.read_range, shard.key)
                header = codec.read_header(read, origin=shard.key)
                starts[shard.key] = header.tensors[STATES].offset
            at = starts[shard.key] + first * TOKEN_BYTES
            self._ranges.append((shard.key, at, (stop - first) * TOKEN_BYTES))

    def one_by_one(self) -> Iterator[torch.Tensor]:
        """One request at a time."""
        return map(self._get, self._ranges)

    def eight_at_once(self) -> Iterator[torch.Tensor]:
        """Threads that run ahead, answers in order."""
        queue: deque[Future[torch.Tensor]] = deque()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for wanted in self._ranges:
                queue.append(pool.submit(self._get, wanted))
                if len(queue) == AT_ONCE:
                    yield queue.popleft().result()
            yield from (future.result() for future in queue)

    def _get(self, wanted: tuple[str, int, int]) -> torch.Tensor:
        key, at, size_bytes = wanted
        answer = self._client.get_object(
            Bucket=s3_server.BUCKET, Key=f"run/{key}", Range=f"bytes={at}-{at + size_bytes - 1}"
        )
        data = bytearray(answer["Body"].read())
        assert len(data) == size_bytes
        states = torch.frombuffer(data, dtype=torch.bfloat16)
        return states.view(-1, len(LAYERS), TOKEN_BYTES // 2 // len(LAYERS))


def measure(
    local: HiddenStates, folder: Path, endpoint_url: str, turns: int
) -> tuple[Bench, list[dict[str, Any]]]:
    """All ways in turns, then a shard cache while it fills and when it is full."""
    store = S3Store(f"s3://{s3_server.BUCKET}/run", S3Settings(endpoint_url=endpoint_url))
    root = Path(local.url)
    for path in sorted(root.rglob("*")):
        if path.is_file():
            store.write(path.relative_to(root).as_posix(), [path.read_bytes()])
    bench = Bench(HiddenStates(store))
    plain = Plain(bench, s3_server.S3Server(endpoint_url).client())
    ways: dict[str, tuple[Read, str | None]] = {
        "raw_ranged_get": (plain.one_by_one, None),
        "map_style": (bench.mapped, "raw_ranged_get"),
        "raw_ranged_get_8_threads": (plain.eight_at_once, None),
        "stream": (bench.stream, "raw_ranged_get_8_threads"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, (read, _) in ways.items():
            times[name].append(bench.seconds(read, []))
    rows = [
        row(bench, name, times[name], times[raw] if raw else None)
        for name, (_, raw) in ways.items()
    ]
    cached = Bench(HiddenStates(store, cache_dir=folder / "cache"))
    return bench, [
        *rows,
        row(cached, "stream_cache_first", [cached.seconds(cached.stream, [])], None),
        row(cached, "stream_cache_next", [cached.seconds(cached.stream, [])], None),
    ]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description="Read a run from S3, shuffled, by ranged GETs.")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", help="where to put a few GB (default: the temporary folder)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["AWS_ACCESS_KEY_ID"] = s3_server.ACCESS_KEY
    os.environ["AWS_SECRET_ACCESS_KEY"] = s3_server.SECRET_KEY
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        dataset = make(folder / "run", options.samples)
        (folder / "s3").mkdir()
        with s3_server.running(folder / "s3") as server:
            bench, rows = measure(dataset, folder, server.endpoint_url, options.turns)
    write_result("reader_s3", bench, options.turns, rows)


if __name__ == "__main__":
    main()
