"""Grafana's JSON as plain dicts: what all panels of all dashboards share, and a layout that never overlaps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

DATASOURCE: Final = {"type": "prometheus", "uid": "swathe-prometheus"}
RUNBOOK: Final = "/public/swathe/runbook.md"
"""docs/runbook.md, mounted where Grafana serves files."""
COLUMNS: Final = 24
_HEIGHTS: Final = {"stat": 4, "timeseries": 8, "table": 8, "bargauge": 8, "state-timeline": 8}

Steps = Sequence[tuple[float | None, str]]
HIGH_IS_GOOD: Final[Steps] = ((None, "red"), (0.3, "orange"), (0.7, "green"))
ANY_IS_BAD: Final[Steps] = ((None, "green"), (1, "red"))
ALL_IS_GOOD: Final[Steps] = ((None, "red"), (1, "green"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression, and how its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel, without its place."""

    title: str
    queries: tuple[Query, ...]
    unit: str
    help: str
    kind: str = "timeseries"
    width: int = 8
    steps: Steps | None = None
    stacked: bool = False
    maximum: float | None = None
    text: str = "value_and_name"
    """What a stat shows: ``value``, ``name`` or both."""
    mappings: Mapping[str, tuple[str, str]] | None = None
    """Words and colours for values."""


def panel(
    title: str, queries: str | Sequence[Query], unit: str, help_: str, **options: Any
) -> Panel:
    """A panel; a bare expression is a query without a legend."""
    found = (Query(expr=queries),) if isinstance(queries, str) else tuple(queries)
    return Panel(title=title, queries=found, unit=unit, help=help_, **options)


def dashboard(
    uid: str, title: str, rows: Mapping[str, Sequence[Panel]], variables: Sequence[Json]
) -> Json:
    """A whole dashboard; panels flow from left to right and wrap."""
    return {
        "uid": uid,
        "title": f"swathe / {title}",
        "tags": ["swathe"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "15s",
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": [_alerts()]},
        "templating": {"list": list(variables)},
        "links": [
            {
                "type": "dashboards", "title": "swathe", "tags": ["swathe"], "asDropdown": False,
                "includeVars": True, "keepTime": True,
            },
            {"type": "link", "title": "Runbook", "url": RUNBOOK, "targetBlank": True},
        ],
        "panels": _place(rows),
    }  # fmt: skip


def variable(name: str, query: str, label: str) -> Json:
    """A choice among a label's values; all of them at first."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _alerts() -> Json:
    return {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "expr": 'ALERTS{alertname=~"Swathe.*",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{device}} {{run}}",
        "iconColor": "red",
        "step": "60s",
    }


def _place(rows: Mapping[str, Sequence[Panel]]) -> list[Json]:
    placed: list[Json] = []
    y = 0
    for title, panels in rows.items():
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        placed.append(
            {"id": len(placed) + 1, "type": "row", "title": title, "collapsed": False,
             "gridPos": place, "panels": []}
        )  # fmt: skip
        y, x, height = y + 1, 0, 0
        for item in panels:
            if x + item.width > COLUMNS:
                y, x, height = y + height, 0, 0
            tall = _HEIGHTS[item.kind]
            height = max(height, tall)
            place = {"x": x, "y": y, "w": item.width, "h": tall}
            placed.append({"id": len(placed) + 1, "gridPos": place, **_panel(item)})
            x += item.width
        y += height
    return placed


def _panel(item: Panel) -> Json:
    return {
        "type": item.kind,
        "title": item.title,
        "description": item.help,
        "datasource": DATASOURCE,
        "targets": [_target(index, query, item.kind) for index, query in enumerate(item.queries)],
        "fieldConfig": {"defaults": _defaults(item), "overrides": []},
        "options": _options(item),
        "links": [{"title": "Runbook", "url": RUNBOOK, "targetBlank": True}],
    }


def _target(index: int, query: Query, kind: str) -> Json:
    instant = kind in {"stat", "table", "bargauge"}
    return {
        "refId": chr(ord("A") + index),
        "datasource": DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": instant,
        "range": not instant,
        **({"format": "table"} if kind == "table" else {}),
    }


def _defaults(item: Panel) -> Json:
    defaults: Json = {"unit": item.unit, "min": 0, "color": {"mode": "palette-classic"}}
    if item.maximum is not None:
        defaults["max"] = item.maximum
    if item.steps is not None:
        steps = [{"value": value, "color": color} for value, color in item.steps]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        if item.kind != "timeseries":
            defaults["color"] = {"mode": "thresholds"}
    if item.mappings is not None:
        options = {
            value: {"text": text, "color": color, "index": index}
            for index, (value, (text, color)) in enumerate(item.mappings.items())
        }
        defaults["mappings"] = [{"type": "value", "options": options}]
    if item.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 60 if item.stacked else 10,
            "showPoints": "never",
            "stacking": {"mode": "normal" if item.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if item.steps is not None else "off"},
        }
    return defaults


def _options(item: Panel) -> Json:
    if item.kind == "timeseries":
        return {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if item.kind == "stat":
        return {
            "reduceOptions": reduce, "textMode": item.text, "colorMode": "background",
            "graphMode": "none", "justifyMode": "center",
        }  # fmt: skip
    if item.kind == "bargauge":
        return {"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "basic"}
    return {"showHeader": True} if item.kind == "table" else {"showValue": "auto"}
