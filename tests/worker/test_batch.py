"""Batches hold every sample once, inside the token budget."""

import random

import pytest

from worker.model.batch import Batch, cut_batches


def mixed_lengths(count: int = 500) -> list[int]:
    rng = random.Random(7)
    return [min(4096, max(1, int(rng.lognormvariate(5.4, 0.9)))) for _ in range(count)]


@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("budget", [1, 64, 2048, 1_000_000])
def test_every_sample_exactly_once_and_budgets_hold(form, budget):
    lengths = mixed_lengths()
    batches = cut_batches(lengths, form=form, max_batch_tokens=budget)
    assert sorted(sample for batch in batches for sample in batch.samples) == list(range(500))
    for batch in batches:
        assert batch.lengths == tuple(lengths[sample] for sample in batch.samples)
        assert batch.samples == tuple(sorted(batch.samples))
        assert batch.computed_tokens <= budget or len(batch.samples) == 1


def test_packed_rows_keep_the_order_and_waste_nothing():
    batches = cut_batches([5, 4, 3, 9, 2], form="packed", max_batch_tokens=9)
    assert [batch.samples for batch in batches] == [(0, 1), (2,), (3,), (4,)]
    assert all(batch.padding_tokens == 0 for batch in batches)


def test_padded_rectangles_group_similar_lengths():
    batches = cut_batches([2, 9, 2, 9, 2], form="padded", max_batch_tokens=18)
    assert [batch.samples for batch in batches] == [(1, 3), (0, 2, 4)]
    assert sum(batch.padding_tokens for batch in batches) == 0


def test_a_sample_longer_than_the_budget_is_alone():
    for form in ("padded", "packed"):
        batches = cut_batches([3, 100, 3], form=form, max_batch_tokens=10)
        assert [batch for batch in batches if 1 in batch.samples] == [
            Batch(form=form, samples=(1,), lengths=(100,))
        ]


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_no_batch_reaches_over_a_limit(form):
    batches = cut_batches([5, 9, 4, 8, 20], form=form, max_batch_tokens=1000, limits=(8, 10))
    assert [batch.samples for batch in batches] == [(0, 2, 3), (1,), (4,)]


def test_packed_rows_are_filled_to_a_multiple():
    (batch,) = cut_batches([100, 29], form="packed", max_batch_tokens=1000, multiple=64)
    assert (batch.real_tokens, batch.filler_tokens, batch.computed_tokens) == (129, 63, 192)
    (batch,) = cut_batches([100, 28], form="packed", max_batch_tokens=1000, multiple=64)
    assert batch.filler_tokens == 0


def test_padding_of_a_sorted_length_mix_is_small():
    batches = cut_batches(mixed_lengths(16_384), form="padded", max_batch_tokens=32_768)
    computed = sum(batch.computed_tokens for batch in batches)
    assert computed / sum(batch.real_tokens for batch in batches) < 1.03


@pytest.mark.parametrize(("lengths", "budget"), [([3, 0], 10), ([3], 0)])
def test_senseless_arguments_are_refused(lengths, budget):
    with pytest.raises(ValueError, match="at least"):
        cut_batches(lengths, form="packed", max_batch_tokens=budget)


def test_no_samples_make_no_batches():
    assert cut_batches([], form="padded", max_batch_tokens=10) == []
