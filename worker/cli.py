"""The command line ``swathe-worker``: a supervisor by default, one device's worker or a check as subcommands."""

import sys
from typing import Annotated

import typer

from swathe.settings import read_settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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


if __name__ == "__main__":
    main()
