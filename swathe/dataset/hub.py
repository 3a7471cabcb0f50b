"""Data sets of the Hugging Face hub: the wanted files of one commit, downloaded into the hub's own cache.

Nothing of the hub is executed and no loading script is known: a data set is its .jsonl and .parquet files. A branch or tag is
resolved to its commit once; run.json names the commit. Without a network the cache serves what it holds completely.
"""

import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swathe.dataset.choice import CARD, choose
from swathe.errors import PlanError

PREFIX: Final = "hf://datasets/"
_HUB_ID: Final = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubId:
    """A data set of the hub: ``name`` is org/name, ``text`` what the user wrote."""

    text: str
    name: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> "HubId | None":
        """The meaning of ``org/name`` or ``org/name@revision``, or None for a text that cannot be one."""
        found = _HUB_ID.fullmatch(text.removeprefix(PREFIX))
        return found and cls(text=text, name=found[1], revision=found[2])


def fetch(hub_id: HubId, split: str | None) -> tuple[Path, str]:
    """Bring the files of a data set here; returns its folder and what run.json calls it.

    Raises PlanError when it is neither in the cache nor to be had, or when a split must be chosen.
    """
    folder = _download(hub_id, hub_id.revision, [CARD])
    commit = folder.name
    pinned = f"{PREFIX}{hub_id.name}@{commit}"
    listing = _listing(hub_id, commit)
    here = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    chosen = choose(
        here if listing is None else listing,
        location=pinned,
        split=split,
        card=_read_card(folder),
        ask=True,
    )
    if listing is None:
        # The client knows from the listing that it kept what the cache lacks of these patterns.
        _download(hub_id, commit, chosen.patterns, cached=True)
    else:
        _download(hub_id, commit, [glob.escape(name) for name in chosen.names])
    return folder, pinned


def _read_card(folder: Path) -> str:
    """The README of a data set; empty where there is none."""
    try:
        return (folder / CARD).read_text(errors="replace")
    except OSError:
        return ""


def _listing(hub_id: HubId, commit: str) -> list[str] | None:
    """All names of a commit, or None while the hub cannot be asked."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - slow to import, rarely needed

    try:
        return HfApi().list_repo_files(hub_id.name, repo_type="dataset", revision=commit)
    except Exception:  # noqa: BLE001 - errors of several libraries; the cache may serve
        return None


def _download(
    hub_id: HubId, revision: str | None, patterns: Iterable[str], *, cached: bool = False
) -> Path:
    """Files of a commit that match; the folder of the commit in the cache."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        folder = snapshot_download(
            hub_id.name,
            repo_type="dataset",
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=cached,
        )
    except Exception as error:  # errors of several libraries
        said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        msg = (
            f"data set {hub_id.text}: no such file or folder here, and not to be had from the hub ({said}); check the path, "
            f"set HF_TOKEN for a gated one, or fetch it where there is a network (hf download {hub_id.name} --repo-type dataset) "
            "and copy the hub's cache or give the folder"
        )
        raise PlanError(msg) from error
    return Path(folder)
