"""Outages as a client lives through them: a refused login is final, a silent server is given up in bounded time, and a
master that became a replica is left for the new one."""

import shutil
import socket
import tempfile
import time
from pathlib import Path

import pytest
from conftest import RedisServer
from fleet import wait_for

from swathe.errors import QueueError
from swathe.queue import RangeQueue, connect, known_runs, policy_warnings
from swathe.queue import connection as module
from swathe.spec import RunId


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("login", ["", ":wrong@"])
def test_a_refused_login_is_said_at_once(login):
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="swathe-"))
    server = RedisServer(folder, "--port", str(port))
    server.start()
    try:
        with connect(server.url) as client:
            client.config_set("requirepass", "right")
        started_s = time.monotonic()
        with (
            pytest.raises(QueueError, match="refused the login"),
            connect(f"redis://{login}127.0.0.1:{port}/0") as client,
        ):
            known_runs(client)
        assert time.monotonic() - started_s < 3
    finally:
        server.stop(kill=True)
        shutil.rmtree(folder)


def test_a_server_that_does_not_answer_is_given_up_in_bounded_time(new_server, monkeypatch):
    """Attempts are not multiplied by those of connecting inside of each."""
    monkeypatch.setattr(module, "_PATIENCE_S", 2.0)
    with connect(new_server.url, socket_timeout_s=0.5) as client:
        known_runs(client)
        new_server.pause()
        try:
            started_s = time.monotonic()
            with pytest.raises(QueueError, match="cannot be reached"):
                known_runs(client)
            assert time.monotonic() - started_s < 5
        finally:
            new_server.pause(on=False)
        assert known_runs(client) == {}


def test_after_a_fail_over_the_new_master_is_found(new_server):
    """The old one keeps the connection and answers READONLY; its name leads to the new one by then."""
    folder = Path(tempfile.mkdtemp(prefix="swathe-"))
    after = RedisServer(folder)
    after.start()
    try:
        with connect(new_server.url, retries=1) as client:
            client.set("k", "1")
            client.replicaof("127.0.0.1", "1")
            new_server.socket.rename(new_server.folder / "old")
            new_server.socket.symlink_to(after.socket)
            client.set("k", "2")
        with connect(after.url) as other:
            assert other.get("k") == b"2"
    finally:
        after.stop(kill=True)
        shutil.rmtree(folder)


def test_a_replica_is_called_one(new_server):
    with connect(new_server.url, retries=0) as client:
        assert policy_warnings(client) == []
        client.replicaof("127.0.0.1", "1")
        assert "read-only replica" in policy_warnings(client)[0]
        with pytest.raises(QueueError, match="must name the master"):
            RangeQueue(client, "q").pause(RunId("r1"))


def test_a_cluster_is_called_one():
    folder = Path(tempfile.mkdtemp(prefix="swathe-"))
    ports = ("--port", str(free_port()), "--cluster-port", str(free_port()))
    server = RedisServer(folder, *ports, "--cluster-enabled", "yes", "--appendonly", "yes")
    server.start()
    try:
        with connect(server.url, retries=0) as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
            wait_for(lambda: client.cluster("INFO")["cluster_state"] == "ok")
            assert "Redis Cluster" in policy_warnings(client)[0]
            with pytest.raises(QueueError, match="names a Redis Cluster"):
                RangeQueue(client, "q").cancel(RunId("r1"))
    finally:
        server.stop(kill=True)
        shutil.rmtree(folder)
