"""Loading: only what is needed, nothing missing; layers mean what they say."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from swathe.errors import ModelError
from tests.worker import tiny
from worker import check
from worker.model.backbone import load_backbone
from worker.model.hidden_states import load_model

NAMES = [*tiny.CONFIGS, *tiny.PADDED, "nested"]
CPU = torch.device("cpu")


def full_states(name, ids):
    """Block outputs of the full model, taken by plain hooks, and what transformers itself reports."""
    model = tiny.build_nested() if name == "nested" else tiny.build(name)
    blocks = next(
        child
        for path, child in model.named_modules()
        if isinstance(child, torch.nn.ModuleList)
        and len(child) == tiny.LAYERS
        and "vis" not in path
    )
    taken = {}
    for index, block in enumerate(blocks):
        block.register_forward_hook(
            lambda _m, _a, out, index=index: taken.__setitem__(
                index, out[0] if isinstance(out, tuple) else out
            )
        )
    with torch.inference_mode():
        output = model(
            input_ids=torch.from_numpy(ids.astype(np.int64))[None],
            use_cache=False,
            output_hidden_states=True,
        )
    return [taken[index][0] for index in range(tiny.LAYERS)], [h[0] for h in output.hidden_states]


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_the_output_of_its_block_in_the_full_model(name, load):
    ids = tiny.samples([31])[0]
    blocks, reported = full_states(name, ids)
    for layers, taken in (((0, 2), (0, 2)), ((1, "final"), (1, 3)), ((2,), (2,))):
        found_SKH = load(name, layers).reference(ids)
        for slot, block in enumerate(taken):
            assert tiny.relative_error(found_SKH[:, slot], blocks[block]) < 1e-4
            if block < tiny.LAYERS - 1 and name != "mamba2":  # whose list has no embedding
                assert tiny.relative_error(found_SKH[:, slot], reported[block + 1]) < 1e-4
                # Negative control: a capture that is off by one layer must not pass.
                assert tiny.relative_error(found_SKH[:, slot], reported[block]) > 1e-2


# NanoChat's norms have no weights to tell.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "nanochat"])
def test_final_is_before_the_final_norm_and_the_norm_is_told(name, load):
    ids = tiny.samples([31])[0]
    _, reported = full_states(name, ids)
    model = load(name, ("final",))
    final_SH = model.reference(ids)[:, 0]
    norm = model.final_norm()
    weight_H = norm.weight_H + 1 if norm.kind == "rms_1p" else norm.weight_H
    if norm.kind == "layernorm":
        normed_SH = torch.nn.functional.layer_norm(
            final_SH, weight_H.shape, weight_H, norm.bias_H, norm.eps
        )
    else:
        normed_SH = torch.nn.functional.rms_norm(final_SH, weight_H.shape, weight_H, norm.eps)
    assert tiny.relative_error(normed_SH, reported[-1]) < 1e-4
    assert tiny.relative_error(final_SH, reported[-1]) > 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2"])
def test_the_check_finds_the_same_states_in_what_transformers_reports(name, checkpoint, load):
    (ids,), layers = tiny.samples([31]), (0, 2, "final")
    full = check._load(checkpoint(name), "float32", CPU, trust=False)
    expected_SKH = check._forward(full, torch.from_numpy(ids).long(), layers)
    assert tiny.relative_error(load(name, layers).reference(ids), expected_SKH) < 1e-4


def test_only_the_blocks_up_to_the_deepest_layer_are_loaded(checkpoint, load):
    parts = load_backbone(checkpoint("nested"), depth=2, dtype="bfloat16", device=CPU)
    assert len(parts.blocks) == 2
    assert parts.num_layers == tiny.LAYERS
    names = [name for name, _ in parts.module.named_parameters()]
    assert not any("visual" in name or "lm_head" in name or "layers.2" in name for name in names)
    assert all(p.dtype == torch.bfloat16 for p in parts.module.parameters())
    norm = load("qwen3", (0,)).final_norm()
    stored = load_file(checkpoint("qwen3") / "model.safetensors")["model.norm.weight"]
    assert torch.equal(norm.weight_H, stored)


def test_missing_weights_are_refused_by_name(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    gone = "model.layers.1.mlp.up_proj.weight"
    del weights[gone]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, layers=[2], dtype="float32", device=CPU)
    # The block is not needed for layer 0.
    assert load_model(folder, layers=[0], dtype="float32", device=CPU).num_layers == tiny.LAYERS


def test_mismatched_weights_are_refused_by_name(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "broken")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name][:8].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"wrong shape for layers\.0\.self_attn\.k_proj\.weight"):
        load_model(folder, layers=[2], dtype="float32", device=CPU)


@pytest.mark.parametrize("extra", ["self_attn.q_proj.bias", "mlp.up_proj.weight_scale"])
def test_weights_that_the_model_does_not_use_are_refused_by_name(extra, checkpoint, tmp_path):
    """A bias that the config denies, the scale of a quantization that it does not mention."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "more")
    weights = load_file(folder / "model.safetensors")
    weights[f"model.layers.1.{extra}"] = torch.ones(32)
    weights["lm_head.weight_scale"] = torch.ones(1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"more than the model uses.*layers\.1\.{extra}"):
        load_model(folder, layers=[2], dtype="float32", device=CPU)
    # The block is not needed for layer 0.
    load_model(folder, layers=[0], dtype="float32", device=CPU)


@pytest.mark.parametrize("method", ["modelopt", "awq", "compressed-tensors"])
def test_quantized_checkpoints_are_refused(method, checkpoint, tmp_path):
    """transformers takes the codes of a method that it does not know for weights."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "quantized")
    _set_quantization(folder, {"quant_method": method})
    with pytest.raises(ModelError, match=rf"quantized \({method}\).*dequantize it first"):
        load_model(folder, layers=[2], dtype="float32", device=CPU)


@pytest.mark.parametrize("name", ["llama", "nested"])
def test_float8_checkpoints_are_computed_with_the_weights_that_their_codes_mean(
    name, checkpoint, tmp_path
):
    """Of a multimodal checkpoint only the outer config says that the text model is quantized."""
    coded = shutil.copytree(checkpoint(name), tmp_path / "coded")
    plain = shutil.copytree(checkpoint(name), tmp_path / "plain")
    weights = load_file(coded / "model.safetensors")
    for key in [key for key in weights if key.endswith("_proj.weight")]:
        if weights[key].shape[0] % 16 or weights[key].shape[1] % 16:
            continue
        blocks = weights[key].unflatten(1, (-1, 16)).unflatten(0, (-1, 16))
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        meant = codes.float() * scales[:, None, :, None]
        weights[key], weights[f"{key}_scale_inv"] = codes.reshape(weights[key].shape), scales
        _replace(plain, key, meant.reshape(weights[key].shape))
    save_file(weights, coded / "model.safetensors", metadata={"format": "pt"})
    _set_quantization(coded, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    ids = tiny.samples([31])[0]
    found, wanted = (
        load_model(folder, layers=[1, 2], dtype="float32", device=CPU).reference(ids)
        for folder in (coded, plain)
    )
    assert tiny.relative_error(found, wanted) < 1e-6


def _set_quantization(folder, options):
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = options
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _replace(folder, key, weight):
    weights = load_file(folder / "model.safetensors") | {key: weight}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_text_models_are_found_in_multimodal_checkpoints_under_any_prefix(tmp_path):
    """Gemma 3 calls its text model's weights ``language_model.model.*`` or ``model.language_model.*``."""
    now, before = tmp_path / "now", tmp_path / "before"
    whole = tiny.build_nested_gemma3()
    whole.save_pretrained(now)
    shutil.copytree(now, before)
    weights = {
        key.replace("model.language_model.", "language_model.model."): weight
        for key, weight in load_file(now / "model.safetensors").items()
    }
    save_file(weights, before / "model.safetensors", metadata={"format": "pt"})
    ids = tiny.samples([31])[0]
    ids_BL = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.inference_mode():
        wanted = whole(input_ids=ids_BL, output_hidden_states=True).hidden_states
    for folder in (now, before):
        found_SKH = load_model(folder, layers=[0, 2], dtype="float32", device=CPU).reference(ids)
        checked_SKH = check._forward(
            check._load(folder, "float32", CPU, trust=False), ids_BL[0], [0, 2]
        )
        for slot, layer in enumerate((0, 2)):
            assert tiny.relative_error(found_SKH[:, slot], wanted[layer + 1][0]) < 1e-4
        assert tiny.relative_error(checked_SKH, found_SKH) < 1e-4


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no readable model config"):
        load_model(tmp_path, layers=[0], dtype="float32", device=CPU)


def test_a_truncated_weight_file_is_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "broken")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="does not load"):
        load_model(folder, layers=[2], dtype="float32", device=CPU)


def test_layers_that_do_not_exist_are_refused(load):
    with pytest.raises(ModelError, match="layer 9 does not exist"):
        load("llama", (9,))
    with pytest.raises(ModelError, match="same tensor"):
        load("llama", (3, "final"))


def test_random_weights_have_the_shape_of_a_config_and_repeat(tmp_path):
    config = tiny.CONFIGS["qwen3_5"]()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()), encoding="utf-8")
    ids = tiny.samples([17])[0]
    state_before = torch.random.get_rng_state()
    first, second = (
        load_model(f"random:{path}", layers=[1, "final"], dtype="float32", device=CPU).reference(
            ids
        )
        for _ in range(2)
    )
    assert first.shape == (17, 2, 32)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert first.norm(dim=-1).min() > 0
    assert torch.equal(state_before, torch.random.get_rng_state())
    assert json.loads(path.read_text(encoding="utf-8"))["num_hidden_layers"] == tiny.LAYERS


def test_learned_positions_limit_a_sample(load):
    assert load("gpt2").max_positions == 512
    assert load("llama").max_positions is None
    assert load("llama").vocab_rows == tiny.VOCAB
