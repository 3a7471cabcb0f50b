"""The command line ``swathe-worker``: a supervisor by default, one device's worker or a check as subcommands."""

import json
import logging
import os
import sys
from dataclasses import asdict
from typing import Annotated, Final, NoReturn

import typer
from pydantic import SecretStr

from swathe import log
from swathe.errors import ConfigError, SwatheError
from swathe.queue import acknowledged_by, connect, release_dead_worker
from swathe.settings import RELAY, Settings, read_settings

_STOP_GRACE_S: Final = 15.0
"""What a worker gets beyond its own bound of a drain before it is killed."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

ExitWhenIdle = Annotated[
    float | None,
    typer.Option(help="Exit with 0 when no queue has held work for so many seconds."),
]


def main() -> None:
    """Entry point of the console script."""
    try:
        settings = read_settings()
        log.setup(form=settings.log_format, level=settings.log_level)
        app()
    except SwatheError as error:
        print(f"swathe-worker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@app.callback(invoke_without_command=True)
def supervise(
    context: typer.Context,
    devices: Annotated[str, typer.Option(help="all, cpu, or GPUs by number or UUID.")] = "all",
    exit_when_idle: ExitWhenIdle = None,
) -> None:
    """Run one worker process on each device, until told to stop."""
    if context.invoked_subcommand is not None:
        return
    from worker.host import devices as inventory
    from worker.host.node import Node
    from worker.host.supervisor import Supervisor, SupervisorOptions
    from worker.telemetry.nvml import GpuMonitor, GpuReader
    from worker.telemetry.relay import Relay
    from worker.telemetry.reports import Inbox

    settings = read_settings()
    connection = connect(_redis_url(settings), retries=1)
    inbox = Inbox()
    node = Node(inbox, GpuMonitor(GpuReader([])))

    if devices == "all" and (advice := inventory.out_of_reach()) is not None:
        # Days of a fleet's work on a CPU would be worse than none.
        raise ConfigError(advice)

    serve = _serve_options(exit_when_idle, node.serve(settings))

    def command(device: inventory.Device, name: str) -> list[str]:
        return [sys.executable, "-P", "-m", "worker.cli", "serve", device.uuid, name, *serve]

    options = SupervisorOptions(
        restart_finished=exit_when_idle is None,
        stop_s=settings.drain_s + _STOP_GRACE_S,
        die_with_parent=True,
    )

    def bury(name: str) -> bool:
        release_dead_worker(connection, name)
        return acknowledged_by(connection, name) > 0

    wanted = inventory.Wanted(devices, os.environ)
    supervisor = Supervisor(command, wanted, options, on_death=bury, inbox=inbox)
    node.follow(supervisor.views, lambda: supervisor.ticked_s)
    relayed = settings.metrics_advertise == RELAY
    relay = Relay(connection, settings.node, lambda: node.metrics().body) if relayed else None
    try:
        raise typer.Exit(supervisor.run())
    finally:
        if relay is not None:
            relay.close()
        node.close()


def _serve_options(exit_when_idle: float | None, metrics: str | None) -> list[str]:
    """What every worker of this node is told."""
    idle = [] if exit_when_idle is None else ["--exit-when-idle", str(exit_when_idle)]
    return idle if metrics is None else [*idle, "--metrics", metrics]


@app.command("serve", hidden=True)
def serve_command(
    uuid: str,
    name: str,
    exit_when_idle: ExitWhenIdle = None,
    report_fd: Annotated[int | None, typer.Option(help="Line to the supervisor.")] = None,
    metrics: Annotated[str | None, typer.Option(help="Where this node's metrics are.")] = None,
) -> None:
    """Work on the one device that this process can see."""
    from worker.model.kernels.cache import keep_kernels

    settings = read_settings()
    keep_kernels(settings.kernel_cache)
    from worker.serve import Place, serve

    place = Place(uuid=uuid, name=name, report_fd=report_fd, metrics=metrics)
    _end_process(serve(settings, _redis_url(settings), place, exit_when_idle_s=exit_when_idle))


@app.command("apart", hidden=True)
def apart_command(trial: str, events: int, parent: int) -> None:
    """Compute one range's samples one by one, and die of them where need be."""
    from worker.apart import attempt

    _end_process(attempt(read_settings(), trial, events=events, parent=parent))


@app.command("check")
def check_command(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    samples: Annotated[int, typer.Option(help="How many random samples to compare.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Which samples.")] = 0,
) -> None:
    """Compare stored samples with single, unpadded forward passes of the full model by transformers alone."""
    import torch

    from swathe import checkpoint
    from swathe.records import open_run
    from swathe.spec import FLOAT8
    from worker.check import check_run

    settings = read_settings()
    _, spec = open_run(run)
    found = checkpoint.resolve_like(spec.model, model_roots=settings.model_roots)
    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    result = check_run(run, found.folder, samples=samples, device=torch.device(where), seed=seed)
    rows = ", ".join(str(row) for row in result.rows)
    print(f"checked rows {rows} ({result.tokens} tokens) against single forward passes:")
    for layer in result.layers:
        name = layer.layer if layer.layer == "final" else f"layer {layer.layer}"
        print(
            f"  {name:>9}  relative error {layer.median:.1e} median, {layer.worst:.1e} worst"
            + (f", {layer.unexplained:.1e} beyond float8" if spec.stored_dtype == FLOAT8 else "")
        )
    if not result.ok:
        print(
            f"swathe-worker: errors above {result.limit:g}: the states are wrong", file=sys.stderr
        )
        raise typer.Exit(1)


@app.command("doctor", hidden=True)
def doctor_command() -> None:
    """Print what this node's devices are and can do, as JSON."""
    from worker import doctor

    found = {
        "software": doctor.software(),
        "devices": [asdict(device) for device in doctor.examine_devices()],
        "problems": doctor.software_problems(),
    }
    print(json.dumps(found))


def _end_process(code: int) -> NoReturn:
    """End at once: a thread that hangs in a device's driver would hold up the interpreter's own end for ever."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redis_url(settings: Settings) -> SecretStr:
    """Where the fleet is. Raises ConfigError when that, or what this worker may open, is not set."""
    if settings.redis_url is None:
        msg = "REDIS_URL is not set: it says where the fleet's queue is, e.g. redis://:PASSWORD@HOST:6379/0"
        raise ConfigError(msg)
    if not settings.store_roots:
        msg = (
            "SWATHE_STORE_ROOTS is not set: name the folders (comma separated) below which this worker may open runs; "
            "it refuses jobs that name others"
        )
        raise ConfigError(msg)
    return settings.redis_url


if __name__ == "__main__":
    main()
