"""From samples to a batch: padded to a rectangle, or packed end to end.

Legend: B samples, L tokens of the longest (rounded up), T tokens of all, K layer slots, H hidden size. Ids, mask and
states stay unshifted. Float8 codes keep their ``hidden_states_scales`` float32 [B, L, K] or [T, K] beside them. Both are
plain functions: give options with ``functools.partial``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from swathe.reader.shards import SCALES, STATES

if TYPE_CHECKING:
    import torch

Sample = dict[str, Any]


def collate_padded(
    samples: Sequence[Sample],
    *,
    pad_id: int = 0,
    multiple_of: int = 1,
    max_length: int | None = None,
) -> Sample:
    """A rectangle, padded on the right and cut at ``max_length``.

    ``row`` int64 [B], ``id`` list, ``length`` int64 [B], ``input_ids`` int64 [B, L], ``loss_mask`` uint8 [B, L] (0 on
    padding), ``attention_mask`` bool [B, L], ``hidden_states`` [B, L, K, H] (0 on padding).
    """
    import torch  # noqa: PLC0415 - torch is needed only where a tensor is asked for

    lengths = [min(len(sample["input_ids"]), max_length or 2**62) for sample in samples]
    longest = -(-max(lengths) // multiple_of) * multiple_of
    length_B = torch.tensor(lengths)
    return {
        "row": torch.tensor([sample["row"] for sample in samples]),
        "id": [sample["id"] for sample in samples],
        "length": length_B,
        "attention_mask": torch.arange(longest)[None] < length_B[:, None],
    } | {
        name: _rectangle(samples, name, lengths, longest, pad_id if name == "input_ids" else 0)
        for name in _ragged(samples)
    }


def collate_packed(samples: Sequence[Sample], *, max_tokens: int | None = None) -> Sample:
    """All samples end to end, as variable-length attention wants them; cut at ``max_tokens`` altogether.

    ``row`` int64 [B], ``id`` list, ``offsets`` int32 [B + 1] (cu_seqlens), ``max_length`` int, ``input_ids`` int64 [T],
    ``loss_mask`` uint8 [T], ``position_ids`` int64 [T] from 0 in each sample, ``sample`` int64 [T] (which sample a token
    is of), ``hidden_states`` [T, K, H]. Samples that find no room are left out of ``row`` and ``id`` too.
    """
    import torch  # noqa: PLC0415

    room = max_tokens if max_tokens is not None else 2**62
    lengths: list[int] = []
    for sample in samples:
        length = min(len(sample["input_ids"]), room)
        if length == 0:
            break
        lengths.append(length)
        room -= length
    kept = samples[: len(lengths)]
    length_B = torch.tensor(lengths)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    offsets[1:] = length_B.cumsum(0)
    return {
        "row": torch.tensor([sample["row"] for sample in kept]),
        "id": [sample["id"] for sample in kept],
        "offsets": offsets,
        "max_length": max(lengths),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "sample": torch.arange(len(lengths)).repeat_interleave(length_B),
    } | {
        name: torch.cat([s[name][:n] for s, n in zip(kept, lengths, strict=True)])
        for name in _ragged(samples)
    }


def _ragged(samples: Sequence[Sample]) -> list[str]:
    """What a sample holds token by token."""
    return [name for name in ("input_ids", "loss_mask", STATES, SCALES) if name in samples[0]]


def _rectangle(
    samples: Sequence[Sample], name: str, lengths: Sequence[int], longest: int, fill: int
) -> "torch.Tensor":
    first = samples[0][name]
    batch: torch.Tensor = first.new_full((len(samples), longest, *first.shape[1:]), fill)
    for place, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        batch[place, :length] = sample[name][:length]
    return batch
