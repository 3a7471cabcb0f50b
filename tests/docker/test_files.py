"""What compose makes of the files, before anything runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docker.engine import ROOT
from tests.docker.stack import Node

PROFILES = ("head", "worker", "monitoring", "dcgm", "demo", "producer")
WORKER_ONLY = "REDIS_URL=redis://:secret@10.0.0.4:6379/0\nSWATHE_STORE_ROOTS=s3://bucket/runs\n"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_valid(checkout_node: Node, profile):
    checkout_node.compose("--profile", profile, "config", "-q")


def test_the_first_node_has_everything_and_publishes_on_loopback_only(checkout_node: Node):
    services = checkout_node.config()
    assert set(services) == {
        "worker", "secrets", "redis", "exporter", "prometheus", "alertmanager", "grafana",
    }  # fmt: skip
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert {port["host_ip"] for port in ports} == {"127.0.0.1"}


def test_two_lines_make_a_node_with_workers_only(engine, tmp_path):
    services = Node(engine, tmp_path / "further", WORKER_ONLY).config()
    assert set(services) == {"worker"}
    worker = services["worker"]
    assert worker["environment"]["REDIS_URL"] == "redis://:secret@10.0.0.4:6379/0"
    assert worker["environment"]["SWATHE_STORE_ROOTS"] == "s3://bucket/runs"
    assert "ports" not in worker


def test_a_head_without_workers(checkout_node: Node):
    assert checkout_node.config(env={"WORKERS": "0"})["worker"]["scale"] == 0


def test_the_gpu_override_asks_for_all_gpus(checkout_node: Node):
    env = {"COMPOSE_FILE": "compose.yaml:docker/compose.gpu.yaml"}
    worker = checkout_node.config(env=env)["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"]) == ("nvidia", -1)
    assert "gpu" in device["capabilities"]
    for profile in PROFILES:
        checkout_node.compose("--profile", profile, "config", "-q", env=env)


def test_every_service_is_confined_pinned_and_logs_within_bounds(checkout_node: Node):
    flags = [part for profile in PROFILES for part in ("--profile", profile)]
    for name, service in checkout_node.config(*flags).items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert re.fullmatch(r".+:v?\d+\.\d+\.\d+(-[\w.]+)*", service["image"]), name
        assert service["logging"]["options"]["max-size"], name
        assert service["init"], name
        assert name in {"secrets", "dcgm-exporter"} or not re.match(r"0(:|$)", service["user"]), (
            name
        )


def test_a_drain_fits_into_the_stop_grace(checkout_node: Node):
    from swathe.settings import Settings  # noqa: PLC0415
    from worker.cli import _STOP_GRACE_S  # noqa: PLC0415

    grace = checkout_node.config()["worker"]["stop_grace_period"]
    minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(\d+)s", grace).groups("0")
    assert int(minutes) * 60 + int(seconds) > Settings().drain_s + _STOP_GRACE_S


def test_dockerfiles_are_clean():
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint, "hadolint is missing: make install"
    files = ["docker/Dockerfile", "tests/docker/standin/Dockerfile"]
    done = subprocess.run([hadolint, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
