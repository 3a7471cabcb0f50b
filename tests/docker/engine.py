"""A Docker engine of the tests' own, and images that stand in for those that cannot be pulled here.

Everything lies in a folder outside the repository and is kept: layers are built once. The engine listens on a socket in
that folder only; `scripts/install-docker` brings its programs. Run as a program, it starts the engine, builds the
stand-ins and waits: then DOCKER_HOST and DOCKER_CONFIG, which it prints, make `docker` use it by hand.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
STANDIN = Path(__file__).parent / "standin"
BASE = "swathe-standin:bookworm"
TARGETS = ("python", "redis", "prometheus", "alertmanager", "grafana")
NEVER_STARTED = "nvcr.io/nvidia/k8s/dcgm-exporter"
"""Needs a GPU: its place in the files is checked, nothing stands in for it."""


def cache() -> Path:
    """Where the engine and its images live."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SWATHE_DOCKER_CACHE") or home / "swathe" / "docker")


class Engine:
    """``with Engine() as engine``: a running dockerd. It ends with the block, with all its containers."""

    def __init__(self) -> None:
        self.folder = cache()
        self.socket = self.folder / "docker.sock"
        self.log_path = self.folder / "dockerd.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            "dockerd",
            "--data-root", str(self.folder / "data"),
            "--exec-root", str(self.folder / "exec"),
            "--pidfile", str(self.folder / "pid"),
            "--host", f"unix://{self.socket}",
        ]  # fmt: skip
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True
            )
        end_s = time.monotonic() + 60
        while self.docker("version", check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > end_s:
                self.__exit__()
                msg = f"dockerd does not start: {self.log_path.read_text()[-2000:]}"
                raise RuntimeError(msg)
            time.sleep(0.2)
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self.clear()
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def environment(self) -> dict[str, str]:
        """Makes ``docker`` speak to this engine, with compose and buildx."""
        return {
            **{name: value for name, value in os.environ.items() if not _is_setting(name)},
            "DOCKER_HOST": f"unix://{self.socket}",
            "DOCKER_CONFIG": str(self.folder / "config"),
            "DOCKER_BUILDKIT": "1",
        }

    def docker(
        self, *arguments: str, check: bool = True, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        """One call of the command line."""
        done = subprocess.run(
            ["docker", *arguments],
            env=self.environment, text=True, capture_output=True, check=False, **options,
        )  # fmt: skip
        if check and done.returncode != 0:
            msg = f"docker {' '.join(arguments)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
            raise RuntimeError(msg)
        return done

    def clear(self) -> None:
        """Remove containers, networks and volumes that an earlier run left; images stay."""
        containers = self.docker("ps", "-aq").stdout.split()
        if containers:
            self.docker("rm", "-f", "-v", *containers)
        self.docker("network", "prune", "-f")
        volumes = self.docker("volume", "ls", "-q").stdout.split()
        if volumes:
            self.docker("volume", "rm", "-f", *volumes)


def _is_setting(name: str) -> bool:
    """Whether a variable would change what compose makes of its files."""
    return name.startswith(("SWATHE_", "COMPOSE_", "AWS_", "HF_")) or name == "REDIS_URL"


def build_standins(engine: Engine) -> None:
    """Make the base once, and tag a stand-in with every image name that the project's files pin."""
    if engine.docker("image", "inspect", BASE, check=False).returncode != 0:
        _import_base(engine)
    for target in TARGETS:
        names = [part for name in _pinned()[target] for part in ("-t", name)]
        engine.docker("build", "-q", "--target", target, *names, str(STANDIN))


def _pinned() -> dict[str, set[str]]:
    """Image names out of Dockerfile and compose.yaml, by stand-in."""
    texts = [(ROOT / "docker" / name).read_text() for name in ("Dockerfile", "compose.yaml")]
    names = set(re.findall(r"^(?:FROM|\s+image:) (\S+:\S+)", "\n".join(texts), re.MULTILINE))
    ours = {name for name in names if name.startswith(("swathe-", NEVER_STARTED))}
    by_target = {
        target: {name for name in names - ours if target in name.partition(":")[0]}
        for target in TARGETS
    }
    strangers = names - ours - set().union(*by_target.values())
    assert not strangers, f"no stand-in for {strangers}"
    assert all(by_target.values()), by_target
    return by_target


def _import_base(engine: Engine) -> None:
    """Debian by debootstrap, with this machine's certificates and pip settings: images know nothing of them."""
    with tempfile.TemporaryDirectory(dir=engine.folder) as folder:
        tree = Path(folder) / "tree"
        _run(["debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "bookworm", str(tree)])  # fmt: skip
        for package in (tree / "var/cache/apt/archives").glob("*.deb"):
            package.unlink()
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", tree / "etc/ssl/certs")
        (tree / "etc/pip.conf").write_text(_pip_settings(tree))
        for source in Path("/etc/apt/apt.conf.d").glob("99*"):
            shutil.copy(source, tree / "etc/apt/apt.conf.d")
        archive = Path(folder) / "base.tar"
        _run(["tar", "-C", str(tree), "-cf", str(archive), "."])
        engine.docker("import", str(archive), BASE)


def _pip_settings(tree: Path) -> str:
    """This machine's, with its folder of wheels copied along and its local indexes left out."""
    done = _run([sys.executable, "-m", "pip", "config", "list"])
    lines = ["[global]"]
    for name, value in re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", done, re.MULTILINE):
        if name in {"index-url", "cert", "trusted-host", "proxy", "default-timeout"}:
            lines.append(f"{name} = {value}")
        if name == "find-links" and Path(value).is_dir():
            shutil.copytree(value, tree / value.lstrip("/"), dirs_exist_ok=True)
            lines.append(f"{name} = {value}")
    return "\n".join(dict.fromkeys(lines)) + "\n"


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        msg = f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        raise RuntimeError(msg)
    return done.stdout


def tested_inputs() -> str:
    """A hash of everything that the container tests are about; docker/tested.sha256 holds that of the last green run."""
    listed = _run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "--", *INPUTS])
    digest = hashlib.sha256()
    for name in sorted(set(listed.split("\n")) - {"", STAMP}):
        if (ROOT / name).is_file():
            digest.update(f"{name}\0".encode() + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()


STAMP = "docker/tested.sha256"
INPUTS = (
    "docker", "compose.yaml", ".env.example", ".dockerignore", "tests/docker", "scripts/install-docker", "pyproject.toml",
    "requirements.lock", "grafana/provisioning", "examples/prepare_demo.py", "producer/cli.py", "producer/exporter.py",
    "worker/cli.py", "worker/telemetry/relay.py", "swathe/settings.py", "docs/examples/kubernetes",
)  # fmt: skip


def main() -> None:
    """Print the hash of the inputs (``--inputs``), or keep an engine running until interrupted."""
    if sys.argv[1:] == ["--inputs"]:
        sys.stdout.write(f"{tested_inputs()}\n")
        return
    with Engine() as running:
        build_standins(running)
        config = running.folder / "config"
        sys.stdout.write(f"export DOCKER_HOST=unix://{running.socket} DOCKER_CONFIG={config}\n")
        sys.stdout.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
