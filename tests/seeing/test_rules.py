"""Recording and alert rules by Prometheus' own tool: each alert fires when it should and is quiet when it should be."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from swathe import metrics
from swathe.stages import Spent, limiting, shares

RULES = Path("docker/prometheus/rules")
STEPS = 160
GPU = 'node="n",instance="n:1",device="GPU-a"'
QUEUED = {'swathe_queue_ranges{queue="q",state="queued"}': 5}
EMPTY = {'swathe_queue_ranges{queue="q",state="queued"}': 0}


@pytest.fixture(scope="session")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("promtool is missing: scripts/install-test-services")
        pytest.skip("promtool is not installed: scripts/install-test-services")
    return found


def grows(step: float) -> str:
    """A counter that grows by this much every 15 seconds."""
    return f"0+{step}x{STEPS}"


def one(name: str, value: float | str, labels: str = GPU) -> dict[str, float | str]:
    return {f"swathe_{name}{{{labels}}}": value}


def run(state: str, value: float) -> dict[str, float | str]:
    return {f'swathe_run_samples{{run="r",state="{state}"}}': value}


def ranges(state: str, value: float) -> dict[str, float | str]:
    return {f'swathe_run_ranges{{run="r",state="{state}"}}': value}


def speeds(*tokens: float) -> dict[str, float | str]:
    """Devices of one kind, each with so many tokens in ten seconds of computing."""
    series: dict[str, float | str] = {}
    for index, count in enumerate(tokens):
        gpu = f'node="n",instance="n:1",device="GPU-{index}"'
        series[f"swathe_tokens_total{{{gpu}}}"] = grows(count)
        series[f'swathe_stage_seconds_total{{{gpu},stage="forward"}}'] = grows(10)
        series[f'swathe_device_info{{{gpu},label="gpu{index}",name="card"}}'] = 1
    return series


def stored(step: float) -> dict[str, float | str]:
    return one("ranges_total", grows(step), f'{GPU},outcome="stored"')


def free(free_bytes: float, remaining_bytes: float) -> dict[str, float | str]:
    return {
        'swathe_run_store_free_bytes{run="r"}': free_bytes,
        'swathe_run_remaining_bytes{run="r"}': remaining_bytes,
    }


def spaced(space: float) -> dict[str, float | str]:
    return one("state_seconds_total", grows(space), f'{GPU},state="space"') | one(
        "state_seconds_total", grows(5), f'{GPU},state="compute"'
    )


UTILIZATION = one("gpu_utilization_ratio", 0.05, f'{GPU},uuid="GPU-a"')
ERROR = one("ranges_total", grows(1), f'{GPU},outcome="store_error"')
FEWER = {'swathe_workers{state="compute"}': f"4+0x{STEPS - 60} 2+0x60"}
FAILED = one("canaries_total", grows(0.05), f'{GPU},outcome="failed"')
THERMAL = f'{GPU},uuid="GPU-a",reason="thermal_hardware"'
ECC = f'{GPU},uuid="GPU-a",kind="uncorrected"'
PAUSED = {'swathe_run_paused{run="r"}': 1}

CASES: dict[str, tuple[list[dict], list[dict]]] = {
    "SwatheGpuStarved": (
        [one("gpu_busy_ratio", 0.1) | QUEUED, UTILIZATION | one("gpu_busy_ratio", 0.9) | QUEUED],
        [one("gpu_busy_ratio", 0.1) | EMPTY, one("gpu_busy_ratio", 0.9) | QUEUED, dict(QUEUED)],
    ),
    "SwatheNoProgress": (
        [stored(0) | QUEUED, dict(QUEUED)],
        [stored(1) | QUEUED, stored(0) | EMPTY, stored(0) | QUEUED | PAUSED],
    ),
    "SwatheWorkerDown": (
        [one("worker_up", 0), {'up{job="swathe-workers",instance="n:1",node="n"}': 0}],
        [one("worker_up", 1), {'up{job="other",instance="n:1"}': 0}],
    ),
    "SwatheWorkersLost": (
        [FEWER | QUEUED],
        [FEWER | EMPTY, {'swathe_workers{state="compute"}': 4} | QUEUED],
    ),
    "SwatheRangesSetAside": ([ranges("set_aside", 2)], [ranges("set_aside", 0)]),
    "SwatheRangesRefused": (
        [{'swathe_queue_ranges{queue="q",state="refused"}': 1}],
        [{'swathe_queue_ranges{queue="q",state="refused"}': 0}],
    ),
    "SwatheQuarantineGrowing": (
        [run("quarantined", 10) | run("stored", 10_000)],
        [run("quarantined", 1) | run("stored", 10_000), run("quarantined", 0) | run("stored", 0)],
    ),
    "SwatheSpaceLow": ([free(100, 99)], [free(1000, 99), free(100, 0)]),
    "SwatheStoreFull": (
        [spaced(10), one("paused_for_space", 1)],
        [spaced(0), one("paused_for_space", 0) | spaced(0)],
    ),
    "SwatheStoreStalled": ([one("store_stalled_seconds", 90)], [one("store_stalled_seconds", 20)]),
    "SwatheStoreThrottling": (
        [one("store_retries_total", grows(15)), ERROR],
        [one("store_retries_total", grows(1)) | stored(1)],
    ),
    "SwatheRedisDown": ([{"swathe_redis_up": 0}], [{"swathe_redis_up": 1}]),
    "SwatheRedisNotDurable": ([{"swathe_redis_durable": 0}], [{"swathe_redis_durable": 1}]),
    "SwatheRedisEvicting": (
        [
            {"swathe_redis_may_evict": 1},
            {"swathe_redis_evicted_keys_total": grows(1)},
            {"swathe_redis_memory_used_bytes": 95, "swathe_redis_memory_max_bytes": 100},
        ],
        [
            {"swathe_redis_may_evict": 0, "swathe_redis_evicted_keys_total": 0},
            {"swathe_redis_memory_used_bytes": 50, "swathe_redis_memory_max_bytes": 100},
        ],
    ),
    "SwatheCanaryError": (
        [FAILED, one("canary_error_ratio", 1.5), ranges("suspect", 3)],
        [one("canary_error_ratio", 0.4) | ranges("suspect", 0)],
    ),
    "SwatheGpuSlow": ([speeds(100, 100, 100, 80), speeds(100, 70)], [speeds(100, 99, 101, 95)]),
    "SwatheGpuErrors": (
        [one("gpu_xid_errors_total", grows(1)), one("gpu_ecc_errors_total", grows(1), ECC)],
        [one("gpu_xid_errors_total", 3), one("gpu_ecc_errors_total", 1, ECC)],
    ),
    "SwatheGpuThrottled": (
        [one("gpu_throttled", 1, THERMAL)],
        [one("gpu_throttled", 0, THERMAL), one("gpu_throttled", 1, f'{GPU},reason="power_cap"')],
    ),
    "SwatheEtaLate": (
        [{'swathe_run_eta_seconds{run="r"}': 800_000}],
        [{'swathe_run_eta_seconds{run="r"}': 500_000}],
    ),
    "SwatheExporterDown": (
        [{'up{job="swathe-exporter"}': 0}, {"swathe_redis_up": 1}],
        [{'up{job="swathe-exporter"}': 1}],
    ),
    "SwatheRunUnreadable": (
        [{'swathe_exporter_errors_total{source="store"}': grows(1)}],
        [{'swathe_exporter_errors_total{source="store"}': 2}],
    ),
}  # fmt: skip


def alerts() -> list[dict]:
    (group,) = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    return group["rules"]


def check(promtool: str, folder: Path, *tests: dict) -> "subprocess.CompletedProcess[str]":
    text = json.dumps(
        {
            "rule_files": [str(path.resolve()) for path in sorted(RULES.glob("*.yml"))],
            "evaluation_interval": "15s",
            "tests": [{"interval": "15s", **test} for test in tests],
        }
    )
    path = folder / "test.yml"  # JSON is YAML
    path.write_text(text)
    return subprocess.run(
        [promtool, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )


def input_series(series: dict) -> list[dict[str, str]]:
    return [
        {"series": name, "values": value if "x" in str(value) else f"{value}x{STEPS}"}
        for name, value in series.items()
    ]


def firing(promtool: str, folder: Path, alert: str, cases: list[dict]) -> int:
    """In how many cases the alert fires after 39 minutes: promtool reports each that breaks a promise of silence."""
    silence = [{"eval_time": "39m", "alertname": alert, "exp_alerts": []}]
    tests = [{"input_series": input_series(case), "alert_rule_test": silence} for case in cases]
    done = check(promtool, folder, *tests)
    said = done.stdout + done.stderr
    fired = said.count(f"alertname: {alert}")
    assert (done.returncode == 0) == (fired == 0), said
    return fired


@pytest.mark.parametrize("alert", sorted(CASES))
def test_each_alert_fires_when_it_should_and_is_quiet_when_it_should_be(promtool, tmp_path, alert):
    fires, quiet = CASES[alert]
    assert firing(promtool, tmp_path, alert, fires) == len(fires)
    assert firing(promtool, tmp_path, alert, quiet) == 0


def test_every_alert_is_tested_and_has_a_page_in_the_runbook():
    runbook = Path("docs/runbook.md").read_text()
    pages = {heading.lower() for heading in re.findall(r"^## (\w+)$", runbook, re.MULTILINE)}
    assert {rule["alert"] for rule in alerts()} == set(CASES)
    assert pages == {alert.lower() for alert in CASES}
    for rule in alerts():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_rules_use_only_metrics_that_exist():
    known = {metric.name for metric in metrics.all_metrics()}
    text = "".join(path.read_text() for path in RULES.glob("*.yml"))
    used = set(re.findall(r"\bswathe_[a-z_]+", text))
    assert used - known == set()


def test_the_starving_alert_says_why(promtool, tmp_path):
    series = one("gpu_busy_ratio", 0.1) | QUEUED
    for state, step in (("input", 14), ("compute", 1)):
        series |= one("state_seconds_total", grows(step), f'{GPU},state="{state}"')
    expected = {
        "exp_labels": {"severity": "warning", "node": "n", "instance": "n:1", "device": "GPU-a"},
        "exp_annotations": {
            "summary": "GPU-a on n is busy 10% of the time while ranges are queued",
            "description": "Limited by: input",
            "runbook": "docs/runbook.md#swathegpustarved",
        },
    }
    test = {
        "input_series": input_series(series),
        "alert_rule_test": [
            {"eval_time": "20m", "alertname": "SwatheGpuStarved", "exp_alerts": [expected]}
        ],
    }
    done = check(promtool, tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("states", "stages"),
    [
        ({"compute": 45, "input": 15}, {"forward": 44, "copy": 5}),
        ({"compute": 45, "input": 15}, {"forward": 20, "copy": 45}),
        ({"compute": 20, "input": 40}, {"forward": 20, "copy": 45}),
        ({"compute": 10, "write": 40, "input": 10}, {"forward": 10, "copy": 1, "write": 200}),
        ({"queue_empty": 59, "compute": 1}, {"forward": 1, "copy": 0}),
        ({"space": 30, "compute": 20, "store_away": 10}, {"forward": 20, "copy": 3}),
        ({"load": 60}, {}),
    ],
)
def test_the_rules_name_the_same_limit_as_the_terminal(promtool, tmp_path, states, stages):
    series = {
        f'swathe_state_seconds_total{{{GPU},state="{state}"}}': grows(seconds / 4)
        for state, seconds in states.items()
    } | {
        f'swathe_stage_seconds_total{{{GPU},stage="{stage}"}}': grows(seconds / 4)
        for stage, seconds in stages.items()
    }
    spent = Spent(states=states, stages=stages)
    expected = [
        {"labels": f'{{limit="{limit}"}}', "value": round(share * 1000)}
        for limit, share in shares(spent).items()
    ]
    worst = [{"labels": f'{{limit="{limiting(spent)}"}}', "value": 1}]
    test = {
        "input_series": input_series(series),
        "promql_expr_test": [
            {
                "expr": "sum by (limit) (round(swathe:limit_share:ratio1m * 1000))",
                "eval_time": "10m",
                "exp_samples": expected,
            },
            {
                "expr": "count by (limit) (swathe:limiting:ratio1m)",
                "eval_time": "10m",
                "exp_samples": worst,
            },
            {
                "expr": "count by (limit) (swathe:fleet_limiting:ratio1m)",
                "eval_time": "10m",
                "exp_samples": worst,
            },
        ],
    }
    done = check(promtool, tmp_path, test)
    assert done.returncode == 0, done.stdout + done.stderr
