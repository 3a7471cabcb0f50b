"""Move states from the device into host buffers that are allocated once and handed on without another copy.

A ring of few pinned buffers, one range each: compute fills the next while older ones are being encoded and written.
When all are taken, taking one waits, and that wait is the back-pressure of a slow store. On a GPU the copies run on a
stream of their own (55 GB/s into pinned memory against 1.1-1.5 GB/s into pageable) behind the forward pass that
made the states, while the next forward pass runs.

Shapes: T tokens, K slots, H hidden size.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch


class HostBuffer:
    """One taking of the ring's memory; ``release`` gives it back, from any thread, and only the first time.

    A new object for each taking: a late second release must not give away what belongs to the next range by then.
    """

    def __init__(self, ring: "HostRing", memory: torch.Tensor) -> None:
        self._ring = ring
        self._bytes = memory
        self._released = threading.Lock()

    def reserve(self, size_bytes: int) -> None:
        """Grow to at least ``size_bytes``; the contents are lost. Ranges are alike, so this ends after a few."""
        if self._bytes.numel() < size_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free the old one before taking more
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._ring.pinned)

    def tensor(
        self, dtype: torch.dtype, shape: Sequence[int], *, offset_bytes: int = 0
    ) -> torch.Tensor:
        """A view of the buffer from an offset, which must be a multiple of the dtype's size."""
        end = offset_bytes + torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[offset_bytes:end].view(dtype).view(tuple(shape))

    def release(self) -> None:
        """Give the buffer back to its ring; nothing may read its views afterwards."""
        if self._released.acquire(blocking=False):
            self._ring.put_back(self._bytes)


class HostRing:
    """``count`` host buffers, taken in turn and given back by whoever wrote them out."""

    def __init__(self, count: int, *, pinned: bool) -> None:
        self.pinned = pinned
        self._free = [torch.empty(0, dtype=torch.uint8) for _ in range(count)]
        self._changed = threading.Condition()
        self.waiting = False
        """Whether a range waits for a buffer now: the store is slower than the device."""

    def take(self, size_bytes: int) -> tuple[HostBuffer, float]:
        """A buffer of at least ``size_bytes``, and the seconds it was waited for."""
        started = time.monotonic()
        with self._changed:
            self.waiting = not self._free
            self._changed.wait_for(lambda: self._free)
            self.waiting = False
            buffer = HostBuffer(self, self._free.pop())
        wait_s = time.monotonic() - started
        try:
            buffer.reserve(size_bytes)
        except BaseException:
            buffer.release()
            raise
        return buffer, wait_s

    def put_back(self, memory: torch.Tensor) -> None:
        """Make a buffer's memory free again."""
        with self._changed:
            self._free.append(memory)
            self._changed.notify()

    @property
    def free(self) -> int:
        """Buffers that can be taken without waiting."""
        return len(self._free)


@dataclass(slots=True)
class Copy:
    """A copy under way. It holds what it reads until it is done."""

    sources: tuple[torch.Tensor, ...]
    seconds: float = 0.0
    _events: tuple[torch.cuda.Event, torch.cuda.Event] | None = field(default=None)

    def wait(self) -> float:
        """Block until the bytes are on the host; returns the seconds that the copy took on the device."""
        if self._events is not None:
            started, ended = self._events
            ended.synchronize()
            self.seconds = started.elapsed_time(ended) / 1000
            self._events = None
        self.sources = ()
        return self.seconds


class Copier:
    """Copies from one device to the host, behind the work that is queued on the device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Copy:
        """Start copying each ``(source, destination)``; destinations must not be read before ``wait``."""
        pairs = list(pairs)
        sources = tuple(source for source, _ in pairs)
        if self._stream is None:
            started = time.monotonic()
            for source, destination in pairs:
                destination.copy_(source)
            return Copy(sources, time.monotonic() - started)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        begin, end = timing_event(), timing_event()
        with torch.cuda.stream(self._stream):
            begin.record()
            for source, destination in pairs:
                destination.copy_(source, non_blocking=True)
                # Should the caller drop the copy unfinished, the source's memory still waits for this stream.
                source.record_stream(self._stream)
            end.record()
        return Copy(sources, _events=(begin, end))


def timing_event() -> torch.cuda.Event:
    """A CUDA event that can be timed."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class Timer:
    """Seconds of device work between its making and ``stop``, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._events = (timing_event(), timing_event()) if device.type == "cuda" else None
        self._clock_s = time.monotonic()
        if self._events is not None:
            self._events[0].record()

    def stop(self) -> None:
        """End of the timed work."""
        self._clock_s = time.monotonic() - self._clock_s
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """The time between; waits for the device to get there."""
        if self._events is None:
            return self._clock_s
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1000


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens [first, first + tokens) of a batch that lie at ``place`` of the range."""

    first: int
    place: int
    tokens: int


def contiguous_runs(
    samples: Sequence[int], lengths: Sequence[int], offsets: Sequence[int]
) -> list[Run]:
    """The pieces of a batch that are also contiguous in the range, so that neighbours are copied in one go.

    ``samples`` ascend; ``offsets[i]`` is the first token of sample i in the range.
    """
    runs = []
    first = 0
    order = list(zip(samples, lengths, strict=True))
    for _, group in groupby(enumerate(order), key=lambda item: item[1][0] - item[0]):
        members = [member for _, member in group]
        tokens = sum(length for _, length in members)
        runs.append(Run(first, int(offsets[members[0][0]]), tokens))
        first += tokens
    return runs
