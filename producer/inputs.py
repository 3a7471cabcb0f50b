"""What a plan is made of, before a row is read: resolved, hashed, and compared with what an existing run was made of."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import xxhash

from producer.options import PlanOptions, dtypes, layer_slots
from swathe import architectures, names
from swathe.chat import describe_tokenizer
from swathe.checkpoint import Checkpoint, resolve
from swathe.dataset import Dataset, InputFile, Limits, for_each, open_dataset, unreadable
from swathe.errors import ConfigError, ObjectMissingError, PlanError, RunMismatchError
from swathe.spec import (
    Batching,
    ComputeDtype,
    DataFile,
    DatasetSpec,
    LayerSlot,
    Policies,
    RunSpec,
    StoredDtype,
    TokenizerSpec,
)
from swathe.store import Store

MAX_RANGE_TOKENS: Final = 4_000_000
_ROW_POLICIES: Final = (
    "max_length", "overlong", "min_length", "min_supervised", "min_supervised_ratio",
)  # fmt: skip
"""Policies that decide which rows are in a run."""
_HASH_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Everything that was asked for, resolved on this machine; the data files are not hashed yet."""

    options: PlanOptions
    checkpoint: Checkpoint
    dataset: Dataset
    tokenizer: TokenizerSpec | None
    layers: tuple[LayerSlot, ...]
    compute_dtype: ComputeDtype
    stored_dtype: StoredDtype
    batching: Batching
    policies: Policies
    limits: Limits
    """What a row must keep to."""

    def dataset_spec(self, files: tuple[DataFile, ...]) -> DatasetSpec:
        """The data set as run.json names it."""
        return DatasetSpec(
            location=self.dataset.location,
            format=self.dataset.format,
            content=self.dataset.columns.content,
            columns=dict(sorted(self.dataset.given_columns.items())),
            files=files,
            limit=self.options.limit,
        )


def resolve_inputs(options: PlanOptions, model_roots: Sequence[Path]) -> Inputs:
    """Find the model and the data set and check all options against them.

    Raises ConfigError, ModelError or PlanError; nothing was written.
    """
    if not 1 <= options.range_tokens <= MAX_RANGE_TOKENS:
        msg = f"range_tokens {options.range_tokens}: a range holds 1 to {MAX_RANGE_TOKENS} tokens"
        raise ConfigError(msg)
    if options.limit is not None and options.limit < 1:
        msg = f"limit {options.limit}: give a positive number of rows"
        raise ConfigError(msg)
    dataset = open_dataset(options.dataset, options.columns, split=options.split)
    checkpoint = resolve(
        options.model, model_roots=model_roots, trust_remote_code=options.trust_remote_code
    )
    spec = checkpoint.spec
    content = dataset.columns.content
    kwargs = options.chat_template_kwargs if content == "messages" else {}
    form = architectures.batch_form(spec.model_type)
    policies = _policies(options, spec.max_positions)
    compute_dtype, stored_dtype = dtypes(options.dtype, spec.checkpoint_dtype)
    return Inputs(
        options=options,
        checkpoint=checkpoint,
        dataset=dataset,
        tokenizer=None
        if content == "input_ids"
        else describe_tokenizer(checkpoint.folder, template_kwargs=kwargs),
        layers=layer_slots(options.layers, final=options.final, num_layers=spec.num_layers),
        compute_dtype=compute_dtype,
        stored_dtype=stored_dtype,
        batching=Batching(
            form=form,
            order=architectures.sample_order(form),
            window_rows=architectures.LENGTH_WINDOW_ROWS,
            range_tokens=options.range_tokens,
        ),
        policies=policies,
        limits=Limits(
            vocab_rows=spec.vocab_rows,
            max_length=policies.max_length,
            overlong=policies.overlong,
            min_length=policies.min_length,
            min_supervised=policies.min_supervised,
            min_supervised_ratio=policies.min_supervised_ratio,
        ),
    )


def _policies(options: PlanOptions, max_positions: int | None) -> Policies:
    """The user's wishes within what the model can take."""
    lengths = [n for n in (options.max_length, max_positions) if n is not None]
    return Policies(
        max_length=min(lengths, default=None),
        overlong=options.overlong,
        min_length=options.min_length,
        min_supervised=options.min_supervised,
        min_supervised_ratio=options.min_supervised_ratio,
    )


def hash_files(
    dataset: Dataset, *, progress: Callable[[float], None] | None = None
) -> tuple[DataFile, ...]:
    """Name, size and content hash of every file; ``progress`` gets the share of all bytes, from several threads.

    Raises PlanError when a file cannot be read.
    """
    total_bytes = sum(file.size_bytes for file in dataset.files)
    read_bytes, lock = 0, threading.Lock()

    def count(size_bytes: int) -> None:
        nonlocal read_bytes
        with lock:
            read_bytes += size_bytes
            if progress is not None:
                progress(min(read_bytes / total_bytes, 1.0) if total_bytes else 1.0)

    return tuple(hashed for _, hashed in for_each(dataset.files, partial(_data_file, count=count)))


def _data_file(file: InputFile, count: Callable[[int], None] = lambda _: None) -> DataFile:
    digest = xxhash.xxh3_128()
    try:
        with file.open() as source:
            while chunk := source.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
                count(len(chunk))
    except OSError as error:
        raise unreadable(file, error) from error
    return DataFile(name=file.name, size_bytes=file.size_bytes, xxh3=digest.hexdigest())


def check_unchanged(dataset: Dataset) -> None:
    """Raise PlanError when a file was written to since the data set was opened."""
    for file, unchanged in for_each(dataset.files, lambda file: file.is_unchanged):
        if not unchanged:
            msg = f"{file.location}: changed while it was read; nothing was planned; plan again"
            raise PlanError(msg)


def require_same(store: Store, inputs: Inputs, run: RunSpec) -> None:
    """Check that an existing run was made of these inputs and options.

    Form and order of the batches are the run's own: a newer swathe may pack what an older one padded, and the run
    goes on all the same. Raises RunMismatchError saying what differs.
    """
    differences = list(_differences(store, inputs, run))
    if differences:
        msg = (
            f"{store.url}: holds a run of other inputs ({'; '.join(differences)}); it is left as it is; "
            "plan into another folder, or give the same inputs to go on"
        )
        raise RunMismatchError(msg)


def _differences(store: Store, inputs: Inputs, run: RunSpec) -> Iterator[str]:
    mine = inputs.dataset_spec(run.dataset.files)
    pairs: dict[str, tuple[Any, Any]] = {
        "layers": ([s.layer for s in run.layers], [s.layer for s in inputs.layers]),
        "dtype": (run.stored_dtype, inputs.stored_dtype),
        "range_tokens": (run.batching.range_tokens, inputs.batching.range_tokens),
        "limit": (run.dataset.limit, mine.limit),
        "columns": (run.dataset.columns, mine.columns),
        "content": (run.dataset.content, mine.content),
        **{
            name: (getattr(run.policies, name), getattr(inputs.policies, name))
            for name in _ROW_POLICIES
        },
        "trust_remote_code": (
            run.model.trust_remote_code, inputs.checkpoint.spec.trust_remote_code,
        ),
    }  # fmt: skip
    for name, (theirs, ours) in pairs.items():
        if theirs != ours:
            yield f"{name}: {theirs} in the run, {ours} asked for"
    if run.model.identity != inputs.checkpoint.spec.identity:
        yield f"model: {run.model.source} in the run, {inputs.checkpoint.spec.source} has another identity"
    yield from _tokenizer_differences(inputs.tokenizer, run.tokenizer)
    yield from _file_differences(store, inputs.dataset, run.dataset.files)


def _tokenizer_differences(mine: TokenizerSpec | None, run: TokenizerSpec | None) -> Iterator[str]:
    if mine is None or run is None:
        return  # then the contents differ too, and that is said already
    if mine.sha256 != run.sha256:
        yield "tokenizer: other files than in the run"
    if mine.chat_template_kwargs != run.chat_template_kwargs:
        yield (
            f"chat_template_kwargs: {run.chat_template_kwargs} in the run, {mine.chat_template_kwargs} asked for"
        )


def _file_differences(
    store: Store, dataset: Dataset, planned: tuple[DataFile, ...]
) -> Iterator[str]:
    """Files by name and size; the content only of those that were written to since the plan."""
    names_now, names_then = [f.name for f in dataset.files], [f.name for f in planned]
    if names_now != names_then:
        yield f"data set: {len(names_then)} files in the run, {len(names_now)} here, or of other names"
        return
    versions = planned_versions(store)
    for file, then in zip(dataset.files, planned, strict=True):
        if file.size_bytes != then.size_bytes:
            yield f"data set: {file.name} has {file.size_bytes} bytes, {then.size_bytes} in the run"
        elif versions.get(file.name) != file.version and _data_file(file) != then:
            yield f"data set: {file.name} has other content than in the run"


def planned_versions(store: Store) -> dict[str, str]:
    """Which writes of the data files the plan saw; empty where that is not known."""
    with contextlib.suppress(ObjectMissingError, ValueError, KeyError, TypeError, AttributeError):
        inputs = json.loads(store.read(names.PROVENANCE))["inputs"]
        return {name: str(entry["version"]) for name, entry in inputs.items()}
    return {}
