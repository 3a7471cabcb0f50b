"""Every error that swathe raises on purpose, under one root.

A message says what went wrong, for which id, what happens next and what to do. The class says what a
caller may do about it: ``retryable`` errors are worth another attempt of the same work, the others are
not; ``exit_code`` is what a command line exits with when the error reaches it.
"""

from typing import ClassVar


class SwatheError(Exception):
    """Root of all errors raised on purpose."""

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class ConfigError(SwatheError):
    """Raised when options, settings or the environment do not make sense; nothing was written."""

    exit_code = 2


class PlanError(SwatheError):
    """Raised when a data set and a model cannot be turned into a plan; nothing was written."""

    exit_code = 2


class ModelError(SwatheError):
    """Raised when a model cannot be resolved, is not the planned one, or does not load completely."""

    exit_code = 2


class RunMismatchError(SwatheError):
    """Raised when a folder holds another run than the one expected (fingerprint or run_id differ)."""

    exit_code = 2


class FormatError(SwatheError):
    """Raised when a file is not of the format."""

    exit_code = 2


class NewerFormatError(FormatError):
    """Raised when a file is of a newer version than this code knows: whole, and nothing to be repaired."""


class IncompleteRunError(SwatheError):
    """Raised when something needs a complete run and ranges or samples are still missing."""


class IntegrityError(SwatheError):
    """Raised when stored bytes are not what their record says; ``key`` names the object."""

    def __init__(self, message: str, *, key: str = "") -> None:
        # A message alone must do: a DataLoader rebuilds a worker's error from it in the parent process.
        super().__init__(message)
        self.key = key


class StoreError(SwatheError):
    """Raised when a store did not do what was asked; the same call may succeed later."""

    retryable = True


class ObjectMissingError(StoreError):
    """Raised when a key is not in the store; asking again does not help."""

    retryable = False


class NoSpaceError(StoreError):
    """Raised when the store is full; work waits until space is back."""


class QueueError(SwatheError):
    """Raised when Redis cannot be used as the fleet's queue; the same call may succeed later."""

    retryable = True


class RefusedJobError(SwatheError):
    """Raised for a job that a worker must not execute (foreign function, callbacks, wrong version...)."""


class OutOfBoundsJobError(RefusedJobError):
    """Raised for a job that this worker may not execute, though another may: its roots or its version are others."""


class PoisonRangeError(SwatheError):
    """Raised when a range that kills its processes cannot be cut down to guilty samples; ``history`` tells how."""

    def __init__(self, message: str, *, history: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.history = history


class WorkerError(SwatheError):
    """Raised when this worker process (its device, kernels or model) cannot go on."""
