"""Real Prometheus, a real run on two real workers, the exporter: what a person on call would see is there and true."""

import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from conftest import RedisServer

from grafana.generate import dashboards
from swathe.queue import connect
from swathe.records import RunWatcher, read_run
from swathe.store import open_store
from tests.seeing.stack import (
    ROOT,
    GpuNode,
    NodeProcess,
    Processes,
    Prometheus,
    dcgm_server,
    free_port,
    until,
)
from tests.seeing.test_nvml import FakeNvml
from worker.loop.keeper import about_key

pytestmark = pytest.mark.timeout(900)
RULES = ROOT / "docker/prometheus/rules"
ROWS = 3600


@dataclass
class Stack:
    prometheus: Prometheus
    processes: Processes
    nodes: list[NodeProcess]
    runs: Path
    started_s: float

    def stored(self, run: str) -> int:
        store = open_store(self.runs / run)
        return RunWatcher(store, read_run(store)).read().stored_samples

    def plan(self, run: str, rows: int) -> None:
        folder = self.processes.folder
        self.processes.run(
            "plan", folder / "rows.jsonl", "--model", folder / "model", "--layers", "0", "--final",
            "--out", self.runs / run, "--range-tokens", "256", "--dtype", "fp32", "--limit", str(rows),
        )  # fmt: skip
        self.processes.run("submit", self.runs / run)


def make_inputs(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    rng = random.Random(0)
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(ROWS):
            ids = [rng.randrange(256) for _ in range(rng.randrange(20, 100))]
            file.write(json.dumps({"id": row, "input_ids": ids}) + "\n")


def announce(redis_url: str, address: str) -> None:
    client = connect(redis_url)
    about = {"metrics": address, "node": "gpunode", "state": "compute"}
    client.set(about_key("fake-gpu-worker"), json.dumps(about))
    client.config_set("maxmemory", "1gb")
    client.close()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if shutil.which("prometheus") is None:
        if os.environ.get("CI"):
            pytest.fail("prometheus is missing: scripts/install-test-services")
        pytest.skip("prometheus is not installed: scripts/install-test-services")
    folder = tmp_path_factory.mktemp("live")
    make_inputs(folder)
    (folder / "runs").mkdir()
    patch = pytest.MonkeyPatch()
    patch.setitem(sys.modules, "pynvml", FakeNvml())
    short = Path(tmp_path_factory.mktemp("r"))
    redis = RedisServer(short, "--appendonly", "yes")
    redis.start()
    exporter, dcgm, gpus = f"127.0.0.1:{free_port()}", dcgm_server(), GpuNode(FakeNvml())
    processes = Processes(folder, redis.url, folder / "runs")
    announce(redis.url, str(gpus.server.address))
    prometheus = Prometheus(folder, exporter, str(dcgm.address))
    try:
        until(prometheus.ready, 60, "Prometheus")
        processes.start("exporter", "producer.cli", "exporter", SWATHE_EXPORTER_ADDRESS=exporter)
        nodes = [processes.node(name, compute=0.2) for name in ("first", "second")]
        found = Stack(prometheus, processes, nodes, folder / "runs", time.time())
        for node in nodes:  # seen at 0 before there is work, or the first ranges would not count
            zero = f'swathe_samples_total{{instance="{node.address}"}} == 0'
            until(lambda zero=zero: prometheus.query(zero), 120, zero)
        found.plan("one", ROWS)
        yield found
    finally:
        processes.close()
        prometheus.close()
        gpus.close()
        dcgm.close()
        redis.stop(kill=True)
        patch.undo()


def test_every_panel_and_rule_has_a_sensible_answer(stack: Stack) -> None:
    prometheus = stack.prometheus
    instances = "|".join(node.address for node in stack.nodes)
    until(
        lambda: prometheus.value(f'count(swathe_gpu_busy_ratio{{instance=~"{instances}"}})') == 2,
        240, "both workers compute",
    )  # fmt: skip
    until(lambda: prometheus.query("swathe_run_eta_seconds"), 60, "an estimate")
    until(lambda: prometheus.query("swathe_canary_error_ratio"), 60, "a canary")
    until(lambda: prometheus.query("swathe:device_speed:tokens_per_second10m"), 60, "speeds")
    assert not [empty for empty in panel_answers(prometheus) if empty], "panels without an answer"
    for name in sorted(RULES.glob("*.yml")):
        for rule in yaml.safe_load(name.read_text())["groups"][0]["rules"]:
            assert_rule_is_fed(prometheus, rule)
    for group in prometheus.get("rules")["groups"]:
        for rule in group["rules"]:
            assert rule["health"] == "ok", rule
    assert_true_now(stack)


def panel_answers(prometheus: Prometheus) -> Iterator[str]:
    """What is wrong with each panel's answer, or an empty text."""
    for name, text in dashboards().items():
        for panel in json.loads(text)["panels"]:
            for target in panel.get("targets", []):
                expr = target["expr"].replace("$__rate_interval", "10s")
                expr = re.sub(r"\$(run|node|device)", ".*", expr)
                values = [value for _, value in prometheus.query(expr)]
                bad = not values or not all(math.isfinite(value) for value in values)
                if panel["fieldConfig"]["defaults"].get("max") == 1:
                    bad = bad or not all(-0.001 <= value <= 1.001 for value in values)
                yield f"{name} {panel['title']}: {expr} -> {values}" if bad else ""


def assert_rule_is_fed(prometheus: Prometheus, rule: dict) -> None:
    """A recording rule has series; an alert, which should be silent, at least asks for series that exist."""
    if "record" in rule:
        assert prometheus.query(rule["record"]), rule["record"]
        return
    prometheus.query(rule["expr"])
    for selector in re.findall(r"\b(?:swathe[_:][a-z_:0-9]+|up\b)", rule["expr"]):
        assert prometheus.query(f"count({selector})"), f"{rule['alert']}: {selector} has no series"


def assert_true_now(stack: Stack) -> None:
    prometheus = stack.prometheus
    utilization = prometheus.query("swathe_gpu_utilization_ratio")
    assert {labels["uuid"]: value for labels, value in utilization} == {
        "GPU-aa": pytest.approx(0.11),
        "GPU-bb": pytest.approx(0.88),
    }
    for node in stack.nodes:
        limits = f'swathe:limiting:ratio1m{{instance="{node.address}",limit="compute"}}'
        until(lambda limits=limits: prometheus.query(limits), 90, "busy for most of a minute")
        up = prometheus.query(f'swathe_worker_up{{instance="{node.address}"}}')
        assert [(labels["device"], value) for labels, value in up] == [("cpu", 1)]
    assert prometheus.value("sum(swathe_workers)") == 3
    rows = prometheus.query("sum by (run) (swathe_run_samples)")
    assert [value for _, value in rows] == [ROWS]
    fraction = prometheus.value("swathe_redis_memory_used_bytes / swathe_redis_memory_max_bytes")
    assert fraction is not None
    assert 0 < fraction < 0.5


def scrapes_after(prometheus: Prometheus, address: str, since_s: float, count: int) -> float:
    """The time of the ``count``-th scrape of a node after a moment."""

    def times() -> list[float]:
        found = prometheus.get("query", query=f'up{{instance="{address}"}}[2m]')["result"]
        return sorted(at for item in found for at, _ in item["values"] if at > since_s)

    return until(lambda: len(times()) >= count and times()[count - 1], 60, "scrapes")


def test_a_killed_workers_gauges_vanish_and_its_counters_stay_true(stack: Stack) -> None:
    prometheus, node = stack.prometheus, stack.nodes[0]
    address = node.address
    busy = f'swathe_gpu_busy_ratio{{instance="{address}"}}'
    until(lambda: prometheus.query(busy), 120, "the worker computes")
    assert stack.stored("one") < ROWS * 0.9, "the run is too short to show anything"
    os.kill(node.worker_pid, signal.SIGKILL)
    second_s = scrapes_after(prometheus, address, time.time(), 2)
    for gauge in ("gpu_busy_ratio", "model_flops_utilization_ratio", "backlog_bytes"):
        assert prometheus.query(f'swathe_{gauge}{{instance="{address}"}}', second_s) == []
    assert prometheus.query(f'swathe_samples_total{{instance="{address}"}}', second_s)

    until(lambda: stack.stored("one") == ROWS, 400, "the run is complete")
    done_s = scrapes_after(prometheus, address, time.time(), 2)
    scrapes_after(prometheus, stack.nodes[1].address, time.time(), 1)
    window = f"{math.ceil(done_s - stack.started_s)}s"
    increase = f'sum(increase(swathe_samples_total{{node!="gpunode"}}[{window}]))'
    assert prometheus.value(increase, done_s) == pytest.approx(ROWS, rel=0.02)
    deaths = f'swathe_worker_deaths_total{{instance="{address}"}}'
    assert prometheus.value(deaths) == 1
    requeued = prometheus.value('swathe_requeued_ranges_total{reason="death"}')
    assert requeued is not None
    assert requeued >= 1
    until(lambda: prometheus.value("sum(swathe_run_complete)") == 1, 60, "the run is sealed")


def test_a_starving_worker_and_a_blocked_one_are_named(stack: Stack) -> None:
    for node in stack.nodes:
        node.stop()
    stack.plan("two", 600)
    slow = {
        "input": stack.processes.node("starving", read=1.0),
        "write": stack.processes.node("blocked", write=4.0),
    }
    for limit, node in slow.items():
        expr = f'swathe:limiting:ratio1m{{instance="{node.address}",limit="{limit}"}} > 0.5'
        until(lambda expr=expr: stack.prometheus.query(expr), 200, f"{limit} is named")
        assert stack.stored("two") < 600, "the run ended first"
