"""Ranges computed sample by sample: who is quarantined, who is stored, and when the device is at fault."""

import time

import numpy as np
import pytest
import torch

from swathe.errors import ModelError, WorkerError
from swathe.tokens import RangeTokens
from tests.worker import tiny
from worker.engine.engine import Engine
from worker.extraction.vouching import vouched
from worker.model.device_errors import breaks_device, device_errors

BAD = 77


def range_of(samples):
    offsets = np.cumsum([0, *map(len, samples)]).astype(np.int64)
    ids = np.concatenate(samples).astype(np.int32)
    return RangeTokens(
        range_id=3,
        rows=np.arange(10, 10 + len(samples)),
        offsets=offsets,
        input_ids=ids,
        loss_mask=np.ones(len(ids), np.uint8),
    )


@pytest.fixture
def model(load):
    return load("llama", layers=[0, 3], dtype="float32", device=torch.device("cpu"))


@pytest.fixture
def samples():
    made = tiny.samples([5, 9, 7, 12])
    for sample in made:
        sample[sample == BAD] = 1
    made[2][3] = BAD
    return made


def poison(model, error):
    real = model.reference

    def reference(ids):
        if BAD in ids:
            raise error
        return real(ids)

    model.reference = reference


def test_the_guilty_sample_is_quarantined_and_the_rest_is_as_ever(model, samples):
    calm = Engine(model, form="padded").compute(range_of([samples[i] for i in (0, 1, 3)]))
    poison(model, ValueError("bad sample"))
    begun, moved = [], []
    engine = Engine(model, form="padded", on_progress=lambda: moved.append(1))
    states = engine.alone(range_of(samples), begun.append)
    assert begun == [0, 1, 2, 3]
    assert len(moved) >= 4
    assert states.samples.rows.tolist() == [10, 11, 13]
    assert [(each.row, each.reason) for each in states.quarantined] == [
        (12, "ValueError: bad sample, alone on the reference path")
    ]
    found, wanted = (
        torch.frombuffer(each.hidden_states.data, dtype=torch.float32) for each in (states, calm)
    )
    assert (found - wanted).abs().max() < 1e-4
    states.release()
    calm.release()
    assert engine.ring.free == 3


def test_a_range_of_guilty_samples_alone_has_no_states(model, samples):
    poison(model, ValueError("bad sample"))
    states = Engine(model, form="padded").alone(range_of([samples[2]]))
    assert (states.samples.count, len(states.quarantined)) == (0, 1)


def test_a_device_that_fails_on_a_harmless_token_accuses_no_sample(model, samples):
    def reference(_ids):
        raise ValueError("everything fails")

    model.reference = reference
    engine = Engine(model, form="padded")
    with pytest.raises(WorkerError, match="harmless"):
        engine.alone(range_of(samples))
    assert engine.ring.free == 3


@pytest.mark.parametrize("method", ["alone", "compute"])
def test_an_error_that_breaks_the_device_accuses_no_sample(model, samples, method):
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    poison(model, error)
    real = model.forward

    def forward(batch, ids):
        if any(BAD in each for each in ids):
            raise error
        return real(batch, ids)

    model.forward = forward
    engine = Engine(model, form="padded")
    with pytest.raises(WorkerError, match="illegal memory access"), device_errors():
        getattr(engine, method)(range_of(samples))
    assert engine.ring.free == 3


@pytest.mark.parametrize(
    ("error", "sticky"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True),
        (RuntimeError("CUDA error: unspecified launch failure\nCompile with..."), True),
        (RuntimeError("cuBLAS: CUBLAS_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("NVRM: Xid 79, GPU has fallen off the bus"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("shape '[3, 4]' is invalid for input of size 5"), False),
        (ValueError("CUDA error: written by a user"), False),
    ],
)
def test_which_errors_break_a_device(error, sticky):
    assert breaks_device(error) is sticky
    wrapped = ModelError("does not load")
    wrapped.__cause__ = error
    assert breaks_device(wrapped) is sticky
    expected = WorkerError if sticky else type(error)
    with pytest.raises(expected), device_errors():
        raise error


def test_a_load_is_vouched_for_while_it_lasts_and_no_longer():
    moved = []
    with vouched(lambda: moved.append(time.monotonic())):
        time.sleep(2.5)
    during = len(moved)
    assert during >= 2
    time.sleep(1.5)
    assert len(moved) <= during + 1
