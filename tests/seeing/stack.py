"""Prometheus, an exporter, workers and a GPU node with a fake driver, as processes and servers of a test."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from swathe.web import Address, Answer, WebServer
from tests.seeing.test_nvml import FakeNvml
from worker.host.node import ChildView, Node
from worker.telemetry.nvml import GpuMonitor, GpuReader
from worker.telemetry.reports import Inbox, Outlet, Report, Totals

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], bound_s: float, what: str) -> Any:
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    msg = f"not within {bound_s} s: {what}"
    raise AssertionError(msg)


class Prometheus:
    """The committed configuration, with this test's addresses and a scrape each second."""

    def __init__(self, folder: Path, exporter: str, dcgm: str) -> None:
        self.port = free_port()
        config = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(ROOT / "docker/prometheus/rules/*.yml")]
        del config["alerting"]
        by_name = {job["job_name"]: job for job in config["scrape_configs"]}
        by_name["swathe-exporter"]["static_configs"] = [{"targets": [exporter]}]
        (discovery,) = by_name["swathe-workers"]["http_sd_configs"]
        discovery |= {
            "url": discovery["url"].replace("exporter:9411", exporter),
            "refresh_interval": "1s",
        }
        del by_name["dcgm"]["dns_sd_configs"]
        by_name["dcgm"]["static_configs"] = [{"targets": [dcgm]}]
        (folder / "prometheus.yml").write_text(json.dumps(config))
        program = shutil.which("prometheus")
        assert program is not None
        with (folder / "prometheus.log").open("wb") as output:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=output,
                stderr=output,
            )

    def get(self, path: str, **query: str | float) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(query, error.read()) from error

    def query(self, expr: str, at_s: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series at a moment."""
        when = {} if at_s is None else {"time": at_s}
        found = self.get("query", query=expr, **when)
        if found["resultType"] == "scalar":
            return [({}, float(found["result"][1]))]
        return [(item["metric"], float(item["value"][1])) for item in found["result"]]

    def value(self, expr: str, at_s: float | None = None) -> float | None:
        """The only series' value, or None."""
        found = self.query(expr, at_s)
        assert len(found) <= 1, found
        return found[0][1] if found else None

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class GpuNode:
    """A node whose two GPUs exist in a fake driver only; it serves real metrics of them."""

    UUIDS = ("GPU-aa", "GPU-bb")

    def __init__(self, nvml: FakeNvml) -> None:
        self.nvml = nvml
        self.inbox = Inbox()
        self.node = Node(self.inbox, GpuMonitor(GpuReader([]), every_s=0.2))
        self.node.follow(self._children, time.monotonic)
        self.server = WebServer(Address("127.0.0.1", 0), {"/metrics": self._metrics})
        self.node._gpus.start()
        self._outlets = [Outlet(os.dup(self.inbox.open(f"w-{u}", u))) for u in self.UUIDS]
        self._started_s = time.monotonic()

    def _metrics(self) -> Answer:
        seconds = time.monotonic() - self._started_s
        for outlet in self._outlets:
            totals = Totals(
                counts={"tokens": 50_000 * seconds, "samples": 150 * seconds},
                stages={"forward": 0.8 * seconds, "copy": 0.1 * seconds},
                states={"compute": 0.9 * seconds, "input": 0.1 * seconds},
            )
            outlet.send(Report(totals=totals, gauges={"busy": 0.8, "mfu": 0.7}, ready=True))
        return self.node.metrics()

    def _children(self) -> list[ChildView]:
        return [
            ChildView(uuid=uuid, label=f"gpu{index}", device_name="card", worker=f"w-{uuid}",
                      state="running", running=True, restarts=0, deaths=0)
            for index, uuid in enumerate(self.UUIDS)
        ]  # fmt: skip

    def close(self) -> None:
        self.node.close()
        self.server.close()
        for outlet in self._outlets:
            outlet.close()
        self.inbox.close()


def dcgm_server() -> WebServer:
    """As much of dcgm-exporter as its panels ask."""
    lines = [
        f'{name}{{gpu="{index}",UUID="{uuid}",Hostname="gpunode"}} 0.6{index}'
        for name in ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE")
        for index, uuid in enumerate(GpuNode.UUIDS)
    ]
    body = ("\n".join(lines) + "\n").encode()
    return WebServer(Address("127.0.0.1", 0), {"/metrics": lambda: Answer.metrics(body)})


class Processes:
    """Commands of this project in an environment of their own; all ended at the end."""

    def __init__(self, folder: Path, redis_url: str, runs: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {
            "REDIS_URL": redis_url,
            "SWATHE_STORE_ROOTS": str(runs),
            "SWATHE_STATE_DIR": str(folder / "state"),
            "SWATHE_METRICS_ADDRESS": "127.0.0.1:0",
            "SWATHE_CANARY_EVERY": "5",
            "SWATHE_LOG_FORMAT": "json",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/support/slow'}",
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self, *arguments: str | Path) -> None:
        subprocess.run(
            [sys.executable, "-m", "producer.cli", *map(str, arguments)],
            env=self.environment, check=True, capture_output=True,
        )  # fmt: skip

    def start(self, name: str, module: str, *arguments: str, **environment: str):
        with (self.folder / f"{name}.log").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=self.environment | environment, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        self._started.append(process)
        return process

    def node(self, name: str, **slow: float) -> "NodeProcess":
        """A supervisor with a worker on the CPU."""
        process = self.start(name, "worker.cli", "--devices", "cpu", TEST_SLOW=json.dumps(slow))
        return NodeProcess(process, self.folder / f"{name}.log")

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        for process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class NodeProcess:
    """What a supervisor's log says of itself."""

    def __init__(self, process: "subprocess.Popen[bytes]", log_path: Path) -> None:
        self.process = process
        self._log_path = log_path

    def said(self, event: str) -> list[dict[str, Any]]:
        lines = self._log_path.read_text().splitlines() if self._log_path.exists() else []
        events = [json.loads(line) for line in lines if line.startswith("{")]
        return [said for said in events if said.get("event") == event]

    @property
    def address(self) -> str:
        """Where its metrics are."""
        (said,) = until(lambda: self.said("metrics"), 60, f"metrics of {self._log_path.name}")
        return str(said["url"]).removeprefix("http://").removesuffix("/metrics")

    @property
    def worker_pid(self) -> int:
        return int(until(lambda: self.said("worker started"), 60, "a worker")[-1]["pid"])

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)
