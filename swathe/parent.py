"""Children that must not outlive the process that started them, whatever ends it (Linux; elsewhere nothing happens)."""

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    ``parent_pid`` closes the gap before the call: a parent that died already ends this process at once.
    """
    _arm(_libc(), parent_pid)


def die_with_me() -> Callable[[], None]:
    """A ``preexec_fn`` for a child of this process: all that it needs is made before the fork.

    Between fork and exec nothing may import, log or wait for a lock. The kernel follows the thread that forks, so
    start such children from a thread that lives as long as the process.
    """
    libc, parent_pid = _libc(), os.getpid()
    return lambda: _arm(libc, parent_pid)


def _arm(libc: Any, parent_pid: int | None) -> None:
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)


def _libc() -> Any:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None
    return libc if hasattr(libc, "prctl") else None
