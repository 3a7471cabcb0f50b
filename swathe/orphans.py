"""What dead attempts leave behind: shards that no record names, and temporaries.

A worker that dies between its shard and its record leaves the shard; nothing ever reads it. It is removed once it
is older than a grace period, longer than any live attempt can take from its shard to its record.
"""

from typing import Final

from swathe import names
from swathe.records import RunState
from swathe.store import ObjectInfo, Store

GRACE_S: Final = 3600.0


def find_orphans(
    store: Store, state: RunState, *, now_s: float, grace_s: float = GRACE_S
) -> list[ObjectInfo]:
    """Shards older than the grace period that no record of ``state`` names.

    A record that cannot be read may name any shard of its range: these stay. ``state`` must have been read after ``now_s``
    was taken, so that a record made meanwhile is known.
    """
    named = {record.shard for record in state.records.values()}
    return [
        item
        for item in store.list(names.STATES)
        if (range_id := names.shard_range(item.key)) is not None
        and range_id not in state.invalid
        and item.key not in named
        and now_s - item.modified_s > grace_s
    ]


def collect(
    store: Store, state: RunState, *, now_s: float, grace_s: float = GRACE_S
) -> tuple[int, int]:
    """Remove orphans and temporaries; returns how many objects and bytes of orphans went."""
    orphans = find_orphans(store, state, now_s=now_s, grace_s=grace_s)
    for orphan in orphans:
        store.delete(orphan.key)
    temporaries = store.collect(older_than_s=grace_s)
    return len(orphans) + temporaries, sum(orphan.size_bytes for orphan in orphans)
