"""Where a run lives: one small protocol, one file for each kind of store."""

from swathe.store.base import ObjectInfo, Store, Written
from swathe.store.opening import open_store

__all__ = ["ObjectInfo", "Store", "Written", "open_store"]
