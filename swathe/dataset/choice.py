"""Which of a folder's files are the data set: those of one kind, and of one split where it has several.

What a split is stands in the front matter of the folder's README.md, as the hub's data sets have it (subsets, there called
configs, with glob patterns for each split). Without that, a file belongs to the split whose name is a word of its path:
``data/train-00000-of-00002.parquet``, ``validation.jsonl``.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from swathe.dataset.jsonl import COMPRESSIONS
from swathe.errors import PlanError

Format = Literal["jsonl", "parquet", "arrow"]

SUFFIXES: Final[dict[str, Format]] = {
    ".jsonl": "jsonl",
    **dict.fromkeys((f".jsonl{end}" for end in COMPRESSIONS), "jsonl"),
    ".parquet": "parquet",
}
READ: Final = ", ".join(SUFFIXES)
CARD: Final = "README.md"
_WORDS: Final = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Names of splits as the hub knows them, and the words that stand for them."""
_ALL: Final = tuple(f"*{end}" for end in SUFFIXES)
_SHOWN: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The files of a folder that are read, sorted. ``patterns`` is what they were chosen by, for the hub's client."""

    format: Format
    names: tuple[str, ...]
    patterns: tuple[str, ...]


def format_of(name: str) -> Format | None:
    """The format that a file's name promises."""
    return next((kind for end, kind in SUFFIXES.items() if name.endswith(end)), None)


def choose(
    names: Iterable[str], *, location: str, split: str | None, card: str, ask: bool
) -> Chosen:
    """The data files among all of a folder's names.

    ``ask`` says that a folder with several splits is refused when ``split`` is None; else all its files are read. Raises
    PlanError when nothing is left, or files of two kinds are.
    """
    visible = [name for name in names if format_of(name) and not _is_hidden(name)]
    if not visible:
        msg = f"data set {location}: nothing there that ends in {READ}, and no datasets.save_to_disk folder"
        raise PlanError(msg)
    left, patterns = _select(visible, location, split, card, ask=ask)
    if not left:
        shown = ", ".join(sorted(visible)[:_SHOWN])
        msg = f"data set {location}: no file of the split {split}; it has {shown}{', ...' * (len(visible) > _SHOWN)}"
        raise PlanError(msg)
    kinds = {kind for kind in map(format_of, left) if kind}
    if len(kinds) > 1:
        msg = (
            f"data set {location}: holds {' and '.join(sorted(kinds))} files; put the kind that is meant into a folder "
            "of its own"
        )
        raise PlanError(msg)
    return Chosen(format=kinds.pop(), names=tuple(sorted(left)), patterns=tuple(patterns))


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "_")) for part in name.split("/"))


def _select(
    names: list[str], location: str, split: str | None, card: str, *, ask: bool
) -> tuple[list[str], Sequence[str]]:
    """The wanted names, and patterns for the like of them."""
    if split is None and not ask:
        return names, _ALL
    if subsets := _subsets(card):
        patterns = _of_subset(subsets, location, split)
        wanted = [re.compile(_expression(pattern)) for pattern in patterns]
        return [name for name in names if any(one.fullmatch(name) for one in wanted)], patterns
    if split is not None:
        return _of_split(names, split), [
            f"*{word}*{end}" for word in _words(split) for end in SUFFIXES
        ]
    found = [one for one in sorted(_WORDS) if _of_split(names, one)]
    if len(found) > 1:
        msg = f"data set {location}: holds the splits {', '.join(found)}; choose one with --split"
        raise PlanError(msg)
    return names, _ALL


def _of_subset(
    subsets: dict[str, dict[str, tuple[str, ...]]], location: str, asked: str | None
) -> tuple[str, ...]:
    """Patterns of ``SPLIT`` in the default subset, or of ``SUBSET/SPLIT``."""
    subset, _, split = (asked or "").rpartition("/")
    subset = subset or (next(iter(subsets)) if len(subsets) == 1 else "default")
    splits = subsets.get(subset, {})
    if asked is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split not in splits:
        has = [
            f"{one}/{two}" if len(subsets) > 1 else two for one, s in subsets.items() for two in s
        ]
        problem = f"no split {asked}" if asked else "several splits"
        msg = f"data set {location}: {problem}; choose one with --split: {', '.join(has)}"
        raise PlanError(msg)
    return splits[split]


def _words(split: str) -> Sequence[str]:
    return _WORDS.get(split, (split,))


def _of_split(names: Sequence[str], split: str) -> list[str]:
    """Names in which the split's name, or another word for it, stands as a word."""
    words = "|".join(map(re.escape, _words(split)))
    expression = re.compile(rf"(?<![^\W_])({words})(?![^\W\d_])")
    return [name for name in names if expression.search(name)]


def _subsets(card: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """Subset -> split -> patterns, from a README's front matter; the default subset is called ``default``."""
    if not card.startswith("---"):
        return {}
    from huggingface_hub import DatasetCard  # noqa: PLC0415 - slow to import, rarely needed

    try:
        data: Any = DatasetCard(card, ignore_metadata_errors=True).data
        configs = data.to_dict().get("configs") or []
        return {
            "default" if one.get("default") else str(one.get("config_name", "default")): _splits(
                one
            )
            for one in configs
        }
    except Exception:  # noqa: BLE001 - a README is anybody's prose; whatever it is, it names no splits then
        return {}


def _splits(config: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    folder = f"{config['data_dir'].strip('/')}/" if config.get("data_dir") else ""
    files = config.get("data_files") or "**"
    if not (isinstance(files, list) and files and isinstance(files[0], dict)):
        files = [{"split": "train", "path": files}]
    found: dict[str, tuple[str, ...]] = {}
    for entry in files:
        paths = [entry["path"]] if isinstance(entry["path"], str) else entry["path"]
        found[str(entry["split"])] = tuple(f"{folder}{path}" for path in paths)
    return found


def _expression(pattern: str) -> str:
    """A glob as a regular expression: ``*`` stays inside a folder, ``**`` does not."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]+\])", pattern)
    plain = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(
        plain.get(part)
        or (part if part.startswith("[") and part.endswith("]") else re.escape(part))
        for part in parts
    )
