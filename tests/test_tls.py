"""TLS to a real server with a certificate of its own: rediss:// works, a wrong certificate is one clear error."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from conftest import need_redis_server
from fleet import FakeWork, Running, enqueue, new_worker, wait_for
from redis import exceptions

from swathe.errors import QueueError
from swathe.queue import connect, describe, known_runs

PASSWORD = "p#ss/@1?"  # noqa: S105


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


@pytest.fixture
def tls_server(tmp_path) -> Iterator[tuple[int, Path]]:
    """Port and certificate of a server that speaks TLS only."""
    binary = need_redis_server()
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = make_certificate(tmp_path, "server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            *(binary, "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", ""),
            *("--tls-cert-file", str(certificate), "--tls-key-file", str(key)),
            *("--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"),
            *("--requirepass", PASSWORD),
        ],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None, "the server does not speak TLS"
            time.sleep(0.05)
    yield port, certificate
    process.kill()
    process.wait()


def url(port: int, certificate: Path, password: str = PASSWORD) -> str:
    return f"rediss://:{quote(password, safe='')}@localhost:{port}/0?ssl_ca_certs={certificate}"


def test_a_worker_works_over_tls_with_a_password_full_of_special_characters(tls_server, tmp_path):
    address = url(*tls_server)
    client = connect(address)
    ranges = enqueue(client, 3)
    work = FakeWork(tmp_path)
    running = Running(new_worker(address, work))
    wait_for(lambda: ranges.counts().work == 0)
    assert running.stop() == 0
    assert work.records() == [0, 1, 2]
    client.close()
    assert describe(address) == f"rediss://localhost:{tls_server[0]}/0"


def test_a_server_with_another_certificate_is_refused(tls_server, tmp_path):
    _key, other = make_certificate(tmp_path, "other")
    client = connect(url(tls_server[0], other), retries=0)
    with pytest.raises(QueueError, match=r"(?i)certificate") as caught:
        known_runs(client)
    assert PASSWORD not in str(caught.value)
    client.close()


def test_plain_text_to_a_tls_port_is_an_error_without_the_password(tls_server):
    port, _certificate = tls_server
    client = connect(f"redis://:{quote(PASSWORD, safe='')}@localhost:{port}/0", retries=0)
    with pytest.raises(QueueError) as caught:
        known_runs(client)
    assert PASSWORD not in str(caught.value)
    client.close()


def test_a_wrong_password_over_tls_is_said_so(tls_server):
    client = connect(url(*tls_server, password="wr#ng"), retries=0)
    with pytest.raises(QueueError, match="login") as caught:
        known_runs(client)
    assert isinstance(caught.value.__cause__, exceptions.AuthenticationError)
    client.close()
