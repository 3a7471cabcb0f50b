"""JSON lines, one object a line, streamed; a line that is no JSON object is a row with a reason."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRow:
    """``row`` is the object, or a text saying why there is none; ``size_bytes`` of the line, blank ones before it."""

    row: dict[str, Any] | str
    size_bytes: int


def read_objects(path: Path) -> Iterator[JsonRow]:
    """Every line that is not blank. Lines end at newline bytes only, never at other Unicode line ends."""
    with path.open("rb") as file:
        size_bytes = 0
        for number, line in enumerate(file):
            size_bytes += len(line)
            text = line.removeprefix(_BOM) if number == 0 else line
            if not text.strip():
                continue
            yield JsonRow(row=_parse(text), size_bytes=size_bytes)
            size_bytes = 0


def _parse(line: bytes) -> dict[str, Any] | str:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start} of its line)"
    except RecursionError:
        return "not readable JSON (nested too deep)"
    except ValueError as error:
        return f"not JSON ({next(iter(str(error).splitlines()), '')})"
    return value if isinstance(value, dict) else "no JSON object"
