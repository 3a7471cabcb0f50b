"""Uploads to S3: checksums, options, parts, buffers, and what a dead or broken one leaves behind."""

import os
import re
import signal
import subprocess
import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from swathe.errors import ConfigError, StoreError
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import S3Server, unfinished_uploads

PART = 5 << 20


@pytest.mark.parametrize(
    ("kind", "header"),
    [
        ("crc32", "x-amz-checksum-crc32"),
        ("sha256", "x-amz-checksum-sha256"),
        ("md5", "content-md5"),
        ("none", None),
    ],
)
def test_every_upload_carries_the_checksum_of_the_settings_and_no_other(
    kind: str, header: str | None, s3: Any, proxy: FaultProxy
) -> None:
    store = s3(endpoint_url=proxy.endpoint_url, checksum=kind, part_bytes=PART)
    data = os.urandom(PART + 100_000)
    store.write("small", [b"x" * 1000])
    store.create("record", b"x")
    store.write("large", [memoryview(data)])
    assert store.read("large") == data
    assert store.read("small") == b"x" * 1000
    for one in proxy.seen:
        names = {name.lower() for name in one.headers}
        sums = {name for name in names if "checksum" in name or name == "content-md5"}
        if one.method == "PUT":
            assert sums == ({header} if header else set())
        if kind in {"md5", "none"}:
            assert not any("checksum" in name for name in names), one
    assert sum(one.method == "PUT" for one in proxy.seen) >= 4


def test_acl_encryption_and_storage_class_are_passed_through(s3: Any, proxy: FaultProxy) -> None:
    store = s3(
        endpoint_url=proxy.endpoint_url,
        attempts=1,
        part_bytes=PART,
        conditional_create="on",
        acl="bucket-owner-full-control",
        sse="aws:kms",
        sse_kms_key_id="alias/states",
        storage_class="STANDARD_IA",
    )
    # The test server has no key service, so it refuses what it is sent; what is sent is the point.
    for action in (
        lambda: store.write("k", [b"x"]),
        lambda: store.create("k", b"x"),
        lambda: store.write("k", [bytes(PART + 1)]),
    ):
        with pytest.raises((StoreError, ConfigError)):
            action()
    sent = [one for one in proxy.seen if re.search(r"/k(\?uploads)?$", one.path)]
    assert len(sent) == 3
    for one in sent:
        headers = {name.lower(): value for name, value in one.headers.items()}
        assert headers["x-amz-acl"] == "bucket-owner-full-control"
        assert headers["x-amz-server-side-encryption"] == "aws:kms"
        assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/states"
        assert headers["x-amz-storage-class"] == "STANDARD_IA"


# --- parts ----------------------------------------------------------------------------------------------------------


class Chunk(bytearray):
    """A buffer that can be watched."""


def test_buffers_made_on_the_fly_do_not_pile_up(s3: Any) -> None:
    alive, most = [], 0

    def chunks() -> Iterator[Chunk]:
        nonlocal most
        for _ in range(16):
            chunk = Chunk(PART)
            alive.append(1)
            weakref.finalize(chunk, alive.pop)
            most = max(most, len(alive))
            yield chunk

    store = s3(part_bytes=PART, concurrency=2)
    assert store.write("k", chunks()).size_bytes == 16 * PART
    assert most <= 2 + 3


def test_a_buffer_is_not_copied_on_its_way(s3: Any) -> None:
    store = s3(part_bytes=PART, concurrency=2)
    store.write("warm", [b"x"])
    data = bytearray(8 * PART)
    tracemalloc.start()
    try:
        store.write("k", [memoryview(data)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < PART


def test_a_killed_upload_leaves_no_object_and_is_collected(
    s3: Any, server: S3Server, plain: Any
) -> None:
    store = s3()
    program = """
import os, signal, sys, time
from swathe.store import open_store
def chunks():
    yield bytes(5 << 20)
    yield bytes(5 << 20)
    yield bytes(5 << 20)
    yield bytes(5 << 20)
    os.kill(os.getpid(), signal.SIGKILL)
open_store(sys.argv[1]).write("states/a", chunks())
"""
    environment = os.environ | {
        "AWS_ENDPOINT_URL_S3": server.endpoint_url,
        "SWATHE_S3__PART_BYTES": str(PART),
        "SWATHE_S3__CONCURRENCY": "1",
    }
    done = subprocess.run([sys.executable, "-c", program, store.url], check=False, env=environment)
    assert done.returncode == -signal.SIGKILL
    assert store.stat("states/a") is None
    assert list(store.list("")) == []
    assert len(unfinished_uploads(plain, store.url)) == 1
    assert store.collect(older_than_s=3600) == 0
    assert store.collect(older_than_s=-60) == 1
    assert unfinished_uploads(plain, store.url) == []


def test_a_source_that_breaks_takes_its_parts_with_it(s3: Any, plain: Any) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(3 * PART)
        raise RuntimeError("source broke")

    store = s3(part_bytes=PART)
    with pytest.raises(RuntimeError, match="source broke"):
        store.write("k", chunks())
    assert unfinished_uploads(plain, store.url) == []


def test_a_broken_read_goes_on_where_it_broke(s3: Any, proxy: FaultProxy) -> None:
    store = s3(endpoint_url=proxy.endpoint_url)
    data = os.urandom(4_000_000)
    store.write("k", [data])
    proxy.inject(Fault("truncated answer", method="GET"))
    assert store.read("k") == data
    ranges = [one.headers.get("Range", "") for one in proxy.seen if one.method == "GET"]
    assert ranges[0] == ""
    assert re.fullmatch(r"bytes=2\d{6}-", ranges[1])


def test_an_object_replaced_while_it_is_read_is_read_again(s3: Any, proxy: FaultProxy) -> None:
    store, other = s3(endpoint_url=proxy.endpoint_url, first_wait_s=0.1), s3()
    store.write("k", [b"a" * 3_000_000])
    same = type(other)(store.url, other._settings, other._connection)
    proxy.inject(Fault("truncated answer", method="GET"))
    replaced = threading.Timer(0.02, same.write, ("k", [b"b" * 2_500_000]))
    replaced.start()
    assert store.read("k") in {b"a" * 3_000_000, b"b" * 2_500_000}
    replaced.join()
