"""From host buffer to committed range, with S3 behind it: no file in between, the record last, a hang told of."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import structlog

from swathe import codec, names
from swathe.errors import StoreError
from swathe.records import read_record
from swathe.spec import RangeId, RangeRecord
from swathe.store.s3 import S3Store
from swathe.tokens import TokenReader
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_server import unfinished_uploads
from tests.support.synthetic_run import write_run
from worker.extraction.sink import Author, Sink
from worker.extraction.store_watch import StoreWatch
from worker.telemetry.totals import Telemetry

RANGE = RangeId(2)
BYTES = 12 << 20
"""Of states: three parts."""

_opened: list[str] = []
_listening = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _listening and event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _opened.append(str(arguments[0]))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Every file that this process opens to write, as the interpreter's audit says."""
    global _listening  # noqa: PLW0603 - an audit hook cannot be taken away
    sys.addaudithook(_hook)
    _opened.clear()
    _listening = True
    yield _opened
    _listening = False


class Writer:
    """A worker's last step for one range of a run in a bucket."""

    def __init__(
        self, store: S3Store, run: S3Store, watch: StoreWatch, telemetry: Telemetry
    ) -> None:
        self.spec = write_run(run, sealed=False).spec
        record = read_record(run, self.spec, RANGE)
        run.delete(names.record(RANGE))
        run.delete(record.shard or "")
        self.run = run
        self.tokens = TokenReader(run, self.spec).read_range(RANGE)
        self.sink = Sink(store, self.spec, telemetry, watch)

    def commit(self) -> RangeRecord | None:
        data = np.random.default_rng(1).integers(0, 256, BYTES, dtype=np.uint8)
        view = codec.TensorView(dtype="bfloat16", shape=(BYTES // 64, 2, 16), data=data.data)
        author = Author(worker="w", device="cpu", software={}, kernels={})
        return self.sink.commit(self.tokens, {"hidden_states": view}, (), author, {})

    def left(self) -> list[str]:
        return [item.key for item in self.run.list(f"states/{RANGE:06d}")]


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@pytest.fixture
def watch(telemetry: Telemetry) -> StoreWatch:
    return StoreWatch(telemetry, limit_s=1.0)


@pytest.fixture
def writer(
    proxy: FaultProxy, s3: Callable[..., S3Store], watch: StoreWatch, telemetry: Telemetry
) -> Writer:
    run = s3()
    # Each process finds out once whether the bucket honours If-None-Match: not a part of the range's way.
    store = s3(
        url=run.url, endpoint_url=proxy.endpoint_url, part_bytes=5 << 20, conditional_create="on"
    )
    return Writer(store, run, watch, telemetry)


def test_the_record_is_created_after_the_upload_was_checked_and_no_file_is_written(
    writer: Writer, proxy: FaultProxy, opened: list[str]
) -> None:
    record = writer.commit()
    assert record is not None
    assert opened == []
    said = [
        (seen.method, "shard" if ".safetensors" in seen.path else "record") for seen in proxy.seen
    ]
    assert said == [
        ("POST", "shard"),  # start
        *[("PUT", "shard")] * 3,  # parts, each with its checksum
        ("POST", "shard"),  # complete
        ("HEAD", "shard"),  # is it there, whole
        ("PUT", "record"),
    ]
    info = writer.run.stat(record.shard or "")
    assert info is not None
    assert info.size_bytes == record.size_bytes > BYTES


@pytest.mark.parametrize(
    "fault",
    [
        Fault("slow down", method="PUT", times=99),
        Fault("wrong checksum", method="PUT", times=99),
        Fault("altered request", method="PUT", times=99),
        Fault("internal error", method="POST", path="uploadId", times=99),
        Fault("full", method="PUT", times=99),
    ],
    ids=lambda fault: fault.kind,
)
def test_without_a_checked_upload_there_is_no_record_and_nothing_is_left(
    writer: Writer, proxy: FaultProxy, plain: Any, fault: Fault
) -> None:
    proxy.inject(fault)
    with pytest.raises(StoreError):
        writer.commit()
    assert not [seen for seen in proxy.seen if seen.path.endswith(".json")], "no record was tried"
    assert writer.left() == []
    assert unfinished_uploads(plain, writer.run.url) == []
    proxy.clear()
    assert writer.commit() is not None


def test_a_store_that_does_not_move_is_told_of_and_waited_for(
    writer: Writer, proxy: FaultProxy, watch: StoreWatch, telemetry: Telemetry
) -> None:
    proxy.inject(Fault("silence", method="PUT", path=r"\.json", times=1))
    done: list[RangeRecord | None] = []

    def commit() -> None:
        with watch.operation():
            done.append(writer.commit())

    with structlog.testing.capture_logs() as logs:
        thread = threading.Thread(target=commit, daemon=True)
        thread.start()
        longest_s = 0.0
        while thread.is_alive():
            watch.look()
            longest_s = max(longest_s, telemetry.snapshot().gauges["store_stalled_s"])
            time.sleep(0.02)
        watch.look()
    assert longest_s > 1.0
    assert telemetry.snapshot().gauges["store_stalled_s"] == 0
    # On a busy machine the upload before may stand still for a second too: said again, and in pairs.
    said = [line["event"].split(";")[0] for line in logs if "move" in line["event"]]
    assert said == ["the store does not move", "the store moves again"] * (len(said) // 2)
    assert said
    assert done[0] is not None


def test_what_gets_on_is_not_stalled(watch: StoreWatch) -> None:
    with watch.operation():
        watch._moved_s[threading.get_ident()] -= 100
        assert watch.stalled_s > 99
        watch.moved()
        assert watch.stalled_s == 0
    watch.moved()
    assert watch.stalled_s == 0
