"""Data sets in a bucket are read like those in a folder: the same rows, the same identity, with ranged requests."""

import dataclasses
import gzip
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from producer.inputs import hash_files
from producer.plan import PlanOptions, plan
from swathe import names
from swathe.dataset import Limits, open_dataset, read_samples
from swathe.errors import ConfigError, PlanError, StoreError
from swathe.store.memory import MemoryStore
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import BUCKET, S3Server

LIMITS = Limits(vocab_rows=1000)
ROWS = [[i % 1000, 7, i % 10] for i in range(3000)]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
    "dtype": "bfloat16",
}


@pytest.fixture
def endpoint(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)


@pytest.fixture
def bucket(plain: Any, endpoint: None) -> Iterator[Any]:
    """Puts a local file or folder into the bucket; gives its URL."""
    del endpoint

    def put(path: Path) -> str:
        prefix = secrets.token_hex(4)
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        for file in files:
            key = f"{prefix}/{file.relative_to(path.parent).as_posix()}"
            plain.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())
        return f"s3://{BUCKET}/{prefix}/{path.name}"

    return put


def jsonl(path: Path, rows: list[list[int]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b"".join(json.dumps({"input_ids": row}).encode() + b"\n" for row in rows)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def parquet(path: Path, rows: list[list[int]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"input_ids": rows}), path, row_group_size=700)
    return path


def arrow(path: Path, rows: list[list[int]]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(str(path), num_shards=2)
    return path


def zst(path: Path, rows: list[list[int]]) -> Path:
    text = jsonl(path.with_suffix(".tmp"), rows).read_bytes()
    with pa.OSFile(str(path), "wb") as sink, pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(text)
    return path


def rows_of(location: str) -> list[list[int]]:
    steps = list(read_samples(open_dataset(location), LIMITS))
    return [
        step.block.input_ids[step.block.offsets[i] : step.block.offsets[i + 1]].tolist()
        for step in steps
        for i in range(len(step.block))
    ]


def folder(path: Path, rows: list[list[int]]) -> Path:
    for number in range(3):
        parquet(path / "data" / f"{number}.parquet", rows[number * 1000 : (number + 1) * 1000])
    return path


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (jsonl, "d.jsonl"), (jsonl, "d.jsonl.gz"), (zst, "d.jsonl.zst"), (parquet, "d.parquet"), (arrow, "saved"),
        (folder, "many"),
    ],
)  # fmt: skip
def test_every_kind_is_read_and_has_the_identity_of_the_local_one(
    tmp_path: Path, bucket: Any, make: Any, name: str
) -> None:
    path = make(tmp_path / name, ROWS)
    url = bucket(path)
    assert rows_of(url) == ROWS
    here, there = open_dataset(path), open_dataset(url)
    assert there.location == url
    assert (here.format, here.columns) == (there.format, there.columns)
    assert hash_files(here) == hash_files(there)


def test_a_folder_of_compressed_lines_and_one_with_a_files_name_are_read(
    tmp_path: Path, bucket: Any
) -> None:
    jsonl(tmp_path / "d" / "0.jsonl", ROWS[:10])
    jsonl(tmp_path / "d" / "1.jsonl.gz", ROWS[10:20])
    assert rows_of(bucket(tmp_path / "d")) == ROWS[:20]
    parquet(tmp_path / "spark.parquet" / "part-0.parquet", ROWS)
    assert rows_of(bucket(tmp_path / "spark.parquet") + "/") == ROWS


def test_a_plan_from_a_bucket_is_the_plan_from_the_folder(tmp_path: Path, bucket: Any) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    path = folder(tmp_path / "d", ROWS)
    options = PlanOptions(
        dataset=str(path), model=f"random:{tmp_path / 'tiny.json'}", final=True, range_tokens=300
    )
    moved = dataclasses.replace(options, dataset=bucket(path))
    here, there = MemoryStore(), MemoryStore()
    one, two = plan(here, options), plan(there, moved)
    assert one.spec.fingerprint == two.spec.fingerprint
    tokens = [info.key for info in here.list(names.TOKENS)]
    assert len(tokens) >= 2
    assert all(here.read(key) == there.read(key) for key in tokens)
    assert two.spec.dataset.location == moved.dataset
    assert plan(there, moved).reused
    assert plan(there, options).reused


def test_an_object_that_changes_while_it_is_read_is_noticed(
    tmp_path: Path, bucket: Any, plain: Any
) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(CONFIG))
    url = bucket(jsonl(tmp_path / "d.jsonl", ROWS))
    key = url.removeprefix(f"s3://{BUCKET}/")
    options = PlanOptions(dataset=url, model=f"random:{tmp_path / 'tiny.json'}", final=True)
    body = (tmp_path / "d.jsonl").read_bytes().replace(b"[5, 7, 5]", b"[5, 8, 5]")

    def change(_: object) -> None:
        plain.put_object(Bucket=BUCKET, Key=key, Body=body)

    with pytest.raises(PlanError, match=rf"{url}: changed while it was read"):
        plan(MemoryStore(), options, progress=change)


def test_a_line_that_breaks_is_taken_up_again(
    tmp_path: Path, bucket: Any, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket(jsonl(tmp_path / "d.jsonl.gz", ROWS))
    monkeypatch.setenv("SWATHE_S3__ENDPOINT_URL", proxy.endpoint_url)
    monkeypatch.setenv("SWATHE_S3__FIRST_WAIT_S", "0.002")
    proxy.inject(Fault("reset in answer", method="GET", path="gz"))
    proxy.inject(Fault("slow down", method="GET", path="gz", times=2))
    assert rows_of(url) == ROWS
    assert len([one for one in proxy.seen if one.fault]) == 3
    proxy.inject(Fault("slow down", method="GET", path="gz", times=1000))
    monkeypatch.setenv("SWATHE_S3__ATTEMPTS", "3")
    with pytest.raises(StoreError, match=r"d\.jsonl\.gz: cannot read: SlowDown"):
        rows_of(url)


def test_looking_at_a_parquet_file_reads_its_footer_alone(
    tmp_path: Path, bucket: Any, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d.parquet"
    noise = np.random.default_rng(0).integers(0, 1000, 2_000_000)
    offsets = np.arange(0, 2_000_001, 100)
    pq.write_table(pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, noise)}), path)
    url = bucket(path)
    monkeypatch.setenv("SWATHE_S3__ENDPOINT_URL", proxy.endpoint_url)
    open_dataset(url)
    gets = [one for one in proxy.seen if one.method == "GET"]
    assert 1 <= len(gets) <= 2
    for one in gets:
        first, last = one.headers["Range"].removeprefix("bytes=").split("-")
        assert int(last) - int(first) < 100_000


def test_what_is_not_there_is_one_clear_line(endpoint: None) -> None:
    del endpoint
    with pytest.raises(PlanError, match=rf"s3://{BUCKET}/none: nothing there that ends in"):
        open_dataset(f"s3://{BUCKET}/none/")
    with pytest.raises(PlanError, match=r"none\.parquet: nothing there"):
        open_dataset(f"s3://{BUCKET}/none.parquet")
    with pytest.raises(ConfigError, match="bucket no-such-bucket does not exist"):
        open_dataset("s3://no-such-bucket/d")
