"""What a GPU benchmark writes: its JSON's schema, and the table made from it.

python -m bench.result bench/results/gpu-27b-rows.json
"""

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

Phase = Literal["first", "steady"]
_PLACES: Final = {"--out", "--work", "--memory", "--cache", "--keep", "--logs", "--git"}


class Strict(BaseModel):
    """A part of the JSON; unknown and missing keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(Strict):
    """One measurement. What a row cannot know is None."""

    name: str
    model: str
    phase: Phase
    """``first`` begins when the weights are loaded, ``steady`` when all is tuned and every stage has work."""
    seconds: float
    samples_s: float
    tokens_s: float
    useful_tflops: float
    """Operations of the wanted blocks on real tokens; see ``worker.model.flops``."""
    useful_mfu: float
    """The same as a share of ``matmul_tflops``."""
    nvml_utilization: float | None = None
    gpu_busy: float | None = None
    power_watts: float | None = None
    padding_ratio: float | None = None
    """Tokens computed and not wanted, to tokens wanted."""
    peak_memory_bytes: int | None = None
    written_bytes_s: float = 0.0
    kernel_cache: Literal["warm", "cold"] | None = None
    gpus: int = 1
    detail: dict[str, Any] = {}


class Result(Strict):
    """A file below ``bench/results/``."""

    bench: str
    device: str
    versions: dict[str, str]
    git: str | None
    command: str
    matmul_tflops: float
    """8192-wide bf16 product, 20 calls after warming up: what the utilizations are a share of."""
    sustained_matmul_tflops: float
    """The same over two seconds, when the power limit has lowered the clocks."""
    host_copy_bytes_s: float
    disk_write_bytes_s: float
    rows: list[Row]
    exactness: dict[str, Any] = {}
    """By model: errors per layer and what became of kernels that were made wrong on purpose."""


_HEADER = (
    "| row | model | phase | samples/s | tokens/s | useful MFU | NVML | busy | padding | peak GB | written GB/s | s |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def command_words(module: str, arguments: Sequence[str]) -> str:
    """A command as a result keeps it: without the options that only say where things lie on one machine."""
    words, rest = ["python", "-m", module], iter(arguments)
    for word in rest:
        if word.partition("=")[0] not in _PLACES:
            words.append(word)
        elif "=" not in word:
            next(rest, None)
    return shlex.join(words)


def table(result: Result) -> str:
    """The rows as Markdown."""
    return "\n".join([*_HEADER, *map(_line, result.rows)])


def _line(row: Row) -> str:
    phase = row.phase if row.kernel_cache is None else f"{row.phase}, {row.kernel_cache} cache"
    cells = [
        row.name if row.gpus == 1 else f"{row.name}, {row.gpus} GPUs",
        row.model,
        phase,
        f"{row.samples_s:.1f}",
        f"{row.tokens_s:,.0f}",
        f"{row.useful_mfu:.3f}",
        _share(row.nvml_utilization),
        _share(row.gpu_busy),
        _share(row.padding_ratio),
        "" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 1e9:.0f}",
        f"{row.written_bytes_s / 1e9:.2f}",
        f"{row.seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g} %"


def ratios(rows: Iterable[Row]) -> dict[str, float]:
    """Steady samples/s of the product over those of each baseline, by model and baseline."""
    steady = {(row.model, row.name): row.samples_s for row in rows if row.phase == "steady"}
    return {
        f"{model}: engine_disk / {name}": round(steady[model, "engine_disk"] / samples_s, 2)
        for (model, name), samples_s in steady.items()
        if name != "engine_disk" and (model, "engine_disk") in steady
    }


def main() -> None:
    """Print the tables of results."""
    for name in sys.argv[1:]:
        result = Result.model_validate_json(Path(name).read_text())
        print(f"{result.device}; 8192-wide product {result.matmul_tflops:.0f} TFLOP/s, ", end="")
        print(f"{result.sustained_matmul_tflops:.0f} sustained\n\n{table(result)}\n")
        for what, ratio in ratios(result.rows).items():
            print(f"{what}: {ratio}")


if __name__ == "__main__":
    main()
