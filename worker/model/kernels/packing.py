"""Packed rows: many samples end to end in one row, kept apart inside attention, convolution and recurrence.

With position ids alone a packed row is silently wrong (errors of order 1): every operation that mixes tokens must get
the samples' boundaries. They stand in a context variable while a packed pass runs, because architectures differ in
which keyword arguments they hand down to these operations; and each operation counts its calls, so that a pass in
which some layer mixed tokens by another way is an error and not a leak.

On a GPU attention is ``varlen_attn`` and the gated delta rule and its convolution are fla's; elsewhere the stock torch
functions run sample by sample, which is what makes packing provable without a GPU.

Shapes: B rows, N heads, L tokens of a row, D head size, C channels, S tokens of one sample.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from swathe.errors import ModelError

ATTENTION_NAME: Final = "swathe_packed"
"""Name under which transformers finds ``packed_attention``. No mask function is registered under it, so that
transformers builds no mask at all."""
CHUNK: Final = 64
_VARLEN: Final = "torch varlen_attn"
_VARLEN_MODULE: Final = "torch.nn.attention.varlen"
_LARGEST_FLASH_HEAD: Final = 256


@dataclass(slots=True)
class Boundaries:
    """Where the samples of a packed row begin and end, and how often each operation has asked."""

    offsets: tuple[int, ...]
    """0, then the end of each sample, the filler included."""
    cu_seqlens: torch.Tensor
    """The same as int32 on the device."""
    chunks: torch.Tensor | None = None
    """On the device, what ``chunk_places`` gives for these offsets: for kernels that work chunk by chunk."""
    cu_seqlens_host: torch.Tensor = field(init=False)
    """And on the host, for kernels that plan their launches there."""
    attention_calls: int = 0
    recurrence_calls: int = 0
    convolution_calls: int = 0

    def __post_init__(self) -> None:
        self.cu_seqlens_host = torch.tensor(self.offsets, dtype=torch.int32)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First token and end of each sample."""
        return list(pairwise(self.offsets))

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(stop - first for first, stop in self.spans)


def chunk_places(lengths: Sequence[int]) -> NDArray[np.int32]:
    """Sample and place in it ``[chunks, 2]`` of each chunk of ``CHUNK`` tokens of a packed row."""
    counts = -(-np.asarray(lengths) // CHUNK)
    samples = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(samples)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([samples, places], axis=1).astype(np.int32)


_CURRENT: ContextVar[Boundaries | None] = ContextVar("boundaries", default=None)


@contextmanager
def packed_row(boundaries: Boundaries, *, mixers: int) -> Iterator[None]:
    """Run one packed forward pass of a model with ``mixers`` token-mixing layers.

    Raises ModelError when the pass mixed tokens anywhere without asking for the boundaries.
    """
    token = _CURRENT.set(boundaries)
    try:
        yield
    finally:
        _CURRENT.reset(token)
    kept = boundaries.attention_calls + boundaries.recurrence_calls
    if kept != mixers or boundaries.convolution_calls != boundaries.recurrence_calls:
        msg = (
            f"packed pass: {kept} of {mixers} layers kept samples apart; their states would leak into each other, "
            "so this architecture must be padded"
        )
        raise ModelError(msg)


def current() -> Boundaries | None:
    """Boundaries of the packed pass that is running, None in a padded or single one."""
    return _CURRENT.get()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What is special about one layer's attention."""

    scaling: float | None
    window: int | None
    """Tokens that a token sees, itself included; None: all before it."""
    sinks_N: torch.Tensor | None
    """Logits, one per head, that take weight and give nothing."""


def packed_attention(
    module: nn.Module,
    query_BNLD: torch.Tensor,
    key_BNLD: torch.Tensor,
    value_BNLD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sample, in the form that transformers calls; returns ``[B, L, N, D]``.

    Raises ModelError for what it does not know (soft caps, biases, masks, bidirectional layers).
    """
    boundaries = _CURRENT.get()
    unknown = [
        name for name in ("softcap", "position_bias", "head_mask") if options.get(name) is not None
    ]
    if attention_mask is not None or not getattr(module, "is_causal", True):
        unknown.append("a mask or bidirectional attention")
    if boundaries is None or unknown:
        what = ", ".join(unknown) or "missing boundaries"
        msg = f"packed attention of {type(module).__name__} does not support {what}"
        raise ModelError(msg)
    boundaries.attention_calls += 1
    kind = _Kind(
        scaling=options.get("scaling"),
        window=options.get("sliding_window"),
        sinks_N=options.get("s_aux"),
    )
    run = _varlen if _varlen_fits(query_BNLD, value_BNLD, kind) else _by_sample
    return run(query_BNLD, key_BNLD, value_BNLD, boundaries, kind), None


def attention_kernel(device: torch.device, dtype: torch.dtype) -> str:
    """What ``packed_attention`` runs on."""
    fits = (
        device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and _varlen_parameters()
    )
    return "torch varlen_attn" if fits else "torch sdpa per sample"


def _by_sample(
    query_BNLD: torch.Tensor,
    key_BNLD: torch.Tensor,
    value_BNLD: torch.Tensor,
    boundaries: Boundaries,
    kind: _Kind,
) -> torch.Tensor:
    attend = _plain if kind.sinks_N is None else _with_sinks
    outputs = []
    for first, stop in boundaries.spans:
        query, key, value = (x[:, :, first:stop] for x in (query_BNLD, key_BNLD, value_BNLD))
        outputs.append(attend(query, key, value, kind))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _plain(
    query_BNSD: torch.Tensor, key_BNSD: torch.Tensor, value_BNSD: torch.Tensor, kind: _Kind
) -> torch.Tensor:
    length = query_BNSD.shape[2]
    narrow = kind.window is not None and length > kind.window
    return functional.scaled_dot_product_attention(
        query_BNSD,
        key_BNSD,
        value_BNSD,
        attn_mask=_band(length, kind.window, query_BNSD.device) if narrow else None,
        is_causal=not narrow,
        scale=kind.scaling,
        enable_gqa=query_BNSD.shape[1] != key_BNSD.shape[1],
    )


def _with_sinks(
    query_BNSD: torch.Tensor, key_BNSD: torch.Tensor, value_BNSD: torch.Tensor, kind: _Kind
) -> torch.Tensor:
    heads, length, head_size = query_BNSD.shape[1:]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key_BNSD, value_BNSD))
    scale = head_size**-0.5 if kind.scaling is None else kind.scaling
    logits = (query_BNSD @ key.transpose(2, 3)) * scale
    logits = logits.masked_fill(~_band(length, kind.window, logits.device), float("-inf"))
    sinks = torch.as_tensor(kind.sinks_N).reshape(1, -1, 1, 1).expand(1, heads, length, 1)
    weights = torch.cat([logits, sinks.to(logits.dtype)], dim=-1).float().softmax(dim=-1)
    return weights[..., :-1].to(value.dtype) @ value


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which keys ``[S, S]`` a token sees: itself and what is before it, ``window`` tokens in all."""
    distance = torch.arange(length, device=device)
    distance = distance[:, None] - distance[None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


@cache
def _varlen_parameters() -> frozenset[str]:
    """Parameters of this torch's ``varlen_attn``; it grew some between versions. Empty when there is none."""
    try:
        varlen: Any = importlib.import_module(_VARLEN_MODULE)
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen.varlen_attn).parameters)


def _varlen_fits(query: torch.Tensor, value: torch.Tensor, kind: _Kind) -> bool:
    head = query.shape[-1]
    known = _varlen_parameters()
    return (
        attention_kernel(query.device, query.dtype) == _VARLEN
        and head == value.shape[-1]
        and head <= _LARGEST_FLASH_HEAD
        and head % 8 == 0
        and (kind.scaling in (None, head**-0.5) or "scale" in known)
        and (kind.window is None or "window_size" in known)
        and (kind.sinks_N is None or "return_aux" in known)
    )


def _varlen(
    query_BNLD: torch.Tensor,
    key_BNLD: torch.Tensor,
    value_BNLD: torch.Tensor,
    boundaries: Boundaries,
    kind: _Kind,
) -> torch.Tensor:
    varlen: Any = importlib.import_module(_VARLEN_MODULE)
    known = _varlen_parameters()
    query, key, value = (x[0].transpose(0, 1) for x in (query_BNLD, key_BNLD, value_BNLD))
    options: dict[str, Any] = {"scale": kind.scaling} if "scale" in known else {}
    if "window_size" in known:
        options["window_size"] = (-1 if kind.window is None else kind.window - 1, 0)
    else:
        options["is_causal"] = True
    # Before torch had a word for it, the kernel took fewer key than query heads all the same.
    if "enable_gqa" in known:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    if kind.sinks_N is not None:
        options["return_aux"] = varlen.AuxRequest(lse=True)
    cu, longest = boundaries.cu_seqlens, boundaries.longest
    qkv = (query.contiguous(), key.contiguous(), value.contiguous())
    out: Any = varlen.varlen_attn(*qkv, cu, cu, longest, longest, **options)
    if kind.sinks_N is None:
        out_LND: torch.Tensor = out
        return out_LND[None]
    # A sink adds exp(sink) to the softmax's denominator exp(lse): the rest keeps the share sigmoid(lse - sink).
    out_LND, lse_NL = out
    share_LN = torch.sigmoid(lse_NL.float() - kind.sinks_N.float()[:, None]).transpose(0, 1)
    return (out_LND * share_LN[..., None].to(out_LND.dtype))[None]


_Function = Callable[..., Any]


def delta_rule_by_sample(pure: _Function) -> _Function:
    """The stock torch delta rule over ``[B, L, N, D]``, sample by sample inside a packed pass."""

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        boundaries = _CURRENT.get()
        if boundaries is None:
            return pure(query, key, value, g=g, beta=beta, **options)[0], None
        boundaries.recurrence_calls += 1
        parts = [
            pure(
                *(x[:, first:stop] for x in (query, key, value)),
                g=g[:, first:stop],
                beta=beta[:, first:stop],
                **options,
            )[0]
            for first, stop in boundaries.spans
        ]
        return torch.cat(parts, dim=1), None

    return run


def convolution_by_sample(pure: _Function) -> _Function:
    """The stock torch causal convolution over ``[B, C, L]``, sample by sample inside a packed pass."""

    def run(
        hidden_BCL: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        boundaries = _CURRENT.get()
        if boundaries is None:
            return torch.as_tensor(pure(hidden_BCL, weight, bias, activation=activation))
        boundaries.convolution_calls += 1
        parts = [
            pure(hidden_BCL[:, :, first:stop], weight, bias, activation=activation)
            for first, stop in boundaries.spans
        ]
        return torch.cat(parts, dim=2)

    return run
