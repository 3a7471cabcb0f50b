"""The fault table: every way in which S3 or the network fails, tried again and again, and what became of the object.

The tests run each row a few times. ``python -m tests.support.fault_table 20`` runs each 20 times and prints the table
of docs/stores.md.
"""

import argparse
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from swathe.errors import NoSpaceError, StoreError
from swathe.settings import S3Settings
from swathe.store.s3 import S3Store
from swathe.store.s3_connection import Connection
from swathe.store.s3_errors import ClockSkewError
from tests.support import fault_proxy, s3_server
from tests.support.fault_proxy import SILENCE_S, Fault, FaultProxy

HEAD = "| operation | fault | tries | succeeded | refused, then done | repeated requests a try | wrong |"
FOREVER = 1_000_000
ATTEMPTS = 4
SMALL, LARGE = 100_000, (11 << 20) + 17
PART = "partNumber="
START, COMPLETE = r"\?uploads", "uploadId="


@dataclass(frozen=True)
class Row:
    """One kind of fault at one operation. ``ends`` is None when the operation must succeed in spite of it."""

    operation: str
    name: str
    faults: Callable[[], list[Fault]]
    ends: type[StoreError] | None = None
    uploads_left: int = 0
    """Unfinished uploads that only ``collect`` can find, because the answer with their id was lost."""

    @property
    def id(self) -> str:
        """Name for a test."""
        return f"{self.operation}: {self.name}"


@dataclass
class Tally:
    """What happened to the tries of a row."""

    tries: int = 0
    succeeded: int = 0
    refused: int = 0
    requests_repeated: int = 0
    problems: list[str] = field(default_factory=list)


def _row(
    operation: str,
    kind: str,
    times: int = 1,
    ends: type[StoreError] | None = None,
    **where: Any,
) -> Row:
    name = where.pop("name", kind) + (f" x{times}" if 1 < times < FOREVER else "")
    left = where.pop("uploads_left", 0)
    name += " for good" if times == FOREVER else ""
    return Row(operation, name, lambda: [Fault(kind, times=times, **where)], ends, left)


def rows() -> Iterator[Row]:
    """All rows."""
    put = {"method": "PUT"}
    for kind, times in (
        ("slow down", 3), ("internal error", 3), ("bad gateway", 1), ("bad digest", 1), ("expired", 1),
        ("reset in request", 2), ("lost answer", 1), ("altered request", 1), ("wrong checksum", 1), ("slow", 1), ("silence", 1),
    ):  # fmt: skip
        yield _row("write", kind, times, **put)
    part = put | {"path": PART, "after": 1}
    for kind, times in (
        ("slow down", 3), ("internal error", 1), ("bad digest", 1), ("expired", 2), ("reset in request", 2),
        ("lost answer", 1), ("altered request", 1), ("wrong checksum", 1), ("silence", 1),
    ):  # fmt: skip
        yield _row("write in parts", kind, times, **part, name=f"part: {kind}")
    yield _row("write in parts", "slow down", 2, method="POST", path=START, name="start: slow down")
    yield _row(
        "write in parts", "lost answer", method="POST", path=START, name="start: lost answer", uploads_left=1
    )  # fmt: skip
    done = {"method": "POST", "path": COMPLETE}
    yield _row("write in parts", "internal error", 2, **done, name="end: internal error")
    yield _row("write in parts", "lost answer", 1, **done, name="end: lost answer")
    yield Row(
        "write in parts",
        "end: lost answer, then no such upload",
        lambda: [Fault("lost answer", **done), Fault("no such upload", **done)],
    )
    for kind in ("slow down", "conflict", "lost answer", "reset in request", "silence"):
        yield _row("create", kind, 1, **put)
    get = {"method": "GET"}
    for kind in (
        "slow down",
        "reset in answer",
        "truncated answer",
        "altered answer",
        "wrong checksum",
        "silence",
    ):
        yield _row("read", kind, 2 if kind != "silence" else 1, **get)
    for kind in ("reset in answer", "truncated answer"):
        yield _row("read in parts", kind, 3, **get)
        yield _row("read a range", kind, 3, **get)
    yield _row("list", "slow down", 2, **get)
    yield _row("list", "truncated answer", 2, **get)
    yield _row("stat", "internal error", 2, method="HEAD")
    yield _row("delete", "lost answer", 2, method="DELETE")
    yield from _permanent(put, part, done, get)


def _permanent(*where: dict[str, Any]) -> Iterator[Row]:
    put, part, done, get = where
    for kind in ("slow down", "reset in request", "altered request", "expired"):
        yield _row("write", kind, FOREVER, StoreError, **put)
    yield _row("write", "skewed", FOREVER, ClockSkewError, **put, name="clock skew")
    yield _row("write", "full", FOREVER, NoSpaceError, **put)
    for kind in ("slow down", "reset in request", "altered request"):
        yield _row("write in parts", kind, FOREVER, StoreError, **part, name=f"part: {kind}")
    yield _row("write in parts", "full", FOREVER, NoSpaceError, **part, name="part: full")
    yield _row("write in parts", "internal error", FOREVER, StoreError, **done, name="end: internal error")  # fmt: skip
    yield _row("create", "slow down", FOREVER, StoreError, **put)
    yield _row("create", "skewed", FOREVER, ClockSkewError, **put, name="clock skew")
    for kind in ("slow down", "truncated answer", "altered answer"):
        yield _row("read", kind, FOREVER, StoreError, **get)


class Bench:
    """The store behind the proxy, and another that looks at the truth."""

    def __init__(self, proxy: FaultProxy, server: s3_server.S3Server, plain: Any) -> None:
        self.proxy = proxy
        common = {
            "attempts": ATTEMPTS,
            "first_wait_s": 0.002,
            "part_bytes": 5 << 20,
            "conditional_create": "on",
        }
        self._faulty = Connection(S3Settings(endpoint_url=proxy.endpoint_url, **common))
        self._impatient = Connection(
            S3Settings(endpoint_url=proxy.endpoint_url, read_timeout_s=SILENCE_S / 2, **common)
        )
        self._true = Connection(S3Settings(endpoint_url=server.endpoint_url, **common))
        self._plain = plain

    def close(self) -> None:
        """Close the stores' sockets."""
        for one in (self._faulty, self._impatient, self._true):
            one.close()

    def attempt(self, row: Row, tally: Tally) -> None:
        """One try: break, act, look, mend, and act again if it had failed."""
        url = f"s3://{s3_server.BUCKET}/{secrets.token_hex(6)}"
        broken = self._impatient if "silence" in row.name else self._faulty
        store, truth = (S3Store(url, one.settings, one) for one in (broken, self._true))
        data = os.urandom(LARGE if "in parts" in row.operation else SMALL)
        action = _Action(row.operation, truth, data)
        self.proxy.clear()
        self.proxy.inject(*row.faults())
        before = store.retries
        tally.tries += 1
        try:
            action.run(store)
        except StoreError as error:
            tally.refused += 1
            if row.ends is None or type(error) is not row.ends or not error.retryable:
                tally.problems.append(f"raised {error!r}")
            self._look(row, action, truth, succeeded=False, tally=tally)
        else:
            tally.succeeded += 1
            if row.ends is not None:
                tally.problems.append("succeeded")
            self._look(row, action, truth, succeeded=True, tally=tally)
        tally.requests_repeated += store.retries - before
        if not any(one.fault for one in self.proxy.seen):
            tally.problems.append("the fault was not met")
        self.proxy.clear()
        if row.ends is not None:
            action.run(store)
            self._look(row, action, truth, succeeded=True, tally=tally)

    def _look(
        self, row: Row, action: "_Action", truth: S3Store, *, succeeded: bool, tally: Tally
    ) -> None:
        there = {item.key: item.size_bytes for item in truth.list("")}
        wanted = action.expected(succeeded=succeeded)
        if there != {key: len(data) for key, data in wanted.items()}:
            tally.problems.append(f"the store holds {there}")
        elif any(truth.read(key) != data for key, data in wanted.items()):
            tally.problems.append("the content is not what was written")
        prefix = truth.url.rpartition("/")[2]
        found = self._plain.list_multipart_uploads(Bucket=s3_server.BUCKET, Prefix=prefix)
        left = len(found.get("Uploads", ()))
        if left != row.uploads_left or truth.collect(older_than_s=-60) != left:
            tally.problems.append(f"{left} unfinished uploads left")


class _Action:
    """An operation on the key ``k``, prepared, run, and what must be there afterwards."""

    def __init__(self, operation: str, truth: S3Store, data: bytes) -> None:
        self._operation = operation
        self._data = data
        self._writes = operation in {"write", "write in parts", "create"}
        if not self._writes:
            truth.write("k", [data])

    def run(self, store: S3Store) -> None:
        """Act; AssertionError when a success is none."""
        data = self._data
        match self._operation:
            case "write" | "write in parts":
                assert store.write("k", [memoryview(data)]).size_bytes == len(data)
            case "create":
                assert store.create("k", data)
            case "read" | "read in parts":
                assert store.read("k") == data
            case "read a range":
                assert store.read_range("k", 1000, 90_000) == data[1000:91_000]
            case "list":
                assert [item.key for item in store.list("")] == ["k"]
            case "stat":
                info = store.stat("k")
                assert info is not None
                assert info.size_bytes == len(data)
            case "delete":
                store.delete("k")

    def expected(self, *, succeeded: bool) -> dict[str, bytes]:
        """All objects."""
        there = succeeded if self._writes else not (self._operation == "delete" and succeeded)
        return {"k": self._data} if there else {}


@contextmanager
def bench() -> Iterator[Bench]:
    """Everything running, for the command line."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        s3_server.running(Path(folder)) as server,
        fault_proxy.running(server.endpoint_url) as proxy,
    ):
        yield Bench(proxy, server, server.client())


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tries", type=int, help="tries of each row")
    tries = parser.parse_args().tries
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    for line in (HEAD, "|---" * HEAD.count(" |") + "|"):
        print(line)  # noqa: T201
    with bench() as one:
        for row in rows():
            tally = Tally()
            for _ in range(tries):
                one.attempt(row, tally)
            repeated = tally.requests_repeated / tries
            cells = (row.operation, row.name, tries, tally.succeeded, tally.refused, f"{repeated:.1f}", len(tally.problems))  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
