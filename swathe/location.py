"""Where a run is, when it is being moved or was: every opener follows the two markers of ``swathe move``.

A run that was moved leaves ``moved.json`` behind, which names its new place; creating it is the one moment at which the
run changes place. A place that is being filled holds ``moving.json`` and is no run yet: whoever opens it is led back to
the source, until the source's ``moved.json`` is of the same move.

Whoever had the run open before looks again *after* each write or reading (``at_home``). The mover lists the source after
it created the marker. So of a writer and the mover at least one sees the other, in any store where a finished write is
visible to all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from swathe import names
from swathe.errors import ConfigError, ObjectMissingError, SwatheError
from swathe.spec import Arrival, Departure, from_json
from swathe.store import Store, open_store

_MOST_MOVES: Final = 64

_Value = TypeVar("_Value")


def open_home(run: str | Path | Store) -> Store:
    """The store that holds a run now, by a URL under which it is or was, or a store there.

    Raises ConfigError when the markers lead round in a circle.
    """
    store = open_store(run) if isinstance(run, str | Path) else run
    for _ in range(_MOST_MOVES):
        onward = _onward(store)
        if onward is None:
            return store
        store = onward
    msg = f"{run}: its moved.json leads on and on; delete the moved.json of the place where the run is"
    raise ConfigError(msg)


def moved(store: Store) -> Store | None:
    """Where the run went that was in this store when it was opened; None when it is still here. One request."""
    return None if store.stat(names.MOVED) is None else open_home(store)


def at_home(store: Store, action: Callable[[Store], _Value]) -> _Value:
    """Do something where the run is, and once more when it was moved meanwhile; ``action`` must bear repeating.

    Errors that are worth another attempt of the whole work pass: a store that is away would only be asked once more.
    """
    store = moved(store) or store
    while True:
        try:
            done = action(store)
        except SwatheError as error:
            if error.retryable or (onward := moved(store)) is None:
                raise
        else:
            if (onward := moved(store)) is None:
                return done
        store = onward


def read_departure(store: Store) -> Departure | None:
    """The marker of a run that left this store."""
    try:
        data = store.read(names.MOVED)
    except ObjectMissingError:
        return None
    return from_json(Departure, data, origin=f"{store.url}/{names.MOVED}")


def read_arrival(store: Store) -> Arrival | None:
    """The marker of a run on its way to this store."""
    try:
        data = store.read(names.MOVING)
    except ObjectMissingError:
        return None
    return from_json(Arrival, data, origin=f"{store.url}/{names.MOVING}")


def _onward(store: Store) -> Store | None:
    """The next place to look; None when the run is here (or nowhere)."""
    if (arrival := read_arrival(store)) is not None:
        source = open_store(arrival.source)
        departure = read_departure(source)
        if departure is not None and departure.move_id == arrival.move_id:
            return None  # the mover has only to clean up
        if departure is None and source.stat(names.RUN) is None:
            msg = (
                f"{store.url}: a run is on its way here from {source.url}, which this machine does not see; go on with "
                f"swathe move {source.url} {store.url}, or delete {names.MOVING} here"
            )
            raise ObjectMissingError(msg)
        return source
    departure = read_departure(store)
    return None if departure is None else open_store(departure.url)
