"""The command line ``swathe``: options in; what makes no sense is one clear line and exit code 2."""

import json
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from producer import exchange, fleet, launch, watching
from producer.display import Display
from producer.doctor import doctor_command
from producer.options import PlanOptions
from producer.plan import PlanReport, plan
from producer.progress import counted_progress, plan_progress
from producer.report import plan_json, plan_lines
from producer.verify import Verification, seal_again, verify, withdraw
from swathe import log
from swathe.errors import ConfigError, IncompleteRunError, SwatheError
from swathe.location import open_home
from swathe.manifest import seal
from swathe.queue import known_runs, paused_runs
from swathe.records import RunWatcher, open_run
from swathe.settings import Settings, read_settings
from swathe.store import Store

_WATCH_EVERY_S: Final = 2.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Hidden states of a large frozen language model, for training speculative drafters.",
)

Dataset = Annotated[
    str,
    typer.Argument(
        help="A .jsonl[.gz|.zst] or .parquet file, a folder of them, or a save_to_disk folder: a path or s3://. Or a hub id."
    ),
]
Model = Annotated[
    str, typer.Option(help="Checkpoint folder, hub id, or random:CONFIG.json for rehearsals.")
]
Layers = Annotated[str, typer.Option(help="Blocks whose outputs are stored, 0-based: 1,16,31")]
Final_ = Annotated[
    bool, typer.Option("--final", help="Also the last block's output, before the norm.")
]
Out = Annotated[str, typer.Option(help="The run's folder or prefix.")]
Split = Annotated[
    str | None, typer.Option(help="Of a data set with splits: SPLIT or SUBSET/SPLIT.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first N rows.")]
MaxLength = Annotated[
    int | None, typer.Option(min=1, help="Longest sample in tokens; unset: what the model takes.")
]
OverlongOption = Annotated[str, typer.Option(help="Longer samples: reject or truncate.")]
RangeTokens = Annotated[int, typer.Option(min=1, help="Tokens of a range, which is one batch.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="Computed and stored in: auto (the checkpoint's), bf16, fp16, fp32; fp8: computed in the checkpoint's."
    ),
]
Columns = Annotated[str, typer.Option(help="Columns by other names: messages=conversations,id=key")]
TemplateKwargs = Annotated[str, typer.Option(help="Extra variables of the chat template, as JSON.")]
MinLength = Annotated[int, typer.Option(min=1, help="Reject rows of fewer tokens.")]
MinSupervised = Annotated[
    str,
    typer.Option(
        help="Reject rows with fewer tokens under the loss mask: a number, or a share (0.1 or 10%)."
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the checkpoint's own Python code.")
]
AllowLowSpace = Annotated[
    bool, typer.Option("--allow-low-space", help="Plan even if the states do not fit now.")
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or prefix.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point of the console script."""
    try:
        settings = read_settings()
        log.setup(form=settings.log_format, level=settings.log_level)
        app()
    except SwatheError as error:
        print(f"swathe: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@app.command("plan")
def plan_command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    dataset: Dataset,
    model: Model,
    out: Out,
    layers: Layers = "",
    final: Final_ = False,
    split: Split = None,
    limit: Limit = None,
    max_length: MaxLength = None,
    overlong: OverlongOption = "reject",
    range_tokens: RangeTokens = 32_768,
    dtype: Dtype = "auto",
    columns: Columns = "",
    chat_template_kwargs: TemplateKwargs = "{}",
    min_length: MinLength = 1,
    min_supervised: MinSupervised = "1",
    trust_remote_code: TrustRemoteCode = False,
    allow_low_space: AllowLowSpace = False,
    json_: Json = False,
) -> None:
    """Read the data set once, write its tokens in planned order, say what the run will cost."""
    options = _options(locals())
    report = _plan(open_home(out), options, read_settings())
    if json_:
        _print_json(plan_json(report))
    else:
        _print_lines(plan_lines(report))


@app.command("run")
def run_command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    dataset: Dataset,
    model: Model,
    out: Out,
    layers: Layers = "",
    final: Final_ = False,
    split: Split = None,
    limit: Limit = None,
    max_length: MaxLength = None,
    overlong: OverlongOption = "reject",
    range_tokens: RangeTokens = 32_768,
    dtype: Dtype = "auto",
    columns: Columns = "",
    chat_template_kwargs: TemplateKwargs = "{}",
    min_length: MinLength = 1,
    min_supervised: MinSupervised = "1",
    trust_remote_code: TrustRemoteCode = False,
    allow_low_space: AllowLowSpace = False,
    devices: Annotated[str, typer.Option(help="all, cpu, or GPUs by number or UUID.")] = "all",
    check: Annotated[
        int, typer.Option(min=0, help="Samples compared with single forward passes at the end.")
    ] = 3,
) -> None:
    """Plan, then everything on this machine until the run is sealed; run again to resume."""
    options, settings = _options(locals()), read_settings()
    store = open_home(out)
    report = _plan(store, options, settings)
    _print_lines(plan_lines(report))
    was_sealed = RunWatcher(store, report.spec).read().sealed
    try:
        with Display() as display:
            manifest = launch.extract(
                store, report.spec, settings=settings, devices=devices, display=display
            )
    except KeyboardInterrupt:
        msg = f"stopped; what is stored in {out} stays, run the same command again to resume"
        raise IncompleteRunError(msg) from None
    accounts = manifest.accounts
    print(
        f"complete: {accounts.stored} stored + {accounts.rejected} rejected + {accounts.quarantined} quarantined "
        f"= {accounts.rows} rows, {accounts.tokens:,} tokens"
    )
    if was_sealed:
        print("(it was complete already; nothing was computed)")
    elif report.spec.model.random_weights:
        print("(the weights are random: there is no checkpoint to compare the states with)")
    elif check:
        launch.check(store, samples=check, devices=devices)
    print("read it:")
    print("  from swathe import HiddenStates")
    print(f'  sample = HiddenStates("{out}")[0]')
    print('  sample["hidden_states"].shape  # [tokens, slots, hidden size]')


@app.command()
def submit(run: Run) -> None:
    """Enqueue the ranges that are not stored; safe to repeat, from any state."""
    one = _fleet(run)
    state = RunWatcher(one.store, one.spec).read()
    done = one.submit(state)
    print(
        f"run {one.spec.run_id}: {done.added} ranges enqueued, {done.repaired} repaired, {done.known} were there; "
        f"{len(state.records)} stored, {len(state.failed)} set aside"
    )


@app.command()
def wait(run: Run) -> None:
    """Show progress until the run is complete, seal it if nobody has, and say so by the exit code."""
    (store, spec), settings = open_run(run), read_settings()
    one = fleet.Fleet(fleet.connect(settings, retries=1), store, spec)
    watcher = RunWatcher(store, spec)
    with Display() as display:
        state = watcher.read()
        while state.missing:
            display.show(one.look(state))
            time.sleep(_WATCH_EVERY_S)
            state = watcher.read()
    manifest = seal(watcher.store, state)
    print(
        f"complete and sealed: {manifest.accounts.stored} samples, {manifest.accounts.tokens:,} tokens"
    )


@app.command("list")
def list_command() -> None:
    """List the runs that the fleet knows."""
    connection = fleet.connect(read_settings())
    paused = paused_runs(connection)
    for run_id, url in sorted(known_runs(connection).items()):
        print(f"{run_id}  {url}{'  paused' if run_id in paused else ''}")


@app.command()
def pause(run: Run) -> None:
    """Start no more ranges of a run; those in flight are finished."""
    _fleet(run).pause()


@app.command()
def resume(run: Run) -> None:
    """Undo pause."""
    print(f"{_fleet(run).resume()} ranges are back in the queue")


@app.command()
def cancel(run: Run) -> None:
    """Take a run out of the queue; what is stored stays, submit brings the rest back."""
    print(f"{fleet.cancel(run, read_settings())} ranges taken out of the queue")


@app.command()
def retry(run: Run) -> None:
    """Bring ranges back that were set aside."""
    (store, spec), settings = open_run(run), read_settings()
    watcher = RunWatcher(store, spec)
    state = watcher.read()
    back = fleet.revive(watcher.store, state)
    if settings.redis_url is None:
        print(
            f"{len(back)} ranges are open again; enqueue them with swathe submit, or with swathe run"
        )
        return
    state = watcher.read()
    fleet.Fleet(fleet.connect(settings), watcher.store, spec).submit(state)
    print(f"{len(back)} ranges are back in the queue")


@app.command("verify")
def verify_command(
    run: Run,
    full: Annotated[
        bool, typer.Option("--full", help="Read every byte: hash, plan, values.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Withdraw damaged ranges so that they are done again.")
    ] = False,
    json_: Json = False,
) -> None:
    """Check every committed range; 0 = complete and undamaged."""
    (store, spec), settings = open_run(run), read_settings()
    with counted_progress("verifying", quiet=json_) as progress:
        result = verify(store, full=full, progress=progress)
    if repair and result.damaged:
        watcher = RunWatcher(store, spec)
        state = watcher.read()
        withdraw(watcher.store, state, list(result.damaged))
        if settings.redis_url is not None:
            state = watcher.read()
            fleet.Fleet(fleet.connect(settings), watcher.store, spec).submit(state)
    if repair and result.index:
        seal_again(store)
    if json_:
        _print_json(_verification_json(result))
    else:
        _print_lines(_verification_lines(result, repaired=repair))
    if not result.ok:
        raise typer.Exit(1)


app.command("move")(exchange.move_command)
app.command("export")(exchange.export_command)
app.command("import")(exchange.import_command)
app.command("gc")(exchange.gc_command)
app.command("doctor")(doctor_command)


def _verification_json(result: Verification) -> dict[str, Any]:
    return {
        "ok": result.ok,
        "full": result.full,
        "checked": result.checked,
        "sealed": result.sealed,
        "missing": list(result.missing),
        "set_aside": list(result.failed),
        "damaged": {str(range_id): why for range_id, why in result.damaged.items()},
        "index": result.index,
    }


def _verification_lines(result: Verification, *, repaired: bool) -> list[str]:
    kind = "full" if result.full else "quick"
    lines = [f"{kind} verification of {result.checked} ranges: {'ok' if result.ok else 'not ok'}"]
    if result.missing:
        lines.append(f"  missing    {len(result.missing)} ranges are not stored yet")
    if result.failed:
        lines.append(
            f"  set aside  {len(result.failed)} ranges; bring them back with: swathe retry"
        )
    lines += [f"  damaged    range {range_id}: {why}" for range_id, why in result.damaged.items()]
    if result.damaged:
        done = "withdrawn; swathe submit or swathe run redoes exactly these"
        lines.append(f"  {done if repaired else 'withdraw them with: swathe verify --repair'}")
    if result.index:
        done = "written anew" if repaired else "write it anew with: swathe verify --full --repair"
        lines.append(f"  index      {result.index}; {done}")
    return lines


def _options(given: dict[str, Any]) -> PlanOptions:
    """Plan options from a command's parameters. Raises ConfigError for what cannot be read."""
    overlong = _one_of("--overlong", given["overlong"], "reject", "truncate")
    min_supervised, ratio = _parsed("--min-supervised", given["min_supervised"], _least)
    return PlanOptions(
        dataset=given["dataset"],
        split=given["split"],
        model=given["model"],
        layers=_parsed("--layers", given["layers"], lambda text: tuple(map(int, _parts(text)))),
        final=given["final"],
        limit=given["limit"],
        max_length=given["max_length"],
        overlong=overlong,
        range_tokens=given["range_tokens"],
        dtype=given["dtype"],
        columns=_parsed("--columns", given["columns"], _columns),
        chat_template_kwargs=_parsed(
            "--chat-template-kwargs", given["chat_template_kwargs"], _object
        ),
        min_length=given["min_length"],
        min_supervised=min_supervised,
        min_supervised_ratio=ratio,
        trust_remote_code=given["trust_remote_code"],
        allow_low_space=given["allow_low_space"],
    )


def _parsed(option: str, text: str, read: Callable[[str], Any]) -> Any:
    try:
        return read(text)
    except ValueError as error:
        msg = f"{option} {text}: not understood ({error}); see swathe plan --help"
        raise ConfigError(msg) from None


def _one_of(option: str, text: str, *allowed: str) -> Any:
    if text not in allowed:
        msg = f"{option} {text}: use {' or '.join(allowed)}"
        raise ConfigError(msg)
    return text


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _columns(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in _parts(text))


def _least(text: str) -> tuple[int, float]:
    """Tokens and share that a text such as 16, 0.1 or 10% asks for; a share asks for one token too."""
    if text.endswith("%"):
        return 1, float(text[:-1]) / 100
    return (1, float(text)) if "." in text else (int(text), 0.0)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        msg = "a JSON object is needed"
        raise ValueError(msg)  # noqa: TRY004 - read by _parsed
    return value


def _plan(store: Store, options: PlanOptions, settings: Settings) -> PlanReport:
    with plan_progress() as progress:
        return plan(store, options, model_roots=settings.model_roots, progress=progress)


def _fleet(run: str) -> fleet.Fleet:
    store, spec = open_run(run)
    return fleet.Fleet(fleet.connect(read_settings()), store, spec)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=1, ensure_ascii=False))


def _print_lines(lines: Any) -> None:
    for line in lines:
        print(line)


app.command()(watching.status)
app.command()(watching.top)
app.command("exporter")(watching.exporter_command)


if __name__ == "__main__":
    main()
