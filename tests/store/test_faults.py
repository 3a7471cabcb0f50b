"""Each fault of the table, a few times: the operation succeeds or says no, nothing is lost, nothing is half."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fault_proxy import FaultProxy
from tests.support.fault_table import Bench, Row, Tally, rows
from tests.support.s3_server import S3Server

TRIES = 2


@pytest.fixture(scope="module")
def bench(proxy_server: FaultProxy, server: S3Server, plain: Any) -> Iterator[Bench]:
    one = Bench(proxy_server, server, plain)
    yield one
    one.close()
    proxy_server.clear()


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: row.id)
def test_fault(row: Row, bench: Bench) -> None:
    tally = Tally()
    tries = TRIES if row.ends is None else 1
    for _ in range(tries):
        bench.attempt(row, tally)
    assert not tally.problems
    assert (tally.succeeded, tally.refused) == ((tries, 0) if row.ends is None else (0, tries))
    assert tally.requests_repeated or row.name == "slow" or row.ends is not None
