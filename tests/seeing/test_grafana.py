"""Dashboards and provisioning agree with each other, with the generator, and with the metrics that exist."""

import json
import re
from pathlib import Path

import pytest
import yaml

from grafana.generate import FOLDER, dashboards
from swathe import metrics

PROVISIONING = Path("grafana/provisioning")
PROMETHEUS = yaml.safe_load(Path("docker/prometheus/prometheus.yml").read_text())
RECORDED = set(
    re.findall(r"record: (\S+)", Path("docker/prometheus/rules/recording.yml").read_text())
)
FILES = sorted(dashboards())


def load(name: str) -> dict:
    return json.loads((FOLDER / name).read_text())


def panels(name: str) -> list[dict]:
    return [panel for panel in load(name)["panels"] if panel["type"] != "row"]


def test_the_committed_dashboards_are_the_generators() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == set(dashboards())
    for name, text in dashboards().items():
        assert (FOLDER / name).read_text() == text, "run: python -m grafana.generate"


def test_the_data_source_is_the_one_that_dashboards_name_and_knows_the_scrape_interval() -> None:
    provided = yaml.safe_load((PROVISIONING / "datasources" / "swathe.yml").read_text())
    (source,) = provided["datasources"]
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    named = re.findall(r'"uid": "([^"]+)"', "".join(dashboards().values()))
    uids = {json.loads(text)["uid"] for text in dashboards().values()}
    assert set(named) - uids == {source["uid"]}
    assert "${" not in "".join(dashboards().values())


def test_dashboards_have_fixed_and_different_uids() -> None:
    uids = [load(name)["uid"] for name in FILES]
    assert sorted(uids) == ["swathe-fleet", "swathe-gpu", "swathe-reliability", "swathe-storage"]
    provided = yaml.safe_load((PROVISIONING / "dashboards" / "swathe.yml").read_text())
    assert provided["providers"][0]["folderUid"] not in uids


@pytest.mark.parametrize("name", FILES)
def test_panels_have_ids_of_their_own_and_do_not_overlap(name: str) -> None:
    everything = load(name)["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("name", FILES)
def test_every_panel_says_what_it_shows_in_a_unit_with_a_link_to_the_runbook(name: str) -> None:
    for panel in panels(name):
        assert panel["type"] in {"timeseries", "stat", "table", "bargauge", "state-timeline"}
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["links"][0]["url"].endswith("runbook.md")
        assert panel["targets"]


@pytest.mark.parametrize("name", FILES)
def test_expressions_use_what_exists(name: str) -> None:
    known = {metric.name for metric in metrics.all_metrics()}
    known |= {metric.name + "_bucket" for metric in metrics.all_metrics() if metric.kind == "histogram"}  # fmt: skip
    variables = {item["name"] for item in load(name)["templating"]["list"]}
    for panel in panels(name):
        for target in panel["targets"]:
            expr = target["expr"]
            assert set(re.findall(r"\bswathe_[a-z_]+", expr)) <= known, expr
            assert set(re.findall(r"\bswathe:[a-z_:0-9]+", expr)) <= RECORDED, expr
            used = set(re.findall(r"\$(\w+)", expr)) - {"__rate_interval"}
            assert used <= variables, expr


def test_every_metric_is_shown_alerted_on_or_recorded() -> None:
    """A metric nobody looks at is a cost without a use; these serve joins, tables of the terminal or by-hand looks."""
    text = "".join(dashboards().values()) + "".join(
        path.read_text() for path in Path("docker/prometheus/rules").glob("*.yml")
    )
    unused = {metric.name for metric in metrics.all_metrics() if metric.name not in text}
    assert unused == {
        "swathe_worker_ready",
        "swathe_matmul_flops_per_second",
        "swathe_model_flops_total",
        "swathe_run_tokens",
        "swathe_run_stored_bytes",
        "swathe_run_observed_timestamp_seconds",
        "swathe_redis_uptime_seconds",
    }
