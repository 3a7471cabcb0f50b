"""One range of samples in, its hidden states out, in planned order, in a host buffer.

``start`` cuts the range into batches and queues their forward passes and copies; ``finish`` waits, checks and hands
over. On a GPU ``start`` returns while the device still works, so a caller that starts the next range before it
finishes the last one leaves no gap on the device. Writing goes on meanwhile from older buffers of the ring.

A sample whose states are not sound is computed again, alone, on the reference path, and quarantined if that fails too;
its neighbours are not touched. Soundness is judged by what the model put out, before ``layout`` makes of it what is
stored. ``alone`` computes a whole range that way. Running out of memory halves the batch budget for good; a sample that does not fit even
alone is quarantined.

Shapes: T tokens of the range, S of one sample, K slots, H hidden size.
"""

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from swathe import log
from swathe.errors import WorkerError
from swathe.spec import BatchForm, Quarantined, StoredDtype
from swathe.tokens import RangeTokens
from worker.engine.layout import close_gaps, layout_of, views
from worker.engine.ranges import RangeStates, RangeStats, StateModel
from worker.engine.soundness import fault, magnitudes
from worker.engine.started import StartedRange
from worker.engine.transfer import Copier, HostRing, Timer, contiguous_runs
from worker.model.batch import Batch, cut_batches
from worker.model.device_errors import breaks_device

__all__ = ["Engine", "RangeStates", "RangeStats", "StartedRange", "StateModel"]

_ROW_MULTIPLE_CUDA: Final = 128
"""Packed rows are filled up to a multiple of this, so that kernels meet aligned shapes: at most 0.4 % of 32k tokens."""


def _nothing(_sample: int = 0) -> None:
    return None


class Engine:
    """Computes ranges on one device with one model. All calls but ``RangeStates.release`` from one thread."""

    def __init__(
        self,
        model: StateModel,
        *,
        form: BatchForm,
        max_batch_tokens: int | None = None,
        buffers: int = 3,
        on_progress: Callable[[], None] = _nothing,
    ) -> None:
        """``form`` is what the plan says; a model that must not pack pads instead.

        Without ``max_batch_tokens`` a batch is as large as its range until memory says otherwise. ``on_progress`` is
        called whenever a batch was queued and whenever the device was seen to have done something.
        """
        self.model = model
        self.form: BatchForm = form if model.can_pack else "padded"
        self.max_batch_tokens = max_batch_tokens or sys.maxsize
        self.ring = HostRing(buffers, pinned=model.device.type == "cuda")
        self._row_multiple = _ROW_MULTIPLE_CUDA if model.device.type == "cuda" else 1
        self._copier = Copier(model.device)
        self._on_progress = on_progress
        self._unfinished: list[StartedRange] = []
        self._returned_at = time.monotonic()
        self._finished_at: float | None = None
        self._log = log.get("engine")
        if self.form != form:
            self._log.warning("padding instead of packing", reason="the model does not pack here")

    def compute(
        self, tokens: RangeTokens, *, stored: StoredDtype | None = None, keep: int | None = None
    ) -> RangeStates:
        """Start a range and finish it."""
        return self.finish(self.start(tokens, stored=stored, keep=keep))

    def start(
        self, tokens: RangeTokens, *, stored: StoredDtype | None = None, keep: int | None = None
    ) -> StartedRange:
        """Queue a range's work; waits for a free host buffer. Every started range must be finished or abandoned.

        ``stored`` is the dtype that comes out, the model's if unset; ``keep`` a sample whose states also stay on the
        device as they were computed.
        """
        started = self._take(tokens, stored)
        started.keep = keep
        try:
            self._run_batches(started)
        except BaseException:
            self.abandon(started)
            raise
        self._returned_at = time.monotonic()
        return started

    def alone(
        self,
        tokens: RangeTokens,
        on_sample: Callable[[int], None] = _nothing,
        *,
        stored: StoredDtype | None = None,
    ) -> RangeStates:
        """Each sample of a range by itself on the reference path; one that raises is set aside like an unsound one.

        ``on_sample`` is told each sample's index before it is computed; until then only a harmless one was. Raises
        WorkerError when that one raises: then the device is at fault.
        """
        self._prove_harmless()
        started = self._take(tokens, stored)
        samples = started.samples
        try:
            for sample in range(samples.count):
                if sample in started.faults:
                    continue
                on_sample(sample)
                reason = self._try_alone(started, sample)
                if reason is not None:
                    started.faults[sample] = f"{reason}, alone on the reference path"
                self._on_progress()
            return self._close(started, 0.0, time.monotonic() - started.started_at, samples.count)
        except BaseException:
            self.abandon(started)
            raise

    def _prove_harmless(self) -> None:
        """Raise WorkerError when even one token, id 0, cannot be computed."""
        try:
            self.model.reference(np.zeros(1, np.int32)).cpu()
        except Exception as error:
            msg = f"the reference path fails on a single harmless token: {type(error).__name__}: {error}"
            raise WorkerError(msg) from error

    def _try_alone(self, started: StartedRange, sample: int) -> str | None:
        """As ``_reference``, for samples that may raise anything; what breaks the device passes."""
        try:
            return self._reference(started, sample)
        except Exception as error:
            if isinstance(error, WorkerError) or breaks_device(error):
                raise
            return f"{type(error).__name__}: {error}"

    def _take(self, samples: RangeTokens, stored: StoredDtype | None) -> StartedRange:
        now = time.monotonic()
        slots = len(self.model.layers)
        layout = layout_of(
            stored,
            dtype=self.model.dtype,
            row=(slots, self.model.hidden_size),
            device=self.model.device,
        )
        buffer, buffer_wait_s = self.ring.take(layout.size_bytes(samples.tokens))
        started = StartedRange(
            samples=samples,
            buffer=buffer,
            layout=layout,
            stored=layout.place(buffer, samples.tokens),
            magnitudes_TK=torch.empty((samples.tokens, slots), pin_memory=self.ring.pinned),
            started_at=now,
            input_wait_s=now - self._returned_at,
            buffer_wait_s=buffer_wait_s,
        )
        self._unfinished.append(started)
        try:
            self._refuse_impossible(started)
        except BaseException:
            self.abandon(started)
            raise
        return started

    def finish(self, started: StartedRange) -> RangeStates:
        """Wait for a started range, check every sample, and hand its states over."""
        try:
            copy_s = sum(copy.wait() for copy in started.copies)
            forward_s = sum(timer.seconds() for timer in started.timers)
            recomputed = self._repair(started)
            return self._close(started, copy_s, forward_s, recomputed)
        except BaseException:
            self.abandon(started)
            raise

    def _close(
        self, started: StartedRange, copy_s: float, forward_s: float, recomputed: int
    ) -> RangeStates:
        states = self._hand_over(started, copy_s, forward_s, recomputed)
        self._on_progress()
        self._unfinished.remove(started)
        self._finished_at = self._returned_at = time.monotonic()
        return states

    def abandon(self, started: StartedRange) -> None:
        """Throw a started range away and give its buffer back, once the device no longer writes to it."""
        if started in self._unfinished:
            self._unfinished.remove(started)
        for copy in started.copies:
            copy.wait()
        started.buffer.release()
        self._returned_at = time.monotonic()

    def _refuse_impossible(self, started: StartedRange) -> None:
        """Set aside what would crash the device's context or has nothing to compute."""
        limit = self.model.max_positions
        for sample, length in enumerate(started.samples.lengths):
            ids = started.samples.ids(sample)
            if length == 0:
                started.faults[sample] = "no tokens"
            elif ids.min() < 0 or ids.max() >= self.model.vocab_rows:
                started.faults[sample] = (
                    f"ids {ids.min()} to {ids.max()} leave the embedding's {self.model.vocab_rows} rows"
                )
            elif limit is not None and length > limit:
                started.faults[sample] = f"{length} tokens, the model has {limit} positions"

    def _cut(self, samples: RangeTokens, chosen: Sequence[int]) -> list[Batch]:
        lengths = samples.lengths
        batches = cut_batches(
            [lengths[sample] for sample in chosen],
            form=self.form,
            max_batch_tokens=min(self.max_batch_tokens, max(samples.tokens, 1)),
            multiple=self._row_multiple,
            limits=self.model.length_limits,
        )
        return [
            Batch(
                form=batch.form,
                samples=tuple(chosen[place] for place in batch.samples),
                lengths=batch.lengths,
                filler_tokens=batch.filler_tokens,
            )
            for batch in batches
        ]

    def _run_batches(self, started: StartedRange) -> None:
        samples = started.samples
        whole = [sample for sample in range(samples.count) if sample not in started.faults]
        waiting = deque(self._cut(samples, whole))
        retried: set[int] = set()
        while waiting:
            batch = waiting.popleft()
            if self._fits(started, batch):
                continue
            # Out of the except block: only now do the frames of the failed pass let go of their tensors.
            self._free_memory()
            started.out_of_memory += 1
            if len(batch.samples) > 1:
                # Less than its real tokens: a row is not to be cut into itself with the same filler again.
                self._learn_budget(min(batch.computed_tokens // 2, batch.real_tokens - 1))
                waiting.extendleft(reversed(self._cut(samples, batch.samples)))
            elif batch.samples[0] not in retried:
                retried.add(batch.samples[0])
                waiting.appendleft(batch)
            else:
                self._learn_budget(batch.computed_tokens - 1)
                started.faults[batch.samples[0]] = (
                    f"{batch.lengths[0]} tokens do not fit into the device's memory, even alone"
                )

    def _learn_budget(self, tokens: int) -> None:
        budget = max(1, min(self.max_batch_tokens, tokens))
        if budget < self.max_batch_tokens:
            self.max_batch_tokens = budget
            self._log.warning("out of device memory; smaller batches from now on", tokens=budget)

    def _free_memory(self) -> None:
        for started in self._unfinished:
            for copy in started.copies:
                copy.wait()
        gc.collect()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fits(self, started: StartedRange, batch: Batch) -> bool:
        try:
            self._queue(started, batch)
        except torch.OutOfMemoryError:
            return False
        self._on_progress()
        started.batches += 1
        started.padding_tokens += batch.padding_tokens
        return True

    def _queue(self, started: StartedRange, batch: Batch) -> None:
        samples = started.samples
        timer = Timer(self.model.device)
        with torch.inference_mode():
            states_TKH = self.model.forward(
                batch, [samples.ids(sample) for sample in batch.samples]
            )
            timer.stop()
            magnitudes_TK = magnitudes(states_TKH)
            encoded = started.layout.encode(states_TKH, magnitudes_TK)
            started.keep_from(batch, states_TKH)
        pairs = []
        for run in contiguous_runs(batch.samples, batch.lengths, samples.offsets.tolist()):
            here = slice(run.first, run.first + run.tokens)
            there = slice(run.place, run.place + run.tokens)
            pairs += [(encoded[name][here], started.stored[name][there]) for name in encoded]
            pairs.append((magnitudes_TK[here], started.magnitudes_TK[there]))
        started.copies.append(self._copier.copy(pairs))
        started.timers.append(timer)

    def _repair(self, started: StartedRange) -> int:
        """Compute unsound samples again, alone, on the reference path; returns how many there were."""
        samples = started.samples
        found = started.magnitudes_TK.numpy()
        recomputed = 0
        for sample in range(samples.count):
            if sample in started.faults:
                continue
            reason = fault(found[started.place(sample)], self.model.layers)
            if reason is None:
                continue
            recomputed += 1
            row = int(samples.rows[sample])
            self._log.warning(
                "unsound states; computing the sample alone on the reference path",
                range_id=samples.range_id,
                row=row,
                reason=reason,
            )
            if sample == started.keep:
                started.keep = None  # the reference path would be compared with itself
            again = self._reference(started, sample)
            if again is not None:
                started.faults[sample] = f"{again}, alone on the reference path too"
        return recomputed

    def _reference(self, started: StartedRange, sample: int) -> str | None:
        """Compute one sample alone into its place; returns what is wrong with it, if anything."""
        ids, place = started.samples.ids(sample), started.place(sample)
        try:
            with torch.inference_mode():
                states_SKH = self.model.reference(ids)
                found_SK = magnitudes(states_SKH)
                for name, tensor in started.layout.encode(states_SKH, found_SK).items():
                    started.stored[name][place].copy_(tensor)
                return fault(found_SK.cpu().numpy(), self.model.layers)
        except torch.OutOfMemoryError:
            return f"{len(ids)} tokens do not fit into the device's memory"

    def _hand_over(
        self, started: StartedRange, copy_s: float, forward_s: float, recomputed: int
    ) -> RangeStates:
        samples = started.samples
        kept = [sample for sample in range(samples.count) if sample not in started.faults]
        if started.faults:
            places = [started.place(sample) for sample in kept]
            close_gaps(started.stored, [(place.start, place.stop) for place in places])
            samples = samples.keep(kept)
        stats = RangeStats(
            samples=samples.count,
            tokens=samples.tokens,
            padding_tokens=started.padding_tokens,
            batches=started.batches,
            flops=self.model.flops(samples.lengths),
            recomputed=recomputed,
            out_of_memory=started.out_of_memory,
            input_wait_s=started.input_wait_s,
            buffer_wait_s=started.buffer_wait_s,
            forward_s=forward_s,
            copy_s=copy_s,
            wall_s=time.monotonic() - (self._finished_at or started.started_at),
        )
        return RangeStates(
            samples=samples,
            tensors=views(started.stored, samples.tokens),
            quarantined=tuple(
                Quarantined(row=int(started.samples.rows[sample]), reason=reason)
                for sample, reason in sorted(started.faults.items())
            ),
            stats=stats,
            buffer=started.buffer,
            kept=started.kept(kept),
        )
