"""Progress of every run the fleet knows, read from the stores in the background, so that a scrape never waits.

A run of 30,000 ranges costs one listing each time and only the new records. A run that is sealed is read once, from its
manifest, and shown for a day.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from producer.display import Pace
from swathe import log, names
from swathe.errors import RunMismatchError, SwatheError
from swathe.location import moved
from swathe.manifest import read_manifest
from swathe.queue import allowed_run_url
from swathe.records import RunState, RunWatcher, open_run
from swathe.settings import Settings
from swathe.spec import RunId

_REST_S: Final = 5.0
_SHARE: Final = 0.1
"""Of the time is spent reading at most."""
_PACE_S: Final = 600.0
SHOWN_AFTER_SEAL_S: Final = 86_400.0
STALE_S: Final = 300.0
"""What a store said longer ago is not shown."""

logger = log.get("exporter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One run at one moment."""

    url: str
    model: str
    observed_s: float
    samples: Mapping[str, int]
    ranges: Mapping[str, int]
    tokens: Mapping[str, int]
    stored_bytes: int
    remaining_bytes: int
    free_bytes: int | None
    eta_s: float | None
    complete: bool


class _Watched:
    """One run between two readings."""

    def __init__(self, url: str) -> None:
        self.store, self.spec = open_run(url)
        self._watcher = RunWatcher(self.store, self.spec)
        self._pace = Pace(_PACE_S)
        self._done: Progress | None = None
        self._sealed_s = 0.0

    def read(self) -> Progress | None:
        """A fresh reading; None for a run that was finished long ago. Raises SwatheError."""
        sealed = self.store.stat(names.MANIFEST)
        if sealed is None:
            self._done = None
            return self._open()
        if self._done is None or self._sealed_s != sealed.modified_s:
            self._done, self._sealed_s = self._sealed(), sealed.modified_s
        return self._done if time.time() - sealed.modified_s < SHOWN_AFTER_SEAL_S else None

    def _open(self) -> Progress:
        state = self._watcher.read()
        totals = self.spec.totals
        rates = self._pace.add(state, time.monotonic())
        stored, quarantined = state.stored_samples, state.quarantined_samples
        return Progress(
            url=self.store.url,
            model=self.spec.model.source,
            observed_s=time.time(),
            samples={
                "stored": stored,
                "rejected": totals.rejected,
                "quarantined": quarantined,
                "remaining": totals.rows - stored - totals.rejected - quarantined,
            },
            ranges=_ranges(state),
            tokens={"stored": state.stored_tokens, "planned": totals.tokens},
            stored_bytes=state.stored_bytes,
            remaining_bytes=(totals.tokens - state.stored_tokens) * self.spec.bytes_per_token,
            free_bytes=self.store.free_bytes(),
            eta_s=rates.eta_s,
            complete=False,
        )

    def _sealed(self) -> Progress:
        accounts, totals = read_manifest(self.store).accounts, self.spec.totals
        return Progress(
            url=self.store.url,
            model=self.spec.model.source,
            observed_s=time.time(),
            samples={
                "stored": accounts.stored,
                "rejected": accounts.rejected,
                "quarantined": accounts.quarantined,
                "remaining": 0,
            },
            ranges={"stored": totals.ranges},
            tokens={"stored": accounts.tokens, "planned": totals.tokens},
            stored_bytes=accounts.size_bytes,
            remaining_bytes=0,
            free_bytes=self.store.free_bytes(),
            eta_s=None,
            complete=True,
        )


def _ranges(state: RunState) -> dict[str, int]:
    return {
        "stored": len(state.records),
        "open": len(state.missing),
        "set_aside": len(state.failed),
        "invalid": len(state.invalid),
        "suspect": len(state.suspect),
    }


class Runs:
    """Readings of all known runs; ``known`` asks Redis which there are. ``errors`` counts readings that failed."""

    def __init__(self, known: Callable[[], Mapping[RunId, str]], settings: Settings) -> None:
        self._known = known
        self._roots = settings.store_roots
        self._watched: dict[RunId, _Watched] = {}
        self._progress: dict[RunId, Progress] = {}
        self._told: dict[RunId, str] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="runs", daemon=True)
        self.errors = 0

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()

    def latest(self) -> dict[RunId, Progress]:
        """The last reading of each run, unless it is old."""
        now_s = time.time()
        return {
            run_id: progress
            for run_id, progress in list(self._progress.items())
            if progress.complete or now_s - progress.observed_s <= STALE_S
        }

    def refresh(self) -> None:
        """Read every run once; one that cannot be read is counted and does not keep the others."""
        try:
            known = self._known()
        except SwatheError:
            return  # Redis is away: no news of which runs there are
        for run_id in self._progress.keys() - known.keys():
            del self._progress[run_id]
        for run_id in self._watched.keys() - known.keys():
            del self._watched[run_id]
        for run_id, url in known.items():
            try:
                self._read(run_id, url)
            except (
                RunMismatchError
            ) as error:  # planned anew in the same place: no trouble of the store's
                self._progress.pop(run_id, None)
                self._tell(run_id, url, error)
            except (SwatheError, OSError) as error:
                self.errors += 1
                self._tell(run_id, url, error)
            else:
                self._told.pop(run_id, None)

    def _read(self, run_id: RunId, url: str) -> None:
        if run_id not in self._watched or moved(self._watched[run_id].store) is not None:
            self._allow(run_id, url)
            watched = _Watched(url)
            self._allow(run_id, watched.store.url)
            if watched.spec.run_id != run_id:
                msg = (
                    f"{url} holds run {watched.spec.run_id} now, and not {run_id}; take that off the list with: "
                    f"swathe cancel {run_id}"
                )
                raise RunMismatchError(msg)
            self._watched[run_id] = watched
        progress = self._watched[run_id].read()
        if progress is None:
            self._progress.pop(run_id, None)
        else:
            self._progress[run_id] = progress

    def _tell(self, run_id: RunId, url: str, error: Exception) -> None:
        """Once; what goes on for hours must not fill the log."""
        if self._told.get(run_id) != str(error):
            self._told[run_id] = str(error)
            logger.warning("run cannot be read", run=run_id, url=url, error=str(error))

    def _allow(self, run_id: RunId, url: str) -> None:
        if self._roots:
            allowed_run_url(run_id, url, self._roots)

    def _loop(self) -> None:
        while not self._stop.is_set():
            started = time.monotonic()
            try:
                self.refresh()
            except Exception:
                self.errors += 1
                logger.exception("runs cannot be read")
            self._stop.wait(max(_REST_S, (time.monotonic() - started) / _SHARE))
