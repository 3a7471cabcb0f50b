"""A node of the fleet as its operator has it: a checkout, a .env, and docker compose."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.docker.engine import ROOT, Engine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], bound_s: float, what: str) -> Any:
    end_s = time.monotonic() + bound_s
    while time.monotonic() < end_s:
        if value := condition():
            return value
        time.sleep(0.5)
    msg = f"not within {bound_s} s: {what}"
    raise AssertionError(msg)


def checkout(folder: Path) -> Path:
    """What a clone of this tree holds, untracked files that are not ignored included."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


class Node:
    """``lines`` is the text of .env; the project is named after the folder, as compose does."""

    def __init__(self, engine: Engine, folder: Path, lines: str) -> None:
        self.engine = engine
        self.folder = checkout(folder)
        (folder / ".env").write_text(lines)

    def compose(
        self, *arguments: str, check: bool = True, env: dict[str, str] | None = None
    ) -> str:
        """Output of one ``docker compose`` command in the node's folder."""
        done = subprocess.run(
            ["docker", "compose", "--ansi", "never", "--progress", "plain", *arguments],
            cwd=self.folder, env=self.engine.environment | (env or {}),
            text=True, capture_output=True, check=False,
        )  # fmt: skip
        if check and done.returncode != 0:
            msg = f"docker compose {' '.join(arguments)} ({done.returncode}): {done.stdout[-4000:]}{done.stderr[-4000:]}"
            raise AssertionError(msg)
        return done.stdout if check else done.stdout + done.stderr

    def config(self, *arguments: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        """The model that compose makes of the files: services by name."""
        found = json.loads(self.compose(*arguments, "config", "--format", "json", env=env))
        return dict(found["services"])

    def swathe(self, *arguments: str) -> str:
        """``docker compose run --rm producer swathe ...``"""
        return self.compose("run", "--rm", "-T", "producer", "swathe", *arguments)

    def containers(self) -> dict[str, dict[str, Any]]:
        """What ``docker inspect`` says of each container, by service."""
        ids = self.compose("ps", "-aq").split()
        inspected = json.loads(self.engine.docker("inspect", *ids).stdout) if ids else []
        return {item["Config"]["Labels"]["com.docker.compose.service"]: item for item in inspected}

    def log(self, service: str) -> str:
        """Both streams of a service's container, in order."""
        container = self.compose("ps", "-aq", service).strip()
        return subprocess.run(
            ["docker", "logs", container], check=True, env=self.engine.environment,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ).stdout  # fmt: skip

    def workers(self) -> set[str]:
        """Names of all worker processes that this node's log tells of."""
        lines = (line for line in self.log("worker").splitlines() if line.startswith("{"))
        events = [json.loads(line) for line in lines]
        return {said["worker"] for said in events if said.get("event") == "worker started"}

    def prometheus(self, query: str) -> list[dict[str, Any]]:
        port = self.compose("port", "prometheus", "9090").strip().rpartition(":")[2]
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return list(json.load(answer)["data"]["result"])


class Run:
    """A run on the shared store, read from outside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def records(self) -> dict[int, str]:
        """The worker of each stored range."""
        paths = (self.folder / "states").glob("*.json")
        stored = [path for path in paths if path.stem.isdecimal()]
        return {int(path.stem): json.loads(path.read_text())["worker"] for path in stored}

    def stored_by(self, workers: Iterable[str]) -> int:
        names = set(workers)
        return sum(worker in names for worker in self.records().values())

    @property
    def manifest(self) -> dict[str, Any] | None:
        path = self.folder / "manifest.json"
        return json.loads(path.read_text()) if path.exists() else None


def tiny_model(folder: Path, wordings: int = 512) -> None:
    """The shape of a llama too small for a second thread, for random weights: these tests are about ranges, not speed."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": wordings,
        "max_position_embeddings": 2048, "torch_dtype": "float32", "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def write_samples(path: Path, count: int, wordings: int = 512) -> None:
    """Rows of 200 tokens, no two alike."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for row in range(count):
            ids = [(row * 7 + place * (row % 13 + 1)) % wordings for place in range(200)]
            file.write(json.dumps({"id": f"r{row}", "input_ids": ids}) + "\n")


def writable_folder(path: Path) -> Path:
    """One that the containers' user may write, as the docs ask for."""
    path.mkdir(parents=True)
    os.chown(path, 1000, 1000)
    return path
