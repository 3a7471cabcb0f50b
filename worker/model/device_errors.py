"""Errors after which a CUDA context answers nothing but the same error: the process must end, whatever the range was.

They come as plain RuntimeErrors from many libraries, at some later call than the one that is to blame, so they are told
by their text. Running out of memory is none of them: the engine answers it with smaller batches.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from swathe.errors import WorkerError

_MARKS: Final = (
    "cuda error", "cudaerror", "triton error [cuda]", "device-side assert", "illegal memory access",
    "unspecified launch failure", "misaligned address", "xid", "device lost", "device is lost", "gpu is lost",
    "fallen off the bus", "uncorrectable", "cublas_status_execution_failed", "cublas_status_internal_error",
    "cudnn_status_execution_failed", "cudnn_status_internal_error",
)  # fmt: skip


def breaks_device(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that the device's context is gone."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and not isinstance(seen, torch.OutOfMemoryError):
            text = str(seen).lower()
            if "out of memory" not in text and any(mark in text for mark in _MARKS):
                return True
        seen = seen.__cause__
    return False


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn errors that break the device's context into WorkerError; all others pass."""
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:
        if not breaks_device(error):
            raise
        msg = (
            f"the device's context is broken ({type(error).__name__}: {_first_line(error)}); this worker hands its "
            "ranges back and ends, its supervisor starts another"
        )
        raise WorkerError(msg) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
