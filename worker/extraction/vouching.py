"""What is told to the watchdog while a model loads: nothing in there says how far it is."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

LOAD_LIMIT_S: Final = 3600.0
"""Longest time that a model may take to load and to be tested; longer, and its process counts as hung."""


@contextmanager
def vouched(on_progress: Callable[[], None]) -> Iterator[None]:
    """Tell the watchdog that all is well, for as long as a load with its self-test may take at most.

    Neither says by itself how far it is; a network mount or a first compilation of kernels takes many minutes.
    """
    done = threading.Event()

    def vouch() -> None:
        end_s = time.monotonic() + LOAD_LIMIT_S
        while not done.wait(1.0) and time.monotonic() < end_s:
            on_progress()

    threading.Thread(target=vouch, name="load", daemon=True).start()
    try:
        yield
    finally:
        done.set()
        on_progress()
