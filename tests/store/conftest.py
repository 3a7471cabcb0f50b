"""The stores under test: a folder, a dict, and a real S3 server with a proxy in front of it that can break things."""

import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from swathe.settings import S3Settings
from swathe.store.s3 import S3Store
from swathe.store.s3_connection import Connection
from tests.support import fault_proxy, s3_server
from tests.support.fault_proxy import FaultProxy
from tests.support.s3_server import S3Server

StoreMaker = Callable[..., S3Store]


@pytest.fixture(scope="session", autouse=True)
def aws_environment() -> Iterator[None]:
    """Only the test server's credentials, whatever the machine has."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", s3_server.ACCESS_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET_KEY)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        yield


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server.running(tmp_path_factory.mktemp("weed")) as one:
        yield one


@pytest.fixture(scope="session")
def plain(server: S3Server) -> Iterator[Any]:
    """A boto3 client beside the store."""
    client = server.client()
    yield client
    client.close()


@pytest.fixture(scope="session")
def proxy_server(server: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy.running(server.endpoint_url) as one:
        yield one


@pytest.fixture
def proxy(proxy_server: FaultProxy) -> Iterator[FaultProxy]:
    proxy_server.clear()
    yield proxy_server
    proxy_server.clear()


@pytest.fixture
def s3(server: S3Server) -> Iterator[StoreMaker]:
    """Makes S3 stores with a client of their own: ``s3(url=..., **settings)``; straight to the server by default."""
    made: list[Connection] = []

    def make(url: str | None = None, **settings: Any) -> S3Store:
        settings = {
            "endpoint_url": server.endpoint_url,
            "attempts": 4,
            "first_wait_s": 0.002,
        } | settings
        one = S3Settings(**settings)
        made.append(Connection(one))
        return S3Store(url or f"s3://{s3_server.BUCKET}/{secrets.token_hex(4)}", one, made[-1])

    yield make
    for connection in made:
        connection.close()
