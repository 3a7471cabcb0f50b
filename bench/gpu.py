"""One GPU, from the loop that people write first to the whole product: samples/s, useful MFU, exactness.

Rows: ``one_sample`` (transformers without fla, one sample at a time, one file each), ``one_sample_fla``,
``padded_stock`` (file-order batches of 32, with fla), ``engine_discard`` (this engine, states thrown away on the host),
``engine_disk`` (the product: plan, server, submit, worker, shards on disk; cold and warm kernel cache) and
``engine_memory`` (the product on a memory file system, by number of GPUs). Each runs in a process of its own, on random
weights and the same length mix: lognormal, mean 335, sigma 0.9, 20 to 4,096.

    python -m bench.gpu                        one H200, about ten minutes
    python -m bench.gpu --rows engine_memory --gpus 2
    python -m bench.gpu --models tiny --device cpu --seconds 1
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from bench.result import Result, Row, command_words, ratios, table
from bench.shapes import SHAPES
from producer.provenance import git_revision

ROWS: Final = ("engine_disk", "engine_discard", "one_sample", "one_sample_fla", "padded_stock")
"""The product first: its first run is the one with an empty kernel cache, and fills it for all others."""
_SHARE: Final = {"one_sample": 0.3, "one_sample_fla": 0.3, "padded_stock": 0.8}
"""Of ``--seconds``: the baselines need less."""
_MARK: Final = "RESULT "
_CHILD_BOUND_S: Final = 420.0


def main(argv: list[str] | None = None) -> int:
    """Run the rows, print and write the result."""
    options = _options(argv)
    if options.child:
        print(_MARK + json.dumps(measure(json.loads(options.child))))
        return 0
    with tempfile.TemporaryDirectory(prefix="swathe-bench-", dir=options.work) as name:
        try:
            for partial in _bench(options, Path(options.keep or name)):
                result = partial
                # Written after each row: time on a device may end early.
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(result.model_dump_json(indent=1) + "\n")
        finally:
            shutil.rmtree(_memory_folder(options), ignore_errors=True)
    print(table(result))
    for what, ratio in ratios(result.rows).items():
        print(f"{what}: {ratio}")
    return 0


def measure(spec: dict[str, Any]) -> Any:
    """One row (or two) in this process."""
    from bench import direct, gauges, product, stock  # noqa: PLC0415 - only what a child needs
    from worker.model.kernels.cache import keep_kernels  # noqa: PLC0415

    keep_kernels(Path(spec["cache_folder"]))
    name = spec["name"]
    if spec["device"] == "cpu":
        _one_thread()
    if name == "ceilings":
        return gauges.ceilings(spec["device"], Path(spec["folder"]))
    if name.startswith(("one_sample", "padded")):
        rows = [stock.run(spec)]
    else:
        rows = [direct.run(spec)] if name == "engine_discard" else product.run(spec)
    for row in rows:
        lengths = row.pop("lengths")
        row["samples"], row["tokens"] = len(lengths), sum(lengths)
        row["flops"] = flops(spec["model"], lengths)
    return rows


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="27b,8b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seconds", type=float, default=40.0, help="of each engine row")
    parser.add_argument("--disk-seconds", type=float, help="of engine_disk with a warm cache")
    parser.add_argument(
        "--first-seconds", type=float, default=300.0, help="the first phase's length"
    )
    parser.add_argument("--gpus", type=int, default=1, help="engine_memory with 1 and this many")
    parser.add_argument("--range-tokens", type=int, default=32_768)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=16_000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cold", choices=("both", "only", "no"), default="both",
                        help="engine_disk with an empty kernel cache, then with a full one")  # fmt: skip
    parser.add_argument("--cold-seconds", type=float, default=75.0, help="of the former")
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu.json"))
    parser.add_argument("--work", help="folder for all that is written meanwhile")
    parser.add_argument("--memory", default="/dev/shm", help="a memory file system")  # noqa: S108
    parser.add_argument("--cache", help="folder of the warm kernel cache; unset: begins empty")
    parser.add_argument("--keep", help="write there instead, and keep it")
    parser.add_argument("--git", help="the revision, where there is no checkout")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _bench(options: argparse.Namespace, folder: Path) -> Iterator[Result]:
    """The result so far, after the ceilings and after each row."""
    folder.mkdir(parents=True, exist_ok=True)
    common: dict[str, Any] = {
        "device": options.device,
        "folder": str(folder),
        "longest": options.longest,
        "samples": options.samples,
        "range_tokens": options.range_tokens,
        "cache_folder": str(options.cache or folder / "kernels"),
    }
    ceilings = child({**common, "name": "ceilings"})
    _say(f"ceilings: {ceilings}")
    result = Result(
        bench="gpu",
        device=device_words(options.device),
        versions=versions(),
        git=options.git or git_revision(),
        command=command_words("bench.gpu", sys.argv[1:]),
        rows=[],
        **{name: round(value, 4) for name, value in ceilings.items()},
    )
    yield result
    for model in options.models.split(","):
        for spec in _specs(options, model, common):
            try:
                found = child(spec)
            except Exception:  # noqa: BLE001 - a row that fails must not cost the others
                _say(f"{spec['name']} {model} FAILED\n{traceback.format_exc()}")
                continue
            exact = [(model, one.pop("exactness")) for one in found if "exactness" in one]
            rows = [_row(raw, ceilings["matmul_tflops"]) for raw in found]
            result = result.model_copy(
                update={"rows": result.rows + rows, "exactness": result.exactness | dict(exact)}
            )
            for row in rows:
                _say(row.model_dump_json())
            yield result


def _specs(options: argparse.Namespace, model: str, common: dict[str, Any]) -> list[dict[str, Any]]:
    specs: list[dict[str, Any]] = []
    hybrid = "linear_num_value_heads" in SHAPES[model].config
    for name in options.rows.split(","):
        spec = {
            **common,
            "name": name,
            "model": model,
            "seconds": options.seconds * _SHARE.get(name, 1.0),
            "fla": name != "one_sample",
            "exactness": True,
        }
        if options.device == "cpu":
            spec["warm_s"] = 0.1
        if name == "one_sample_fla" and not hybrid:
            continue
        if name == "engine_disk":
            specs += _disk_specs(options, spec)
        elif name == "engine_memory":
            specs += _memory_specs(options, spec)
        else:
            specs.append(spec)
    return specs


def _disk_specs(options: argparse.Namespace, spec: dict[str, Any]) -> list[dict[str, Any]]:
    product = {
        "devices": "cpu" if options.device == "cpu" else "0",
        "rolling": not options.keep,
        "file_system": "local disk",
        "first_s": options.first_seconds,
    }
    runs = {
        "cold": {"kernel_cache": "cold", "seconds": options.cold_seconds},
        "warm": {"kernel_cache": "warm", "seconds": options.disk_seconds or options.seconds},
    }
    chosen = {"both": ("cold", "warm"), "only": ("cold",), "no": ("warm",)}[options.cold]
    return [{**spec, **product, **runs[name]} for name in chosen]


def _memory_specs(options: argparse.Namespace, spec: dict[str, Any]) -> list[dict[str, Any]]:
    product = {
        "folder": str(_memory_folder(options)),
        "rolling": True,
        "file_system": "memory",
        "first_s": options.first_seconds,
        "kernel_cache": "warm",
    }
    return [
        {
            **spec,
            **product,
            "devices": ",".join(map(str, range(count))),
            "name": f"engine_memory_{count}",
        }
        for count in dict.fromkeys((1, options.gpus))
    ]


def _memory_folder(options: argparse.Namespace) -> Path:
    return Path(options.memory) / f"swathe-bench-{os.getpid()}"


def child(spec: dict[str, Any]) -> Any:
    """A row in a process of its own: the device's memory is empty when it begins."""
    Path(spec["folder"]).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "bench.gpu", "--child", json.dumps(spec)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, timeout=_CHILD_BOUND_S
    )
    marked = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not marked:
        msg = f"{spec['name']} ended with {done.returncode}: {done.stdout[-2000:]}"
        raise RuntimeError(msg)
    return json.loads(marked[-1].removeprefix(_MARK))


def _row(raw: dict[str, Any], matmul_tflops: float) -> Row:
    seconds = raw["seconds"]
    tflops = raw.pop("flops") / seconds / 1e12
    return Row(
        samples_s=round(raw.pop("samples") / seconds, 3),
        tokens_s=round(raw.pop("tokens") / seconds, 1),
        useful_tflops=round(tflops, 3),
        useful_mfu=round(tflops / matmul_tflops, 4),
        **{
            key: round(value, 5) if isinstance(value, float) else value
            for key, value in raw.items()
        },
    )


def _one_thread() -> None:
    """Tiny tensors gain nothing from threads."""
    import torch  # noqa: PLC0415 - only children load torch

    torch.set_num_threads(1)


def flops(model: str, lengths: list[int], depth: int | None = None) -> float:
    """Operations of samples through the blocks up to the deepest wanted one; no weights are made."""
    import torch  # noqa: PLC0415 - only children load torch
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415

    from worker.model.backbone import cut_depth, find_blocks  # noqa: PLC0415
    from worker.model.flops import count_flops  # noqa: PLC0415

    shape = SHAPES[model]
    raw = dict(shape.config)
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    depth = depth or max(shape.layers) + 1
    cut_depth(config, depth)
    with torch.device("meta"):
        module = AutoModel.from_config(config)
    return count_flops(tuple(find_blocks(module, depth)), config).of(lengths)


def device_words(device: str) -> str:
    """The machine in words."""
    if device == "cpu":
        return f"{platform.machine()} CPU, {len(os.sched_getaffinity(0))} cores"
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    return f"{len(found)} x {found[0]}, {len(os.sched_getaffinity(0))} cores"


def versions() -> dict[str, str]:
    """Of what decides speed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "triton", "fla-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
