"""The commands that carry a run's contents across its border: move, export, import, gc."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from producer import fleet
from producer.display import duration_text, size_text
from producer.move import move
from producer.progress import counted_progress
from swathe import checkpoint
from swathe.errors import ConfigError
from swathe.export import ExportOptions, export
from swathe.importing import ImportOptions, import_speculators
from swathe.location import open_home
from swathe.orphans import GRACE_S, collect
from swathe.records import RunWatcher, open_run
from swathe.settings import read_settings

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or prefix.")]


def move_command(
    run: Run,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Where it is to be.")],
) -> None:
    """Move a run to another folder or prefix, also one that goes on; run again to go on after an interruption."""
    settings = read_settings()
    with counted_progress("moving") as progress:
        report = move(run, dest, progress=progress)
    home = report.dest
    print(
        f"run {report.run_id} is at {home.url} now: {report.ranges} ranges, {size_text(report.size_bytes)} copied in "
        f"{duration_text(report.seconds)}; moved.json in {report.source} leads there"
    )
    watcher = RunWatcher(*open_run(home))
    state = watcher.read()
    if state.complete:
        return
    if settings.redis_url is not None:
        fleet.Fleet(fleet.connect(settings), watcher.store, state.spec).relocate(state)
    print(f"it goes on there, by workers whose SWATHE_STORE_ROOTS allow {home.url}")


def export_command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    run: Run,
    dest: Annotated[Path, typer.Argument(help="Folder to write; an interrupted export resumes.")],
    format_: Annotated[str, typer.Option("--format", help="speculators, specforge or modelopt.")],
    algorithm: Annotated[
        str, typer.Option(help="SpecForge's: eagle3, dflash, domino or dspark.")
    ] = "eagle3",
    layers: Annotated[str, typer.Option(help="Blocks to export; unset: all of the run.")] = "",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    fp8: Annotated[bool, typer.Option("--fp8", help="speculators' float8 variant.")] = False,
    max_length: Annotated[int | None, typer.Option(min=1, help="Cut longer samples.")] = None,
    allow_random: Annotated[
        bool, typer.Option("--allow-random", help="Export a run of random weights.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Files written at the same time.")] = 4,
) -> None:
    """Write a run in a trainer's own format, with its layer ids and norm convention explained in its README."""
    given: dict[str, Any] = {"format": format_, "algorithm": algorithm, "dtype": dtype}
    options = ExportOptions(
        **given,
        layers=_numbers("--layers", layers) or None,
        fp8=fp8,
        max_length=max_length,
        allow_random=allow_random,
        workers=workers,
    )
    options.check()
    with counted_progress("exporting") as progress:
        report = export(run, dest, options, progress=lambda now: progress(now.done, now.total))
    print(
        f"{report.dest}: {report.samples} samples ({report.found} were there, {report.left_out} left out), "
        f"{size_text(report.written_bytes)} written in {duration_text(report.seconds)}; see its README.md"
    )


def import_command(
    source: Annotated[Path, typer.Argument(help="Folder of hs_*.safetensors files.")],
    model: Annotated[str, typer.Option(help="The model that computed the states.")],
    layer_ids: Annotated[
        str, typer.Option(help="speculators' ids, without the final one: 2,32,61")
    ],
    out: Annotated[str, typer.Option(help="The run's folder or prefix.")],
    format_: Annotated[str, typer.Option("--format", help="speculators.")] = "speculators",
    final_norm: Annotated[
        Path | None, typer.Option(help="final_norm.safetensors of another run of the model.")
    ] = None,
) -> None:
    """Make a sealed run out of a folder of another tool's, verified on the way in."""
    if format_ != "speculators":
        msg = f"--format {format_}: only speculators can be imported"
        raise ConfigError(msg)
    found = checkpoint.resolve(model, model_roots=read_settings().model_roots)
    options = ImportOptions(
        model=found.spec, layer_ids=_numbers("--layer-ids", layer_ids), final_norm=final_norm
    )
    with counted_progress("importing") as progress:
        report = import_speculators(
            source,
            open_home(out),
            options,
            progress=lambda now: progress(now.ranges_done, now.ranges),
        )
    norm = "before the norm" if report.norm_checked else "not checked against the final norm"
    print(
        f"{out}: {report.stored} stored + {report.rejected} rejected + {report.quarantined} quarantined = "
        f"{report.rows} rows, {size_text(report.size_bytes)}; the last slot is {norm}"
    )


def gc_command(
    run: Run,
    grace_s: Annotated[
        float,
        typer.Option(min=0, help="Leave what is younger; an attempt may still be writing it."),
    ] = GRACE_S,
) -> None:
    """Remove what dead attempts left behind: shards that no record names, and temporaries."""
    now_s = time.time()
    store, spec = open_run(run)
    state = RunWatcher(store, spec).read()
    objects, size_bytes = collect(store, state, now_s=now_s, grace_s=grace_s)
    print(f"{objects} objects removed, {size_text(size_bytes)} of them shards")


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        msg = f"{option} {text}: numbers with commas between are wanted, such as 1,16,31"
        raise ConfigError(msg) from None
