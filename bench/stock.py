"""What people write first: transformers in a loop. The baselines, each with its states on disk.

Both keep only the wanted layers of ``output_hidden_states``, so they are kinder to themselves than the loop that this
project began with. Files are deleted as soon as they are written.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.gauges import watching
from bench.shapes import SHAPES, chat_lengths, random_ids

_WARM_S = 8.0
BATCH = 32


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run a baseline for ``seconds`` after a warm-up; ``fla`` says whether transformers may find it."""
    if not spec["fla"]:
        hidden: Any = None
        sys.modules["fla"] = hidden  # transformers' import of it fails
    import torch  # noqa: PLC0415 - after fla is hidden

    from worker.model.backbone import load_backbone  # noqa: PLC0415

    shape, device = SHAPES[spec["model"]], torch.device(spec["device"])
    folder = Path(spec["folder"])
    source = f"random:{shape.write(folder)}"
    backbone = load_backbone(
        source,
        depth=int(shape.config["num_hidden_layers"]),
        dtype=shape.config["dtype"],
        device=device,
    )
    lengths = chat_lengths(spec["samples"], longest=spec["longest"], seed=1)
    samples = random_ids(lengths, shape.config["vocab_size"])
    step = _single if spec["name"].startswith("one_sample") else _padded
    loop = step(backbone.module, samples, shape.layers, folder)
    with watching() as gauges, torch.inference_mode():
        _repeat(loop, spec.get("warm_s", _WARM_S))
        started = time.time()
        done = _repeat(loop, spec["seconds"])
        seconds = time.time() - started
    counted = lengths[np.array(done) % len(lengths)]
    return {
        "name": spec["name"],
        "model": spec["model"],
        "phase": "steady",
        "seconds": seconds,
        "lengths": counted.tolist(),
        "written_bytes_s": float(
            counted.sum() * len(shape.layers) * backbone.config.hidden_size * 2 / seconds
        ),
        **gauges.between(started, started + seconds),
    }


def _repeat(loop: Iterator[list[int]], seconds: float) -> list[int]:
    done: list[int] = []
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        done += next(loop)
    return done


def _single(
    module: Any, samples: list[Any], layers: tuple[int, ...], folder: Path
) -> Iterator[list[int]]:
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    place = 0
    while True:
        ids = torch.from_numpy(samples[place % len(samples)].astype(np.int64))[None]
        out = module(
            input_ids=ids.to(module.device), use_cache=False, output_hidden_states=True
        ).hidden_states
        states = torch.stack([out[layer + 1][0] for layer in layers], dim=1).cpu()
        path = folder / f"{place}.safetensors"
        save_file({"hidden_states": states}, path)
        path.unlink()
        yield [place]
        place += 1


def _padded(
    module: Any, samples: list[Any], layers: tuple[int, ...], folder: Path
) -> Iterator[list[int]]:
    from safetensors.torch import save_file  # noqa: PLC0415

    place = 0
    while True:
        chosen = [(place + i) % len(samples) for i in range(BATCH)]
        states = _halved(_forward, module, [samples[i] for i in chosen], layers)
        path = folder / f"{place}.safetensors"
        save_file({str(i): one for i, one in enumerate(states)}, path)
        path.unlink()
        yield list(range(place, place + BATCH))
        place += BATCH


def _halved(forward: Callable[..., Any], module: Any, batch: list[Any], layers: Any) -> list[Any]:
    """A batch, or its halves where it does not fit: 65 states of 32 long samples are 87 GB."""
    import torch  # noqa: PLC0415

    try:
        return list(forward(module, batch, layers))
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
    torch.cuda.empty_cache()
    middle = len(batch) // 2
    return [
        one
        for half in (batch[:middle], batch[middle:])
        for one in _halved(forward, module, half, layers)
    ]


def _forward(module: Any, batch: list[Any], layers: tuple[int, ...]) -> list[Any]:
    import torch  # noqa: PLC0415

    width = max(map(len, batch))
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(batch):
        ids[row, : len(sample)] = torch.from_numpy(sample.astype(np.int64))
        mask[row, : len(sample)] = 1
    out = module(
        input_ids=ids.to(module.device),
        attention_mask=mask.to(module.device),
        use_cache=False,
        output_hidden_states=True,
    ).hidden_states
    return [
        torch.stack([out[layer + 1][row, : len(sample)] for layer in layers], dim=1).cpu()
        for row, sample in enumerate(batch)
    ]
