"""Which architectures are proven to pack, by ``model_type`` of the text config.

A packed batch is one row that holds many samples end to end. It is exact only where attention, convolution and
recurrence all get the samples' boundaries; an architecture stands here once a test has compared its packed form
with single samples. All others are padded on the right, without a mask, which is exact for every causal model.
"""

from typing import Final

from swathe.spec import BatchForm, Order

PACKS: Final[frozenset[str]] = frozenset({
    "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama", "mistral", "qwen2", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next",
})  # fmt: skip
"""Proven in tests/worker/test_exact_packed.py, which fails for a name that it does not cover."""

LENGTH_WINDOW_ROWS: Final = 16_384
"""Rows that ``length`` order sorts at a time: 32k-token batches then waste about 1.4 % on padding."""


def batch_form(model_type: str) -> BatchForm:
    """The batch form that a plan fixes for an architecture."""
    return "packed" if model_type in PACKS else "padded"


def sample_order(form: BatchForm) -> Order:
    """The user's own order where nothing is padded, else by length inside windows."""
    return "user" if form == "packed" else "length"
