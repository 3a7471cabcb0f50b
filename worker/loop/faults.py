"""Whose fault an error is: the range's, this node's, the store's, or the device's."""

from typing import Literal

from swathe.errors import (
    ConfigError,
    FormatError,
    ModelError,
    RefusedJobError,
    RunMismatchError,
    SwatheError,
    WorkerError,
)

Kind = Literal["infrastructure", "mismatch", "refused", "worker", "range"]


def classify(error: BaseException) -> Kind:
    """Whose fault an error is."""
    if isinstance(error, RefusedJobError):
        return "refused"
    if isinstance(error, RunMismatchError | ModelError | ConfigError | FormatError):
        # These depend on this node (its model, its software, its mounts): elsewhere the range may be fine, and a
        # single ill-equipped node must not spend the budget of every range of the run.
        return "mismatch"
    if isinstance(error, WorkerError) or not isinstance(error, Exception):
        return "worker"
    if (isinstance(error, SwatheError) and error.retryable) or isinstance(error, OSError):
        return "infrastructure"
    return "range"


def brief(error: BaseException) -> str:
    """A few words of it, which can be sent and stored: an error may quote a path that is no Unicode."""
    return f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
