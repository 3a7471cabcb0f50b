"""Packed rows give every sample the states of its single run, in fp32 to 1e-4; without boundaries they do not."""

import pytest
import torch

from swathe.architectures import PACKS
from swathe.errors import ModelError
from tests.worker import tiny
from worker.model.batch import cut_batches
from worker.model.kernels import packing
from worker.model.kernels.packing import Boundaries

LENGTHS = [37, 5, 64, 1, 29, 70]
NAMES = [*tiny.CONFIGS, "nested"]


def pack(samples, multiple=1):
    lengths = [len(sample) for sample in samples]
    (batch,) = cut_batches(lengths, form="packed", max_batch_tokens=100_000, multiple=multiple)
    return batch


def errors(model, samples, found_TKH):
    parts = torch.split(found_TKH, [len(sample) for sample in samples])
    return [
        tiny.relative_error(part, model.reference(sample))
        for part, sample in zip(parts, samples, strict=True)
    ]


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("name", NAMES)
def test_packed_equals_one_by_one(name, multiple, load):
    model = load(name, (0, 2, "final"))
    samples = tiny.samples(LENGTHS)
    found_TKH = model.forward(pack(samples, multiple), samples)
    assert found_TKH.shape == (sum(LENGTHS), 3, 32)
    assert max(errors(model, samples, found_TKH)) < 1e-4


def leaky(wrap):
    """A kernel that asks for the boundaries, as it must, and then ignores them."""

    def make(pure):
        kept = wrap(pure)

        def run(*args, **kwargs):
            boundaries = packing.current()
            if boundaries is None:
                return kept(*args, **kwargs)
            before = boundaries.offsets
            boundaries.offsets = (0, before[-1])
            try:
                return kept(*args, **kwargs)
            finally:
                boundaries.offsets = before

        return run

    return make


@pytest.mark.parametrize("name", NAMES)
def test_attention_without_boundaries_is_noticed(name, load, monkeypatch):
    model = load(name, (0, "final"))
    samples = tiny.samples(LENGTHS)
    monkeypatch.setattr(packing, "_by_sample", leaky(lambda pure: pure)(packing._by_sample))
    found_TKH = model.forward(pack(samples), samples)
    found = errors(model, samples, found_TKH)
    assert found[0] < 1e-4
    assert min(found[1:]) > 1e-2


@pytest.mark.parametrize("kind", ["delta_rule_by_sample", "convolution_by_sample"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "qwen3_5_moe", "nested"])
def test_recurrence_or_convolution_without_boundaries_is_noticed(name, kind, load, monkeypatch):
    monkeypatch.setattr(packing, kind, leaky(getattr(packing, kind)))
    model = load(name, (0, "final"))
    samples = tiny.samples(LENGTHS)
    found = errors(model, samples, model.forward(pack(samples), samples))
    assert found[0] < 1e-4
    assert min(found[1:]) > 1e-2


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_swapped_samples_are_noticed(name, load):
    model = load(name)
    samples = tiny.samples([40, 40])
    found_TKH = model.forward(pack(samples), samples)
    assert min(errors(model, samples[::-1], found_TKH)) > 1e-2


def test_every_architecture_that_packs_is_proven_here():
    assert {config().model_type for config in tiny.CONFIGS.values()} == PACKS


def test_a_layer_that_never_asks_for_boundaries_is_an_error():
    boundaries = Boundaries(offsets=(0, 3, 5), cu_seqlens=torch.tensor([0, 3, 5]))
    with (
        pytest.raises(ModelError, match="0 of 4 layers"),
        packing.packed_row(boundaries, mixers=4),
    ):
        pass
    assert packing.current() is None


def test_attention_of_an_unknown_kind_is_refused():
    query = torch.zeros(1, 2, 5, 8)
    boundaries = Boundaries(offsets=(0, 5), cu_seqlens=torch.tensor([0, 5]))
    for options in ({"softcap": 30.0}, {"position_bias": query}):
        with (
            pytest.raises(ModelError, match=next(iter(options))),
            packing.packed_row(boundaries, mixers=1),
        ):
            packing.packed_attention(torch.nn.Identity(), query, query, query, None, **options)
    with pytest.raises(ModelError, match="missing boundaries"):
        packing.packed_attention(torch.nn.Identity(), query, query, query, None)


def test_a_kernel_that_cannot_scale_is_used_for_the_usual_scale_only(monkeypatch):
    """``varlen_attn`` took no scale before torch 2.11."""
    monkeypatch.setattr(packing, "attention_kernel", lambda *_: "torch varlen_attn")
    query = torch.zeros(1, 2, 5, 64)
    kinds = [packing._Kind(scaling=x, window=None, sinks_N=None) for x in (None, 0.125, 0.3)]
    for known, fits in ((set(), [True, True, False]), ({"scale"}, [True] * 3)):
        monkeypatch.setattr(packing, "_varlen_parameters", lambda known=known: known)
        assert [packing._varlen_fits(query, query, kind) for kind in kinds] == fits


def test_the_reference_kernels_do_not_pack(load):
    model = load("llama", kernels="reference")
    samples = tiny.samples([4, 5])
    assert not model.can_pack
    with pytest.raises(ModelError, match="does not pack"):
        model.forward(pack(samples), samples)


def test_kernels_are_bound_to_this_model_only(load):
    """A second model of the same architecture, and transformers itself, stay as they were."""
    model = load("qwen3_5")
    samples = tiny.samples([40, 40])
    other = tiny.build("qwen3_5")
    ids_BL = torch.from_numpy(samples[0]).long()[None]
    with torch.inference_mode():
        before = other(input_ids=ids_BL, use_cache=False).logits
        model.forward(pack(samples), samples)
        after = other(input_ids=ids_BL, use_cache=False).logits
    assert torch.equal(before, after)
    assert model.config._attn_implementation == "sdpa"
    assert other.config._attn_implementation == "sdpa"
    assert model.kernels == {
        "attention": "sdpa",
        "packed_attention": "torch sdpa per sample",
        "delta_rule": "torch",
        "convolution": "torch",
    }
