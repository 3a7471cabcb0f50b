"""``swathe run``: plan, then everything on this machine, until the run is sealed and checked.

The embedded server and the workers are children that die with this process. The run itself is in its store: after
any kind of end the same command goes on where the records stop.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from producer import fleet
from producer.display import Display
from producer.embedded import embedded_server
from swathe import log, queue
from swathe.errors import IncompleteRunError, WorkerError
from swathe.manifest import Manifest, seal
from swathe.parent import die_with_me
from swathe.records import RunState, RunWatcher
from swathe.settings import Settings
from swathe.spec import RunSpec
from swathe.store import Store

_LOOK_EVERY_S: Final = 0.5
_STOP_GRACE_S: Final = 15.0
_LOG_TAIL_LINES: Final = 15
_QUIET_S: Final = 3.0

logger = log.get("run")


def extract(
    store: Store, spec: RunSpec, *, settings: Settings, devices: str, display: Display
) -> Manifest:
    """Work on a planned run until it is sealed.

    Raises IncompleteRunError when ranges are set aside, WorkerError when the workers end too early.
    """
    watcher = RunWatcher(store, spec)
    state = watcher.read()
    while (
        state.missing
    ):  # once, unless the run is moved meanwhile: workers are let into the new place only anew
        with contextlib.ExitStack() as stack:
            if settings.redis_url is not None:
                redis_url = settings.redis_url.get_secret_value()
            else:
                redis_url = stack.enter_context(embedded_server(settings.state_dir, spec.run_id))
            connection = stack.enter_context(contextlib.closing(queue.connect(redis_url)))
            run = fleet.Fleet(connection, watcher.store, spec)
            run.submit(state)
            log_path = settings.state_dir / spec.run_id / "worker.log"
            worker = stack.enter_context(
                _workers(devices, redis_url, run.store, settings, log_path)
            )
            patient = settings.redis_url is not None
            state = _watch(watcher, run, worker, log_path, display, patient=patient)
    return seal(watcher.store, state)


@contextlib.contextmanager
def _workers(
    devices: str, redis_url: str, store: Store, settings: Settings, log_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor with a worker on each device; asked to stop in order at the end, then made to."""
    roots = dict.fromkeys([*settings.store_roots, store.url])
    environment = os.environ | {"REDIS_URL": redis_url, "SWATHE_STORE_ROOTS": ",".join(roots)}
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker.cli", "--devices", devices],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is ours to hand on, once
            preexec_fn=die_with_me(),  # noqa: PLW1509 - this process has one thread here
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                _wait(process, settings.drain_s + _STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                logger.warning("the workers did not stop in time and are killed", pid=process.pid)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(process: subprocess.Popen[bytes], bound_s: float) -> None:
    """Wait for the workers' orderly end, and say so when it takes long."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_QUIET_S)
        return
    logger.info(
        "the workers store what they have computed; Ctrl-C ends them at once, nothing stored is lost",
        at_most_s=bound_s,
    )  # fmt: skip
    process.wait(bound_s - _QUIET_S)


def _watch(
    watcher: RunWatcher,
    run: fleet.Fleet,
    worker: subprocess.Popen[bytes],
    log_path: Path,
    display: Display,
    *,
    patient: bool,
) -> RunState:
    """Show progress until every range has a record or a marker, or the run was moved; bounded by the workers' life."""
    while True:
        exited = (
            worker.poll() is not None
        )  # asked first: what it committed before is in the reading below
        state = watcher.read()
        # An embedded server that ended does not come back; the fleet's does, and its workers wait for it.
        look = run.look if patient else run.snapshot
        snapshot = look(state, own_workers=True)
        display.show(snapshot)
        if not state.missing or watcher.store is not run.store:
            return state
        if snapshot.refusal:
            msg = f"no worker can serve the run: {snapshot.refusal}"
            raise WorkerError(msg)
        if exited:
            msg = (
                f"the workers ended (exit code {worker.returncode}) with {len(state.missing)} ranges open; what is "
                f"stored stays, run again to go on. The end of {log_path}:\n{_tail(log_path)}"
            )
            raise WorkerError(msg)
        time.sleep(_LOOK_EVERY_S)


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:])


def check(store: Store, *, samples: int, devices: str) -> None:
    """Have a few stored samples compared with single forward passes of the full model.

    Torch is loaded by a process of the worker's package, never by this one. Raises IncompleteRunError when the
    states differ.
    """
    command = [
        *(sys.executable, "-P", "-m", "worker.cli", "check", store.url),
        *("--samples", str(samples), "--device", "cpu" if devices == "cpu" else "auto"),
    ]
    done = subprocess.run(command, check=False, preexec_fn=die_with_me())
    if done.returncode:
        msg = (
            f"{store.url}: the stored states are not what the model computes (or could not be checked, see above); "
            "do not train on them"
        )
        raise IncompleteRunError(msg)
