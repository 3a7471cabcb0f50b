"""From conversations and texts to tokens, with a loss mask on exactly what the assistant says.

Masks are never made by comparing the renderings of a conversation's prefixes: templates that rewrite earlier turns
(Qwen3 takes the thinking out of them) make such masks silently wrong. See ``turns`` for what is done instead.
"""

from swathe.chat.encoders import ChatEncoder, TextEncoder
from swathe.chat.tokenizer import describe_tokenizer, load_tokenizer

__all__ = ["ChatEncoder", "TextEncoder", "describe_tokenizer", "load_tokenizer"]
