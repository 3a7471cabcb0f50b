"""The Kubernetes example against the schemas of Kubernetes, KEDA and the Prometheus operator, and against this code."""

import copy
import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from swathe import names
from swathe.settings import Settings
from tests.docker.engine import ROOT, cache

FOLDER = ROOT / "docs" / "examples" / "kubernetes"
PACKAGES = (
    "kubernetes-validate==1.37.0",
    "cloudcoil.models.keda==2.16.1.0",
    "cloudcoil.models.prometheus_operator==0.80.1.0",
)
KINDS = ["Deployment", "ScaledObject", "TriggerAuthentication", "PodMonitor"]


def documents() -> dict[str, Any]:
    paths: list[str] = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert {*paths, "kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}
    found = [item for name in paths for item in yaml.safe_load_all(Path(FOLDER / name).read_text())]
    return {item["kind"]: item for item in found}


def pod() -> dict[str, Any]:
    return dict(documents()["Deployment"]["spec"]["template"]["spec"])


@pytest.fixture(scope="module")
def judge() -> Path:
    """The Python of an environment with the schemas, made once."""
    folder = cache() / "schemas"
    done = folder / "installed"
    if not done.exists() or done.read_text() != str(PACKAGES):
        venv.create(folder, clear=True, with_pip=True)
        command = [
            folder / "bin" / "python",
            "-m",
            "pip",
            "install",
            "-q",
            *PACKAGES,
        ]
        subprocess.run(command, check=True)
        done.write_text(str(PACKAGES))
    return folder / "bin" / "python"


def problems(judge: Path, found: list[Any]) -> list[str]:
    command = [str(judge), str(Path(__file__).with_name("judge_kubernetes.py"))]
    done = subprocess.run(command, input=json.dumps(found), text=True, capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_document_fits_its_schema(judge):
    found = documents()
    assert list(found) == KINDS
    assert problems(judge, [*found.values()]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_document_is_noticed(judge, kind):
    wrong = copy.deepcopy(documents()[kind])
    wrong["spec"]["surprise"] = {}
    (problem,) = problems(judge, [wrong])
    assert problem.startswith(kind)


def test_workers_get_a_gpu_each_and_time_to_drain():
    (container,) = pod()["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod()["terminationGracePeriodSeconds"] > Settings().drain_s + 15
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/tmp", "/models", "/kernels"} <= mounted  # noqa: S108 - in the container


def test_names_are_those_of_this_code():
    (endpoint,) = documents()["PodMonitor"]["spec"]["podMetricsEndpoints"]
    (port,) = pod()["containers"][0]["ports"]
    assert endpoint["port"] == port["name"]
    assert f"SWATHE_METRICS_ADDRESS=0.0.0.0:{port['containerPort']}" in (
        (ROOT / "docker" / "Dockerfile").read_text()
    )
    jobs = yaml.safe_load((ROOT / "docker/prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert endpoint["relabelings"][0]["replacement"] in {job["job_name"] for job in jobs}
    (trigger,) = documents()["ScaledObject"]["spec"]["triggers"]
    assert trigger["metadata"]["listName"] == f"rq:queue:{names.queue('MODEL-KEY')}"
    secret = {
        item["key"] for item in documents()["TriggerAuthentication"]["spec"]["secretTargetRef"]
    }
    told = (ROOT / "docs" / "deploy.md").read_text()
    assert all(f"--from-literal={key}=" in told for key in {*secret, "redis-url"})
