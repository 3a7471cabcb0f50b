"""The stand-in for screenshots draws every panel, whatever the values are."""

import json
import math
from xml.etree import ElementTree as ET

import pytest

from grafana.generate import dashboards
from grafana.render import Prometheus, render, words


class Made(Prometheus):
    """Answers every query with the same series."""

    def __init__(self, series):
        self._series = series

    def series(self, _target):
        return self._series


@pytest.mark.parametrize(
    "series",
    [
        [],
        [("a", [(0.0, 1.0)])],
        [("a <b>", [(0.0, 0.0), (1.0, math.nan), (2.0, 3e9)]), ("b", [(0.0, 0.5)])],
    ],
)
def test_every_dashboard_is_a_picture(series):
    for text in dashboards().values():
        dashboard = json.loads(text)
        root = ET.fromstring(render(dashboard, Made(series)))  # noqa: S314 - our own
        drawn = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {panel["title"] for panel in dashboard["panels"]} <= drawn


def test_values_read_well():
    values = [(0.713, "percentunit"), (5400, "s"), (12.34, "s"), (2.5e9, "Bps"), (3, "short")]
    assert [words(*value) for value in values] == ["71.3 %", "1.5 h", "12.3 s", "2.50 GB/s", "3"]
