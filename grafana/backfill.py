"""Makes past scrapes of a node's /metrics readable for Prometheus: python -m grafana.backfill SCRAPES NODE > FILE.

SCRAPES holds pages one after another, every sample line with its time in seconds appended; where a machine cannot run
Prometheus, a loop that saves the page is enough. The output is OpenMetrics:

    promtool tsdb create-blocks-from openmetrics FILE DATA
    prometheus --storage.tsdb.path=DATA --storage.tsdb.retention.time=100y ...
    promtool tsdb create-blocks-from rules --start=A --end=B --eval-interval=5s --url=URL --output-dir=DATA RULES
    python -m grafana.render URL FOLDER --end B
"""

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+) (\d+\.\d+)$")
_SUFFIXES: Final = ("_total", "_created", "_bucket", "_sum", "_count")


def open_metrics(lines: Iterable[str], node: str) -> Iterator[str]:
    """The same samples, each family once, in order of time within each series."""
    kinds: dict[str, str] = {}
    series: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            kinds[name.removesuffix("_total") if kind == "counter" else name] = kind
        elif found := _SAMPLE.match(line):
            name, labels, value, at = found.groups()
            where = f'instance="{node}",node="{node}"'
            inner = f"{labels[1:-1]},{where}" if labels else where
            key = f"{name}{{{inner}}}"
            series.setdefault(_family(name, kinds), {}).setdefault(key, []).append(
                f"{key} {value} {at}"
            )
    for family, members in series.items():
        yield f"# TYPE {family} {kinds.get(family, 'unknown')}"
        for samples in members.values():
            yield from samples
    yield "# EOF"


def _family(name: str, kinds: dict[str, str]) -> str:
    """The family that a sample belongs to: its name less the suffix of its kind."""
    bare = (name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix))
    return name if name in kinds else next((one for one in bare if one in kinds), name)


def main() -> None:
    """Convert one file."""
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    for line in open_metrics(text.splitlines(), sys.argv[2]):
        print(line)  # noqa: T201


if __name__ == "__main__":
    main()
