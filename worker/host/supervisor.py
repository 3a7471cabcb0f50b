"""One process for each device, kept alive: started, restarted with growing pauses, given up, and stopped in order.

The supervisor holds no device and no model, so nothing that breaks a worker breaks it. It is one thread, and forks from
that thread only: a child's death signal is bound to the thread that started it.
"""

import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Literal

from swathe import log
from swathe.parent import die_with_me
from worker.host.devices import Device
from worker.host.node import ChildView
from worker.telemetry.reports import Inbox

State = Literal["running", "waiting", "done", "given up"]

_EXIT_CONFIGURATION = 2

_POLITE: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
"""torch's threads sleep while they wait for each other. When two processes share the cores, waiting threads that spin keep
the working ones off them: two workers on two cores then do a fiftieth of the work of one. Alone it costs 4 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorOptions:
    """Bounds of the supervisor."""

    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    max_failures: int = 5
    """Failures in a row after which a device is given up."""
    healthy_s: float = 300.0
    """A worker that lived this long has proved its device: failures are counted anew."""
    rescan_s: float = 5.0
    stop_s: float = 75.0
    """From SIGTERM to SIGKILL; longer than the workers' own bound of a drain."""
    restart_finished: bool = True
    """Whether a worker that ended well is started again; not so with ``--exit-when-idle``."""
    die_with_parent: bool = False
    """Let the kernel kill the workers when this process dies, however it dies."""
    poll_s: float = 0.1


class _Child:
    """The worker of one device, over all its processes."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.name = ""
        self.state: State = "waiting"
        self.process: subprocess.Popen[bytes] | None = None
        self.present = True
        self.kill_at_s = float("inf")
        self.failures = 0
        self.restarts = -1
        self.deaths = 0
        self.started_s = 0.0
        self.start_at_s = 0.0
        self.last_code: int | None = None


class Supervisor:
    """``run`` keeps the workers alive until they are finished, given up or told to stop; returns the exit status.

    ``command`` makes the command line of a device's worker, which has to take the name given; ``on_death`` is told the
    name of a worker that ended, so that its ranges need not wait for their leases to run out, and answers whether that
    worker had stored any: then its device works, and the failure is the first in a row. ``devices`` lists the
    devices that should have a worker now, or None when that cannot be told at the moment (nothing changes then).
    With an ``inbox`` each worker gets ``--report-fd`` behind its command: its line to this process.
    """

    def __init__(
        self,
        command: Callable[[Device, str], Sequence[str]],
        devices: Callable[[], Sequence[Device] | None],
        options: SupervisorOptions | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        on_death: Callable[[str], bool] = lambda _name: False,
        inbox: Inbox | None = None,
    ) -> None:
        self._command = command
        self._inbox = inbox
        self.ticked_s = time.monotonic()
        """When the loop last came round."""
        self._on_death = on_death
        self._devices = devices
        self._options = options or SupervisorOptions()
        self._environment = dict(os.environ if environment is None else environment)
        self._children: dict[str, _Child] = {}
        self._signals = 0
        self._wake = threading.Event()
        self._log: Any = log.get("supervisor")

    def run(self) -> int:
        """Supervise. 0: all ended well; 1: a device was given up or a worker ended badly; 2: configuration."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGINT, self._on_signal)
        rescan_at_s = 0.0
        while not self._signals:
            self._tick()
            if time.monotonic() >= rescan_at_s:
                self._scan()
                rescan_at_s = time.monotonic() + self._options.rescan_s
            for child in self._children.values():
                self._look_after(child)
            if self._children and all(
                child.state in ("done", "given up") for child in self._children.values()
            ):
                break
            self._wake.wait(self._options.poll_s)
        self._stop_all()
        return self._exit_status()

    def stop(self) -> None:
        """What SIGTERM does; a second time, the workers end at once."""
        self._signals += 1
        self._wake.set()

    def states(self) -> dict[str, tuple[Device, State, int | None]]:
        """Device, state and process id by UUID, for health checks."""
        return {
            uuid: (child.device, child.state, child.process.pid if child.process else None)
            for uuid, child in list(self._children.items())
        }

    def views(self) -> list[ChildView]:
        """Every device with its worker, for metrics and health checks."""
        return [
            ChildView(
                uuid=uuid,
                label=child.device.label,
                device_name=child.device.name,
                worker=child.name,
                state=child.state,
                running=child.process is not None,
                restarts=max(0, child.restarts),
                deaths=child.deaths,
            )
            for uuid, child in list(self._children.items())
        ]

    def _tick(self) -> None:
        self.ticked_s = time.monotonic()
        if self._inbox is not None:
            self._inbox.drain()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stop()

    def _scan(self) -> None:
        """Notice devices that came and went."""
        found = self._devices()
        if found is None:
            return
        by_uuid = {device.uuid: device for device in found}
        for uuid, device in by_uuid.items():
            child = self._children.get(uuid)
            if child is None:
                self._log.info("device found", device=uuid, label=device.label, name=device.name)
                self._children[uuid] = _Child(device)
            elif not child.present:
                self._log.info("device is back", device=uuid, label=device.label)
                child.present, child.failures, child.start_at_s = True, 0, 0.0
                child.state = "running" if child.process else "waiting"
        for uuid, child in self._children.items():
            if child.present and uuid not in by_uuid:
                self._log.error(
                    "device vanished; its worker stops", device=uuid, label=child.device.label
                )
                child.present = False
                child.kill_at_s = time.monotonic() + self._options.stop_s
                if child.process is not None:
                    child.process.terminate()

    def _look_after(self, child: _Child) -> None:
        if child.process is not None:
            code = child.process.poll()
            if code is not None:
                self._buried(child, code)
                self._ended(child, code)
            elif not child.present and time.monotonic() >= child.kill_at_s:
                # A process in a call to a device that is gone does not hear SIGTERM.
                child.kill_at_s = float("inf")
                _signal_group(child.process, signal.SIGKILL, group=True)
        elif child.state == "waiting" and child.present and time.monotonic() >= child.start_at_s:
            self._start(child)

    def _start(self, child: _Child) -> None:
        child.name = worker_name(child.device.label)
        command = list(self._command(child.device, child.name))
        fds: list[int] = []
        if self._inbox is not None:
            fds = [self._inbox.open(child.name, child.device.uuid)]
            command += ["--report-fd", str(fds[0])]
        try:
            child.process = subprocess.Popen(
                command,
                pass_fds=fds,
                env={**_POLITE, **self._environment, **child.device.environment()},
                # A session of its own: Ctrl-C in a terminal reaches the supervisor only, which passes it on once.
                start_new_session=True,
                preexec_fn=die_with_me() if self._options.die_with_parent else None,  # noqa: PLW1509
            )
        except OSError as error:  # no more processes or memory: the workers that run go on
            if self._inbox is not None:
                self._inbox.ended(child.name)
            self._failed(child, 0.0, {"device": child.device.uuid, "error": str(error)})
            return
        if self._inbox is not None:
            self._inbox.started(child.name)
        child.state = "running"
        child.started_s = time.monotonic()
        child.restarts += 1
        self._log.info(
            "worker started",
            device=child.device.uuid, worker=child.name, pid=child.process.pid, restarts=child.restarts,
        )  # fmt: skip

    def _buried(self, child: _Child, code: int) -> None:
        """Whatever follows, the process is gone."""
        child.process, child.last_code = None, code
        if self._inbox is not None:
            self._inbox.ended(child.name)
        if code != 0:
            child.deaths += 1
            self._bury(child)

    def _bury(self, child: _Child) -> None:
        try:
            if self._on_death(child.name):
                child.failures = 0
        except Exception as error:  # noqa: BLE001 - a help, not a duty
            self._log.warning(
                "ranges of the dead worker wait for their leases to run out",
                worker=child.name, error=str(error),
            )  # fmt: skip

    def _ended(self, child: _Child, code: int) -> None:
        lived_s = time.monotonic() - child.started_s
        facts: dict[str, Any] = {
            "device": child.device.uuid, "label": child.device.label, "status": code, "lived_s": round(lived_s, 1),
        }  # fmt: skip
        if not child.present:
            child.state = "waiting"
            self._log.info("worker of the vanished device ended", **facts)
        elif code == 0 and not self._options.restart_finished:
            child.state = "done"
            self._log.info("worker finished", **facts)
        elif code == 0:
            child.state, child.start_at_s = (
                "waiting",
                time.monotonic() + self._options.first_pause_s,
            )
            self._log.info("worker ended, starting it again", **facts)
        elif code == _EXIT_CONFIGURATION:
            child.state = "given up"
            self._log.error(
                "worker refused its configuration (see its message); the same would happen again, it is"
                " not restarted. Mend it and start swathe-worker again", **facts,
            )  # fmt: skip
        else:
            self._failed(child, lived_s, facts)

    def _failed(self, child: _Child, lived_s: float, facts: dict[str, Any]) -> None:
        options = self._options
        child.failures = 1 if lived_s >= options.healthy_s else child.failures + 1
        if child.failures >= options.max_failures:
            child.state = "given up"
            self._log.error(
                "device given up after repeated failures; its ranges went back to the queue. Look at the"
                " device, then start swathe-worker again", failures=child.failures, **facts,
            )  # fmt: skip
            return
        pause_s = min(options.first_pause_s * 2 ** (child.failures - 1), options.longest_pause_s)
        child.state, child.start_at_s = "waiting", time.monotonic() + pause_s
        self._log.warning(
            "worker died, starting another", pause_s=pause_s, failures=child.failures, **facts
        )

    def _stop_all(self) -> None:
        """SIGTERM to all at once; again at a second signal; SIGKILL at the bound."""
        told = 0
        end_s = time.monotonic() + self._options.stop_s
        running = [child for child in self._children.values() if child.process is not None]
        while running:
            if told < min(max(self._signals, 1), 2):
                told += 1
                for child in running:
                    _signal_group(child.process, signal.SIGTERM, group=False)
            if time.monotonic() >= end_s:
                self._log.warning("workers do not stop, killed", workers=len(running))
                for child in running:
                    _signal_group(child.process, signal.SIGKILL, group=True)
                end_s = float("inf")
            self._tick()
            self._wake.clear()
            self._wake.wait(self._options.poll_s)
            for child in running:
                if child.process is not None and (code := child.process.poll()) is not None:
                    self._buried(child, code)
            running = [child for child in running if child.process is not None]

    def _exit_status(self) -> int:
        codes = {
            child.last_code for child in self._children.values() if child.last_code is not None
        }
        if codes == {_EXIT_CONFIGURATION}:
            return _EXIT_CONFIGURATION
        given_up = any(child.state == "given up" for child in self._children.values())
        return 1 if given_up or codes - {0} else 0


def worker_name(label: str) -> str:
    """A name that no earlier process had: the same place started again is another worker at once."""
    return f"{socket.gethostname()}-{label}-{secrets.token_hex(4)}"


def _signal_group(
    process: "subprocess.Popen[bytes] | None", number: signal.Signals, *, group: bool
) -> None:
    """Signal a child (or all it started); one that has just ended is no error."""
    if process is None or process.poll() is not None:
        return
    try:
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    except ProcessLookupError:
        return
