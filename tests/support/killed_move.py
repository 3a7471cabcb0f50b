"""A mover that is really killed: before, in the middle of, or after a change of a store."""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, Literal

from producer.move import move
from swathe.store.local import LocalStore
from swathe.store.s3 import S3Store

When = Literal["before", "during", "after"]

_CHANGES = ("write", "create", "delete")


def killed_move(
    run: str,
    dest: str,
    *,
    at: int | str,
    when: When = "after",
    environment: Mapping[str, str] | None = None,
) -> bool:
    """Move in a process that dies at its ``at``-th change, or at the creation of the key ``at``; False when it ended before, all done."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_move, args=(run, dest, at, when, dict(environment or {})))
    process.start()
    process.join(60)
    assert process.exitcode in {0, -signal.SIGKILL}, process.exitcode
    return process.exitcode != 0


def _move(run: str, dest: str, at: int | str, when: When, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    count = itertools.count(1)
    for kind in (LocalStore, S3Store):
        for name in _CHANGES:
            setattr(kind, name, _deadly(getattr(kind, name), count, at, when))
    move(run, dest)


def _deadly(
    change: Callable[..., Any], count: "itertools.count[int]", at: int | str, when: When
) -> Callable[..., Any]:
    def changed(self: Any, key: str, *data: Any) -> Any:
        mine = next(count) == at or (change.__name__ == "create" and key == at)
        if mine and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if mine and when == "during" and data and not isinstance(data[0], bytes):
            return change(self, key, _broken_off(data[0]))
        done = change(self, key, *data)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    return changed


def _broken_off(chunks: Any) -> Any:
    for chunk in chunks:
        yield chunk
        os.kill(os.getpid(), signal.SIGKILL)
