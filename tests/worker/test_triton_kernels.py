"""Our Triton kernels compute what their torch forms do, on a GPU or under Triton's interpreter (TRITON_INTERPRET=1)."""

import importlib
import os

import pytest
import torch

from worker.model.kernels import pointwise

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU or TRITON_INTERPRET=1"
)
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(found, wanted):
    tolerance = 1e-5 if wanted.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture
def kernels():
    return importlib.import_module("worker.model.kernels.triton_pointwise")


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(kernels, dtype):
    gate, up = (draw(1, 37, 100, dtype=dtype, seed=seed) for seed in (1, 2))
    close(kernels.swiglu(gate, up), pointwise.swiglu(gate, up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 48, 128])
def test_l2_norm(kernels, size, dtype):
    x = draw(1, 37, 3, size, dtype=dtype)
    close(kernels.l2_norm(x), pointwise.l2_norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gate_reads_its_gate_where_it_lies(kernels, dtype):
    both = draw(2, 19, 3, 2 * 24, dtype=dtype)
    x = draw(2, 19, 3, 24, dtype=dtype, seed=3)
    close(kernels.sigmoid_gate(x, both[..., 24:]), pointwise.sigmoid_gate(x, both[..., 24:]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("part", [8, 24])
def test_rotation_turns_the_first_part_in_place(kernels, part, rows, dtype):
    cos, sin = (draw(1, 19, part, dtype=dtype, seed=seed) for seed in (1, 2))
    fused = draw(rows, 19, 5, 24, dtype=dtype)
    found, wanted = fused.clone(), fused.clone()
    kernels.rotate_in_place(found[:, :, 1:4], cos, sin)
    pointwise.rotate_in_place(wanted[:, :, 1:4], cos, sin)
    close(found, wanted)
    assert torch.equal(found[:, :, 0], fused[:, :, 0])
