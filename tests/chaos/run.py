"""The whole chaos suite with real leases, and its table: `python tests/chaos/run.py --seeds 10 --out FILE.json`."""

# ruff: noqa: E402 - run as a program, it has to find its own package first

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from chaos.harness import chaos_fleet
from chaos.scenarios import SCENARIOS, Scenario


def one(name: str, scenario: Scenario, seed: int, lease_s: float) -> dict[str, Any]:
    """Run one scenario once; what it took and what was recomputed."""
    bound_s = scenario.leases * lease_s + scenario.extra_s
    folder = Path(tempfile.mkdtemp(prefix="swathe-chaos-"))
    with chaos_fleet(
        folder, seed, ranges=scenario.ranges, lease_s=lease_s, persistent=scenario.persistent
    ) as fleet:
        row: dict[str, Any] = {"name": name, "seed": seed, "lease_s": lease_s, "bound_s": bound_s}
        try:
            scenario.run(fleet)
            started = time.monotonic()
            fleet.finish(bound_s)
        except AssertionError as error:
            return {**row, "passed": False, "error": str(error), "folder": str(folder)}
        lost = folder / "lost"
        return {
            **row,
            "passed": True,
            "to_end_s": round(time.monotonic() - started, 2),
            "recoveries_s": [round(value, 2) for value in fleet.recoveries()],
            "recomputed": fleet.recomputed(),
            "second_attempts": len(lost.read_text().split()) if lost.exists() else 0,
            "set_aside": len(fleet.work.failed()),
        }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line for each scenario. Passed: every range stored or set aside once, no job left in Redis."""
    head = (
        "fault", "seeds", "passed", "s to the end of the run: median / worst (bound)",
        "s from kill to the range elsewhere: median / worst", "computed again", "records lost to an earlier attempt",
    )  # fmt: skip
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        good = [row for row in mine if row["passed"]]
        times = [row["to_end_s"] for row in good] or [float("nan")]
        again = [value for row in good for value in row["recoveries_s"]]
        elsewhere = f"{statistics.median(again):.1f} / {max(again):.1f}" if again else "-"
        recomputed = sum(row["recomputed"] for row in good)
        second = sum(row["second_attempts"] for row in good)
        out.append(
            f"| {name} | {len(mine)} | {len(good)} | {statistics.median(times):.1f} / {max(times):.1f}"
            f" ({mine[0]['bound_s']:.0f}) | {elsewhere} | {recomputed} | {second} |"
        )
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--lease-s", type=float, default=15.0)
    parser.add_argument("--only", default=[""], nargs="*", help="parts of scenarios' names")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name, scenario in SCENARIOS.items():
        if not any(part in name for part in options.only):
            continue
        for seed in range(options.seeds):
            rows.append(one(name, scenario, seed, options.lease_s))
            print(json.dumps(rows[-1]), flush=True)  # noqa: T201
    if options.out:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        result = {
            "bench": "chaos",
            "device": f"{os.cpu_count()} CPUs",
            "versions": {"python": platform.python_version()},
            "git": git.stdout.strip(),
            "command": " ".join(["python", "tests/chaos/run.py", *sys.argv[1:]]),
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))  # noqa: T201
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
