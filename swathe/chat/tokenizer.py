"""A model's tokenizer: loaded, refused when it cannot tell where a token lies in the text, and named by a hash."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from swathe.errors import ConfigError, ModelError
from swathe.spec import TokenizerSpec

_FILES: Final = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "sentencepiece.bpe.model",
    "special_tokens_map.json", "spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "vocab.json", "vocab.txt",
)  # fmt: skip


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The fast tokenizer of a checkpoint folder.

    Raises ModelError when there is none, ConfigError when it cannot map tokens to places in the text.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds to import; tokenized data needs none

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # a tokenizer's files fail in the ways of many libraries
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        msg = f"{folder}: no tokenizer can be loaded ({reason}); put tokenizer.json beside config.json"
        raise ModelError(msg) from error
    if not tokenizer.is_fast:
        msg = (
            f"{folder}: the tokenizer has no fast form (tokenizer.json), so loss masks cannot be made; "
            "convert it, or tokenize yourself and give input_ids with loss_mask"
        )
        raise ConfigError(msg)
    return tokenizer


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's template for conversations. Raises ConfigError when it has none."""
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError as error:
        msg = (
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; use a chat model, "
            "or give a data set with text or input_ids"
        )
        raise ConfigError(msg) from error
    return template


def describe_tokenizer(
    folder: Path, template: str | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> TokenizerSpec:
    """What made the ids, for run.json: equal hashes and arguments make equal ids of equal texts.

    The hash covers the tokenizer's files and its templates', so it is had without loading the tokenizer;
    ``template`` is the one in use.
    """
    digest = hashlib.sha256()
    for path in (folder / name for name in _FILES):
        if path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return TokenizerSpec(
        sha256=digest.hexdigest(),
        chat_template_sha256=template and hashlib.sha256(template.encode()).hexdigest(),
        chat_template_kwargs=dict(template_kwargs or {}),
    )
