"""Where the assistant's words lie in a rendered conversation.

A template marked with ``{% generation %}`` says so itself. For all others the conversation is rendered twice: as it
is, and with the core of every assistant content (and of its thinking) replaced by a sentinel; white space around the
core stays, so that a template strips both renderings alike. The text between the sentinels is the frame. Only if
frame and cores together are the first rendering, character by character, do the sentinels' places count; a template
that drops earlier thinking drops its sentinel too and is right by itself. Where that fails, the same is tried with
one message at a time; where that fails too the row is rejected: a wrong mask is worse than a missing row.

A turn begins where the generation prompt ends (what a template inserts after it, such as an empty
``<think></think>``, is what the model would have to say), and ends with the special token right after the content.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from swathe.chat.messages import Message

Span = tuple[int, int]
Render = Callable[[list[Message], bool], str]
"""Renders messages, with the generation prompt after them or not."""

_THINKING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
_PROBE: Final = "swathe probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation as text, and the spans of the assistant's turns in it, in order."""

    text: str
    spans: list[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Match:
    """A frame laid over the full text. ``starts[k]`` is where ``pieces[k]`` begins; slots lie between pieces."""

    text: str
    pieces: list[str]
    starts: list[int]
    slots: list[str]


class TurnFinder:
    """Finds turns in the conversations of one template."""

    def __init__(self, render: Render, special_tokens: Sequence[str]) -> None:
        self._render = render
        self._special = sorted(special_tokens, key=len, reverse=True)
        self._prompts = _prompt_forms(render, special_tokens)
        self._end = self._end_of_turn()

    def find(self, messages: list[Message]) -> Rendered | str:
        """The rendered text and its spans, or why they cannot be told for sure. Template errors pass."""
        text = self._render(messages, False)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        tag = next(tag for k in count() if (tag := f"swathe{k}turn") not in text)
        match = self._match(messages, turns, text, tag)
        if match is not None:
            found = [self._span(messages, turn, match, tag) for turn in turns]
        else:
            found = [self._alone(messages, turn, text, tag) for turn in turns]
        spans: list[Span] = []
        for turn, span in zip(turns, found, strict=True):
            if span is None or (spans and span[0] < spans[-1][1]):
                return f"message {turn}: the template changes the assistant's text, so its place is not sure"
            spans.append(span)
        return Rendered(text=text, spans=spans)

    def _alone(self, messages: list[Message], turn: int, text: str, tag: str) -> Span | None:
        match = self._match(messages, [turn], text, tag)
        return None if match is None else self._span(messages, turn, match, tag)

    def _match(
        self, messages: list[Message], turns: list[int], text: str, tag: str
    ) -> _Match | None:
        """Lay the frame of some turns over the text; None where they do not agree exactly."""
        cores: dict[str, str] = {}
        marked = list(messages)
        for turn in turns:
            marked[turn] = _mark(messages[turn], f"{tag}{turn:06d}", cores)
        frame = re.split(f"({tag}\\d{{6}}[a-z])", self._render(marked, False))
        pieces, slots = frame[::2], frame[1::2]
        answers = [slot for slot in slots if slot.endswith("a")]
        if answers != [f"{tag}{turn:06d}a" for turn in turns] or len(set(slots)) != len(slots):
            return None
        starts, at = [], 0
        for piece, slot in zip(pieces, [*slots, ""], strict=True):
            starts.append(at)
            core = cores.get(slot, "")
            if not text.startswith(piece, at) or not text.startswith(core, at + len(piece)):
                return None
            at += len(piece) + len(core)
        if at != len(text):
            return None
        return _Match(text=text, pieces=pieces, starts=starts, slots=slots)

    def _span(self, messages: list[Message], turn: int, match: _Match, tag: str) -> Span | None:
        place = match.slots.index(f"{tag}{turn:06d}a")
        start = self._start(messages, turn, match, place)
        end = self._finish(messages[turn], match, place)
        return None if start is None or end is None else (start, end)

    def _start(self, messages: list[Message], turn: int, match: _Match, place: int) -> int | None:
        """The end of the generation prompt before the turn's first words; these words themselves where there is none."""
        first = place
        while first > 0 and not match.slots[first - 1].endswith("a"):
            first -= 1
        region = list(zip(match.pieces[first : place + 1], match.starts[first:], strict=False))
        for prompt in self._prompts:
            if sum(piece.count(prompt) for piece, _ in region) <= _quoted(messages, turn, prompt):
                continue
            # Forward: the answer may have a head of its own after the thinking's.
            for piece, at in region:
                if (found := piece.rfind(prompt)) >= 0:
                    return at + found + len(prompt)
        if _is_call(messages[turn]):
            return None  # what stands before a call's name is the template's, and unknown
        words = match.starts[first] + len(match.pieces[first])
        core = match.starts[place] + len(match.pieces[place])
        content = messages[turn]["content"]
        answer = content.rpartition("</think>")[2].lstrip()
        leads = (
            content[: len(content) - len(answer)],
            content[: len(content) - len(content.lstrip())],
        )
        lead = next((lead for lead in leads if match.text.endswith(lead, 0, core)), "")
        return min(words, core - len(lead))

    def _finish(self, message: Message, match: _Match, place: int) -> int | None:
        """The end of the special token after the answer; of the answer itself where there is none."""
        after, at = match.pieces[place + 1], match.starts[place + 1]
        if message.get("tool_calls"):
            # The calls stand between the content and the end of the turn, and are the assistant's words too.
            found = after.find(self._end) if self._end else -1
            return at + found + len(self._end) if found >= 0 else None
        content = message["content"]
        trail = content[len(content.rstrip()) :] if content.strip() else ""
        for space in (trail, "") if trail else ("",):
            if after.startswith(space) and (token := self._special_at(after, len(space))):
                return at + len(space) + len(token)
        return at + (len(trail) if after.startswith(trail) else 0)

    def _special_at(self, text: str, at: int) -> str:
        return next((token for token in self._special if text.startswith(token, at)), "")

    def _end_of_turn(self) -> str:
        """The special token that ends a turn, or an empty text when the template has none."""
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            _, _, after = self._render(turns, False).partition(_PROBE)
        except Exception:  # noqa: BLE001 - a template that wants more than two messages; rows will tell
            return ""
        return self._special_at(after, 0)


def _quoted(messages: list[Message], turn: int, prompt: str) -> int:
    """How often a prompt stands inside the messages since the assistant's turn before: theirs, not the template's."""
    times = 0
    for message in reversed(messages[:turn]):
        if message["role"] == "assistant":
            break
        times += message["content"].count(prompt)
    return times


def _prompt_forms(render: Render, special_tokens: Sequence[str]) -> list[str]:
    """The generation prompt, and its beginnings up to each line end, longest first.

    A prompt that opens the thinking ends later than the head of a turn whose thinking was taken out; then the
    longest beginning that the turn really has is its head.
    """
    turns: list[Message] = [{"role": "user", "content": _PROBE}]
    try:
        without, with_prompt = render(turns, False), render(turns, True)
    except Exception:  # noqa: BLE001 - a template of someone else; rows will tell
        return []
    pairs = enumerate(zip(without, with_prompt, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), len(without))
    if _PROBE not in without[:at]:
        return []
    # Phi-3 ends what has no prompt with <|endoftext|>, and its prompt begins with <|assistant|>: they share "<|".
    for token in special_tokens:
        begin = with_prompt.rfind(token, 0, at + len(token) - 1)
        if 0 <= begin < at < begin + len(token):
            at = begin
    prompt = with_prompt[at:]
    ends = [found.end() for found in re.finditer(r"\n", prompt)] + [len(prompt)]
    forms = {prompt[:end] for end in ends if prompt[:end].strip()}
    return sorted(forms, key=len, reverse=True)


def _mark(message: Message, name: str, cores: dict[str, str]) -> Message:
    """The message with sentinels in place of its answer and thinking; ``cores`` gets what they stand for.

    A call without content has its sentinel in the call's name: templates ask whether there is content before a call.
    """
    marked = {**message}
    if _is_call(message):
        first, *others = message["tool_calls"]
        marked["tool_calls"] = [_rename(first, f"{name}a", cores), *others]
    else:
        head, closing, answer = message["content"].rpartition("</think>")
        if closing:
            before, opening, thinking = head.rpartition("<think>")
            head = before + opening + _replace(thinking, f"{name}r", cores)
        marked["content"] = head + closing + _replace(answer, f"{name}a", cores, always=True)
    for field, kind in zip(_THINKING_FIELDS, "fgh", strict=True):
        if isinstance(message.get(field), str):
            marked[field] = _replace(message[field], f"{name}{kind}", cores)
    return marked


def _is_call(message: Message) -> bool:
    return bool(message.get("tool_calls")) and not message["content"].strip()


def _rename(call: dict[str, Any], sentinel: str, cores: dict[str, str]) -> dict[str, Any]:
    """A call, ``{"function": {"name", ...}}`` or bare, with the sentinel in place of its name."""
    if "function" in call:
        return {**call, "function": _rename(call["function"], sentinel, cores)}
    cores[sentinel] = call["name"]
    return {**call, "name": sentinel}


def _replace(text: str, sentinel: str, cores: dict[str, str], *, always: bool = False) -> str:
    """Put the sentinel in place of what is left of the text without the white space around it."""
    core = text.strip()
    if not core and not always:
        return text  # templates ask whether there is any thinking
    cores[sentinel] = core
    lead = text[: len(text) - len(text.lstrip())]
    return lead + sentinel + text[len(lead) + len(core) :]
