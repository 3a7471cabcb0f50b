"""Cut a range's samples into batches that one forward pass takes; pure arithmetic, no torch.

Two forms. *Padded*: rows of a rectangle, samples sorted by length first so that the rectangle is nearly full (32k
tokens out of 16,384 sorted samples waste about 1.4 %; file order wastes 280 %). *Packed*: one row that holds samples
end to end in the given order (next-fit), so that nothing is padded but the row's tail.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swathe.spec import BatchForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples that go through the model together.

    ``samples`` are indices into the range, ascending, so that neighbours stay neighbours when the states are copied
    out; ``lengths`` are their tokens. ``filler_tokens`` is a throw-away segment at the end of a packed row.
    """

    form: BatchForm
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    filler_tokens: int = 0

    @property
    def real_tokens(self) -> int:
        """Tokens whose states are wanted."""
        return sum(self.lengths)

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model, padding included."""
        if self.form == "padded":
            return len(self.lengths) * max(self.lengths)
        return self.real_tokens + self.filler_tokens

    @property
    def padding_tokens(self) -> int:
        """Tokens computed and thrown away."""
        return self.computed_tokens - self.real_tokens


def cut_batches(
    lengths: Sequence[int],
    *,
    form: BatchForm,
    max_batch_tokens: int,
    multiple: int = 1,
    limits: Sequence[int] = (),
) -> list[Batch]:
    """Batches that hold every sample exactly once and compute at most ``max_batch_tokens`` each.

    A sample longer than the budget gets a batch alone. ``limits`` ascend; samples longer than one share no batch with those
    that are not. Packed rows are filled up to a multiple of ``multiple`` tokens, so that kernels meet few different
    shapes; the filler may exceed the budget by less than that multiple.
    """
    if max_batch_tokens < 1 or multiple < 1:
        msg = f"max_batch_tokens={max_batch_tokens} and multiple={multiple} must be at least 1"
        raise ValueError(msg)
    if any(length < 1 for length in lengths):
        msg = "every sample must have at least one token"
        raise ValueError(msg)
    groups = _padded if form == "padded" else _packed
    return [
        _batch(group, lengths, form=form, multiple=multiple)
        for alike in _alike(lengths, limits)
        for group in groups(alike, lengths, max_batch_tokens)
    ]


def _alike(lengths: Sequence[int], limits: Sequence[int]) -> list[list[int]]:
    """Samples between the same limits."""
    sides: list[list[int]] = [[] for _ in range(len(limits) + 1)]
    for sample, length in enumerate(lengths):
        sides[bisect_left(limits, length)].append(sample)
    return sides


def _batch(group: list[int], lengths: Sequence[int], *, form: BatchForm, multiple: int) -> Batch:
    samples = tuple(sorted(group))
    taken = tuple(lengths[sample] for sample in samples)
    filler = -sum(taken) % multiple if form == "packed" else 0
    return Batch(form=form, samples=samples, lengths=taken, filler_tokens=filler)


def _padded(samples: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    group: list[int] = []
    # Longest first: the rectangle's width is known when its batch is opened, and memory is tried at its worst early.
    for sample in sorted(samples, key=lambda sample: (-lengths[sample], sample)):
        if group and (len(group) + 1) * lengths[group[0]] > budget:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group


def _packed(samples: Sequence[int], lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    group: list[int] = []
    tokens = 0
    for sample in samples:
        if group and tokens + lengths[sample] > budget:
            yield group
            group, tokens = [], 0
        group.append(sample)
        tokens += lengths[sample]
    if group:
        yield group
