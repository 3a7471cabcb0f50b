"""A fleet that grows, loses half of its devices to SIGKILL, and finishes its run: scaling, recovery, accounting.

Instances of one host join one after another, so that 1, 2, 4 and 8 devices work on the same run; each time all of them
are busy, a window is measured. That run is cancelled and another one submitted. When a third of it is stored, the last
instance, half of the devices, is killed: its supervisor gets SIGKILL, and the kernel kills its workers with it. The others
finish, and the accounts are read. One slot is stored by default, so that the disk does not decide.

    python -m bench.fleet --gpus 2
    python -m bench.fleet --gpus 8
    python -m bench.fleet --gpus 2 --device cpu --model tiny --seconds 3 --samples 80 --range-tokens 128 --longest 48
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from bench import gpu
from bench.result import Result, Row, command_words, table
from bench.shapes import SHAPES
from bench.story import Accounting, Kill, Story
from producer.provenance import git_revision


class FleetResult(Result):
    """``bench/results/fleet*.json``: a row for each size of the fleet, and what the kill cost."""

    efficiency: dict[str, float]
    """Samples/s over so many times those of one device."""
    kill: Kill
    accounting: Accounting


def main(argv: list[str] | None = None) -> int:
    """Run the story, print and write the result."""
    options = _options(argv)
    with tempfile.TemporaryDirectory(prefix="swathe-fleet-", dir=options.work) as name:
        folder = Path(options.keep or name)
        folder.mkdir(parents=True, exist_ok=True)
        common = {"device": options.device, "folder": str(folder)}
        cache = str(options.cache or folder / "kernels")
        ceilings = gpu.child({**common, "name": "ceilings", "cache_folder": cache})
        _say(f"ceilings: {ceilings}")
        story = Story(options, folder, cache, ceilings["matmul_tflops"])
        try:
            story.play()
        finally:
            for log in folder.glob("*.log"):
                if options.logs:
                    shutil.copy(log, options.logs)
    result = FleetResult(
        bench="fleet",
        device=gpu.device_words(options.device),
        versions=gpu.versions(),
        git=options.git or git_revision(),
        command=command_words("bench.fleet", sys.argv[1:] if argv is None else argv),
        rows=story.rows,
        efficiency=_efficiency(story.rows),
        kill=story.kill,
        accounting=story.accounting,
        **{name: round(value, 4) for name, value in ceilings.items()},
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(result.model_dump_json(indent=1) + "\n")
    _say(table(result))
    for part in (result.efficiency, result.kill, result.accounting):
        _say(str(part))
    return 0 if _is_clean(result.accounting) else 1


def _efficiency(rows: list[Row]) -> dict[str, float]:
    one = next(row.samples_s for row in rows if row.gpus == 1)
    return {f"{row.name}, {row.gpus}": round(row.samples_s / row.gpus / one, 4) for row in rows}


def _is_clean(found: Accounting) -> bool:
    """Whether nothing was lost, doubled or left over that should not be."""
    whole = found.stored + found.rejected + found.quarantined == found.rows
    return whole and not (found.rows_twice or found.rows_missing) and bool(found.verify["ok"])


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=2, help="devices of the whole fleet")
    parser.add_argument("--model", default="27b", choices=tuple(SHAPES))
    parser.add_argument("--seconds", type=float, default=40.0, help="of each window")
    parser.add_argument(
        "--samples", type=int, default=1500, help="for each device, of the run with the kill"
    )
    parser.add_argument(
        "--scaling-samples", type=int, default=60_000, help="of the other: enough for all windows"
    )
    parser.add_argument("--slots", type=int, default=1, help="the deepest layers of the shape")
    parser.add_argument(
        "--bound", type=float, default=600.0, help="seconds until the run must have ended"
    )
    parser.add_argument("--lease", type=float, default=15.0)
    parser.add_argument("--range-tokens", type=int, default=32_768)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/fleet.json"))
    parser.add_argument("--work", help="folder for all that is written meanwhile")
    parser.add_argument("--cache", help="folder of the kernel cache; unset: begins empty")
    parser.add_argument("--keep", help="write there instead, and keep it")
    parser.add_argument("--logs", help="keep the instances' logs there")
    parser.add_argument("--git", help="the revision, where there is no checkout")
    return parser.parse_args(argv)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
