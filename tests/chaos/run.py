"""The whole chaos suite with real leases, and its table.

python tests/chaos/run.py --seeds 10 --jobs 4 --out FILE.json     run it
python tests/chaos/run.py --table FILE.json                       the table of results that are there
"""

# ruff: noqa: E402 - run as a program, it has to find its own package first

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from chaos.harness import chaos_fleet
from chaos.real import real_fleet
from chaos.real_scenarios import REAL_SCENARIOS, RealScenario
from chaos.scenarios import SCENARIOS, Scenario
from conftest import server_binary

Row = dict[str, Any]


def one(name: str, scenario: Scenario, seed: int, lease_s: float) -> Row:
    """Run one scenario of fake work once; what it took and what was computed again."""
    bound_s = scenario.leases * lease_s + scenario.extra_s
    folder = Path(tempfile.mkdtemp(prefix="swathe-chaos-"))
    with chaos_fleet(
        folder, seed, ranges=scenario.ranges, lease_s=lease_s, persistent=scenario.persistent
    ) as fleet:
        row: Row = {"name": name, "seed": seed, "lease_s": lease_s, "bound_s": bound_s}
        try:
            scenario.run(fleet)
            started = time.monotonic()
            fleet.finish(bound_s)
        except Exception as error:  # noqa: BLE001 - it stands in the results
            return {**row, "passed": False, "error": repr(error), "folder": str(folder)}
        lost = folder / "lost"
        row |= {
            "passed": True,
            "to_end_s": round(time.monotonic() - started, 2),
            "recoveries_s": [round(value, 2) for value in fleet.recoveries()],
            "recomputed": fleet.recomputed(),
            "second_attempts": len(lost.read_text().split()) if lost.exists() else 0,
            "set_aside": len(fleet.work.failed()),
        }
    shutil.rmtree(folder)
    return row


def one_real(name: str, scenario: RealScenario, seed: int, lease_s: float) -> Row:
    """The same with real workers and true states."""
    row: Row = {"name": name, "seed": seed, "lease_s": lease_s, "bound_s": scenario.bound_s}
    folder = Path(tempfile.mkdtemp(prefix="swathe-chaos-"))
    with real_fleet(
        folder, seed, lease_s=lease_s, persistent=scenario.persistent, bad=scenario.bad
    ) as fleet:
        try:
            scenario.run(fleet)
            started = time.monotonic()
            state = fleet.finish(scenario.bound_s)
        except Exception as error:  # noqa: BLE001 - it stands in the results
            return {**row, "passed": False, "error": repr(error), "folder": str(folder)}
        row |= {
            "passed": True,
            "to_end_s": round(time.monotonic() - started, 2),
            "recoveries_s": [],
            "quarantined": state.quarantined_samples,
            "set_aside": len(state.failed),
        }
    shutil.rmtree(folder)
    return row


def table(rows: list[Row]) -> str:
    """Markdown: one line for each scenario; what was lost or doubled had made its run fail."""
    head = (
        "fault", "seeds", "passed", "bound promised (s)", "s to the end of the run: median / worst",
        "s until the range ran elsewhere: median / worst", "lost", "doubled", "computed again",
    )  # fmt: skip
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        good = [row for row in mine if row["passed"]]
        times = [row["to_end_s"] for row in good] or [float("nan")]
        again = [value for row in good for value in row["recoveries_s"]]
        elsewhere = f"{statistics.median(again):.1f} / {max(again):.1f}" if again else "-"
        doubt = "0" if len(good) == len(mine) else "?"
        recomputed = (
            sum(row.get("recomputed", 0) for row in good) if "recomputed" in mine[0] else "-"
        )
        out.append(
            f"| {name} | {len(mine)} | {len(good)} | {mine[0]['bound_s']:.0f} |"
            f" {statistics.median(times):.1f} / {max(times):.1f} | {elsewhere} | {doubt} | {doubt} | {recomputed} |"
        )
    return "\n".join(out)


def run_all(options: argparse.Namespace, keep: Callable[[list[Row]], None]) -> list[Row]:
    """Every scenario and seed that is asked for, a few at a time: they mostly wait. The longest start first.

    ``keep`` gets the rows so far, in the suite's order, after each one: hours of waiting are not lost at the end.
    """
    every: dict[str, Callable[[int], Row]] = {}
    for name, fake in SCENARIOS.items():
        every[name] = partial(one, name, fake, lease_s=options.lease_s)
    for name, real in REAL_SCENARIOS.items():
        every[name] = partial(one_real, name, real, lease_s=options.lease_s)
    asked = [
        (name, seed)
        for name in every
        if any(part in name for part in options.only)
        and not any(part in name for part in options.without)
        for seed in range(options.seeds)
    ]
    done: dict[tuple[str, int], Row] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {
            pool.submit(every[name], seed): (name, seed)
            for name, seed in sorted(asked, key=lambda case: "20 minutes" not in case[0])
        }
        for future in as_completed(waiting):
            row = {**future.result(), "load": round(os.getloadavg()[0], 1)}
            done[waiting[future]] = row
            print(f"{len(done)}/{len(asked)} {json.dumps(row)}", flush=True)  # noqa: T201
            keep([done[case] for case in asked if case in done])
    return [done[case] for case in asked]


def server_version() -> str:
    """What the servers of the suite are."""
    said = subprocess.run(
        [str(server_binary()), "--version"], capture_output=True, text=True, check=False
    )
    return said.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--lease-s", type=float, default=15.0)
    parser.add_argument("--only", default=[""], nargs="*", help="parts of scenarios' names")
    parser.add_argument("--without", default=[], nargs="*", help="parts of those left out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())["rows"]))  # noqa: T201
        return 0
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "bench": "chaos",
        "device": f"{os.cpu_count()} CPUs",
        "versions": {"python": platform.python_version(), "server": server_version()},
        "git": git.stdout.strip(),
        "command": " ".join(["python", "tests/chaos/run.py", *sys.argv[1:]]),
    }

    def keep(rows: list[Row]) -> None:
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")

    rows = run_all(options, keep)
    print(table(rows))  # noqa: T201
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
