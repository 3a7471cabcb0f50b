"""Objects of a run from one store to another: streamed, hashed on the way, counted only when proven.

A range's record is created at the destination after its shard is there, durable, with the size and hash of the record. No
more than a few pieces of each shard under way are in memory, whatever its size.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from swathe import names
from swathe.errors import IntegrityError, ObjectMissingError
from swathe.spec import RangeId, RangeRecord, from_json
from swathe.store import Store, Written

_PIECE_BYTES: Final = 16 << 20
SHARDS_AT_ONCE: Final = 4


def carry_object(source: Store, dest: Store, key: str, size_bytes: int) -> Written:
    """Copy an object of a known size; replaces one of the same name."""

    def pieces() -> Iterator[bytes]:
        for at in range(0, size_bytes, _PIECE_BYTES):
            yield source.read_range(key, at, min(_PIECE_BYTES, size_bytes - at))

    return dest.write(key, pieces())


def carry_known(source: Store, dest: Store, key: str, size_bytes: int, xxh3: str) -> None:
    """Copy an object whose hash is known. Raises IntegrityError when the source does not hold it as it should be."""
    info = source.stat(key)
    if info is None or info.size_bytes != size_bytes:
        found = "is missing" if info is None else f"has {info.size_bytes} bytes"
        msg = f"{source.url}/{key}: {found}, {size_bytes} bytes are recorded"
        raise IntegrityError(msg, key=key)
    written = carry_object(source, dest, key, size_bytes)
    if (written.size_bytes, written.xxh3) != (size_bytes, xxh3):
        dest.delete(key)
        msg = f"{source.url}/{key}: content does not have the recorded hash"
        raise IntegrityError(msg, key=key)


def carry_range(source: Store, dest: Store, record: RangeRecord) -> bool:
    """Copy a range's shard, then create its record; False when the destination had a record of its own by then.

    Raises IntegrityError when the shard is not what its record says, or the record is another by now.
    """
    key = names.record(record.range_id)
    if record.shard is not None:
        carry_known(source, dest, record.shard, record.size_bytes, record.xxh3)
    data = source.read(key)
    if from_json(RangeRecord, data, origin=f"{source.url}/{key}") != record:
        msg = f"{source.url}/{key}: the range was done again meanwhile"
        raise IntegrityError(msg, key=key)
    return dest.create(key, data)


def carry_ranges(
    source: Store, dest: Store, records: Iterable[RangeRecord], done: Callable[[RangeRecord], None]
) -> dict[RangeId, str]:
    """Copy ranges side by side; ``done`` is told after each. Returns what is wrong with those that are damaged."""
    damaged: dict[RangeId, str] = {}

    def carry(record: RangeRecord) -> str | None:
        try:
            carry_range(source, dest, record)
        except (IntegrityError, ObjectMissingError) as error:
            return str(error)
        return None

    pool = ThreadPoolExecutor(SHARDS_AT_ONCE, "carry")
    try:
        work = [(record, pool.submit(carry, record)) for record in records]
        for record, future in work:
            if (problem := future.result()) is None:
                done(record)
            else:
                damaged[record.range_id] = problem
    finally:
        # After an error or Ctrl-C: what is under way ends, the rest is not begun.
        pool.shutdown(cancel_futures=True)
    return damaged
