"""Faster forwards for the modules of one model: fewer passes over memory around the same matrix products.

The matrix products of a 27B hybrid are four fifths of its time; the rest is norms, activations, residual sums and
layout copies, and that rest is what is cut here:

* norms, gated norms and SwiGLU run as one kernel each (``worker.model.kernels.pointwise``);
* rotary embeddings run as one kernel, on heads as they lie in memory;
* gated attention reads its gate where the projection left it (``worker.model.kernels.gated_attention``);
* GatedDeltaNet works in ``[B, L, C]`` throughout, so that nothing is transposed or split by copying;
* residual sums ride on the output projections: ``hidden += x @ W`` in place, which the matrix product does for free.
  The block's output then lies where its input lay; captures copy an output before the next block runs.

Each of these recognizes its modules by what they compute, not by name alone, and leaves others as they are. The whole
is compared with the reference path by the exactness tests and by the worker's self-test.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from swathe.errors import ModelError
from worker.model.kernels import gated_attention, pointwise
from worker.model.norm import norm_eps, norm_kind, probe_values

Forward = Callable[..., Any]
Binding = tuple[nn.Module, Forward]

_ROTARY: Final = "apply_rotary_pos_emb"
_DENSE_LAYER: Final = {"input_layernorm", "post_attention_layernorm", "mlp"}


@dataclass(slots=True)
class Residual:
    """The hidden states that the next output projection adds itself to, in place."""

    hidden_BLH: torch.Tensor | None = None

    def project(self, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """``hidden += linear(x)`` where a layer left its hidden states, plain ``linear(x)`` elsewhere."""
        hidden, self.hidden_BLH = self.hidden_BLH, None
        if hidden is None:
            return functional.linear(x, linear.weight)
        hidden.view(-1, hidden.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), linear.weight.t())
        return hidden


@dataclass(slots=True)
class Fusions:
    """Bindings made so far, and how many modules of each kind they cover."""

    device: torch.device
    bindings: list[Binding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def bind(self, kind: str, module: nn.Module, forward: Forward) -> None:
        """Give a module another forward."""
        self.bindings.append((module, forward))
        self.counts[kind] = self.counts.get(kind, 0) + 1

    @property
    def names(self) -> dict[str, str]:
        """What is bound, in the words of a record."""
        names = dict.fromkeys(self.counts, "fused by torch")
        if self.device.type == "cuda":
            own = {"swiglu", "rotary", "gated_attention"} if pointwise.has_own_kernels() else set()
            names = {kind: "triton" if kind in own else "torch.compile" for kind in self.counts}
        return names | {kind: "in place" for kind in self.counts if kind == "residual"}


def fuse(
    blocks: Sequence[nn.Module], device: torch.device, *, rebind: Callable[..., Forward]
) -> Fusions:
    """Faster forwards for what is recognized in the blocks.

    ``rebind(module, functions)`` makes a module's own forward with some global functions replaced.
    """
    fusions = Fusions(device)
    for block in blocks:
        for module in block.modules():
            _fuse_norm(module, fusions)
            _fuse_gated_norm(module, fusions)
            _fuse_mlp(module, fusions)
            _fuse_rotary(module, fusions, rebind)
            _fuse_gated_attention(module, fusions)
        _fuse_residual(block, fusions)
    return fusions


def _fuse_norm(module: nn.Module, fusions: Fusions) -> None:
    if not type(module).__name__.endswith("RMSNorm"):
        return
    try:
        kind = norm_kind(module)
    except ModelError:
        return
    if kind == "layernorm":
        return
    formula = pointwise.rms_norm if kind == "rms" else pointwise.rms_norm_1p
    run = pointwise.for_device(formula, fusions.device)
    eps = norm_eps(module)
    fusions.bind("norm", module, lambda x: run(x, module.weight, eps))


def _fuse_gated_norm(module: nn.Module, fusions: Fusions) -> None:
    eps, weight_D = norm_eps(module), getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNormGated") or not isinstance(weight_D, torch.Tensor):
        return
    probe = copy.deepcopy(module).to(device="cpu", dtype=torch.float32)
    x, gate = probe_values(2, 4, weight_D.shape[0])
    with torch.inference_mode():
        wanted = probe(x, gate)
        found = pointwise.gated_rms_norm(x, gate, probe.weight, eps or 0.0)  # type: ignore[arg-type]
    if torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
        run = pointwise.for_device(pointwise.gated_rms_norm, fusions.device)
        fusions.bind("gated_norm", module, lambda x, gate: run(x, gate, module.weight, eps))


def is_swiglu(module: nn.Module) -> bool:
    """Whether a module computes ``down(silu(gate(x)) * up(x))`` without biases."""
    projections = [getattr(module, f"{name}_proj", None) for name in ("gate", "up", "down")]
    activation = getattr(module, "act_fn", None)
    if not callable(activation) or len(list(module.parameters())) != len(projections):
        return False
    x = probe_values(64)
    return all(isinstance(linear, nn.Linear) for linear in projections) and torch.allclose(
        activation(x), functional.silu(x), atol=1e-6
    )


def _fuse_mlp(module: Any, fusions: Fusions) -> None:
    if not is_swiglu(module):
        return
    run = pointwise.for_device(pointwise.swiglu, fusions.device)

    def forward(x: torch.Tensor) -> Any:
        return module.down_proj(run(module.gate_proj(x), module.up_proj(x)))

    fusions.bind("swiglu", module, forward)


def _fuse_rotary(module: nn.Module, fusions: Fusions, rebind: Callable[..., Forward]) -> None:
    forward: Any = inspect.unwrap(type(module).forward)
    if _ROTARY in forward.__code__.co_names and not gated_attention.fits(module):
        rotate = _rotation(forward, fusions.device)
        fusions.bind("rotary", module, rebind(module, {_ROTARY: rotate}))


def _fuse_gated_attention(module: nn.Module, fusions: Fusions) -> None:
    forward: Any = inspect.unwrap(type(module).forward)
    if _ROTARY in forward.__code__.co_names and gated_attention.fits(module):
        rotate = _rotation(forward, fusions.device)
        gate = pointwise.for_device(pointwise.sigmoid_gate, fusions.device)
        fused = gated_attention.fused_forward(module, rotate, gate)
        fusions.bind("rotary", module, fused)
        fusions.counts["gated_attention"] = fusions.counts.get("gated_attention", 0) + 1


def _rotation(forward: Any, device: torch.device) -> Callable[..., Any]:
    """The module's rotary function, in place where it is the usual one, else as one kernel.

    Heads come as ``[B, N, L, D]``, a transposed view; a kernel over that shape writes it out transposed, six times
    slower, and packed attention copies it back. So the view is undone first. In place only the rotated part of each
    head is touched, a quarter of it in qwen3_5; queries and keys are fresh from a projection or norm, nobody else's.
    """
    stock = inspect.unwrap(forward.__globals__[_ROTARY])
    if not _turns_halves(stock):
        return pointwise.for_device(stock, device)
    rotate = pointwise.for_device(pointwise.rotate_in_place, device)

    def in_place(
        query_BNLD: torch.Tensor,
        key_BNLD: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        **other_layout: Any,
    ) -> Any:
        if other_layout:
            return stock(query_BNLD, key_BNLD, cos, sin, **other_layout)
        for heads_BNLD in (query_BNLD, key_BNLD):
            rotate(heads_BNLD.transpose(1, 2), cos, sin)
        return query_BNLD, key_BNLD

    return in_place


def _turns_halves(rotary: Callable[..., Any]) -> bool:
    """Whether a rotary function is ``pointwise.rotate_in_place``, found by trying it on a part and on all of a head."""
    query, key = probe_values(2, 3, 5, 16), probe_values(2, 1, 5, 16) * 2
    for size in (8, 16):
        cos, sin = probe_values(2, 5, size), probe_values(2, 5, size) - 1
        try:
            wanted = rotary(query, key, cos, sin)
        except (RuntimeError, TypeError):  # of other shapes or parameters
            if size == 8:
                continue  # one that always turns whole heads
            return False
        for heads, turned in zip((query, key), wanted, strict=True):
            found = heads.clone()
            pointwise.rotate_in_place(found.transpose(1, 2), cos, sin)
            if found.shape != turned.shape or not torch.allclose(found, turned, atol=1e-5):
                return False
    return True


def _fuse_residual(block: Any, fusions: Fusions) -> None:
    """Let the two output projections of a plain pre-norm block add themselves to the hidden states."""
    children = {name for name, _ in block.named_children()}
    linear = children == _DENSE_LAYER | {"linear_attn"}
    if not linear and children != _DENSE_LAYER | {"self_attn"}:
        return
    mixer, name = (block.linear_attn, "out_proj") if linear else (block.self_attn, "o_proj")
    out = getattr(mixer, name, None)
    if not is_swiglu(block.mlp) or not isinstance(out, nn.Linear) or out.bias is not None:
        return
    if not _adds_plainly(block, out.out_features):
        return
    residual = Residual()

    def forward(
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        normed = block.input_layernorm(hidden_states)
        residual.hidden_BLH = hidden_states
        if linear:
            hidden = block.linear_attn(normed, attention_mask=attention_mask, **kwargs)
        else:
            hidden, _ = block.self_attn(
                hidden_states=normed,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **kwargs,
            )
        normed = block.post_attention_layernorm(hidden)
        residual.hidden_BLH = hidden
        summed: torch.Tensor = block.mlp(normed)
        return summed

    for projection in (out, block.mlp.down_proj):
        fusions.bind("residual", projection, _projection(residual, projection))
    fusions.bind("residual", block, forward)


def _adds_plainly(block: Any, hidden_size: int) -> bool:
    """Whether a block is ``y = x + mixer(norm(x)); y + mlp(norm(y))``, found by trying it with other children.

    Many with the same children are not: Granite, MiniCPM3 and Doge scale what they add.
    """
    tried = copy.copy(block)
    tried.__dict__ |= {
        "input_layernorm": lambda x: 2 * x + 1,
        "self_attn": lambda **options: (3 * options["hidden_states"] - 1, None),
        "linear_attn": lambda hidden_states, **_: 3 * hidden_states - 1,
        "post_attention_layernorm": lambda x: 5 * x - 2,
        "mlp": lambda x: 0.5 * x + 3,
    }
    x = probe_values(1, 3, hidden_size)
    try:
        with torch.inference_mode():
            found = inspect.unwrap(type(block).forward)(
                tried, x.clone(), position_embeddings=None, attention_mask=None, position_ids=None
            )
    except Exception:  # noqa: BLE001 - whatever it needs beyond this, it is another block
        return False
    y = x + 3 * (2 * x + 1) - 1
    wanted = y + 0.5 * (5 * y - 2) + 3
    return isinstance(found, torch.Tensor) and torch.allclose(found, wanted, atol=1e-5)


def _projection(residual: Residual, linear: nn.Linear) -> Forward:
    return lambda x: residual.project(linear, x)
