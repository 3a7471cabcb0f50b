"""The cost of a pass follows from the architecture."""

import pytest
import transformers

from tests.worker import tiny
from worker.model.flops import FlopCount, count_flops


def test_a_dense_model_costs_two_per_weight_and_four_per_pair(load):
    model = load("llama", ("final",))
    weights = 4 * (32 * 32 * 2 + 2 * 32 * 16 + 3 * 32 * 48)
    pairs = 10 * 11 // 2
    assert model.flops([10]) == 2 * weights * 10 + 4 * 4 * 8 * 4 * pairs
    assert model.flops([10, 10]) == 2 * model.flops([10])


def test_only_loaded_blocks_count(load):
    assert load("llama", (0,)).flops([50]) * 4 == load("llama", ("final",)).flops([50])


def test_a_window_limits_the_pairs():
    count = FlopCount(per_token=0, per_pair=1, windows=(None, 12))
    assert count.of([20]) == 20 * 21 // 2 + 12 * 13 // 2 + 8 * 12


def test_experts_count_by_the_share_that_a_token_uses(load):
    model = load("qwen3_moe", ("final",))
    attention = 32 * 32 * 2 + 2 * 32 * 16
    weights = 4 * (attention + 4 * 32 + 2 * 3 * 32 * 16)
    assert model.flops([1]) == 2 * weights + 4 * 4 * 8 * 4


@pytest.mark.parametrize("name", sorted(tiny.CONFIGS | tiny.PADDED))
def test_every_architecture_has_a_cost(name, load):
    assert load(name, ("final",)).flops([10]) > 10 * 32 * 32


def test_recurrent_layers_cost_the_delta_rule_and_no_pairs(load):
    model = load("qwen3_5", (2,))
    assert model.flops([200]) == 2 * model.flops([100])
    convolution_and_state = 2 * 64 * 4 + 6 * 4 * 8 * 8
    assert model.flops([1]) > 3 * convolution_and_state


def test_a_model_without_attention_costs_no_pairs(load):
    model = load("mamba2", (2,))
    assert model.flops([20]) == 2 * model.flops([10])


def test_routed_experts_by_another_name_count_by_their_share():
    """In Gemma 4 a token uses ``top_k_experts``."""
    config = tiny.PADDED["gemma4"]()
    config.num_experts, config.top_k_experts, config.moe_intermediate_size = 4, 1, 16
    config.enable_moe_block = True
    one = count_flops(tuple(transformers.AutoModel.from_config(config).layers), config)
    config.top_k_experts = 2
    two = count_flops(tuple(transformers.AutoModel.from_config(config).layers), config)
    assert two.per_token - one.per_token == 4 * 2 * 3 * 32 * 16
