"""What a device can do at best: matrix products per second, bytes per second to the host, tokens that fit.

Measured, not looked up: boards of one name differ by their power limit and cooling. A utilization is a share of the
matrix rate measured here, in the same process.
"""

import gc
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from swathe import log
from swathe.spec import BatchForm
from worker.engine.transfer import timing_event
from worker.model.batch import cut_batches
from worker.model.hidden_states import HiddenStateModel

_SIZE_CUDA: Final = 8192
_SIZE_CPU: Final = 1024
_WARM_TOKENS: Final = 32_768
_SAFE_SHARE: Final = 0.85
"""Of the free memory; the rest is for fragmentation and for samples that differ from those measured."""


def matmul_flops(device: torch.device, dtype: torch.dtype, *, repeats: int = 20) -> float:
    """Operations per second of a square matrix product, 8192 wide on a GPU, after warming up."""
    size = _SIZE_CUDA if device.type == "cuda" else _SIZE_CPU
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out), device, repeats)


def host_copy_bytes(device: torch.device, *, size_bytes: int = 1 << 28) -> float:
    """Bytes per second from the device into pinned host memory."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return size_bytes / seconds(lambda: pinned.copy_(source, non_blocking=True), device, 8)


def tokens_that_fit(model: HiddenStateModel, form: BatchForm, *, wanted: int) -> int | None:
    """The largest batch, up to ``wanted`` tokens, whose activations fit beside the model with a safe margin.

    Measured on two small batches, whose difference is the cost of a token. None on a CPU, where memory is not
    the device's.
    """
    if model.device.type != "cuda":
        return None
    small, large = 2048, 4096
    used = [_peak_bytes(model, form, tokens) for tokens in (small, large)]
    per_token = max((used[1] - used[0]) / (large - small), 1.0)
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, _total = torch.cuda.mem_get_info(model.device)
    # States of two ranges may be on the device at once: one being copied while the next is computed.
    states = 2 * len(model.layers) * model.hidden_size * model.dtype.itemsize
    fit = int(_SAFE_SHARE * free_bytes / (per_token + states))
    return max(1, min(wanted, fit))


def warm_up(model: HiddenStateModel, form: BatchForm, *, tokens: int) -> None:
    """Run one large batch, so that kernels are compiled, and tuned on the size that they will work on.

    Tuning happens at the first call and is not repeated for other sizes; the self-test's is far too small. What fails
    here is left to the self-test, which tells why and falls back.
    """
    if model.device.type != "cuda":
        return
    started = time.monotonic()
    try:
        _peak_bytes(model, form if model.can_pack else "padded", min(tokens, _WARM_TOKENS))
    except Exception as error:  # noqa: BLE001 - see above
        log.get("rates").warning("the first batch failed", error=f"{type(error).__name__}: {error}")
    log.get("rates").info("kernels ready", seconds=round(time.monotonic() - started, 1))


def _peak_bytes(model: HiddenStateModel, form: BatchForm, tokens: int) -> int:
    length = min(512, model.max_positions or 512)
    lengths = [length] * max(1, tokens // length)
    (batch,) = cut_batches(lengths, form=form, max_batch_tokens=tokens)
    ids = [np.zeros(length, np.int32)] * len(lengths)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    model.forward(batch, ids)
    torch.cuda.synchronize(model.device)
    return torch.cuda.max_memory_allocated(model.device) - before


def seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one call, the mean of ``repeats`` after three that do not count."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - started) / repeats
    begin, end = timing_event(), timing_event()
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats
