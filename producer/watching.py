"""Commands that look and change nothing: ``status`` and ``top`` for a person, ``exporter`` for Prometheus."""

import contextlib
import json
import threading
import time
from typing import Annotated, Final

import typer
from rich.console import Console

from producer import fleet
from producer.display import Display, Snapshot
from producer.exporter import Exporter
from producer.runs import Runs
from producer.status import as_json, as_lines
from producer.top import watch_fleet
from swathe import log, queue
from swathe.errors import ConfigError, QueueError
from swathe.records import RunWatcher, open_run
from swathe.settings import read_settings
from swathe.web import Address, WebServer

_WATCH_EVERY_S: Final = 2.0

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or prefix.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

logger = log.get("swathe")


def status(
    run: Run,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until the run is complete.")
    ] = False,
    json_: Json = False,
) -> None:
    """Tell a run's state from its store alone, and from Redis where REDIS_URL is set."""
    (store, spec), settings = open_run(run), read_settings()
    watcher = RunWatcher(store, spec)
    one = None
    if settings.redis_url:  # few retries: what the store says does not wait for Redis
        one = fleet.Fleet(fleet.connect(settings, retries=1), store, spec)
    if watch:
        state = watcher.read()
        with Display() as display:
            while state.missing:  # what is set aside comes by nobody's work
                display.show(one.look(state) if one else Snapshot(state=state))
                time.sleep(_WATCH_EVERY_S)
                state = watcher.read()
    view = None
    try:
        known = one.known() if one else None
        state = watcher.read()
        if one and known:
            view = one.view(state, known)
    except QueueError as error:
        logger.warning("shown from the store alone", error=str(error))
        state = watcher.read()
    if json_:
        value = as_json(state, view) | {"failures": fleet.failures(watcher.store, state)}
        print(json.dumps(value, indent=1, ensure_ascii=False))
    else:
        for line in as_lines(state, view):
            print(line)
        for failure in fleet.failures(watcher.store, state):
            print(f"  aside    range {failure['range']}: {failure['reason']}")


def top(
    once: Annotated[bool, typer.Option("--once", help="Print the fleet once and end.")] = False,
) -> None:
    """Show every worker of the fleet: utilization, speed, and what it waits for."""
    connection = fleet.connect(read_settings(), retries=1)
    with contextlib.suppress(KeyboardInterrupt):
        watch_fleet(connection, Console(), once=once)


def exporter_command() -> None:
    """Serve Prometheus metrics of the fleet and HTTP service discovery of its workers, until interrupted."""
    settings = read_settings()
    address = Address.parse(settings.exporter_address, name="SWATHE_EXPORTER_ADDRESS")
    if address is None:
        msg = "SWATHE_EXPORTER_ADDRESS is off; give it HOST:PORT such as 127.0.0.1:9411"
        raise ConfigError(msg)
    connection = fleet.connect(settings, retries=1)
    runs = Runs(lambda: queue.known_runs(connection), settings)
    exporter = Exporter(connection, runs)
    routes = {
        "/metrics": exporter.metrics,
        "/targets": exporter.targets,
        "/healthz": exporter.healthz,
    }
    try:
        server = WebServer(address, routes, {"/nodes/": exporter.node})
    except OSError as error:
        msg = f"SWATHE_EXPORTER_ADDRESS {address} cannot be had ({error}); choose another"
        raise ConfigError(msg) from error
    runs.start()
    logger.info("exporter", url=f"http://{server.address}/metrics", targets="/targets")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        runs.close()
        server.close()
