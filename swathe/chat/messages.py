"""Conversations as people store them, brought to the form that chat templates take."""

from collections.abc import Mapping
from typing import Any, Final

Message = dict[str, Any]

_SHAREGPT_ROLES: Final[Mapping[str, str]] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


def normalize(value: Any) -> list[Message] | str:
    """Messages with role and text content, or why there are none.

    Takes a list of ``{role, content}`` or ShareGPT ``{from, value}``, or a dict of such lists (an older Arrow form).
    Keys whose value is null are dropped: Arrow gives every message every key of the column. An empty list of calls is none.
    """
    if isinstance(value, Mapping):
        value = _rows_of_columns(value)
    if not isinstance(value, list) or not value:
        return "no messages"
    messages = []
    for number, given in enumerate(value):
        message = _message(given)
        if isinstance(message, str):
            return f"message {number}: {message}"
        messages.append(message)
    return messages


def _rows_of_columns(columns: Mapping[str, Any]) -> list[Message] | None:
    lists = {name: items for name, items in columns.items() if isinstance(items, list)}
    lengths = {len(items) for items in lists.values()}
    if len(lengths) != 1:
        return None
    return [{name: items[i] for name, items in lists.items()} for i in range(lengths.pop())]


def _message(given: Any) -> Message | str:
    if not isinstance(given, Mapping):
        return "no object with role and content"
    message = {key: value for key, value in given.items() if value is not None}
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # templates ask whether there is such a field
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        if speaker not in _SHAREGPT_ROLES:
            return f"unknown speaker {speaker!r}"
        message["role"] = _SHAREGPT_ROLES[speaker]
        message["content"] = message.pop("value", None)
    if not isinstance(message.get("role"), str):
        return "no role"
    content = _text(message)
    if content is None:
        return f"{message['role']} without text content"
    return {**message, "content": content}


def _text(message: Message) -> str | None:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        return "".join(texts) if len(texts) == len(parts) else None
    return None
