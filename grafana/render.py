"""Draws the dashboards as SVG from a running Prometheus: python -m grafana.render URL FOLDER [--minutes M] [--end TIME].

A stand-in for a screenshot where no Grafana can run: the panels, queries, units and thresholds are the dashboards' own,
the drawing is ours and plainer than Grafana's.
"""

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from grafana.generate import dashboards

Point = tuple[float, float]
Series = tuple[str, list[Point]]

_CELL: Final = 50
_ROW: Final = 30
_PALETTE: Final = (
    "#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#ca95e5",
)  # fmt: skip
_COLORS: Final = {"green": "#3d8b40", "orange": "#c4661f", "red": "#b5323e"}
_SCALES: Final = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_SUFFIX: Final = {
    "bytes": "B", "Bps": "B/s", "watt": "W", "celsius": "°C", "hertz": "Hz", "reqps": "/s", "short": "",
}  # fmt: skip


class Prometheus:
    """Range and instant queries over the last minutes, with dashboard variables replaced by everything."""

    def __init__(self, url: str, seconds: float, end_s: float | None = None) -> None:
        self._url = url
        self.end_s = time.time() if end_s is None else end_s
        self.start_s = self.end_s - seconds
        self._step_s = max(1.0, seconds / 240)

    def series(self, target: dict[str, Any]) -> list[Series]:
        """Each series with its legend; an instant query gives one point."""
        expr = re.sub(r"\$(run|node|device)", ".*", target["expr"])
        expr = expr.replace("$__rate_interval", f"{max(10, round(4 * self._step_s))}s")
        if target["instant"]:
            found = self._get("query", query=expr, time=self.end_s)
        else:
            times = {"start": self.start_s, "end": self.end_s, "step": self._step_s}
            found = self._get("query_range", query=expr, **times)
        if found["resultType"] == "scalar":
            return [("", [_point(found["result"])])]
        return [
            (_legend(target["legendFormat"], item["metric"]),
             [_point(pair) for pair in item.get("values") or [item["value"]]])
            for item in found["result"]
        ]  # fmt: skip

    def _get(self, path: str, **query: str | float) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)["data"]


def _point(pair: Sequence[Any]) -> Point:
    return float(pair[0]), float(pair[1])


def _legend(template: str, labels: dict[str, str]) -> str:
    if template == "__auto":
        return ""
    legend = re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), template)
    return re.sub(r"(GPU-[0-9a-f]{8})[0-9a-f-]+", r"\1", legend)  # a whole UUID has no room here


def words(value: float, unit: str) -> str:
    """A value as Grafana would write it, nearly."""
    if not math.isfinite(value):
        return str(value)
    if unit == "percentunit":
        return f"{value * 100:.1f} %"
    if unit == "s":
        return f"{value / 3600:.1f} h" if value >= 3600 else f"{value:.1f} s"
    for prefix, scale in _SCALES:
        if abs(value) >= scale:
            return f"{value / scale:.2f} {prefix}{_SUFFIX.get(unit, '')}"
    return f"{value:.4g} {_SUFFIX.get(unit, '')}".rstrip()


def render(dashboard: dict[str, Any], prometheus: Prometheus) -> str:
    """The whole dashboard."""
    parts, height = [], 0
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        x, y = place["x"] * _CELL, place["y"] * _ROW + 40
        width, tall = place["w"] * _CELL, place["h"] * _ROW
        height = max(height, y + tall)
        drawn = _row(panel) if panel["type"] == "row" else _panel(panel, prometheus, width, tall)
        parts.append(f'<g transform="translate({x},{y})">{drawn}</g>')
    title = _text(10, 26, dashboard["title"], size=18, fill="#e0e0e0")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {24 * _CELL} {height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="#111217"/>{title}{"".join(parts)}</svg>\n'
    )


def _row(panel: dict[str, Any]) -> str:
    return _text(10, 20, panel["title"], size=14, fill="#ccccdc")


def _panel(panel: dict[str, Any], prometheus: Prometheus, width: int, tall: int) -> str:
    series = [found for target in panel["targets"] for found in prometheus.series(target)]
    draw = {"stat": _stat, "timeseries": _lines}.get(panel["type"], _bars)
    inner = draw(panel, series, width, tall)
    frame = f'<rect x="3" y="3" width="{width - 6}" height="{tall - 6}" rx="3" fill="#181b1f" stroke="#2c3235"/>'
    return f"{frame}{inner}{_text(12, 20, panel['title'], size=12, fill='#ccccdc')}"


def _stat(panel: dict[str, Any], series: list[Series], width: int, tall: int) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    if not series:
        return _text(width / 2, tall / 2 + 12, "no data", size=16, fill="#8e8e8e", anchor="middle")
    name, points = series[0]
    value = points[-1][1]
    shown = words(value, defaults["unit"])
    for mapping in defaults.get("mappings", []):
        shown = mapping["options"].get(f"{value:g}", {}).get("text", shown)
    color = "#2b3037"
    for step in defaults.get("thresholds", {}).get("steps", []):
        if step["value"] is None or value >= step["value"]:
            color = _COLORS[step["color"]]
    box = f'<rect x="6" y="28" width="{width - 12}" height="{tall - 36}" rx="3" fill="{color}"/>'
    text = f"{name} {shown}".strip()
    return box + _text(width / 2, tall / 2 + 22, text, size=18, fill="#fff", anchor="middle")


def _bars(panel: dict[str, Any], series: list[Series], width: int, tall: int) -> str:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    top = max((points[-1][1] for _, points in series), default=1) or 1
    high = min(24.0, (tall - 40) / max(len(series), 1))
    parts = []
    for index, (name, points) in enumerate(series):
        y, value = 34 + index * high, points[-1][1]
        length = max(0.0, value / top) * (width - 30)
        color = _PALETTE[index % len(_PALETTE)]
        parts.append(f'<rect x="12" y="{y:.0f}" width="{length:.0f}" height="{high - 4:.0f}" fill="{color}" '
                     'opacity="0.45"/>')  # fmt: skip
        parts.append(
            _text(16, y + high * 0.6, f"{name}  {words(value, unit)}", size=10, fill="#e0e0e0")
        )
    return "".join(parts)


def _lines(panel: dict[str, Any], series: list[Series], width: int, tall: int) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    shown = series[:10]
    series = _stack(series) if stacked else series
    legend = 14 * math.ceil(len(shown) / 2)
    left, right, upper, lower = 62, width - 14, 30, tall - 18 - legend
    values = [value for _, points in series for _, value in points if math.isfinite(value)]
    top = defaults.get("max") or (max(values, default=1) * 1.1) or 1
    times = [at for _, points in series for at, _ in points]
    start, end = min(times, default=0), max(times, default=1)

    def spot(point: Point) -> str:
        x = left + (point[0] - start) / max(end - start, 1) * (right - left)
        y = lower - min(max(point[1] / top, 0), 1) * (lower - upper)
        return f"{x:.1f},{y:.1f}"

    parts = [_axis(left, right, lower - share * (lower - upper), words(top * share, defaults["unit"]))
             for share in (0, 0.5, 1)]  # fmt: skip
    for index, (name, points) in reversed(list(enumerate(series))):
        color = _PALETTE[index % len(_PALETTE)]
        line = " ".join(spot(point) for point in points if math.isfinite(point[1]))
        fill = "none"
        if stacked and points:
            first, last = line.split()[0].split(",")[0], line.split()[-1].split(",")[0]
            line, fill = f"{first},{lower} {line} {last},{lower}", color
        parts.append(f'<polyline points="{line}" fill="{fill}" stroke="{color}" stroke-width="1.5" '
                     f'fill-opacity="0.75"/>')  # fmt: skip
        if index < len(shown):
            x, y = 14 + index % 2 * (width / 2 - 10), tall - legend + 14 * (index // 2)
            parts.append(f'<rect x="{x}" y="{y - 8}" width="10" height="4" fill="{color}"/>')
            last_value = shown[index][1][-1][1] if points else 0.0
            label = name if stacked else f"{name}  {words(last_value, defaults['unit'])}"
            parts.append(_text(x + 16, y - 2, label, size=10, fill="#b0b0b8"))
    return "".join(parts)


def _stack(series: list[Series]) -> list[Series]:
    """Each series on top of those before it; the first is drawn last and lies at the bottom."""
    below: dict[float, float] = {}
    out = []
    for name, points in series:
        raised = []
        for at, value in points:
            below[at] = below.get(at, 0.0) + (value if math.isfinite(value) else 0.0)
            raised.append((at, below[at]))
        out.append((name, raised))
    return out


def _axis(left: float, right: float, y: float, label: str) -> str:
    line = f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#2c3235"/>'
    return line + _text(left - 4, y + 4, label, size=9, fill="#8e8e8e", anchor="end")


def _text(x: float, y: float, text: str, *, size: int, fill: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def main() -> None:
    """Draw every dashboard into a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--end", type=float, help="seconds since 1970; unset: now")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    prometheus = Prometheus(options.url, options.minutes * 60, options.end)
    for name, text in dashboards().items():
        svg = render(json.loads(text), prometheus)
        (options.folder / name.replace(".json", ".svg")).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
