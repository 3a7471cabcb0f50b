"""The command line ``swathe``: options in, one clear line and exit code 2 out when they make no sense."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from producer import fleet, launch
from producer.display import Display
from producer.plan import PlanOptions, PlanReport, plan
from producer.report import plan_lines
from producer.status import as_json, as_lines
from producer.verify import verify, withdraw
from swathe import log
from swathe.errors import ConfigError, SwatheError
from swathe.manifest import seal
from swathe.records import RunWatcher, read_run
from swathe.settings import Settings, read_settings
from swathe.spec import RunSpec
from swathe.store import open_store

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Hidden states of a large frozen language model, for training speculative drafters.",
)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or prefix.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point of the console script."""
    settings = _guarded(read_settings)
    log.setup(form=settings.log_format, level=settings.log_level)
    _guarded(lambda: app(standalone_mode=True, obj=settings))


def _guarded(action: Callable[[], Any]) -> Any:
    """Run a command; errors raised on purpose are one line and their exit code."""
    try:
        return action()
    except SwatheError as error:
        print(f"swathe: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("swathe: stopped; run the same command again to resume", file=sys.stderr)  # noqa: T201
        sys.exit(1)


if __name__ == "__main__":
    main()
