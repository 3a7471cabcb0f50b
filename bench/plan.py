"""Plan 1,000,000 tokenized rows on two cores: seconds and resident memory.

The rows are chat-like: lengths lognormal with mean 335 and sigma 0.9, from 20 to 4,096; ids, masks and row ids in ten
parquet files. Each form of plan (packed, in the user's order; padded, by length) runs in a process of its own, on two
cores, and reports its own peak of resident memory. With ``--s3`` the packed plan is made once more from the same files in a
SeaweedFS server on loopback, which shares the two cores.

    python -m bench.plan [--rows N] [--s3]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from producer.plan import PlanOptions, plan
from producer.provenance import git_revision, versions
from swathe.store import open_store
from tests.support import s3_server

FILES: Final = 10
MEAN: Final = 335
SIGMA: Final = 0.9
VOCAB_ROWS: Final = 32_000
MODELS: Final = {"packed": "llama", "padded": "an architecture not proven to pack"}
CONFIG: Final = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": VOCAB_ROWS,
    "max_position_embeddings": 4096,
    "dtype": "bfloat16",
}
RESULTS: Final = Path(__file__).parent / "results"


def make_dataset(folder: Path, rows: int) -> int:
    """Write the data set; returns its tokens."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    tokens = 0
    for number in range(FILES):
        count = rows // FILES
        mu = np.log(MEAN) - SIGMA**2 / 2
        lengths = np.clip(rng.lognormal(mu, SIGMA, count), 20, 4096).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        total = int(offsets[-1])
        ids = rng.integers(0, VOCAB_ROWS, total, dtype=np.int32)
        mask = (np.arange(total) % 7 > 2).astype(np.uint8)
        table = pa.table({
            "id": [f"sample-{number}-{i}" for i in range(count)],
            "input_ids": pa.ListArray.from_arrays(offsets, ids),
            "loss_mask": pa.ListArray.from_arrays(offsets, mask),
        })  # fmt: skip
        pq.write_table(table, folder / f"{number:02d}.parquet", row_group_size=50_000)
        tokens += total
    return tokens


def measure(root: Path, data: str, form: str) -> dict[str, Any]:
    """Plan once, and once more over the finished run; runs in a process of its own."""
    config = root / f"{form}.json"
    config.write_text(json.dumps({"model_type": MODELS[form], **CONFIG}))
    options = PlanOptions(
        dataset=data,
        model=f"random:{config}",
        layers=(1,),
        final=True,
        allow_low_space=True,  # the states are never made
    )
    name = f"{form}_from_s3" if data.startswith("s3://") else form
    store = open_store(root / name)
    started_s, cpu_s = time.monotonic(), time.process_time()
    report = plan(store, options)
    seconds, cpu_s = time.monotonic() - started_s, time.process_time() - cpu_s
    peak_bytes = peak_rss_bytes()
    started_s = time.monotonic()
    again = plan(store, options)
    assert again.reused
    assert report.spec.batching.form == form
    return {
        "name": f"tokenized_parquet_{name}",
        "rows": report.spec.totals.rows,
        "tokens": report.tokens,
        "ranges": report.ranges,
        "padding_ratio": round(report.padding_ratio, 4),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_s, 2),
        "rows_s": round(report.spec.totals.rows / seconds),
        "peak_rss_bytes": peak_bytes,
        "again_seconds": round(time.monotonic() - started_s, 2),
        "file_bytes": sum(file.size_bytes for file in report.spec.dataset.files),
    }


def in_child(root: Path, data: str, form: str, **environment: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "bench.plan", "--child", str(root), data, form]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env={**os.environ, **environment}
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def from_s3(root: Path) -> dict[str, Any]:
    """The packed plan from a bucket."""
    (root / "weed").mkdir()
    with s3_server.running(root / "weed") as server:
        client = server.client()
        for path in (root / "data").iterdir():
            client.upload_file(str(path), s3_server.BUCKET, f"data/{path.name}")
        return in_child(
            root,
            f"s3://{s3_server.BUCKET}/data",
            "packed",
            AWS_ENDPOINT_URL_S3=server.endpoint_url,
            AWS_ACCESS_KEY_ID=s3_server.ACCESS_KEY,
            AWS_SECRET_ACCESS_KEY=s3_server.SECRET_KEY,
        )


def peak_rss_bytes() -> int:
    """Peak of this process alone: getrusage's would begin with the parent's size at the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    """Make the data set, measure in a child, write the result."""
    parser = argparse.ArgumentParser(description="Plan tokenized rows: seconds and memory.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, data, form = arguments.child
        print(json.dumps(measure(Path(folder), data, form)))
        return
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_dataset(root / "data", arguments.rows)
        rows = [in_child(root, str(root / "data"), form) for form in MODELS]
        if arguments.s3:
            rows.append(from_s3(root))
    result = {
        "bench": "plan",
        "device": f"{cpu_model()}, {len(cores)} cores",
        "versions": {"python": platform.python_version(), **versions()},
        "git": git_revision(),
        "command": f"python -m bench.plan --rows {arguments.rows}{' --s3' * arguments.s3}",
        "load": round(os.getloadavg()[0], 1),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"plan-{arguments.rows}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
