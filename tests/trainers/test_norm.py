"""The final norm from the run equals the model's own module, to the bit."""

from pathlib import Path

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from swathe import codec, names
from swathe.adapters.norm import FinalNorm, read_final_norm
from swathe.errors import ConfigError, FormatError, RunMismatchError
from swathe.records import read_run
from tests.support.runs import Recipe, make_run, view_of, write_norm

HIDDEN = 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "module"),
    [
        ("rms", LlamaRMSNorm),
        ("rms", Qwen3RMSNorm),
        ("rms_1p", GemmaRMSNorm),
        ("rms_1p", Gemma3RMSNorm),
        ("rms_1p", Qwen3_5RMSNorm),
        ("layernorm", torch.nn.LayerNorm),
    ],
)
def test_it_is_the_models_module(kind: str, module: type, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs = module(HIDDEN, eps=1e-5).to(dtype)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=0.3)
    ours = FinalNorm(
        kind=kind,
        eps=1e-5,
        weight_H=theirs.weight.detach(),
        bias_H=theirs.bias.detach() if kind == "layernorm" else None,
    )
    states = (torch.randn(7, HIDDEN) * 30).to(dtype)
    with torch.inference_mode():
        assert torch.equal(ours(states), theirs(states))


def test_another_kind_gives_other_states() -> None:
    """What a run that forgot the (1 + w) of Gemma would look like."""
    weight, states = torch.rand(HIDDEN), torch.randn(7, HIDDEN)
    plain, plus_one = (
        FinalNorm(kind=kind, eps=1e-5, weight_H=weight, bias_H=None)(states)
        for kind in ("rms", "rms_1p")
    )
    assert (plain - plus_one).norm() > 0.5 * plain.norm()


def test_it_is_read_from_the_run(tmp_path: Path) -> None:
    store = make_run(tmp_path)
    spec = read_run(store)
    norm = read_final_norm(store, spec)
    assert (norm.kind, norm.eps, norm.weight_H.dtype) == ("rms", 1e-6, torch.bfloat16)
    with pytest.raises(FormatError, match="16 weights"):
        norm(torch.ones(3, 8))
    write_norm(store, "layernorm", 16)
    assert read_final_norm(store, spec).bias_H is not None
    write_norm(store, "scale", 16)
    with pytest.raises(FormatError, match="scale"):
        read_final_norm(store, spec)
    views = {"weight": view_of(torch.ones(16))}
    metadata = {"kind": "rms", "eps": "1e-6", "fingerprint": "another"}
    store.write(names.FINAL_NORM, codec.encode(views, metadata))
    with pytest.raises(RunMismatchError, match="another run"):
        read_final_norm(store, spec)
    with pytest.raises(ConfigError, match="final_norm"):
        read_final_norm(make_run(tmp_path / "no-norm", Recipe(norm=None)), spec)
