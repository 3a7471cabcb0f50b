"""Tiny random models of every architecture, saved as checkpoints that ``load_model`` reads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

VOCAB = 128
LAYERS = 4

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
_GQA = {**_COMMON, "num_key_value_heads": 2, "head_dim": 8}
_MOE = {**_GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GDN = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_TYPES = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
WINDOW = 12


def _vision() -> dict[str, Any]:
    return {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_GQA),
    "qwen2": lambda: transformers.Qwen2Config(**{k: v for k, v in _GQA.items() if k != "head_dim"}),
    "mistral": lambda: transformers.MistralConfig(**_GQA, sliding_window=WINDOW),
    "qwen3": lambda: transformers.Qwen3Config(**_GQA),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_GQA,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=512
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_COMMON),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_MOE),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_GQA,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_MOE, **_GDN, shared_expert_intermediate_size=16, layer_types=_TYPES
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_GQA, **_GDN, layer_types=_TYPES),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(
        **_MOE, **_GDN, shared_expert_intermediate_size=16, layer_types=_TYPES
    ),
}


PADDED: dict[str, Callable[[], Any]] = {
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **_GQA,
        global_head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
    ),
    "granite": lambda: transformers.GraniteConfig(
        **{k: v for k, v in _GQA.items() if k != "head_dim"}, residual_multiplier=0.22
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **{k: v for k, v in _GQA.items() if k != "head_dim"},
        layer_types=["conv", "full_attention"] * 2,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=LAYERS,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=1,
        chunk_size=16,
    ),
    "minicpm3": lambda: transformers.MiniCPM3Config(
        **_COMMON,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
    "nanochat": lambda: transformers.NanoChatConfig(**_COMMON, num_key_value_heads=2),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(
        **{k: v for k, v in _GQA.items() if k != "head_dim"},
        **_GDN,
        layer_types=_TYPES,
        pad_token_id=0,
    ),
}
"""Some that do not pack: their blocks depend on the model's depth, or look like others and are not."""


def build(name: str) -> Any:
    """The full model, head included, weights large enough that a wrong token changes everything."""
    return build_like((CONFIGS | PADDED)[name]())


def build_like(config: Any) -> Any:
    """The same of any config."""
    torch.manual_seed(3)
    return _shake(transformers.AutoModelForCausalLM.from_config(config))


def longrope(kind: type) -> Any:
    """A config whose rotary frequencies are others for samples of more than 32 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 32,
    }
    options = {k: v for k, v in _GQA.items() if k != "head_dim"}
    if kind is transformers.Phi3Config:
        options |= {"original_max_position_embeddings": 32, "pad_token_id": 0}
    return kind(**options, rope_parameters=rope)


def build_nested() -> Any:
    """A multimodal checkpoint whose text model is nested."""
    torch.manual_seed(3)
    text = CONFIGS["qwen3_5"]()
    config = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=_vision())
    return _shake(transformers.Qwen3_5ForConditionalGeneration(config))


def build_nested_gemma3() -> Any:
    """Another, of an architecture whose text weights transformers does not find by itself."""
    torch.manual_seed(3)
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=CONFIGS["gemma3"]().to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    return _shake(transformers.Gemma3ForConditionalGeneration(config))


def _shake(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim > 1 and "embed" not in name else 0.1
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.add_(noise.to(parameter.dtype))
    return model.eval()


def samples(lengths: list[int], seed: int = 11) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest relative L2 error over tokens and slots."""
    difference = (found.double() - wanted.double()).norm(dim=-1)
    return float((difference / wanted.double().norm(dim=-1)).max())
