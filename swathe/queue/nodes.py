"""Metrics of nodes by way of Redis, for a Prometheus that cannot reach the nodes themselves.

A node behind a firewall, or one whose ports are published nowhere, needs no way in: it hands its page over every few
seconds (a few kilobytes, compressed), and the exporter serves it under the node's name.
"""

import secrets
import zlib
from typing import Any, Final

from redis import Redis

from swathe import names
from swathe.queue.connection import redis_errors

_KEEP_S: Final = 30
"""A node that has been silent for longer is gone."""
_AUTHOR_BYTES: Final = 8


def new_author() -> bytes:
    """Tells one process that hands metrics over from any other."""
    return secrets.token_bytes(_AUTHOR_BYTES)


def hand_over_metrics(connection: Redis, node: str, page: bytes, *, author: bytes) -> bool:
    """Leave a node's metrics for the exporter; False when what lay there was another author's.

    Raises QueueError when Redis cannot be reached.
    """
    value = author + zlib.compress(page)
    with redis_errors(f"metrics of node {node}"):
        before: Any = connection.set(names.node_key(node), value, ex=_KEEP_S, get=True)
    return before is None or before[:_AUTHOR_BYTES] == author


def relayed_nodes(connection: Redis) -> list[str]:
    """Names of the nodes that hand their metrics over, sorted."""
    prefix = names.node_key("")
    with redis_errors("list of nodes"):
        keys = [key.decode() for key in connection.scan_iter(match=f"{prefix}*", count=1000)]
    return sorted(key.removeprefix(prefix) for key in keys)


def relayed_metrics(connection: Redis, node: str) -> bytes | None:
    """What a node handed over last; None when it is gone."""
    with redis_errors(f"metrics of node {node}"):
        packed: Any = connection.get(names.node_key(node))
    return None if packed is None else zlib.decompress(packed[_AUTHOR_BYTES:])
