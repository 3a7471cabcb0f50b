"""A model source becomes a folder and an identity; another identity is refused."""

import json
import shutil

import numpy as np
import pytest

from swathe import codec
from swathe.checkpoint import resolve, resolve_like
from swathe.errors import ModelError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}


def write_weights(path, rows=32, hidden=8, name="model.embed_tokens.weight"):
    table = np.zeros((rows, hidden), np.float32)
    path.write_bytes(b"".join(codec.encode({name: codec.view(table)}, {"format": "pt"})))


def write_checkpoint(folder, config=None, **weights):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    write_weights(folder / "model.safetensors", **weights)
    return folder


def test_a_folder_is_read_with_the_rows_that_its_embedding_really_has(tmp_path):
    spec = resolve(str(write_checkpoint(tmp_path / "m"))).spec
    assert (spec.hidden_size, spec.num_layers, spec.vocab_rows) == (8, 3, 32)
    assert (spec.model_type, spec.max_positions, spec.checkpoint_dtype) == ("llama", 64, "bfloat16")
    assert spec.source == str(tmp_path / "m")
    assert [file.name for file in spec.weights] == ["model.safetensors"]
    assert spec.revision is None
    assert not spec.random_weights


def test_the_text_model_of_a_multimodal_checkpoint_is_described(tmp_path):
    config = {"model_type": "qwen3_5", "text_config": CONFIG | {"model_type": "qwen3_5_text"}}
    folder = write_checkpoint(
        tmp_path / "m", config, name="model.language_model.embed_tokens.weight", rows=40
    )
    spec = resolve(str(folder)).spec
    assert (spec.model_type, spec.hidden_size, spec.vocab_rows) == ("qwen3_5_text", 8, 40)


def test_sizes_that_a_config_leaves_to_its_class_are_found(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 8, "num_hidden_layers": 2}
    folder = write_checkpoint(
        tmp_path / "m", {"model_type": "gemma3", "text_config": text}, name="other.weight"
    )
    assert resolve(str(folder)).spec.vocab_rows == 262_208


def test_quantized_weights_are_refused_where_their_codes_might_pass_for_weights(tmp_path):
    for method in ("modelopt", "awq"):
        config = CONFIG | {"quantization_config": {"quant_method": method}}
        with pytest.raises(ModelError, match=rf"quantized \({method}\)"):
            resolve(str(write_checkpoint(tmp_path / method, config)))
    text = CONFIG | {"quantization_config": {"quant_method": "compressed-tensors"}}
    inner = write_checkpoint(tmp_path / "inner", {"model_type": "gemma3", "text_config": text})
    with pytest.raises(ModelError, match=r"quantized \(compressed-tensors\)"):
        resolve(str(inner))
    beside = write_checkpoint(tmp_path / "beside")
    (beside / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"quantized \(modelopt\)"):
        resolve(str(beside))
    config = CONFIG | {"quantization_config": {"quant_method": "fp8"}}
    resolve(str(write_checkpoint(tmp_path / "fp8", config)))


def test_gpt2_names_are_understood(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "vocab_size": 9, "n_positions": 16}
    spec = resolve(str(write_checkpoint(tmp_path / "m", config, name="wte.weight", rows=9))).spec
    assert (spec.hidden_size, spec.num_layers, spec.max_positions) == (8, 2, 16)
    assert spec.checkpoint_dtype == "float32"


def test_a_random_model_has_an_identity_of_its_config_alone(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    found = resolve(f"random:{path}")
    assert found.spec.random_weights
    assert found.spec.weights == ()
    assert found.spec.vocab_rows == 30
    assert resolve_like(found.spec).config_path == path


def test_a_hub_id_is_found_below_the_model_roots(tmp_path):
    write_checkpoint(tmp_path / "roots" / "org" / "name")
    found = resolve("org/name", model_roots=[tmp_path / "roots"])
    assert found.folder == tmp_path / "roots" / "org" / "name"
    assert found.spec.source == "org/name"


def test_the_planned_model_is_found_in_another_folder_of_this_node(tmp_path):
    spec = resolve(str(write_checkpoint(tmp_path / "there" / "m"))).spec
    shutil.move(tmp_path / "there" / "m", tmp_path / "here" / "m")
    found = resolve_like(spec, model_roots=[tmp_path / "here"])
    assert found.folder == tmp_path / "here" / "m"
    assert found.spec == spec


def test_a_config_that_was_only_saved_again_keeps_the_identity(tmp_path):
    spec = resolve(str(write_checkpoint(tmp_path / "m"))).spec
    write_checkpoint(tmp_path / "m", {"transformers_version": "9", **CONFIG})
    assert resolve(str(tmp_path / "m")).spec.identity == spec.identity


@pytest.mark.parametrize(
    ("config", "rows", "says"),
    [
        (CONFIG, 33, "another model.safetensors"),
        (CONFIG | {"num_hidden_layers": 4}, 32, "another config.json"),
    ],
)
def test_another_identity_is_refused_and_the_difference_named(tmp_path, config, rows, says):
    spec = resolve(str(write_checkpoint(tmp_path / "m"))).spec
    write_checkpoint(tmp_path / "m", config, rows=rows)
    with pytest.raises(ModelError, match=says):
        resolve_like(spec)


def test_a_model_that_is_not_on_the_node_says_where_to_put_it(tmp_path):
    spec = resolve(str(write_checkpoint(tmp_path / "m"))).spec
    shutil.rmtree(tmp_path / "m")
    with pytest.raises(ModelError, match="SWATHE_MODEL_ROOTS"):
        resolve_like(spec)


def test_an_unknown_source_is_one_clear_line(tmp_path):
    with pytest.raises(ModelError, match="neither a folder here nor a hub id") as caught:
        resolve(str(tmp_path / "nothing"))
    assert "\n" not in str(caught.value)


def test_missing_and_cut_weight_files_are_named(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="its header says"):
        resolve(str(folder))
    path.write_bytes(b"cut")
    with pytest.raises(ModelError, match="no readable safetensors header"):
        resolve(str(folder))
    index = {"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="2 of 2 weight files"):
        resolve(str(folder))


def test_a_config_that_is_no_language_model_is_refused(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text("[1]")
    with pytest.raises(ModelError, match="no JSON object"):
        resolve(f"random:{path}")
    path.write_text("{")
    with pytest.raises(ModelError, match="unreadable"):
        resolve(f"random:{path}")
