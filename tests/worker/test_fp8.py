"""Float8: the quantizer against a slow reference, the engine's ways to a stored range, and what a canary sees."""

import math

import numpy as np
import pytest
import torch

from swathe.errors import WorkerError
from swathe.names import SCALES_TENSOR, STATES_TENSOR
from swathe.reader.float8 import dequantize
from tests.worker import tiny
from tests.worker.test_engine import LENGTHS, Sabotaged, range_of, spoil
from worker.engine import quantize as quantize_module
from worker.engine.canary import canary_bounds, take_canary
from worker.engine.engine import Engine
from worker.engine.quantize import quantize, require_float8, scales_of
from worker.engine.selftest import prove
from worker.engine.soundness import magnitudes

FP8 = "float8_e4m3fn"
CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda:0"),
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
]


def codes_table():
    """Values of the codes 0 to 126: sign 1, exponent 4 (bias 7), mantissa 3; 127 is NaN."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        step = math.ldexp(1, max(exponent, 1) - 10)
        values.append((mantissa + (8 if exponent else 0)) * step)
    return np.array(values)


TABLE = codes_table()


def slow(states: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [T, K, H] and scales [T, K] in exact double precision, from the words of the format."""
    values = states.double().numpy()
    largest = 0.9375 * 2.0 ** math.frexp(torch.finfo(states.dtype).max)[1]
    scales = np.ones(values.shape[:2])
    for place in np.ndindex(*scales.shape):
        most = np.abs(values[place]).max()
        if most:
            scale = 2.0**-126
            while most / scale > 448:
                scale *= 2
            scales[place] = scale
    scaled = np.minimum(np.abs(values), largest) / scales[..., None]
    above = np.searchsorted(TABLE, scaled).clip(1, 126)  # TABLE[above - 1] < scaled <= TABLE[above]
    down, up = scaled - TABLE[above - 1], TABLE[above] - scaled
    up_wins = (up < down) | ((up == down) & (above % 2 == 0))
    codes = np.where(up_wins, above, above - 1).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << 7
    return codes, scales


def both(states: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    there = states.to(device)
    codes, scales = quantize(there, magnitudes(there))
    return codes.cpu(), scales.cpu()


def assert_exact(states: torch.Tensor, device: torch.device) -> None:
    codes, scales = both(states, device)
    slow_codes, slow_scales = slow(states)
    assert scales.double().numpy().tolist() == slow_scales.tolist()
    differing = np.argwhere(codes.view(torch.uint8).numpy() != slow_codes)
    assert not len(differing), (states[tuple(differing[0])], differing[0])


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All finite numbers of a 16-bit dtype, or a million random ones of float32."""
    if dtype == torch.float32:
        bits = np.random.default_rng(1).integers(-(2**31), 2**31, 1 << 20).astype(np.int32)
    else:
        bits = np.arange(1 << 16).astype(np.uint16).view(np.int16)
    numbers = torch.from_numpy(bits).view(dtype)
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("order", ["alike", "mixed", "each alone"])
def test_every_number_is_quantized_as_the_format_says(dtype, order, device):
    numbers = every_number(dtype)
    if order == "alike":  # rows of near magnitudes: all codes are met
        numbers = numbers[numbers.abs().sort().indices]
    elif order == "mixed":
        numbers = numbers[torch.from_numpy(np.random.default_rng(2).permutation(len(numbers)))]
    width = 1 if order == "each alone" else 31
    rows = numbers[: len(numbers) // (2 * width) * 2 * width].reshape(-1, 2, width)
    if order == "each alone":
        rows = rows[:: max(1, len(rows) // 20_000)]
    assert_exact(rows, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_edges(dtype, device):
    """448 * 2^n and its neighbours, powers of two, the largest and smallest numbers, zeros of both signs."""
    info = torch.finfo(dtype)
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    edges = [448.0 * 2.0**n for n in range(-20, 7)] + [2.0**n for n in range(-24, 16)]
    edge = torch.tensor([*edges, info.max, info.tiny, info.smallest_normal], dtype=dtype)
    bits = edge.view(integer)
    around = torch.cat([edge, (bits[:-3] + 1).view(dtype), (bits - 1).view(dtype)])
    smallest = torch.tensor([1, 2, 3], dtype=integer).view(dtype)
    most = torch.cat([around, smallest])
    parts = torch.tensor([1, -1, 0.5, 2**-10, -(2**-14), 2**-18, 0.0, -0.0])
    rows = (most.double()[:, None] * parts.double()).to(dtype)[:, None]
    assert_exact(rows, device)
    zeros = torch.tensor([0.0, -0.0], dtype=dtype).expand(3, 1, 2)
    codes, scales = both(zeros, device)
    assert scales.tolist() == [[1.0]] * 3
    assert codes.view(torch.uint8)[0, 0].tolist() == [0, 128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_comes_back_is_finite_and_as_near_as_promised(dtype):
    """At most 1/16 of each value, or 2^-10 of the scale; the largest row uses the upper half of float8."""
    numbers = every_number(dtype)
    numbers = numbers[numbers.abs().sort().indices]
    for width in (1, 7, 63):
        rows = numbers[: len(numbers) // width * width].reshape(-1, 1, width)
        codes, scales = quantize(rows, magnitudes(rows))
        again = dequantize(codes, scales, dtype)
        assert again.isfinite().all()
        error = (again.double() - rows.double()).abs()
        allowed = torch.maximum(rows.double().abs() / 16, scales.double()[..., None] / 1024)
        assert (error <= allowed).all()
        usual = scales > 2.0**-126
        assert (codes.float().abs().amax(2)[usual & (magnitudes(rows) > 0)] >= 224).all()


def test_a_large_range_is_quantized_in_parts_that_agree(monkeypatch):
    states = torch.randn(257, 3, 64).bfloat16()
    whole = quantize(states, magnitudes(states))
    monkeypatch.setattr(quantize_module, "_CHUNK_ITEMS", 1000)
    parts = quantize(states, magnitudes(states))
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    empty = states[:0]
    codes, scales = quantize(empty, magnitudes(empty))
    assert (codes.shape, scales.shape) == ((0, 3, 64), (0, 3))


def test_scales_of_what_is_not_finite_are_numbers():
    """Unsound rows are found before; they must not disturb the rows beside them."""
    scales = scales_of(torch.tensor([[math.nan, math.inf, -math.nan, 448.0, 0.0]]))
    assert scales.isfinite().all()
    assert scales[0, 3:].tolist() == [1, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_is_asked_once_whether_it_rounds_as_its_host(device, monkeypatch):
    require_float8.cache_clear()
    require_float8(device)
    real = quantize_module.quantize
    answers = iter(range(100))

    def wrong_there(states, found):
        codes, scales = real(states, found)
        if next(answers) % 2:
            codes.view(torch.uint8)[9, 0, 3] ^= 1
        return codes, scales

    monkeypatch.setattr(quantize_module, "quantize", wrong_there)
    require_float8(device)  # known
    require_float8.cache_clear()
    with pytest.raises(WorkerError, match="rounds"):
        require_float8(device)
    require_float8.cache_clear()


def stored(states) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a range's states, copied."""
    assert list(states.tensors) == [SCALES_TENSOR, STATES_TENSOR]
    tensors = []
    for name, dtype in ((STATES_TENSOR, torch.float8_e4m3fn), (SCALES_TENSOR, torch.float32)):
        view = states.tensors[name]
        raw = torch.frombuffer(bytearray(view.data), dtype=torch.uint8)
        tensors.append(raw.view(dtype).view(view.shape))
    return tensors[0], tensors[1]


def assert_quantized(states, samples, model) -> None:
    """The stored range is each sample's own states, quantized: both were computed in the same way."""
    codes, scales = stored(states)
    lengths = [len(sample) for sample in samples]
    assert states.samples.lengths == lengths
    assert states.size_bytes == sum(lengths) * 2 * (32 + 4)
    for sample, code, scale in zip(
        samples, codes.split(lengths), scales.split(lengths), strict=True
    ):
        wanted = model.reference(sample)
        error = (dequantize(code, scale, torch.float32) - wanted).abs()
        # Float32 differences between batch and single run may tip a tie.
        allowed = torch.maximum(wanted.abs() / 16, scale[..., None] / 1024)
        assert (error <= allowed * 1.001 + 1e-6).all()
        assert (error > 0).float().mean() > 0.5, "nothing was quantized"


@pytest.mark.parametrize("budget", [None, 64])
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_a_range_comes_out_quantized_in_planned_order(form, budget, load):
    model = load("qwen3_5")
    samples = tiny.samples(LENGTHS)
    engine = Engine(model, form=form, max_batch_tokens=budget)
    states = engine.compute(range_of(samples), stored=FP8)
    assert_quantized(states, samples, model)
    states.release()
    plain = engine.compute(range_of(samples), stored="float32")
    assert list(plain.tensors) == [STATES_TENSOR]
    assert plain.hidden_states.dtype == "float32"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_unsound_states_are_found_before_they_are_quantized(value, load):
    """Float8 has no infinity, and a saturated one would look sound."""
    model = load("llama")
    samples = tiny.samples(LENGTHS)
    broken = Sabotaged(model, forward=spoil(value, 64, slot=1))
    states = Engine(broken, form="packed").compute(range_of(samples), stored=FP8, keep=2)
    assert states.stats.recomputed == 1
    assert states.kept is None, "a canary on it would compare the reference path with itself"
    assert_quantized(states, samples, model)


def test_quarantined_samples_leave_no_gap_in_states_or_scales(load):
    model = load("llama")
    samples = tiny.samples(LENGTHS)
    nan = float("nan")

    def reference(ids, out_SKH):
        return out_SKH * nan if len(ids) == 64 else out_SKH

    broken = Sabotaged(model, forward=spoil(nan, 64), reference=reference)
    engine = Engine(broken, form="packed")
    kept = [sample for sample in samples if len(sample) != 64]
    together = engine.compute(range_of(samples), stored=FP8, keep=5)
    assert_quantized(together, kept, model)
    assert together.kept.sample == 4
    assert len(together.kept.states_SKH) == 70
    together.release()
    alone = engine.alone(range_of(samples), stored=FP8)
    assert_quantized(alone, kept, model)
    assert [bad.row for bad in alone.quarantined] == [102]
    nothing = engine.compute(range_of(tiny.samples([0, 0])), stored=FP8)
    assert [view.shape for view in nothing.tensors.values()] == [(0, 2), (0, 2, 32)]


def test_a_buffer_serves_float8_and_other_ranges_in_turn(load):
    model = load("llama")
    samples = tiny.samples(LENGTHS)
    engine = Engine(model, form="packed", buffers=1)
    for dtype in (FP8, None, FP8):
        states = engine.compute(range_of(samples), stored=dtype)
        if dtype == FP8:
            assert_quantized(states, samples, model)
        states.release()


@pytest.fixture
def canary(load):
    model = load("qwen3", dtype="bfloat16")
    bounds = canary_bounds(prove(model, "packed", lengths=(5, 70, 1, 37)))
    samples = tiny.samples(LENGTHS)

    def take(forward=None, change=lambda states: states):
        engine = Engine(Sabotaged(model, forward=forward), form="packed")
        states = engine.compute(range_of(samples), stored=FP8, keep=4)
        return take_canary(model, change(states), bounds)

    return take


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_every_sample_arrives_as_the_host_would_have_made_it(form, device, load):
    """On a GPU: quantized there, copied behind the forward pass, two ranges at once."""
    model = load("llama", dtype="bfloat16", device=device)
    samples = tiny.samples(LENGTHS)
    engine = Engine(model, form=form, buffers=2)
    bounds = dict.fromkeys(model.layers, 0.1)
    for keep in range(0, len(samples), 2):
        both = [engine.start(range_of(samples), stored=FP8, keep=keep + i) for i in range(2)]
        for started in both:
            states = engine.finish(started)
            taken = take_canary(model, states, bounds)
            assert taken.stored_as_computed
            assert taken.passed
            states.release()
    assert engine.ring.free == 2


def test_a_canary_of_a_float8_run_passes(canary):
    taken = canary()
    assert taken.passed
    assert (taken.row, taken.tokens) == (104, 29)


def test_a_canary_sees_through_the_rounding_of_float8(canary):
    """5 % of a value is less than what float8 may take off it, and is seen all the same."""
    taken = canary(forward=lambda _batch, out: out * 1.05)
    assert not taken.passed
    assert taken.stored_as_computed
    assert all(0.03 < error < 0.07 for error in taken.errors.values())


@pytest.mark.parametrize("name", [STATES_TENSOR, SCALES_TENSOR])
def test_a_canary_sees_one_bit_that_is_stored_otherwise(canary, name):
    def flip(states):
        view = states.tensors[name]
        width = len(view.data) // states.samples.tokens
        view.data[width * int(states.samples.offsets[4]) + 5] ^= 1
        return states

    taken = canary(change=flip)
    assert not taken.stored_as_computed
    assert not taken.passed
    assert taken.record("run", worker="w", device="d").stored_as_computed is False


def test_a_bit_of_another_sample_is_none_of_the_canarys_business(canary):
    def flip(states):
        states.tensors[STATES_TENSOR].data[0] ^= 1
        return states

    assert canary(change=flip).passed
