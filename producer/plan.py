"""The plan: read a data set once, keep what the model can take, write tokens in planned order, and run.json last.

Rows stream through: a block is read (or tokenized), judged, arranged into ranges and written, so memory does not
grow with the data set. Everything that can be refused without reading rows is refused before the first write; after
an error later on, what was written is removed. run.json is created exclusively and last: a run exists with it.
"""

import contextlib
import dataclasses
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from producer.arrange import Arranger, computed_tokens
from producer.inputs import Inputs, check_unchanged, hash_files, require_same, resolve_inputs
from producer.options import PlanOptions
from producer.provenance import provenance
from producer.tally import PlanProgress, PlanReport, Tally
from swathe import names
from swathe.chat import ChatEncoder, TextEncoder, describe_tokenizer, load_tokenizer
from swathe.clock import utc_now
from swathe.dataset import read_samples
from swathe.errors import ObjectMissingError, PlanError, RunMismatchError
from swathe.records import RunState, RunWatcher, read_run
from swathe.samples import Encoder, Rejected
from swathe.spec import RunId, RunSpec, TokenFile, TokenizerSpec, Totals, fingerprint, to_json
from swathe.store import Store
from swathe.tokens import TokenWriter, all_keys, check_files

__all__ = ["PlanOptions", "PlanProgress", "PlanReport", "plan"]

Progress = Callable[[PlanProgress], None]


def plan(
    store: Store,
    options: PlanOptions,
    *,
    model_roots: Sequence[Path] = (),
    progress: Progress | None = None,
    argv: Sequence[str] | None = None,
) -> PlanReport:
    """Plan a run into a store, or take up the run that is there if it is of the same inputs.

    Raises ConfigError, ModelError or PlanError when that cannot be done, RunMismatchError when the store holds
    another run; then the store is as it was before.
    """
    started_s = time.monotonic()
    inputs = resolve_inputs(options, model_roots)
    with contextlib.suppress(ObjectMissingError):
        run = read_run(store)
        require_same(store, inputs, run)
        return _reused(store, run)
    encoding = _Encoding(inputs)
    with _nothing_half_written(store):
        spec, tally = _write(store, inputs, encoding, progress)
        _require_space(store, spec, options)
        summary = {**tally.summary(), "warnings": encoding.warnings}
        report = _report(store, spec, summary, seconds=time.monotonic() - started_s)
        _write_provenance(store, inputs, summary, report, sys.argv if argv is None else argv)
        if store.create(names.RUN, to_json(spec, indent=1)):
            return report
        winner = read_run(store)
        if winner.fingerprint != spec.fingerprint:
            check_files(store, winner)  # says that what we wrote has hurt it
            msg = f"{store.url}: another plan was made here meanwhile; it is left as it is; use another folder"
            raise RunMismatchError(msg)
        return dataclasses.replace(report, spec=winner, reused=True)


class _Encoding:
    """The encoder that the data set's content needs, with what run.json says about it."""

    def __init__(self, inputs: Inputs) -> None:
        self.encode: Encoder | None = None
        self.tokenizer: TokenizerSpec | None = inputs.tokenizer
        self.warnings = inputs.dataset.columns.warnings
        if inputs.tokenizer is None:
            return
        folder = inputs.checkpoint.folder
        trusted = inputs.options.trust_remote_code
        tokenizer = load_tokenizer(folder, trust_remote_code=trusted)
        if inputs.dataset.columns.content == "text":
            self.encode = TextEncoder(tokenizer)
            return
        kwargs = inputs.tokenizer.chat_template_kwargs
        chat = ChatEncoder(tokenizer, kwargs)
        self.encode = chat
        self.warnings += chat.warnings
        self.tokenizer = describe_tokenizer(folder, chat.template, kwargs)


def _write(
    store: Store, inputs: Inputs, encoding: _Encoding, progress: Progress | None
) -> tuple[RunSpec, Tally]:
    """Write tokens/ and rejected.jsonl; returns the run they belong to."""
    data_files = hash_files(inputs.dataset, progress=progress and _hashing(progress))
    tally, writer = Tally(), TokenWriter(store)
    _stream(inputs, encoding.encode, writer, tally, progress)
    if not tally.samples:
        reason = next(iter(tally.summary()["rejected"]), "it has no rows")
        msg = (
            f"data set {inputs.dataset.location}: none of its {tally.rows} rows can be used (most: {reason}); "
            "nothing was planned; see docs/datasets.md"
        )
        raise PlanError(msg)
    files = writer.close()
    check_unchanged(inputs.dataset)
    store.write(names.REJECTED, _rejected_lines(tally.rejected, as_text=writer.ids_are_text))
    # An interrupted plan of other options may have left more files than this one has; a plan that won has not.
    if store.stat(names.RUN) is None:
        for stale in _token_keys(store) - all_keys(files):
            store.delete(stale)
    draft = RunSpec(
        run_id=RunId(secrets.token_hex(8)),
        fingerprint="",
        dataset=inputs.dataset_spec(data_files),
        model=inputs.checkpoint.spec,
        tokenizer=encoding.tokenizer,
        layers=inputs.layers,
        compute_dtype=inputs.compute_dtype,
        stored_dtype=inputs.stored_dtype,
        batching=inputs.batching,
        policies=inputs.policies,
        totals=_totals(tally, files),
        token_files=files,
    )
    return dataclasses.replace(draft, fingerprint=fingerprint(draft)), tally


def _hashing(progress: Progress) -> Callable[[float], None]:
    return lambda fraction: progress(PlanProgress(step="hashing", fraction=fraction))


def _stream(
    inputs: Inputs,
    encode: Encoder | None,
    writer: TokenWriter,
    tally: Tally,
    progress: Progress | None,
) -> None:
    """Read, judge, arrange and write, block by block."""
    arranger = Arranger(inputs.batching)
    form = inputs.batching.form
    steps = read_samples(
        inputs.dataset, inputs.limits, encode=encode, max_rows=inputs.options.limit
    )
    for step in steps:
        tally.rows += step.rows
        tally.read_samples += len(step.block)
        tally.read_tokens += len(step.block.input_ids)
        tally.rejected.extend(step.rejected)
        for block, starts in arranger.add(step.block):
            tally.add_planned(block.lengths, computed_tokens(block.lengths, starts, form))
            writer.add(block, starts)
        if progress is not None:
            progress(tally.progress(step.fraction))
    for block, starts in arranger.finish():
        tally.add_planned(block.lengths, computed_tokens(block.lengths, starts, form))
        writer.add(block, starts)


def _totals(tally: Tally, files: tuple[TokenFile, ...]) -> Totals:
    return Totals(
        rows=tally.rows,
        samples=tally.samples,
        tokens=tally.tokens,
        rejected=len(tally.rejected),
        ranges=sum(file.ranges for file in files),
        longest=tally.longest,
    )


def _rejected_lines(rejected: Sequence[Rejected], *, as_text: bool) -> Iterator[bytes]:
    """One JSON object a line; ids in the form that they have in the run."""
    for one in rejected:
        line = {"row": one.row, "id": str(one.id) if as_text else one.id, "reason": one.reason}
        yield json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _require_space(store: Store, spec: RunSpec, options: PlanOptions) -> None:
    free = store.free_bytes()
    if free is None or spec.state_bytes <= free or options.allow_low_space:
        return
    msg = (
        f"{store.url}: the run will store {spec.state_bytes / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free; nothing "
        "was planned; ask for fewer layers or rows, use another --out, or allow it with --allow-low-space"
    )
    raise PlanError(msg)


def _write_provenance(
    store: Store, inputs: Inputs, summary: dict[str, Any], report: PlanReport, argv: Sequence[str]
) -> None:
    value = provenance(
        argv,
        planned_at=utc_now(),
        inputs={
            file.name: {"size_bytes": file.size_bytes, "version": file.version}
            for file in inputs.dataset.files
        },
    )
    value |= {"plan_seconds": round(report.seconds, 3), "report": summary}
    data = json.dumps(value, indent=1, ensure_ascii=False).encode(errors="backslashreplace")
    store.write(names.PROVENANCE, [data + b"\n"])


def _report(
    store: Store,
    spec: RunSpec,
    summary: dict[str, Any],
    *,
    state: RunState | None = None,
    seconds: float = 0.0,
) -> PlanReport:
    """``state`` is that of a run that was there already."""
    return PlanReport(
        spec=spec,
        reused=state is not None,
        padding_ratio=summary.get("padding_ratio", 0.0),
        rejected=summary.get("rejected", {}),
        length_histogram=tuple((a, b, n) for a, b, n in summary.get("length_histogram", [])),
        free_bytes=store.free_bytes(),
        stored_bytes=spec.shard_bytes(state.stored_tokens, state.stored_samples) if state else 0,
        warnings=tuple(summary.get("warnings", [])),
        seconds=seconds,
    )


def _reused(store: Store, spec: RunSpec) -> PlanReport:
    """The report of a run that was planned before; what provenance.json does not say stays empty."""
    summary: dict[str, Any] = {}
    with contextlib.suppress(ObjectMissingError, ValueError, KeyError, TypeError):
        summary = dict(json.loads(store.read(names.PROVENANCE))["report"])
    return _report(store, spec, summary, state=RunWatcher(store, spec).read())


def _token_keys(store: Store) -> set[str]:
    """What plans wrote below tokens/. A folder of that name may have been there before, with a user's data set in it."""
    return {info.key for info in store.list(names.TOKENS) if names.is_of_run(info.key)}


@contextlib.contextmanager
def _nothing_half_written(store: Store) -> Iterator[None]:
    """After an error, remove what the plan wrote, and folders that are empty then."""
    root = store.local_path(names.RUN)
    was_there = root is not None and root.parent.exists()
    try:
        yield
    except BaseException:
        if store.stat(names.RUN) is None:
            for key in _token_keys(store):
                store.delete(key)
            store.delete(names.REJECTED)
            store.delete(names.PROVENANCE)
            if root is not None:
                with contextlib.suppress(OSError):
                    (root.parent / names.TOKENS).rmdir()
                    if not was_there:
                        root.parent.rmdir()
        raise
