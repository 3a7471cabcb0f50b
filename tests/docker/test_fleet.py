"""One fleet of two nodes from its first start to its last run, in the order in which a user meets it.

Both nodes are on this host, each with a checkout and a .env of its own; what makes them two is that they share nothing
but Redis' address and the folder of the runs. NODE_NAME is set from outside only because two nodes on one host would
have one name.
"""

import ipaddress
import json
import time

import pytest

from tests.docker.conftest import NOTES
from tests.docker.stack import (
    Node,
    Run,
    free_port,
    tiny_model,
    until,
    writable_folder,
    write_samples,
)

SECOND = {"NODE_NAME": "second"}
SAMPLES = 1200
"""In 600 ranges."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = writable_folder(tmp_path_factory.mktemp("shared") / "runs")
    tiny_model(runs / "tiny")
    return runs


@pytest.fixture(scope="module")
def first(engine, images, runs, tmp_path_factory):
    assert images
    folder = tmp_path_factory.mktemp("first")
    data = folder / "datasets"
    # This host as containers of any network see it: the "address in the private network" of the first node.
    # An engine that runs for the first time does not name its gateway yet: it is the network's first address.
    subnet = engine.docker(
        "network", "inspect", "bridge", "-f", "{{(index .IPAM.Config 0).Subnet}}"
    )
    gateway = next(ipaddress.ip_network(subnet.stdout.strip(), strict=False).hosts())
    write_samples(data / "samples.jsonl", SAMPLES)
    node = Node(engine, folder / "swathe-first", "")
    example = (node.folder / ".env.example").read_text()
    changes = {
        "RUNS_DIR": runs,
        "DATA_DIR": data,
        "REDIS_LISTEN": f"{gateway}:{free_port()}",
        "GRAFANA_LISTEN": f"127.0.0.1:{free_port()}",
        "PROMETHEUS_LISTEN": f"127.0.0.1:{free_port()}",
        "ALERTMANAGER_LISTEN": f"127.0.0.1:{free_port()}",
    }
    lines = [f"{name}={value}" for name, value in changes.items()]
    (node.folder / ".env").write_text("\n".join([example, *lines, ""]))
    yield node
    node.compose("--profile", "demo", "down", "-v", "-t", "1", check=False)


@pytest.fixture(scope="module")
def second(engine, first, runs, tmp_path_factory):
    """A further node: two lines, found as docs/deploy.md says."""
    url = first.compose("exec", "-T", "exporter", "cat", "/secrets/redis-url").strip()
    listen = first.config()["redis"]["ports"][0]
    address = f"{listen['host_ip']}:{listen['published']}"
    lines = f"REDIS_URL={url.replace('redis:6379', address)}\nRUNS_DIR={runs}\n"
    node = Node(engine, tmp_path_factory.mktemp("second") / "swathe-second", lines)
    yield node
    node.compose("down", "-v", "-t", "1", check=False)


def timed(what):
    """Notes how long a step took."""

    class Timer:
        def __enter__(self):
            self.started_s = time.monotonic()

        def __exit__(self, *_):
            NOTES.append(f"{what}: {time.monotonic() - self.started_s:.0f} s")

    return Timer()


def plan(node, name):
    node.swathe(
        "plan", "/data/samples.jsonl", "--model", "random:/runs/tiny/config.json", "--layers", "0,1", "--final",
        "--range-tokens", "400", "--out", f"/runs/{name}",
    )  # fmt: skip


def test_up_brings_a_healthy_stack(first):
    with timed("up --wait of the first node"):
        first.compose("up", "-d", "--wait", "--no-build")
    states = {name: item["State"] for name, item in first.containers().items()}
    assert states.pop("secrets")["ExitCode"] == 0
    assert set(states) == {"worker", "redis", "exporter", "prometheus", "alertmanager", "grafana"}
    assert {state["Health"]["Status"] for state in states.values()} == {"healthy"}


def test_the_doctors_report_comes_first_in_the_workers_log(first):
    until(first.workers, 60, "a worker's start in the log")
    log = first.log("worker")
    assert "this node can work" in log
    assert log.index("this node can work") < log.index("worker started")
    assert "redis://redis:6379/0" in log, "the address without the password"
    password = first.compose("exec", "-T", "exporter", "cat", "/secrets/redis-password").strip()
    assert len(password) == 48
    everything = first.compose("logs") + json.dumps([*first.containers().values()])
    assert password not in everything, "not in logs, command lines or environments"


def test_containers_run_as_nobody_special_on_a_read_only_root(first):
    for service, user in (
        ("worker", "1000"), ("exporter", "1000"), ("redis", "999"), ("prometheus", "65534"), ("grafana", "472"),
    ):  # fmt: skip
        assert first.compose("exec", "-T", service, "id", "-u").strip() == user, service
        refused = first.compose("exec", "-T", service, "touch", "/new", check=False)
        assert "Read-only file system" in refused, service


def test_redis_asks_for_the_password_and_keeps_what_it_is_told(first):
    redis = ["exec", "-T", "redis", "sh", "-c"]
    assert "NOAUTH" in first.compose(*redis, "redis-cli dbsize", check=False)
    cli = "REDISCLI_AUTH=$(cat /secrets/redis-password) redis-cli config get"
    for name, value in (
        ("appendonly", "yes"), ("appendfsync", "everysec"), ("maxmemory-policy", "noeviction"),
    ):  # fmt: skip
        assert first.compose(*redis, f"{cli} {name}").split()[1] == value


def test_the_demo_runs_inside_to_a_sealed_and_verified_run(first, runs):
    with timed("demo job, 4 conversations, model conversion included"):
        said = first.compose("run", "--rm", "-T", "-e", "DEMO_LIMIT=4", "demo")
    assert "complete and sealed" in said
    assert Run(runs / "demo").manifest is not None
    assert Run(runs / "demo").stored_by(first.workers()) == len(Run(runs / "demo").records())


def test_a_second_node_joins_with_two_lines(second):
    with timed("up --wait of the second node"):
        second.compose("up", "-d", "--wait", "--no-build", env=SECOND)
    assert set(second.containers()) == {"worker"}


@pytest.mark.usefixtures("second")
def test_prometheus_sees_the_workers_of_both_nodes(first):
    def seen():
        found = first.prometheus("sum by (node, instance) (swathe_worker_up)")
        return {item["metric"]["node"]: float(item["value"][1]) for item in found}

    until(lambda: len(seen()) == 2, 90, "two nodes in Prometheus")
    found = seen()
    assert found.pop("second") == 1
    assert list(found.values()) == [1], "the first node, under the host's own name"
    (up,) = first.prometheus('min(up{job=~"swathe-.*"})')
    assert float(up["value"][1]) == 1


def test_both_take_ranges_and_a_killed_node_loses_nothing(first, second, runs):
    plan(first, "shared")
    first.swathe("submit", "/runs/shared")
    run = Run(runs / "shared")
    for node in (first, second):
        until(lambda node=node: run.stored_by(node.workers()) >= 3, 180, f"ranges of {node.folder}")
    assert run.manifest is None, "the run must still be going on; give it more samples"
    second.compose("kill")
    stored, gone = len(run.records()), second.workers()
    assert run.manifest is None
    with timed(f"the first node finishes alone, {stored} ranges were stored"):
        said = first.swathe("wait", "/runs/shared")
    assert f"complete and sealed: {SAMPLES} samples" in said
    assert run.stored_by(gone) >= 3
    assert run.stored_by(first.workers()) + run.stored_by(gone) == len(run.records())
    first.swathe("verify", "/runs/shared", "--full")
    found = json.loads(first.swathe("status", "/runs/shared", "--json"))
    assert found["complete"], found


def test_down_and_up_goes_on(first, runs):
    plan(first, "again")
    first.swathe("submit", "/runs/again")
    run = Run(runs / "again")
    until(lambda: len(run.records()) >= 5, 120, "the first ranges")
    with timed("drain and down in the middle of a run"):
        first.compose("stop", "worker")
        assert first.containers()["worker"]["State"]["ExitCode"] == 0, "drained, not killed"
        first.compose("down")
    stored = len(run.records())
    assert run.manifest is None, "the run must be cut short; give it more samples"
    assert first.containers() == {}
    with timed("up --wait again"):
        first.compose("up", "-d", "--wait", "--no-build")
    with timed(f"the rest of the run after {stored} stored ranges"):
        first.swathe("wait", "/runs/again")
    assert len(run.records()) > stored
    first.swathe("verify", "/runs/again", "--full")
