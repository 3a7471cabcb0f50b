"""What float8 costs.

python -m bench.float8 error RUN8 RUN   in precision: a run stored as float8 held against the same run in the dtype that it was computed in
python -m bench.float8 cost             in time: states of 32k tokens quantized on this machine's GPU, or CPU

Both add ``--json FILE``. ``error``: the runs are of the same data, model and layers, computed on the same device, so that all
that differs is the rounding. For comparison the same states are also quantized with one scale for all slots of a token,
as speculators stores them.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from swathe import HiddenStates
from swathe.adapters.speculators import quantize_fp8
from worker.engine.quantize import quantize
from worker.engine.rates import seconds
from worker.engine.soundness import magnitudes


def measure(float8: HiddenStates, wide: HiddenStates) -> list[dict[str, Any]]:
    """A row for each layer: relative L2 error and cosine of tokens, and the magnitudes that explain them."""
    parts = [torch.stack(list(_token_figures(*pair))) for pair in _pairs(float8, wide)]
    figures_5TK = torch.cat(parts, dim=1)
    return [
        {
            "layer": layer,
            "error_median": _quantile(error_T, 0.5),
            "error_p99": _quantile(error_T, 0.99),
            "error_worst": float(error_T.max()),
            "cosine_median": _quantile(cosine_T, 0.5),
            "cosine_worst": float(cosine_T.min()),
            "one_scale_error_median": _quantile(one_scale_T, 0.5),
            "one_scale_error_p99": _quantile(one_scale_T, 0.99),
            "one_scale_error_worst": float(one_scale_T.max()),
            "rms_median": _quantile(rms_T, 0.5),
            "largest_median": _quantile(largest_T, 0.5),
            "largest": float(largest_T.max()),
        }
        for layer, (error_T, cosine_T, one_scale_T, rms_T, largest_T) in zip(
            wide.layers, figures_5TK.permute(2, 0, 1), strict=True
        )
    ]


def _pairs(float8: HiddenStates, wide: HiddenStates) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if float8.layers != wide.layers or float8.rows.tolist() != wide.rows.tolist():
        raise SystemExit("the runs are not of the same rows and layers")
    for index in range(len(wide)):
        yield float8[index]["hidden_states"].float(), wide[index]["hidden_states"].float()


def _token_figures(found_SKH: torch.Tensor, wanted_SKH: torch.Tensor) -> Iterator[torch.Tensor]:
    """Five figures [S, K]."""
    norm_SK = wanted_SKH.norm(dim=2)
    codes_SKH, scales_S11 = quantize_fp8(wanted_SKH)
    one_scale_SKH = codes_SKH.float() * scales_S11
    yield (found_SKH - wanted_SKH).norm(dim=2) / norm_SK
    yield torch.cosine_similarity(found_SKH, wanted_SKH, dim=2)
    yield (one_scale_SKH - wanted_SKH).norm(dim=2) / norm_SK
    yield norm_SK / wanted_SKH.shape[2] ** 0.5
    yield wanted_SKH.abs().amax(dim=2)


def _quantile(values_T: torch.Tensor, share: float) -> float:
    return float(torch.quantile(values_T, share))


def measure_cost(device: torch.device, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Milliseconds and bytes of one range's states [T, K, H] in bfloat16, beside what is done with them anyway."""
    states_TKH = torch.randn(shape, device=device).bfloat16()
    found_TK = magnitudes(states_TKH)
    codes_TKH, scales_TK = quantize(states_TKH, found_TK)
    free_bytes = _held(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    quantize(states_TKH, found_TK)
    held = torch.cuda.max_memory_allocated(device) - free_bytes if device.type == "cuda" else None
    pinned = device.type == "cuda"
    host, host8 = (
        torch.empty(shape, dtype=dtype, pin_memory=pinned)
        for dtype in (states_TKH.dtype, codes_TKH.dtype)
    )
    repeats = 20 if pinned else 1
    steps = {
        "quantize_ms": lambda: quantize(states_TKH, found_TK),
        "magnitudes_ms": lambda: magnitudes(states_TKH),
        "copy_to_host_ms": lambda: host.copy_(states_TKH, non_blocking=True),
        "copy_float8_to_host_ms": lambda: host8.copy_(codes_TKH, non_blocking=True),
    }
    return {
        "shape": list(shape),
        **{name: round(1000 * seconds(step, device, repeats), 3) for name, step in steps.items()},
        "states_bytes": states_TKH.nbytes,
        "float8_bytes": codes_TKH.nbytes + scales_TK.nbytes,
        "held_while_quantizing_bytes": held,
    }


def _held(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main() -> None:
    """Measure what was asked for, print it, and keep it where it is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    error, cost = what.add_parser("error"), what.add_parser("cost")
    error.add_argument("float8")
    error.add_argument("wide")
    cost.add_argument("--shape", type=int, nargs=3, default=(32_768, 5, 5120))
    for command in (error, cost):
        command.add_argument("--json", type=Path)
    asked = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    if asked.what == "error":
        result = {"bench": "float8", "device": _machine(), **_error(asked.float8, asked.wide)}
    else:
        name = torch.cuda.get_device_name(device) if cuda else _machine()
        result = {
            "bench": "float8_cost",
            "device": name,
            "torch": torch.__version__,
            "rows": [measure_cost(device, tuple(asked.shape))],
        }
        print(json.dumps(result, indent=1))
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _error(float8_url: str, wide_url: str) -> dict[str, Any]:
    """Measure and print the table for docs/layers.md."""
    float8, wide = HiddenStates(float8_url), HiddenStates(wide_url)
    rows = measure(float8, wide)
    print(
        "| layer | error: median | p99 | worst | cosine: median | worst | one scale a token, error: median | p99 |"
        " worst | largest value: median token | all |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['layer']} | {row['error_median']:.2%} | {row['error_p99']:.2%} | {row['error_worst']:.2%} | "
            f"{row['cosine_median']:.5f} | {row['cosine_worst']:.5f} | {row['one_scale_error_median']:.2%} | "
            f"{row['one_scale_error_p99']:.2%} | {row['one_scale_error_worst']:.2%} | "
            f"{row['largest_median']:,.0f} | {row['largest']:,.0f} |"
        )
    print(f"\n{len(wide)} samples, {int(wide.lengths.sum())} tokens")
    return {
        "model": Path(wide.spec.model.source).name,
        "computed": wide.spec.compute_dtype,
        "samples": len(wide),
        "tokens": int(wide.lengths.sum()),
        "rows": rows,
    }


if __name__ == "__main__":
    main()
