"""The self-test passes right kernels, catches wrong ones, and falls back; canaries do the same on stored states."""

import numpy as np
import pytest
import torch

from swathe.errors import ModelError, WorkerError
from swathe.spec import RangeId
from swathe.tokens import RangeTokens
from tests.worker import tiny
from worker.engine.canary import canary_bounds, one_in, take_canary
from worker.engine.engine import Engine
from worker.engine.rates import host_copy_bytes, matmul_flops, tokens_that_fit
from worker.engine.selftest import prove, self_test, token_errors
from worker.model.backbone import load_backbone
from worker.model.hidden_states import HiddenStateModel, load_model

CPU = torch.device("cpu")
SHORT = (5, 70, 1, 37)
NAMES = [*tiny.CONFIGS, "nested"]


@pytest.fixture
def fused(checkpoint):
    def get(name, dtype="float32"):
        backbone = load_backbone(checkpoint(name), depth=tiny.LAYERS, dtype=dtype, device=CPU)
        return HiddenStateModel(backbone, layers=(0, 2, "final"), fuse=True)

    return get


def perturb(model, name, change):
    """Make the fast kernels of one class of modules wrong."""
    model._kernels._fast[:] = [
        (module, wrapped(forward, change) if name in type(module).__name__ else forward)
        for module, forward in model._kernels._fast
    ]


def wrapped(forward, change):
    return lambda *args, **kwargs: change(forward(*args, **kwargs))


def range_of(lengths):
    samples = tiny.samples(lengths)
    return RangeTokens(
        range_id=RangeId(3),
        rows=np.arange(len(lengths)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_ids=np.concatenate(samples),
        loss_mask=np.ones(sum(lengths), np.uint8),
    )


@pytest.mark.parametrize("name", NAMES)
def test_float32_one_block_at_a_time_is_the_float32_model(name, load):
    """A bf16 model computed in float32 is a float32 model with the bf16 weights."""
    ids = tiny.samples([40])[0]
    half = load(name, (0, "final"), dtype="bfloat16")
    weights = {key: value.clone() for key, value in half._module.state_dict().items()}
    wide = load(name, (0, "final"))
    wide._module.load_state_dict(weights)
    found = half.exact(ids)
    assert found.dtype == torch.float32
    rounding = tiny.relative_error(half.reference(ids), wide.reference(ids))
    # What is left is the rounding of the scaled or summed embeddings, which the stock path has too.
    assert tiny.relative_error(found, wide.reference(ids)) < 0.5 * rounding
    for key, value in half._module.state_dict().items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, weights[key])


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_right_kernels_pass_in_float32(name, form, fused):
    test = self_test(fused(name), form, SHORT)
    assert test.passed, test.reason
    assert [error.layer for error in test.layers] == [0, 2, "final"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5"])
def test_right_kernels_pass_in_bfloat16(name, fused):
    test = self_test(fused(name, "bfloat16"), "packed", SHORT)
    assert test.passed, test.reason
    assert all(error.stock_median > 1e-4 for error in test.layers)


@pytest.mark.parametrize("name", ["RMSNorm", "MLP", "GatedDeltaNet"])
def test_a_perturbed_kernel_is_caught_and_the_reference_used(name, fused):
    model = fused("qwen3_5", "bfloat16")
    perturb(model, name, lambda out: out * 1.05)
    assert not self_test(model, "packed", SHORT).passed
    test = prove(model, "packed", lengths=SHORT)
    assert test.form == "padded"
    assert model.kernels == {"attention": "sdpa", "delta_rule": "torch", "convolution": "torch"}


def test_a_kernel_that_makes_nan_or_raises_is_caught(fused):
    model = fused("llama")
    perturb(model, "MLP", lambda out: out * float("nan"))
    assert "not finite" in self_test(model, "packed", SHORT).reason

    def crash(_out):
        msg = "no kernel image is available"
        raise RuntimeError(msg)

    model = fused("llama")
    perturb(model, "MLP", crash)
    assert "no kernel image" in self_test(model, "padded", SHORT).reason
    assert prove(model, "packed", lengths=SHORT).form == "padded"


def test_packing_alone_is_given_up_where_only_packing_is_wrong(fused, monkeypatch):
    model = fused("llama")
    monkeypatch.setattr(
        "worker.model.kernels.packing._by_sample",
        lambda query, *_: query.transpose(1, 2).contiguous(),
    )
    test = prove(model, "packed", lengths=SHORT)
    assert test.form == "padded"
    assert not model.can_pack
    assert model.kernels["swiglu"] == "fused by torch"


def test_a_float32_pass_that_is_not_the_models_proves_nothing(fused, monkeypatch):
    """Against it every path is equally far off."""
    model = fused("llama", "bfloat16")
    exact = model.exact
    monkeypatch.setattr(model, "exact", lambda ids: exact(ids).flip(-1))
    assert "cannot be its own" in self_test(model, "padded", SHORT).reason


def test_models_that_cannot_be_batched_are_refused_and_the_device_is_not_blamed(tmp_path):
    config = tiny.CONFIGS["gemma3"]()
    config.use_bidirectional_attention = True
    tiny.build_like(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, layers=(0, 2), dtype="float32", device=CPU)
    with pytest.raises(ModelError, match="gemma3_text is not causal"):
        prove(model, "packed", lengths=SHORT)


def test_a_model_whose_states_cannot_be_taken_is_refused(fused, monkeypatch):
    model = fused("llama")
    monkeypatch.setattr(model._module.layers[3], "forward", lambda x, **_: x[None])
    model._kernels._fast.clear()
    with pytest.raises(ModelError, match="not hidden states"):
        prove(model, "padded", lengths=SHORT)


def test_a_device_without_any_right_path_is_refused(fused):
    model = fused("llama")
    perturb(model, "MLP", lambda out: out * float("nan"))
    with pytest.raises(WorkerError, match="not finite"):
        prove(model, "packed", lengths=SHORT, failure="refuse")


def test_canaries_pass_on_right_states_and_fail_on_wrong_ones(fused):
    model = fused("qwen3_5", "bfloat16")
    bounds = canary_bounds(prove(model, "packed", lengths=SHORT))
    engine = Engine(model, form="packed")
    good = take_canary(model, engine.compute(range_of([30, 64, 12]), keep=1), bounds)
    assert good.passed
    assert (good.range_id, good.row, good.tokens) == (3, 1, 64)
    perturb(model, "MLP", lambda out: out * 1.5)
    assert not take_canary(model, engine.compute(range_of([30, 64, 12]), keep=1), bounds).passed


def test_states_that_are_zero_in_both_are_no_error():
    wanted_SKH = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]], [[0.0, 0.0]]])
    found_SKH = torch.tensor([[[0.0, 0.0]], [[3.0, 4.5]], [[1e-3, 0.0]]])
    errors_SK = token_errors(found_SKH, wanted_SKH)
    assert errors_SK[:2, 0].tolist() == pytest.approx([0.0, 0.1])
    assert errors_SK[2, 0] > 1e9


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_canaries_pass_where_the_self_tests_batch_was_too_small_to_differ(name, load):
    model = load(name, (0, 2, "final"), dtype="bfloat16")
    bounds = canary_bounds(prove(model, "padded", lengths=(5, 70, 1, 33)))
    engine = Engine(model, form="padded")
    lengths = np.random.default_rng(0).integers(5, 120, 40).tolist()
    for sample in (0, 16, 32):
        canary = take_canary(model, engine.compute(range_of(lengths), keep=sample), bounds)
        assert canary.passed, canary


def test_canaries_are_spread_and_repeatable():
    chosen = [range_id for range_id in range(20_000) if one_in(200)(range_id, 90) is not None]
    assert 60 < len(chosen) < 140
    assert chosen == [r for r in range(20_000) if one_in(200)(r, 90) is not None]
    assert one_in(1)(5, 0) is None
    assert 0 <= one_in(1)(5, 90) < 90


def test_rates_are_measured(load):
    assert matmul_flops(CPU, torch.float32, repeats=1) > 1e8
    assert host_copy_bytes(CPU, size_bytes=1 << 20) > 1e6
    assert tokens_that_fit(load("llama"), "packed", wanted=100) is None
