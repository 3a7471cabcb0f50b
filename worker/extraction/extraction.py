"""What a worker does with one range: read it, compute it, commit it. The queue's threads call the three steps.

Reading and committing run beside the device; only ``compute`` owns it. The model is loaded by the first range that
needs it, on the compute thread, and exchanged only when a range of another model comes.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from swathe import checkpoint, log, names
from swathe.clock import utc_now
from swathe.errors import ConfigError, WorkerError
from swathe.records import read_record
from swathe.settings import Settings
from swathe.spec import (
    BatchForm,
    CanaryRecord,
    FailedMarker,
    Layer,
    RangeId,
    RangeJob,
    RangeRecord,
    RunSpec,
    to_json,
)
from worker.engine import selftest
from worker.engine.canary import canary_bounds, one_in, take_canary
from worker.engine.engine import Engine
from worker.engine.ranges import RangeStates
from worker.engine.rates import matmul_flops, tokens_that_fit, warm_up
from worker.extraction.isolation import Isolation, Trials
from worker.extraction.open_runs import OpenRuns
from worker.extraction.room import Room
from worker.extraction.sink import Author
from worker.extraction.software import software_versions
from worker.extraction.steps import Computed, OpenRun, Prepared, Started
from worker.extraction.store_watch import StoreWatch
from worker.extraction.vouching import vouched
from worker.loop.contract import STORED
from worker.model.device_errors import device_errors
from worker.model.hidden_states import HiddenStateModel, load_model
from worker.model.norm import store_final_norm
from worker.telemetry import accounts
from worker.telemetry.totals import Telemetry

_Step = TypeVar("_Step")

logger = log.get("extraction")


class Extraction:
    """The work of one worker process on one device."""

    apart_command: tuple[str, ...] = (sys.executable, "-P", "-m", "worker.cli", "apart")
    """Starts a process made to die; see ``worker.apart``."""

    def __init__(
        self,
        *,
        name: str,
        device: torch.device,
        device_id: str,
        settings: Settings,
        telemetry: Telemetry,
        patient: bool = True,
    ) -> None:
        """Who is ``patient`` keeps what is computed until there is room for it in the store."""
        self._name = name
        self._device = device
        self._device_id = device_id
        self._settings = settings
        self._telemetry = telemetry
        self.watch = StoreWatch(telemetry, limit_s=settings.store_stall_s)
        self._runs = OpenRuns(settings, telemetry, self.watch)
        self._room = Room(telemetry, self.watch) if patient else None
        self._engine: Engine | None = None
        self._model: HiddenStateModel | None = None
        self._engine_key: tuple[object, ...] | None = None
        self._on_device: Started | None = None
        self._last_run: OpenRun | None = None
        self._measured: torch.dtype | None = None
        self._choose = one_in(settings.canary_every)
        self._bounds: dict[Layer, float] = {}
        self._software = software_versions(device)
        self.on_progress: Callable[[], None] = lambda: None
        """Told whenever the device, or the loading of a model, moved."""

    @property
    def ready(self) -> bool:
        """Whether a model is loaded."""
        return self._engine is not None

    def waits_for_buffer(self) -> bool:
        """Whether computing stands still because a slow store holds every host buffer."""
        engine = self._engine
        return engine is not None and engine.ring.waiting

    def waits_for_room(self) -> bool:
        """Whether something computed cannot be stored because the store is full."""
        return self._room is not None and self._room.waiting

    @property
    def store_retries(self) -> int:
        """Requests to stores after the first; stores that never repeat one count none."""
        return self._runs.store_retries

    def note_free_space(self) -> None:
        """Look how much room the store last written to has; cheap, and never raises."""
        accounts.note_free_space(self._telemetry, self._last_run.store if self._last_run else None)

    def prepare(self, job: RangeJob) -> object:
        """Open the job's run and read the range's tokens, unless its record is there already.

        Raises RunMismatchError when the URL holds another run than the job's.
        """
        with self._telemetry.stage("read"), self.watch.operation():
            prepared = self._runs.at_home(
                self._runs.open(job), lambda run: _read(run, job.range_id)
            )
        if prepared is None:
            self._telemetry.outcome("present")
            return STORED
        return prepared

    @property
    def overlaps(self) -> bool:
        """On a GPU the device works while this thread prepares the next range."""
        return self._device.type != "cpu"

    def compute(self, prepared: object) -> object:
        """Put a range on the device, behind the one that is there; its states go to a buffer of the engine's."""
        prepared = _expect(Prepared, prepared)
        with device_errors():
            engine = self._engine_for(prepared.run)
            run, tokens = prepared.run, prepared.tokens
            keep = self._choose(tokens.range_id, tokens.count)
            started = engine.start(tokens, stored=run.spec.stored_dtype, keep=keep)
            self._on_device = Started(run=run, engine=engine, started=started)
        return self._on_device

    def finish(self, started: object) -> object:
        """Wait for a range that ``compute`` put on the device; done once, with the model that computed it."""
        started = _expect(Started, started)
        if started.computed is None:
            # Let go of it: a model that has to make room for another must not hang on a range that waits its turn.
            engine, started.engine = started.engine, None
            if engine is None:
                msg = "the range was to be finished before, and that failed"
                raise WorkerError(msg)
            with device_errors():
                states = engine.finish(started.started)
                if self._on_device is started:
                    self._on_device = None
                canary = self._take_canary(started.run, states)
            started.computed = self._computed(started.run, states, canary)
        return started.computed

    def compute_alone(
        self, prepared: object, on_sample: Callable[[int], None] = lambda _index: None
    ) -> object:
        """Compute each sample by itself on the reference path; ``on_sample`` is told its index before."""
        prepared = _expect(Prepared, prepared)
        with device_errors():
            states = self._engine_for(prepared.run).alone(
                prepared.tokens, on_sample, stored=prepared.run.spec.stored_dtype
            )
        return self._computed(prepared.run, states, None)

    def compute_apart(self, job: RangeJob) -> None:
        """Have the range computed and committed by processes made to die, the model's memory freed for them."""
        run = self._runs.open(job)
        self._unload()
        trials = Trials(
            self.apart_command,
            worker=self._name,
            device=self._device_id,
            on_progress=self.on_progress,
        )
        Isolation(trials).resolve(job)
        record = self._runs.at_home(run, lambda run: read_record(run.store, run.spec, job.range_id))
        accounts.note_record(self._telemetry, record)

    def _unload(self) -> None:
        self._engine = self._model = self._engine_key = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _computed(self, run: OpenRun, states: RangeStates, canary: CanaryRecord | None) -> Computed:
        accounts.note_states(self._telemetry, states)
        computed = Computed(run=run, states=states, canary=canary, author=self._author())
        # A range whose lease was lost is dropped without a word: its buffer must come back all the same.
        weakref.finalize(computed, accounts.let_go, self._telemetry, states)
        return computed

    def publish(self, computed: object) -> None:
        """Commit the range; when this returns its record is durable, ours or another worker's. A full store is waited for."""
        computed = _expect(Computed, computed)
        states = computed.states

        def commit(run: OpenRun) -> RangeRecord | None:
            self._last_run = run
            return run.sink.commit(
                states.samples,
                states.tensors if states.samples.count else None,
                states.quarantined,
                computed.author,
                states.stats.stage_seconds,
            )

        def store() -> RangeRecord | None:
            return self._runs.commit(computed.run, commit)

        try:
            with self.watch.operation():
                record = self._room.wait_for(store) if self._room else store()
        finally:
            states.release()
        if record is not None:
            accounts.note_record(self._telemetry, record)
        if computed.canary is not None:
            self._keep_canary(computed.run, computed.canary)

    def set_aside(self, job: RangeJob, reason: str, history: Sequence[str]) -> None:
        """Leave a durable marker, so that no flushed queue brings the range back unasked."""
        run = self._runs.open(job)
        marker = FailedMarker(
            run_id=run.spec.run_id,
            range_id=job.range_id,
            reason=reason,
            history=tuple(history),
            worker=self._name,
            failed_at=utc_now(),
        )
        key, data = names.failed(job.range_id), to_json(marker, indent=1)
        self._runs.at_home(run, lambda run: run.store.create(key, data))

    def _take_canary(self, run: OpenRun, states: RangeStates) -> CanaryRecord | None:
        """Now and then compute a stored sample again. Raises WorkerError when the device computes wrong."""
        range_id = states.samples.range_id
        if states.kept is None or self._model is None:
            return None
        with self._telemetry.stage("canary"):
            taken = take_canary(self._model, states, self._bounds)
        canary = taken.record(run.spec.run_id, worker=self._name, device=self._device_id)
        accounts.note_canary(self._telemetry, canary)
        if canary.passed:
            return canary
        states.release()
        self._keep_canary(run, canary)
        logger.error("canary failed", range_id=range_id, row=canary.row, errors=canary.errors)
        msg = (
            f"device {self._device_id} computed row {canary.row} of range {range_id} wrong: errors {canary.errors}, "
            f"allowed {canary.bounds}, stored as computed: {canary.stored_as_computed}; the worker stops, and what this device stored since its last good canary is "
            "suspect: have it done again with swathe verify --repair"
        )
        raise WorkerError(msg)

    def _keep_canary(self, run: OpenRun, canary: CanaryRecord) -> None:
        """Canaries are never changed: of two on one range the first stays, but a failed one is never lost."""
        key, data = names.canary(canary.range_id), to_json(canary, indent=1)

        def keep(run: OpenRun) -> None:
            if not run.store.create(key, data) and not canary.passed:
                run.store.write(key, [data])

        self._runs.at_home(run, keep)

    def _engine_for(self, run: OpenRun) -> Engine:
        spec = run.spec
        key = (spec.model.identity, spec.layers, spec.compute_dtype, spec.batching.form)
        if self._engine is None or key != self._engine_key:
            # The old model's memory must be free for the new one, so what it still computes is finished first.
            if self._on_device is not None:
                self.finish(self._on_device)
            self._unload()
            with self._telemetry.stage("load"), vouched(self.on_progress):
                self._engine = self._load(spec)
            self._engine_key = key
            self._write_final_norm(run)
        return self._engine

    def _load(self, spec: RunSpec) -> Engine:
        self._measure(getattr(torch, spec.compute_dtype))
        found = checkpoint.resolve_like(spec.model, model_roots=self._settings.model_roots)
        source = f"random:{found.config_path}" if spec.model.random_weights else found.folder
        model = load_model(
            source,
            layers=[slot.layer for slot in spec.layers],
            dtype=spec.compute_dtype,
            device=self._device,
            kernels=self._settings.kernels,
            trust_remote_code=spec.model.trust_remote_code,
        )
        logger.info(
            "model loaded",
            model=spec.model.source,
            load_s=round(model.load_s, 1),
            peak_host_bytes=model.peak_host_bytes,
            kernels=model.kernels,
        )
        warm_up(model, spec.batching.form, tokens=spec.batching.range_tokens)
        test = selftest.prove(
            model,
            spec.batching.form,
            failure=self._settings.selftest_failure,
            lengths=selftest.LENGTHS if self._device.type == "cuda" else selftest.SHORT_LENGTHS,
        )
        self._model, self._bounds = model, canary_bounds(test)
        return Engine(
            model,
            form=test.form,
            max_batch_tokens=self._batch_tokens(model, test.form, spec),
            # All but the one being read; two are on the device before the first of them is finished.
            buffers=max(2, self._settings.jobs_in_flight - 1),
            on_progress=self.on_progress,
        )

    def _measure(self, dtype: torch.dtype) -> None:
        """The device's matrix rate, while its memory is still free: utilizations are shares of it."""
        if dtype != self._measured:
            repeats = 20 if self._device.type == "cuda" else 2
            self._telemetry.set("matmul_flops", matmul_flops(self._device, dtype, repeats=repeats))
            self._measured = dtype
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _batch_tokens(self, model: HiddenStateModel, form: BatchForm, spec: RunSpec) -> int:
        """A range is one batch, unless the operator or the device's memory says less."""
        wanted = self._settings.max_batch_tokens or max(
            spec.batching.range_tokens, spec.totals.longest
        )
        fit = tokens_that_fit(model, form, wanted=wanted)
        if fit is not None and fit < wanted:
            logger.warning("the device's memory holds smaller batches", tokens=fit, wanted=wanted)
        return wanted if fit is None else fit

    def _write_final_norm(self, run: OpenRun) -> None:
        """Keep the final norm beside the states, so that exports need no model. The first worker's stays."""

        def write(run: OpenRun) -> None:
            if self._model is not None and run.store.stat(names.FINAL_NORM) is None:
                store_final_norm(run.store, self._model.final_norm(), run.spec.fingerprint)

        self._runs.at_home(run, write)

    def _author(self) -> Author:
        if self._model is None:
            msg = "a range was computed without a model; this is a bug"
            raise ConfigError(msg)
        return Author(
            worker=self._name,
            device=self._device_id,
            software=self._software,
            kernels=self._model.kernels,
        )


def _read(run: OpenRun, range_id: RangeId) -> Prepared | None:
    """A range's tokens, or None when it has a record."""
    if run.sink.committed(range_id):
        return None
    return Prepared(run=run, tokens=run.tokens.read_range(range_id))


def _expect(kind: type[_Step], value: object) -> _Step:
    if not isinstance(value, kind):
        msg = f"{type(value).__name__} came where {kind.__name__} was due; this is a bug"
        raise TypeError(msg)
    return value
