"""Conversations and texts to tokens and masks, many at a time through the fast tokenizer.

Legend: S tokens of one sample. A token is supervised if it shares a character with a supervised span; several
tokens of one character (byte-level vocabularies) share its span.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from swathe.chat.messages import Message, normalize
from swathe.chat.tokenizer import chat_template
from swathe.chat.turns import Rendered, Span, TurnFinder
from swathe.samples import Encoded, UInt8

_BATCH: Final = 512
"""Texts given to the tokenizer at once: enough for its threads, and little memory for their offsets."""
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TextEncoder:
    """Texts as the tokenizer makes them, with its own special tokens; every token is supervised."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, values: Sequence[Any]) -> list[Encoded | str]:
        """For each text its tokens, or why there are none."""
        rendered = [
            _checked(Rendered(text=value, spans=[])) if isinstance(value, str) else "no text"
            for value in values
        ]
        return _tokenize(self._tokenizer, rendered, whole=True)


class ChatEncoder:
    """Conversations through the model's own template; the assistant's turns are supervised."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self.template: Final = chat_template(tokenizer)
        self._kwargs = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self._marked = _GENERATION.search(self.template) is not None
        self._turns = None if self._marked else TurnFinder(self._render, _special_tokens(tokenizer))

    @property
    def warnings(self) -> list[str]:
        """What the operator should know about the template, in one line each."""
        takes_date = "date_string" in self.template
        if "strftime_now" not in self.template or (takes_date and "date_string" in self._kwargs):
            return []
        how = (
            'for example with --chat-template-kwargs \'{"date_string": "01 Jan 2026"}\''
            if takes_date
            else "with a copy of the model's folder whose chat template has a date in place of strftime_now"
        )
        return [f"the chat template writes today's date into samples; fix it for equal runs, {how}"]

    def __call__(self, values: Sequence[Any]) -> list[Encoded | str]:
        """For each conversation its tokens, or why there are none."""
        return _tokenize(self._tokenizer, [self._rendered(value) for value in values], whole=False)

    def _rendered(self, value: Any) -> Rendered | str:
        messages = normalize(value)
        if isinstance(messages, str):
            return messages
        try:
            found = self._turns.find(messages) if self._turns else self._generated(messages)
        except Exception as error:  # noqa: BLE001 - a template is a program of someone else
            reason = next(iter(str(error).strip().splitlines()), "")
            return f"chat template: {reason or type(error).__name__}"
        return found if isinstance(found, str) else _checked(found)

    def _render(self, messages: list[Message], add_generation_prompt: bool) -> str:  # noqa: FBT001
        return self._template_output(messages, add_generation_prompt=add_generation_prompt)[0]

    def _generated(self, messages: list[Message]) -> Rendered:
        """Text and spans of a template with ``{% generation %}``."""
        text, spans = self._template_output(messages, return_assistant_tokens_mask=True)
        return Rendered(text=text, spans=[span for span in spans if span[1] > span[0]])

    def _template_output(self, messages: list[Message], **options: bool) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import (  # noqa: PLC0415 - slow to import
            render_jinja_template,
        )

        texts, spans = render_jinja_template(
            conversations=[messages], chat_template=self.template, **options, **self._kwargs
        )
        return texts[0], spans[0] if spans else []


def _special_tokens(tokenizer: Any) -> list[str]:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def _checked(rendered: Rendered) -> Rendered | str:
    """Refuse text that is no Unicode (JSON can spell lone surrogates), which would stop the whole batch."""
    try:
        rendered.text.encode()
    except UnicodeEncodeError as error:
        return f"text is not Unicode (character {error.start})"
    return rendered


def _tokenize(
    tokenizer: Any, rendered: Sequence[Rendered | str], *, whole: bool
) -> list[Encoded | str]:
    results: list[Encoded | str] = [row if isinstance(row, str) else "" for row in rendered]
    wanted = [(place, row) for place, row in enumerate(rendered) if isinstance(row, Rendered)]
    for first in range(0, len(wanted), _BATCH):
        part = wanted[first : first + _BATCH]
        made = tokenizer(
            [row.text for _, row in part],
            add_special_tokens=whole,
            return_offsets_mapping=not whole,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for number, (place, row) in enumerate(part):
            ids = np.array(made["input_ids"][number], np.int32)
            mask = (
                np.ones(len(ids), np.uint8)
                if whole
                else _mask(made["offset_mapping"][number], row.spans)
            )
            results[place] = Encoded(input_ids=ids, loss_mask=mask)
    return results


def _mask(offsets: Sequence[Span], spans: Sequence[Span]) -> UInt8:
    """Which tokens share a character with a span: uint8 [S]. Spans ascend and do not overlap."""
    places = np.array(offsets, np.int64).reshape(-1, 2)
    if not spans:
        return np.zeros(len(places), np.uint8)
    starts, ends = np.array(spans, np.int64).T
    nearest = np.searchsorted(ends, places[:, 0], side="right")
    inside = nearest < len(ends)
    # A token of no width counts as the character where it stands.
    stops = np.maximum(places[:, 1], places[:, 0] + 1)
    mask: UInt8 = (inside & (starts[np.minimum(nearest, len(ends) - 1)] < stops)).astype(np.uint8)
    return mask
