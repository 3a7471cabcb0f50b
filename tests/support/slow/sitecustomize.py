"""Makes a worker process slow on purpose, when TEST_SLOW says where: {"read": 0.5, "compute": 0.2, "write": 1.0}."""

import json
import os
import time


def _slow(owner, name, seconds):
    original = getattr(owner, name)

    def slowed(*args, **kwargs):
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(owner, name, slowed)


_WHERE = json.loads(os.environ.get("TEST_SLOW", "{}"))
if _WHERE:
    from swathe.store.local import LocalStore
    from swathe.tokens import TokenReader

    _slow(TokenReader, "read_range", _WHERE.get("read", 0))
    _slow(LocalStore, "write", _WHERE.get("write", 0))
    if "compute" in _WHERE:
        import sys

        # Torch is loaded by workers only; a supervisor stays small.
        if "serve" in sys.argv or "serve" in sys.orig_argv:
            from worker.engine.engine import Engine

            _slow(Engine, "finish", _WHERE["compute"])
