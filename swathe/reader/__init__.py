"""Reading a run: map-style and iterable data sets of hidden states, from local disk or an object store."""

from swathe.reader.collate import collate_packed, collate_padded
from swathe.reader.dataset import HiddenStates

__all__ = ["HiddenStates", "collate_packed", "collate_padded"]
