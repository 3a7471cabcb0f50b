"""Padded batches give every sample the states of its single run, in fp32 to 1e-4, on every architecture."""

import numpy as np
import pytest
import torch

from tests.worker import tiny
from worker.model.batch import Batch, cut_batches

LENGTHS = [37, 5, 64, 1, 29, 70]
"""Longer than the sliding window, shorter than the convolution, longer than a chunk of the delta rule."""
NAMES = [*tiny.CONFIGS, *tiny.PADDED, "nested"]


def batch_of(samples) -> Batch:
    (batch,) = cut_batches([len(s) for s in samples], form="padded", max_batch_tokens=100_000)
    return batch


def errors(model, samples, found_TKH):
    lengths = [len(sample) for sample in samples]
    parts = torch.split(found_TKH, lengths)
    return [
        tiny.relative_error(part, model.reference(sample))
        for part, sample in zip(parts, samples, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_batched_equals_one_by_one(name, load):
    model = load(name, (0, 2, "final"))
    samples = tiny.samples(LENGTHS)
    found_TKH = model.forward(batch_of(samples), samples)
    assert found_TKH.shape == (sum(LENGTHS), 3, 32)
    assert max(errors(model, samples, found_TKH)) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_comparison_notices_swapped_samples_layers_and_neighbours(name, load):
    model = load(name, (0, 2))
    samples = tiny.samples([40, 40])
    found_TKH = model.forward(batch_of(samples), samples)
    assert max(errors(model, samples, found_TKH)) < 1e-4
    assert min(errors(model, samples[::-1], found_TKH)) > 1e-2
    assert min(errors(model, samples, found_TKH.flip(1))) > 1e-2
    # Without a boundary between them the second sample sees the first.
    joined_TKH = model.reference(np.concatenate(samples))
    assert errors(model, samples, joined_TKH)[1] > 1e-2


def test_a_batch_of_one_row_needs_no_padding(load):
    model = load("qwen3_5")
    (sample,) = tiny.samples([37])
    found_TKH = model.forward(batch_of([sample]), [sample])
    assert errors(model, [sample], found_TKH)[0] < 1e-6


def test_ids_that_are_not_the_batchs_are_refused(load):
    samples = tiny.samples([5, 6])
    with pytest.raises(ValueError, match="not the batch's"):
        load("llama").forward(batch_of(samples), samples[::-1])


def test_ids_equal_to_the_filler_are_real_tokens(load):
    """Rows are filled with id 0; a text that holds id 0 must not be treated as padding."""
    model = load("gemma3")
    samples = tiny.samples([30, 44])
    samples[0][[0, 7, 29]] = 0
    found_TKH = model.forward(batch_of(samples), samples)
    assert max(errors(model, samples, found_TKH)) < 1e-4


def test_states_of_deeper_layers_are_not_kept(load):
    model = load("llama", (0, 1))
    samples = tiny.samples([50] * 4)
    found_TKH = model.forward(batch_of(samples), samples)
    assert found_TKH.untyped_storage().nbytes() == 200 * 2 * 32 * 4
