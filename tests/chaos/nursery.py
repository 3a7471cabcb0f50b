"""Real workers (`swathe-worker serve`), forked from one process that has torch loaded, so that a restart is cheap.

python tests/chaos/nursery.py          a line on stdin (a ``Birth`` as JSON) starts a worker, its pid is the answer
python tests/chaos/nursery.py apart .. the process made to die, with the same bad samples

A sample that ends with three times 90 raises, with 91 kills its process, with 92 kills it only in a batch. The store is
full while the file FULL exists.
"""

# ruff: noqa: E402 - run as a program, it has to find its own package first

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch

from swathe import log
from swathe.errors import NoSpaceError
from swathe.parent import die_with_parent
from swathe.settings import read_settings
from swathe.store.local import LocalStore
from worker import cli
from worker.extraction.extraction import Extraction
from worker.extraction.software import software_versions
from worker.model.hidden_states import HiddenStateModel
from worker.serve import Place, serve

RAISES, KILLS, KILLS_IN_COMPANY = 90, 91, 92


@dataclass(frozen=True)
class Birth:
    """What is asked of the nursery."""

    name: str
    log: str
    redis_url: str
    clock_skew_s: float = 0.0


def spoil() -> None:
    """Bad samples, a store that fills up, and stages that take long enough to be hit."""
    forward, reference = HiddenStateModel.forward, HiddenStateModel.reference

    def bad_forward(self, batch, ids):
        for sample in ids:
            _misbehave(sample)
            if _ends_with(sample, KILLS_IN_COMPANY):
                os.kill(os.getpid(), signal.SIGSEGV)
        return forward(self, batch, ids)

    def bad_reference(self, ids):
        _misbehave(ids)
        return reference(self, ids)

    HiddenStateModel.forward, HiddenStateModel.reference = bad_forward, bad_reference
    write = LocalStore.write

    def full_write(self, key, chunks):
        if Path(os.environ["SWATHE_TEST_FULL"]).exists():
            raise NoSpaceError("no space left")
        return write(self, key, chunks)

    LocalStore.write = full_write
    Extraction.apart_command = (sys.executable, __file__, "apart")
    slow_s = float(os.environ.get("SWATHE_TEST_SLOW_S", "0"))
    for step in ("prepare", "compute", "finish", "publish"):
        setattr(Extraction, step, _slowed(getattr(Extraction, step), slow_s))


def _ends_with(ids, token):
    return len(ids) >= 3 and all(each == token for each in ids[-3:])


def _misbehave(ids):
    if _ends_with(ids, RAISES):
        raise ValueError("bad sample")
    if _ends_with(ids, KILLS):
        os.kill(os.getpid(), signal.SIGSEGV)


def _slowed(step, slow_s):
    def slowed(self, value):
        result = step(self, value)
        time.sleep(
            random.uniform(0, slow_s)
        )  # after the deed: before the next stage, or before the acknowledgement
        return result

    return slowed


def work(birth: Birth) -> None:
    os.setsid()
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    target = os.open(birth.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    log.setup(form="json")
    if birth.clock_skew_s:
        real = time.time
        time.time = lambda: real() + birth.clock_skew_s
    place = Place(uuid="cpu", name=birth.name)
    code = serve(read_settings(), birth.redis_url, place, exit_when_idle_s=None)
    cli._end_process(code)


def main() -> None:
    spoil()
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["apart"]:
        log.setup(form="json")
        cli.app()
    software_versions(torch.device("cpu"))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for the dead
    for line in sys.stdin:
        birth = Birth(**json.loads(line))
        pid = os.fork()
        if not pid:
            work(birth)
        print(pid, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
