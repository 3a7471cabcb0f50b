"""The command line ``swathe-worker``: a supervisor by default, one device's worker or a check as subcommands."""

import os
import sys
from typing import Annotated

import typer

from swathe import log
from swathe.errors import ConfigError, SwatheError
from swathe.settings import Settings, read_settings

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
    die_with_parent: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run one worker process on each device, until told to stop."""
    if context.invoked_subcommand is not None:
        return
    from worker.supervisor import supervise_devices

    _require_fleet(read_settings())
    command = [sys.executable, "-P", "-m", "worker.cli", "serve"]
    if exit_when_idle is not None:
        command += ["--exit-when-idle", str(exit_when_idle)]
    raise typer.Exit(supervise_devices(devices, command, die_with_parent=die_with_parent))


@app.command("serve", hidden=True)
def serve_command(exit_when_idle: ExitWhenIdle = None) -> None:
    """Work on the one device that this process can see."""
    from worker.serve import serve

    settings = read_settings()
    _require_fleet(settings)
    raise typer.Exit(
        serve(
            settings, device_id=os.environ.get("SWATHE_DEVICE", ""), exit_when_idle_s=exit_when_idle
        )
    )


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
    from swathe.records import read_run
    from swathe.store import open_store
    from worker.check import check_run

    settings = read_settings()
    spec = read_run(open_store(run))
    found = checkpoint.resolve_like(spec.model, model_roots=settings.model_roots)
    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    result = check_run(run, found.folder, samples=samples, device=torch.device(where), seed=seed)
    rows = ", ".join(str(row) for row in result.rows)
    print(f"checked rows {rows} ({result.tokens} tokens) against single forward passes:")
    for layer in result.layers:
        name = layer.layer if layer.layer == "final" else f"layer {layer.layer}"
        print(f"  {name:>9}  relative error {layer.median:.1e} median, {layer.worst:.1e} worst")
    if not result.ok:
        print(
            f"swathe-worker: errors above {result.limit:g}: the states are wrong", file=sys.stderr
        )
        raise typer.Exit(1)


def _require_fleet(settings: Settings) -> None:
    if settings.redis_url is None:
        msg = "REDIS_URL is not set: it says where the fleet's queue is, e.g. redis://:PASSWORD@HOST:6379/0"
        raise ConfigError(msg)
    if not settings.store_roots:
        msg = (
            "SWATHE_STORE_ROOTS is not set: name the folders (comma separated) below which this worker may open runs; "
            "it refuses jobs that name others"
        )
        raise ConfigError(msg)


if __name__ == "__main__":
    main()
