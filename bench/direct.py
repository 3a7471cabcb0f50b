"""The engine by itself, states thrown away when they reach the host; and whether what it computes is right."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.gauges import watching
from bench.shapes import SHAPES, chat_lengths, random_ids

_LENGTHS: Final = (300, 40, 700, 90, 5)
_FIRST_RANGES: Final = 4
"""Not steady yet: pinned buffers are allocated, stages fill."""


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Ranges of the length mix for ``seconds``; then, where asked for, exactness."""
    import torch  # noqa: PLC0415 - only children load torch

    from worker.engine import selftest  # noqa: PLC0415
    from worker.engine.engine import Engine  # noqa: PLC0415
    from worker.engine.rates import tokens_that_fit, warm_up  # noqa: PLC0415
    from worker.model.hidden_states import load_model  # noqa: PLC0415

    shape = SHAPES[spec["model"]]
    model = load_model(
        f"random:{shape.write(Path(spec['folder']))}",
        layers=shape.layers,
        dtype=shape.config["dtype"],
        device=torch.device(spec["device"]),
    )
    loaded = time.time()
    warm_up(model, "packed", tokens=spec["range_tokens"])
    warm_s = time.time() - loaded
    test = selftest.prove(model, "packed")
    fit = tokens_that_fit(model, "packed", wanted=1 << 30)
    engine = Engine(model, form=test.form, max_batch_tokens=spec["range_tokens"], buffers=4)
    ready_s = time.time() - loaded
    finished: list[tuple[float, Any]] = []
    with watching() as gauges:
        on_device = None
        for samples in _ranges(spec, model.vocab_rows):
            started = engine.start(samples)
            if on_device is not None:
                finished.append(_finish(engine, on_device))
            on_device = started
            if finished and finished[-1][0] - loaded - ready_s > spec["seconds"]:
                break
        finished.append(_finish(engine, on_device))
    # A range is finished when the next one is on the device; the last has none behind it and would end too early.
    finished = finished[:-1] if len(finished) > 2 else finished
    first, last = finished[min(_FIRST_RANGES, len(finished) - 2)][0], finished[-1][0]
    steady = [states for at, states in finished if at > first]
    found: dict[str, Any] = {
        "name": "engine_discard",
        "model": spec["model"],
        "phase": "steady",
        "seconds": last - first,
        "lengths": [length for states in steady for length in states.samples.lengths],
        "gpu_busy": sum(states.stats.forward_s for states in steady) / (last - first),
        "padding_ratio": sum(s.stats.padding_tokens for s in steady)
        / sum(s.stats.tokens for s in steady),
        **gauges.between(first, last),
        "detail": {
            "load_s": round(model.load_s, 2),
            "warm_up_s": round(warm_s, 2),
            "ready_s": round(ready_s, 2),
            "peak_host_bytes": model.peak_host_bytes,
            "tokens_that_fit": fit,
            "kernels": model.kernels,
        },
    }
    if spec["exactness"]:
        found["exactness"] = _exactness(model, engine, spec)
    return found


def _finish(engine: Any, started: Any) -> tuple[float, Any]:
    states = engine.finish(started)
    states.release()
    return time.time(), states


def _ranges(spec: dict[str, Any], vocab_rows: int) -> Iterator[Any]:
    """Ranges of at most ``range_tokens`` in file order, over and over, as a plan cuts them."""
    number = 0
    while True:
        group: list[int] = []
        lengths = chat_lengths(spec["samples"], longest=spec["longest"], seed=number)
        for length in lengths.tolist():
            if group and sum(group) + length > spec["range_tokens"]:
                yield _range(group, vocab_rows, number)
                group, number = [], number + 1
            group.append(length)
        yield _range(group, vocab_rows, number)
        number += 1


def _range(lengths: list[int], vocab_rows: int, number: int) -> Any:
    from swathe.spec import RangeId  # noqa: PLC0415
    from swathe.tokens import RangeTokens  # noqa: PLC0415

    ids = random_ids(np.array(lengths), vocab_rows, seed=number)
    return RangeTokens(
        range_id=RangeId(number),
        rows=np.arange(len(lengths)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_ids=np.concatenate(ids),
        loss_mask=np.ones(sum(lengths), np.uint8),
    )


def _exactness(model: Any, engine: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Errors per layer against float32, packed against alone, and kernels made wrong on purpose."""
    from worker.engine import selftest  # noqa: PLC0415

    test = selftest.self_test(model, "packed")
    found: dict[str, Any] = {
        "packed": {"passed": test.passed, "reason": test.reason, "layers": _layers(test)}
    }
    found["packed_neighbours"] = _neighbours(model)
    found["perturbed"] = _perturbed(model, engine, spec)
    return found


def _layers(test: Any) -> list[dict[str, Any]]:
    names = ("fast_median", "fast_p99", "stock_median", "stock_p99", "between_median")
    return [
        {"layer": error.layer, **{name: float(f"{getattr(error, name):.4g}") for name in names}}
        for error in test.layers
    ]


def _neighbours(model: Any) -> dict[str, Any]:
    """Median errors against float32 of samples in one packed row and of the same samples alone in a row each."""
    import torch  # noqa: PLC0415

    from worker.engine.selftest import random_samples, token_errors  # noqa: PLC0415
    from worker.model.batch import cut_batches  # noqa: PLC0415

    def forward(samples: list[Any]) -> tuple[torch.Tensor, ...]:
        lengths = [len(sample) for sample in samples]
        (batch,) = cut_batches(lengths, form="packed", max_batch_tokens=1 << 20, multiple=128)
        return torch.split(model.forward(batch, samples), lengths)

    samples = random_samples(model, _LENGTHS)
    exact = [model.exact(sample) for sample in samples]
    together = forward(samples)
    alone = [forward([sample])[0] for sample in samples]
    return {
        name: [
            float(f"{value:.4g}")
            for value in np.median(
                np.concatenate([token_errors(f, e) for f, e in zip(states, exact, strict=True)]),
                axis=0,
            )
        ]
        for name, states in (("together", together), ("alone", alone))
    }


def _perturbed(model: Any, engine: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Make one fast kernel wrong by 5 %; the self-test must refuse it, a canary must fail."""
    from worker.engine import selftest  # noqa: PLC0415
    from worker.engine.canary import canary_bounds, take_canary  # noqa: PLC0415

    bounds = canary_bounds(selftest.self_test(model, "packed"))
    samples = next(_ranges({**spec, "range_tokens": 4096}, model.vocab_rows))
    good = engine.compute(samples, keep=0)
    found: dict[str, Any] = {"canary_of_right_kernels": take_canary(model, good, bounds).passed}
    good.release()
    fast = model._kernels._fast  # noqa: SLF001 - made wrong on purpose
    right = list(fast)
    for name in ("MLP", "GatedDeltaNet", "Attention"):
        fast[:] = [
            (module, _scaled(forward, 1.05) if name in type(module).__name__ else forward)
            for module, forward in right
        ]
        if not any(name in type(module).__name__ for module, _ in right):
            continue
        test = selftest.self_test(model, "packed")
        states = engine.compute(samples, keep=0)
        canary = take_canary(model, states, bounds)
        states.release()
        found[name] = {"self_test": test.reason or "passed", "canary_passed": canary.passed}
        found[name]["canary_errors"] = {k: round(v, 4) for k, v in canary.errors.items()}
        found[name]["canary_bounds"] = {k: round(v, 4) for k, v in canary.bounds.items()}
    fast[:] = right
    return found


def _scaled(forward: Any, factor: float) -> Any:
    """The same forward, its result (or the first part of it) wrong by a factor."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

    return run
