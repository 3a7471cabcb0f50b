"""JSON lines, one object a line, streamed, compressed or not; a line that is no JSON object is a row with a reason.

A compressed file is inflated as it is read and never held whole: one megabyte of lines and one block of the codec.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import pyarrow as pa

from swathe.dataset.files import InputFile, unreadable

COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}
"""What may follow ``.jsonl`` in a name, and the codec it stands for."""
_BOM: Final = b"\xef\xbb\xbf"
_BUFFER_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRow:
    """``row`` is the object, or a text saying why there is none.

    ``size_bytes`` of the line and of blank ones before it; ``fraction`` of the file was read to get it.
    """

    row: dict[str, Any] | str
    size_bytes: int
    fraction: float


def read_objects(file: InputFile, *, whole: bool = True) -> Iterator[JsonRow]:
    """Every line that is not blank. Lines end at newline bytes only, never at other Unicode line ends.

    ``whole`` says that most of the file will be read.

    Raises PlanError naming file and place where it cannot be read or inflated any further.
    """
    size_bytes = number = 0
    source = None
    try:
        with file.open(whole=whole) as source, _inflated(file, source) as lines:
            for number, line in enumerate(lines, start=1):
                size_bytes += len(line)
                text = line.removeprefix(_BOM) if number == 1 else line
                if not text.strip():
                    continue
                fraction = source.tell() / file.size_bytes
                yield JsonRow(row=_parse(text), size_bytes=size_bytes, fraction=fraction)
                size_bytes = 0
    except OSError as error:
        place = f"after line {number}" if number else "from its first line on"
        raise unreadable(file, error, place=place) from error


def first_keys(file: InputFile, rows: int) -> list[str] | None:
    """Keys of the first rows, in order of appearance; None for a file without rows."""
    keys: dict[str, None] | None = None
    for value in islice(read_objects(file, whole=False), rows):
        keys = keys or {}
        keys.update(dict.fromkeys(value.row) if isinstance(value.row, dict) else {})
    return None if keys is None else list(keys)


def _inflated(file: InputFile, source: Any) -> io.BufferedReader:
    """The file's text as a stream of lines."""
    for suffix, codec in COMPRESSIONS.items():
        if file.name.endswith(suffix):
            source = pa.CompressedInputStream(source, codec)
    return io.BufferedReader(source, _BUFFER_BYTES)


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
