"""``hs_*.safetensors`` folders become a run: two passes, resumable.

The first pass reads headers and ids only and plans: a row whose file is missing, cut short, of another shape or of other
tokens is rejected with its reason. The second copies states range by range, looks at every value, quarantines samples
that hold NaN or infinity, and commits each range like a worker does. Importing again goes on with the open ranges.
"""

import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import xxhash

from swathe import names
from swathe.errors import ConfigError, ObjectMissingError, PlanError, RunMismatchError
from swathe.importing.folder import BadSampleError, Row, data_files, read_rows, state_file
from swathe.importing.normed import NormCheck
from swathe.importing.ranges import RangeImporter
from swathe.manifest import seal
from swathe.records import RunWatcher, read_run
from swathe.samples import Rejected, SampleBlock, offsets_of
from swathe.spec import (
    Batching,
    ComputeDtype,
    DataFile,
    DatasetSpec,
    Layer,
    LayerSlot,
    ModelSpec,
    Policies,
    RunId,
    RunSpec,
    StoredDtype,
    Totals,
    fingerprint,
    to_json,
)
from swathe.store import Store
from swathe.tokens import TokenWriter

_HEADERS_AT_ONCE: Final = 8
_HEADERS_AHEAD: Final = 1024
_HASH_CHUNK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """``layer_ids`` as speculators counts (``hidden_states[k]``), without the final one; ``model`` that computed them.

    ``final_norm`` is a ``final_norm.safetensors`` of another run of the model: with it, states that were stored after the
    norm are recognised and refused, and formats that want them after the norm can be exported.
    """

    model: ModelSpec
    layer_ids: tuple[int, ...]
    final_norm: Path | None = None
    range_tokens: int = 8192

    def layers(self) -> tuple[LayerSlot, ...]:
        """Our slots. Raises ConfigError for ids that name no block's output."""
        depth = self.model.num_layers
        bad = [k for k in self.layer_ids if not 1 <= k < depth]
        if bad or not self.layer_ids or len(set(self.layer_ids)) != len(self.layer_ids):
            msg = (
                f"layer ids {list(self.layer_ids)}: give the different ids that the states were made with, from 1 to "
                f"{depth - 1} (0 is the embedding, which a run does not hold; {depth} is the final slot, left out here)"
            )
            raise ConfigError(msg)
        layers: list[Layer] = [*(k - 1 for k in self.layer_ids), "final"]
        meanings = [f"output of decoder block {k - 1} (0-based)" for k in self.layer_ids]
        meanings.append("output of the last decoder block, before the model's final norm")
        return tuple(
            LayerSlot(slot=slot, layer=layer, meaning=meaning)
            for slot, (layer, meaning) in enumerate(zip(layers, meanings, strict=True))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportProgress:
    """``ranges_done`` of ``ranges``; during the first pass, when these are not known yet, only ``rows``."""

    rows: int
    ranges_done: int
    ranges: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportReport:
    """What became of the rows. ``norm_checked`` tells whether the last slot is known to be before the norm."""

    rows: int
    stored: int
    rejected: int
    quarantined: int
    size_bytes: int
    norm_checked: bool
    seconds: float


OnProgress = Callable[[ImportProgress], None]


def import_speculators(
    source: Path, store: Store, options: ImportOptions, *, progress: OnProgress | None = None
) -> ImportReport:
    """Import a folder into the run at ``store`` and seal it.

    Raises PlanError when the folder is none of speculators' or nothing in it can be used, ConfigError for impossible
    layer ids, RunMismatchError when ``store`` holds another run, IntegrityError when the last slot is after the norm.
    """
    started, report = time.monotonic(), progress or (lambda _: None)
    norm, is_new = _norm(store, options)
    check = None if norm is None else NormCheck(norm, origin=str(options.final_norm or store.url))
    spec = _planned(source, store, options, report)
    importer = RangeImporter(source, store, spec, check)
    state = RunWatcher(store, spec).read()
    if norm is not None and is_new:
        # Ranges of an earlier call that had no norm. Where one is in the run, all its ranges were checked.
        for range_id in state.records:
            importer.check(range_id)
        store.create(names.FINAL_NORM, norm)
    for done, range_id in enumerate(state.missing, start=len(state.records)):
        report(ImportProgress(rows=spec.totals.rows, ranges_done=done, ranges=spec.totals.ranges))
        importer.commit(range_id)
    accounts = seal(store).accounts
    return ImportReport(
        rows=accounts.rows,
        stored=accounts.stored,
        rejected=accounts.rejected,
        quarantined=accounts.quarantined,
        size_bytes=accounts.size_bytes,
        norm_checked=check is not None and check.can_tell,
        seconds=time.monotonic() - started,
    )


def _norm(store: Store, options: ImportOptions) -> tuple[bytes | None, bool]:
    """The norm to check with, that of an earlier call where none is given now; and whether it is new to the run."""
    try:
        held = store.read(names.FINAL_NORM)
    except ObjectMissingError:
        held = None
    given = options.final_norm
    return held if given is None else given.read_bytes(), held is None


def _planned(source: Path, store: Store, options: ImportOptions, report: OnProgress) -> RunSpec:
    """The run to fill: the one that is there, if it is of the same folder and layers, or a new plan."""
    try:
        spec = read_run(store)
    except ObjectMissingError:
        return _plan(source, store, options, report)
    same = (
        spec.dataset.files == _hashed(data_files(source))
        and spec.layers == options.layers()
        and spec.model.identity == options.model.identity
    )
    if not same:
        msg = f"{store.url}: holds another run (data, layers or model differ); it is left as it is; use another folder"
        raise RunMismatchError(msg)
    return spec


class _Plan:
    """Gathers good rows into ranges, each about ``range_tokens`` long."""

    def __init__(self, store: Store, range_tokens: int) -> None:
        self.writer = TokenWriter(store)
        self.rejected: list[Rejected] = []
        self.samples = self.tokens = self.ranges = self.longest = 0
        self._budget = range_tokens
        self._pending: list[Row] = []
        self._pending_tokens = 0

    def add(self, row: Row) -> None:
        length = len(row.input_ids)
        if self._pending and self._pending_tokens + length > self._budget:
            self.flush()
        self._pending.append(row)
        self._pending_tokens += length
        self.longest = max(self.longest, length)

    def flush(self) -> None:
        rows = self._pending
        if not rows:
            return
        block = SampleBlock(
            row=np.array([row.row for row in rows], np.int64),
            ids=pa.array([row.row for row in rows], pa.int64()),
            input_ids=np.concatenate([row.input_ids for row in rows]),
            loss_mask=np.concatenate([row.loss_mask for row in rows]),
            offsets=offsets_of(np.array([len(row.input_ids) for row in rows])),
        )
        self.writer.add(block, np.zeros(1, np.int64))
        self.samples += len(rows)
        self.tokens += self._pending_tokens
        self.ranges += 1
        self._pending, self._pending_tokens = [], 0


def _plan(source: Path, store: Store, options: ImportOptions, report: OnProgress) -> RunSpec:
    layers, files = options.layers(), data_files(source)
    plan, dtype, rows = _Plan(store, options.range_tokens), "", 0
    for row, found in _checked(source, files, options):
        rows += 1
        reason = found if found.startswith("!") else ""
        if not reason and dtype and found != dtype:
            reason = f"!hidden states are {found}, those before {dtype}"
        if reason:
            plan.rejected.append(Rejected(row=row.row, id=row.row, reason=reason[1:]))
        else:
            dtype = found
            plan.add(row)
        if rows % 1000 == 0:
            report(ImportProgress(rows=rows, ranges_done=0, ranges=0))
    plan.flush()
    if not plan.samples:
        why = plan.rejected[0].reason if plan.rejected else "it has no rows"
        msg = f"{source}: none of its {rows} rows can be imported (first: {why}); nothing was imported"
        raise PlanError(msg)
    spec = _spec(source, options, layers, plan, rows, dtype)
    lines = [json.dumps(dataclasses.asdict(one)).encode() + b"\n" for one in plan.rejected]
    store.write(names.REJECTED, lines)
    made = {"format_version": 1, "imported_from": str(source), "rows": rows}
    store.write(names.PROVENANCE, [json.dumps(made, indent=1).encode()])
    store.create(names.RUN, to_json(spec, indent=1))
    return read_run(store)


def _checked(source: Path, files: list[Path], options: ImportOptions) -> Iterator[tuple[Row, str]]:
    """Each row with the dtype of its states, or with ``!`` and the reason why it cannot be imported."""
    slots, hidden_size = len(options.layer_ids) + 1, options.model.hidden_size

    def check(row: Row) -> str:
        if len(row.input_ids) == 0 or len(row.loss_mask) != len(row.input_ids):
            return f"!{len(row.input_ids)} tokens with a loss mask of {len(row.loss_mask)}"
        if int(row.loss_mask.max()) > 1:
            return f"!loss_mask holds {row.loss_mask.max()}, neither 0 nor 1"
        if not 0 <= int(row.input_ids.min()) <= int(row.input_ids.max()) < options.model.vocab_rows:
            return "!a token id that the model does not know"
        try:
            return state_file(source, row, slots, hidden_size).dtype
        except BadSampleError as error:
            return f"!{error}"

    with ThreadPoolExecutor(_HEADERS_AT_ONCE, "headers") as pool:
        batch: list[Row] = []
        for row in read_rows(files):
            batch.append(row)
            if len(batch) == _HEADERS_AHEAD:
                yield from zip(batch, pool.map(check, batch), strict=True)
                batch = []
        yield from zip(batch, pool.map(check, batch), strict=True)


def _spec(
    source: Path,
    options: ImportOptions,
    layers: tuple[LayerSlot, ...],
    plan: _Plan,
    rows: int,
    dtype: str,
) -> RunSpec:
    stored: StoredDtype = dtype  # type: ignore[assignment]
    computed: ComputeDtype = "bfloat16" if dtype == "float8_e4m3fn" else dtype  # type: ignore[assignment]
    draft = RunSpec(
        run_id=RunId(secrets.token_hex(8)),
        fingerprint="",
        dataset=DatasetSpec(
            location=str(source),
            format="arrow",
            content="input_ids",
            files=_hashed(data_files(source)),
        ),
        model=options.model,
        layers=layers,
        compute_dtype=computed,
        stored_dtype=stored,
        batching=Batching(
            form="packed", order="user", window_rows=0, range_tokens=options.range_tokens
        ),
        policies=Policies(min_supervised=0),
        totals=Totals(
            rows=rows,
            samples=plan.samples,
            tokens=plan.tokens,
            rejected=len(plan.rejected),
            ranges=plan.ranges,
            longest=plan.longest,
        ),
        token_files=plan.writer.close(),
    )
    return dataclasses.replace(draft, fingerprint=fingerprint(draft))


def _hashed(files: list[Path]) -> tuple[DataFile, ...]:
    return tuple(
        DataFile(name=path.name, size_bytes=path.stat().st_size, xxh3=_hash(path)) for path in files
    )


def _hash(path: Path) -> str:
    digest: Any = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return str(digest.hexdigest())
