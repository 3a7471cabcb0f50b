"""The contract that producer, workers, readers and trainers share."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swathe.reader import HiddenStates

__all__ = ["HiddenStates"]


def __getattr__(name: str) -> Any:
    # Importing swathe must stay cheap: the reader's libraries are loaded when it is asked for.
    if name == "HiddenStates":
        from swathe.reader import HiddenStates  # noqa: PLC0415

        return HiddenStates
    msg = f"module 'swathe' has no attribute {name!r}"
    raise AttributeError(msg)
