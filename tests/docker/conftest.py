"""One engine and one build of the images for all tests; their times and sizes are printed at the end."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.engine import Engine, build_standins
from tests.docker.stack import Node

NOTES: list[str] = []
IMAGES = ("swathe-producer:0.1.0", "swathe-worker:0.1.0", "swathe-demo:0.1.0")


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine() as running:
        started_s = time.monotonic()
        build_standins(running)
        NOTES.append(f"stand-in images: {time.monotonic() - started_s:.0f} s")
        yield running


@pytest.fixture(scope="session")
def checkout_node(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Node:
    """A fresh clone with the .env that the README tells to make."""
    folder = tmp_path_factory.mktemp("clone")
    node = Node(engine, folder, "")
    (folder / ".env").write_text((folder / ".env.example").read_text())
    return node


@pytest.fixture(scope="session")
def images(engine: Engine, checkout_node: Node) -> tuple[str, ...]:
    """The project's images, built by compose."""
    started_s = time.monotonic()
    checkout_node.compose("--profile", "demo", "--profile", "producer", "build")
    NOTES.append(f"build of the project's images: {time.monotonic() - started_s:.0f} s")
    base = _size_mb(engine, "python:3.11.14-slim-bookworm")
    NOTES.extend(
        f"{name}: {_size_mb(engine, name) - base} MB over the stand-in base's {base} MB"
        for name in IMAGES
    )
    return IMAGES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that asks for engine or images also waits for their building."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1800))


def _size_mb(engine: Engine, image: str) -> int:
    said = engine.docker("image", "inspect", "--format", "{{.Size}}", image).stdout
    return int(said) // 1_000_000


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for note in NOTES:
        terminalreporter.write_line(note)
