"""Hooks take block outputs, whole and only the wanted ones, whatever a block returns."""

import pytest
import torch
from torch import nn

from swathe.errors import ModelError
from worker.model.capture import Capture, block_index, block_indices


class Block(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, hidden):
        hidden = hidden + 1
        return {"tensor": hidden, "tuple": (hidden,), "pair": (hidden, None)}.get(
            self.form, [hidden]
        )


def run(blocks, hidden):
    for block in blocks:
        hidden = block(hidden)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    return hidden


@pytest.mark.parametrize("form", ["tensor", "tuple", "pair"])
def test_tensor_and_tuple_outputs_give_all_rows(form):
    blocks = [Block(form) for _ in range(4)]
    hidden_BLH = torch.randn(2, 3, 5)
    out_TKH = torch.full((6, 2, 5), torch.nan)
    with Capture(blocks, [1, 3]).into(out_TKH):
        run(blocks, hidden_BLH)
    assert torch.equal(out_TKH[:, 0], (hidden_BLH + 1 + 1).reshape(6, 5))
    assert torch.equal(out_TKH[:, 1], (hidden_BLH + 1 + 1 + 1 + 1).reshape(6, 5))


def test_only_the_named_tokens_are_taken_in_their_order():
    blocks = [Block("tensor")]
    hidden_BLH = torch.randn(2, 3, 5)
    out_TKH = torch.empty(3, 1, 5)
    with Capture(blocks, [0]).into(out_TKH, torch.tensor([0, 1, 4])):
        run(blocks, hidden_BLH)
    assert torch.equal(out_TKH[:, 0], (hidden_BLH + 1).reshape(6, 5)[[0, 1, 4]])


def test_an_unknown_kind_of_output_is_refused_by_name():
    blocks = [Block("list")]
    with (
        pytest.raises(ModelError, match="list"),
        Capture(blocks, [0]).into(torch.empty(6, 1, 5)),
    ):
        run(blocks, torch.randn(2, 3, 5))


def test_a_block_that_did_not_run_is_an_error():
    blocks = [Block("tensor") for _ in range(3)]
    with (
        pytest.raises(ModelError, match=r"\[2\]"),
        Capture(blocks, [0, 2]).into(torch.empty(6, 2, 5)),
    ):
        run(blocks[:2], torch.randn(2, 3, 5))


def test_a_block_that_runs_twice_is_an_error():
    blocks = [Block("tensor") for _ in range(2)]
    with (
        pytest.raises(ModelError, match="block 0 ran twice"),
        Capture(blocks, [0, 1]).into(torch.empty(6, 2, 5)),
    ):
        run([*blocks, blocks[0]], torch.randn(2, 3, 5))


def test_nothing_is_kept_outside_of_a_capture_or_after_removal():
    blocks = [Block("tensor")]
    capture = Capture(blocks, [0])
    run(blocks, torch.randn(2, 3, 5))
    capture.remove()
    with pytest.raises(ModelError), capture.into(torch.empty(6, 1, 5)):
        run(blocks, torch.randn(2, 3, 5))


def test_layers_name_blocks():
    assert block_indices([1, "final"], 4) == (1, 3)
    with pytest.raises(ModelError, match="0 to 3"):
        block_index(4, 4)
    with pytest.raises(ModelError, match="same tensor"):
        block_indices([3, "final"], 4)
    with pytest.raises(ModelError, match="no layers"):
        block_indices([], 4)
