"""A range comes out whole, in planned order and equal to single runs, whatever goes wrong with single samples."""

import threading

import numpy as np
import pytest
import torch
import transformers

from swathe.spec import RangeId
from swathe.tokens import RangeTokens
from tests.worker import tiny
from worker.engine.engine import Engine
from worker.engine.selftest import self_test
from worker.model.batch import Batch
from worker.model.hidden_states import load_model

LENGTHS = [37, 5, 64, 1, 29, 70, 12, 12, 90, 3]


def range_of(samples, range_id=7):
    lengths = [len(sample) for sample in samples]
    ids = np.concatenate([*samples, np.zeros(0)]).astype(np.int32)
    return RangeTokens(
        range_id=RangeId(range_id),
        rows=np.arange(100, 100 + len(samples)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        input_ids=ids,
        loss_mask=(np.arange(len(ids)) % 2).astype(np.uint8),
    )


def tensor(states):
    view = states.hidden_states
    raw = torch.frombuffer(bytearray(view.data), dtype=getattr(torch, view.dtype))
    return raw.view(view.shape)


def worst(model, samples, states):
    """Largest error of the stored states against each sample's single run."""
    found = torch.split(tensor(states), [len(sample) for sample in samples])
    assert len(found) == len(samples)
    return max(
        tiny.relative_error(part, model.reference(sample))
        for part, sample in zip(found, samples, strict=True)
    )


@pytest.mark.parametrize(
    ("kind", "form"), [(transformers.Phi3Config, "padded"), (transformers.LlamaConfig, "packed")]
)
def test_long_samples_do_not_turn_short_ones_by_their_frequencies(kind, form, tmp_path):
    """LongRoPE chooses its factors by the longest sample of a batch."""
    tiny.build_like(tiny.longrope(kind)).save_pretrained(tmp_path)
    model = load_model(tmp_path, layers=(0, 2), dtype="float32", device=torch.device("cpu"))
    samples = tiny.samples([37, 5, 64, 32, 33, 1])
    assert model.length_limits == (32,)
    states = Engine(model, form=form).compute(range_of(samples))
    assert worst(model, samples, states) < 1e-4
    assert self_test(model, form, (5, 70, 1, 33)).passed


def test_samples_beyond_what_dynamic_ntk_is_made_for_are_set_aside(tmp_path):
    """It would turn the samples that follow by the frequencies of the longest so far."""
    config = tiny.CONFIGS["llama"]()
    config.max_position_embeddings = 40
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    tiny.build_like(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, layers=(0, 2), dtype="float32", device=torch.device("cpu"))
    samples = tiny.samples([37, 64, 40, 5])
    states = Engine(model, form="packed").compute(range_of(samples))
    assert [one.row for one in states.quarantined] == [101]
    assert worst(model, [samples[0], *samples[2:]], states) < 1e-4


class Sabotaged:
    """A model whose passes are tampered with."""

    def __init__(self, model, *, forward=None, reference=None):
        self._model = model
        self._forward, self._reference = forward, reference
        self.batches = []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def forward(self, batch, ids):
        self.batches.append(batch)
        out_TKH = self._model.forward(batch, ids)
        return self._forward(batch, out_TKH) if self._forward else out_TKH

    def reference(self, ids):
        out_SKH = self._model.reference(ids)
        return self._reference(ids, out_SKH) if self._reference else out_SKH


@pytest.mark.parametrize("budget", [None, 64, 150, 1])
@pytest.mark.parametrize("form", ["padded", "packed"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_states_are_those_of_single_runs_in_planned_order(name, form, budget, load):
    model = load(name)
    samples = tiny.samples(LENGTHS)
    states = Engine(model, form=form, max_batch_tokens=budget).compute(range_of(samples))
    assert worst(model, samples, states) < 1e-4
    assert states.quarantined == ()
    assert states.samples.rows.tolist() == list(range(100, 110))
    assert states.hidden_states.shape == (sum(LENGTHS), 2, 32)
    assert (states.stats.samples, states.stats.tokens) == (10, sum(LENGTHS))
    assert states.stats.flops == model.flops(LENGTHS) > 0
    assert (states.stats.padding_tokens > 0) == (form == "padded" and budget != 1)
    assert set(states.stats.stage_seconds) == {"input_wait", "buffer_wait", "forward", "copy"}
    assert 0 < states.stats.forward_s < states.stats.wall_s


def test_swapped_samples_would_be_noticed(load):
    model = load("llama")
    samples = tiny.samples([30, 30])
    states = Engine(model, form="padded").compute(range_of(samples))
    assert worst(model, samples[::-1], states) > 1e-2


def test_bfloat16_is_handed_over_as_raw_bytes(load):
    model = load("llama", dtype="bfloat16")
    samples = tiny.samples([9])
    states = Engine(model, form="packed").compute(range_of(samples))
    assert states.hidden_states.dtype == "bfloat16"
    assert memoryview(states.hidden_states.data).nbytes == 9 * 2 * 32 * 2
    assert torch.equal(tensor(states), model.forward(model_batch(9), samples))


def model_batch(length):
    return Batch(form="packed", samples=(0,), lengths=(length,))


def test_a_plan_that_packs_is_padded_where_the_model_must_not_pack(load):
    model = load("qwen3_5", kernels="reference")
    samples = tiny.samples(LENGTHS)
    engine = Engine(model, form="packed")
    assert engine.form == "padded"
    assert worst(model, samples, engine.compute(range_of(samples))) < 1e-4


def spoil(value, length, slot=None):
    """Put a value into the states of the samples of one length."""

    def tamper(batch, out_TKH):
        first = 0
        out_TKH = out_TKH.clone()
        for taken in batch.lengths:
            if taken == length:
                out_TKH[first : first + taken, slice(None) if slot is None else slot] = value
            first += taken
        return out_TKH

    return tamper


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_unsound_states_are_computed_again_on_the_reference_path(form, value, load):
    model = load("llama")
    samples = tiny.samples(LENGTHS)
    engine = Engine(Sabotaged(model, forward=spoil(value, 64, slot=1)), form=form)
    states = engine.compute(range_of(samples))
    assert worst(model, samples, states) < 1e-4
    assert states.stats.recomputed == 1
    assert states.quarantined == ()


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_a_sample_that_fails_twice_is_quarantined_and_its_neighbours_are_right(form, load):
    model = load("llama")
    samples = tiny.samples(LENGTHS)

    def reference(ids, out_SKH):
        return out_SKH * float("nan") if len(ids) == 64 else out_SKH

    broken = Sabotaged(model, forward=spoil(float("nan"), 64), reference=reference)
    states = Engine(broken, form=form).compute(range_of(samples))
    (bad,) = states.quarantined
    assert bad.row == 102
    assert bad.reason == "layer 0 is not finite at token 0, alone on the reference path too"
    kept = [sample for sample in samples if len(sample) != 64]
    assert worst(model, kept, states) < 1e-4
    assert states.samples.rows.tolist() == [100, 101, *range(103, 110)]
    assert states.samples.input_ids.tolist() == np.concatenate(kept).tolist()
    assert states.samples.offsets.tolist() == [0, *np.cumsum([len(s) for s in kept]).tolist()]
    assert len(states.samples.loss_mask) == states.samples.tokens == states.hidden_states.shape[0]


def test_one_bad_value_in_one_token_is_noticed(load):
    model = load("llama")
    samples = tiny.samples(LENGTHS)

    def one_value(_batch, out_TKH):
        out_TKH = out_TKH.clone()
        out_TKH[50, 1, 31] = float("nan")
        return out_TKH

    states = Engine(Sabotaged(model, forward=one_value), form="packed").compute(range_of(samples))
    assert states.stats.recomputed == 1
    assert worst(model, samples, states) < 1e-4


def out_of_memory_above(limit):
    def tamper(batch, out_TKH):
        if batch.computed_tokens > limit:
            raise torch.OutOfMemoryError
        return out_TKH

    return tamper


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_running_out_of_memory_halves_the_budget_and_learns_it(form, load):
    model = load("llama")
    samples = tiny.samples(LENGTHS)
    broken = Sabotaged(model, forward=out_of_memory_above(100))
    engine = Engine(broken, form=form)
    states = engine.compute(range_of(samples))
    assert worst(model, samples, states) < 1e-4
    assert states.stats.out_of_memory > 0
    assert 40 < engine.max_batch_tokens <= 100
    broken.batches.clear()
    again = engine.compute(range_of(samples))
    assert again.stats.out_of_memory == 0
    assert worst(model, samples, again) < 1e-4


def test_a_sample_that_does_not_fit_alone_is_quarantined(load):
    model = load("llama")
    samples = tiny.samples(LENGTHS)
    broken = Sabotaged(model, forward=out_of_memory_above(80))
    states = Engine(broken, form="packed").compute(range_of(samples))
    (bad,) = states.quarantined
    assert (bad.row, bad.reason) == (
        108,
        "90 tokens do not fit into the device's memory, even alone",
    )
    assert worst(model, [s for s in samples if len(s) != 90], states) < 1e-4
    assert sum(90 in batch.lengths and len(batch.lengths) == 1 for batch in broken.batches) == 2


def test_a_range_that_came_back_while_it_is_on_the_device_is_another(load):
    model = load("llama")
    samples = tiny.samples([12, 5])
    engine = Engine(model, form="packed")
    first, second = (engine.start(range_of(samples)) for _ in range(2))
    engine.abandon(second)
    assert engine.ring.free == 2
    assert worst(model, samples, engine.finish(first)) < 1e-4


def test_a_short_row_that_does_not_fit_is_not_cut_into_itself(load):
    """On a GPU rows are filled up, so half of what was computed may be more than all that is wanted."""
    samples = tiny.samples([5, 4])

    def crowded(batch, out_TKH):
        if len(batch.samples) > 1:
            raise torch.OutOfMemoryError
        return out_TKH

    model = load("llama")
    engine = Engine(Sabotaged(model, forward=crowded), form="packed")
    engine._row_multiple = 128
    states = engine.compute(range_of(samples))
    assert worst(model, samples, states) < 1e-4
    assert states.stats.out_of_memory == 1


def test_out_of_memory_that_passes_costs_nothing(load):
    """Fragmentation: the same sample alone fits after memory was freed."""
    model = load("llama")
    failures = iter([True])

    def once(_batch, out_TKH):
        if next(failures, False):
            raise torch.OutOfMemoryError
        return out_TKH

    samples = tiny.samples([40])
    states = Engine(Sabotaged(model, forward=once), form="packed").compute(range_of(samples))
    assert states.quarantined == ()
    assert worst(model, samples, states) < 1e-4


def test_impossible_samples_are_quarantined_with_their_reason(load):
    model = load("gpt2")
    samples = tiny.samples([5, 0, 6, 513, 7, 8])
    samples[2][3] = tiny.VOCAB
    samples[4][0] = -1
    states = Engine(model, form="padded").compute(range_of(samples))
    assert {bad.row: bad.reason for bad in states.quarantined} == {
        101: "no tokens",
        102: f"ids {samples[2].min()} to 128 leave the embedding's 128 rows",
        103: "513 tokens, the model has 512 positions",
        104: f"ids -1 to {samples[4].max()} leave the embedding's 128 rows",
    }
    assert worst(model, [samples[0], samples[5]], states) < 1e-4


def test_a_range_in_which_everything_is_quarantined_is_empty(load):
    states = Engine(load("llama"), form="packed").compute(range_of(tiny.samples([0, 0])))
    assert states.hidden_states.shape == (0, 2, 32)
    assert states.samples.count == 0
    assert len(states.quarantined) == 2
    states.release()


def test_the_next_range_is_computed_while_older_ones_are_written(load):
    model = load("llama")
    engine = Engine(model, form="packed", buffers=3)
    ranges = [tiny.samples(LENGTHS, seed=seed) for seed in range(3)]
    done = [engine.compute(range_of(samples)) for samples in ranges]
    for samples, states in zip(ranges, done, strict=True):
        assert worst(model, samples, states) < 1e-4
    threading.Timer(0.2, done[0].release).start()
    fourth = engine.compute(range_of(ranges[0]))
    assert fourth.stats.buffer_wait_s > 0.1
    assert worst(model, ranges[1], done[1]) < 1e-4
    assert worst(model, ranges[0], fourth) < 1e-4


def test_ranges_may_be_started_before_the_last_one_is_finished(load):
    model = load("qwen3_5")
    engine = Engine(model, form="packed", buffers=2)
    ranges = [tiny.samples(LENGTHS, seed=seed) for seed in range(2)]
    started = [engine.start(range_of(samples)) for samples in ranges]
    for samples, one in zip(ranges, started, strict=True):
        assert worst(model, samples, engine.finish(one)) < 1e-4


def test_a_failed_or_abandoned_range_gives_its_buffer_back(load):
    def crash(_batch, _out_TKH):
        msg = "device lost"
        raise RuntimeError(msg)

    engine = Engine(Sabotaged(load("llama"), forward=crash), form="packed", buffers=1)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.compute(range_of(tiny.samples(LENGTHS)))
    assert engine.ring.free == 1
    engine = Engine(load("llama"), form="packed", buffers=1)
    engine.abandon(engine.start(range_of(tiny.samples(LENGTHS))))
    assert engine.ring.free == 1
