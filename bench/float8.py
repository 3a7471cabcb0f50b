"""What float8 costs in precision: a run stored as float8 held against the same run in the dtype that it was computed in.

python -m bench.float8 RUN8 RUN [--json FILE]

Both runs are of the same data, model and layers, computed on the same device, so that all that differs is the rounding.
For comparison the same states are also quantized with one scale for all slots of a token, as speculators stores them.
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


def main() -> None:
    """Print the table for docs/layers.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("float8")
    parser.add_argument("wide")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    float8, wide = HiddenStates(asked.float8), HiddenStates(asked.wide)
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
    if asked.json is not None:
        result = {
            "bench": "float8",
            "device": f"{platform.machine()}, {os.cpu_count()} cores",
            "model": Path(wide.spec.model.source).name,
            "computed": wide.spec.compute_dtype,
            "samples": len(wide),
            "tokens": int(wide.lengths.sum()),
            "rows": rows,
        }
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
