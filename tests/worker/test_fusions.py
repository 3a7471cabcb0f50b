"""Fused forwards, in their torch form, compute what the stock ones compute; each covers what it should."""

import inspect

import pytest
import torch

from tests.worker import tiny
from worker.model.backbone import load_backbone
from worker.model.batch import cut_batches
from worker.model.hidden_states import HiddenStateModel
from worker.model.kernels.fusions import _turns_halves

LENGTHS = [37, 5, 64, 1, 29, 70]
NAMES = [*tiny.CONFIGS, "nested"]
DENSE = {"norm", "swiglu", "rotary", "residual"}
COVERED = {
    "llama": DENSE,
    "mistral": DENSE,
    "qwen2": DENSE,
    "qwen3": DENSE,
    "qwen3_5": DENSE | {"gated_norm", "gated_attention"},
    "nested": DENSE | {"gated_norm", "gated_attention"},
    "qwen3_5_moe": {"norm", "gated_norm", "gated_attention", "swiglu", "rotary"},
    "qwen3_next": {"norm", "gated_norm", "gated_attention", "swiglu", "rotary"},
    "qwen3_moe": {"norm", "rotary"},
    "gpt_oss": {"norm", "rotary"},
    "gemma3": {"norm", "rotary"},
    "gpt_neox": {"rotary"},
    "gpt2": set(),
}


@pytest.fixture
def fused(checkpoint):
    def get(name, layers=(0, 2, "final")):
        depth = tiny.LAYERS if "final" in layers else max(layers) + 1
        backbone = load_backbone(
            checkpoint(name), depth=depth, dtype="float32", device=torch.device("cpu")
        )
        return HiddenStateModel(backbone, layers=layers, fuse=True)

    return get


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, form) for name in NAMES for form in ("padded", "packed")),
        *((name, "padded") for name in tiny.PADDED),
    ],
)
def test_fused_equals_stock(name, form, fused):
    model = fused(name)
    samples = tiny.samples(LENGTHS)
    (batch,) = cut_batches(LENGTHS, form=form, max_batch_tokens=10_000, multiple=64)
    found = torch.split(model.forward(batch, samples), LENGTHS)
    worst = max(
        tiny.relative_error(part, model.reference(sample))
        for part, sample in zip(found, samples, strict=True)
    )
    assert worst < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_each_architecture_gets_the_fusions_that_fit_it(name, fused):
    kinds = {"norm", "gated_norm", "gated_attention", "swiglu", "rotary", "residual"}
    assert set(fused(name).kernels) & kinds == COVERED[name]


@pytest.mark.parametrize("name", [n for n in NAMES if "rotary" in COVERED[n] and n != "gpt_oss"])
def test_the_usual_rotation_runs_in_place(name, fused):
    """Only gpt_oss, whose cosines are half as long, keeps its own function."""
    net = next(m for m in fused(name)._module.modules() if type(m).__name__.endswith("Attention"))
    forward = inspect.unwrap(type(net).forward)
    assert _turns_halves(inspect.unwrap(forward.__globals__["apply_rotary_pos_emb"]))


def test_the_reference_path_is_left_as_it_was(fused, load):
    ids = tiny.samples([50])[0]
    model = fused("qwen3_5")
    (batch,) = cut_batches([50], form="packed", max_batch_tokens=50)
    model.forward(batch, [ids])
    assert torch.equal(model.reference(ids), load("qwen3_5", (0, 2, "final")).reference(ids))


def test_a_perturbed_kernel_shows_in_the_states_and_not_in_the_reference(fused):
    model = fused("llama")
    ids = tiny.samples([50])[0]
    before = model.reference(ids)
    perturb(model, "LlamaMLP", 1.05)
    (batch,) = cut_batches([50], form="packed", max_batch_tokens=50)
    assert tiny.relative_error(model.forward(batch, [ids]), before) > 1e-2
    assert torch.equal(model.reference(ids), before)


def perturb(model, name, factor):
    """Make one fast kernel wrong by a factor."""
    model._kernels._fast[:] = [
        (
            module,
            (lambda *a, f=forward, **k: f(*a, **k) * factor)
            if type(module).__name__ == name
            else forward,
        )
        for module, forward in model._kernels._fast
    ]
