"""Which implementation each operation of one loaded model runs on, and the switch between fast and stock.

Implementations are bound to the modules of this model's instance, never to transformers' classes or modules: other
models in the process, and this model's own reference path, keep the stock ones.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Final, Literal

import torch
from torch import nn
from transformers import AttentionInterface

from swathe import log
from swathe.architectures import PACKS
from swathe.errors import ModelError
from worker.model.kernels import delta_net, packing
from worker.model.kernels import fla as fla_kernels
from worker.model.kernels.fla import FlaKernels
from worker.model.kernels.fusions import Binding
from worker.model.kernels.fusions import fuse as fuse_blocks
from worker.model.norm import final_norm_module

Kernels = Literal["auto", "reference"]
Mode = Literal["packed", "padded", "stock"]

_DELTA_RULE: Final = "torch_chunk_gated_delta_rule"
_CONVOLUTION: Final = "causal_conv1d_fn"


class KernelSet:
    """The bound implementations of one model. ``names`` says for each operation what is bound."""

    def __init__(
        self,
        module: Any,
        blocks: Sequence[nn.Module],
        *,
        kernels: Kernels,
        device: torch.device,
        fuse: bool | None = None,
    ) -> None:
        """``fuse`` says whether to fuse what is around the matrix products; unset: on a GPU, with ``auto``."""
        self._config = module.config
        self._stock_attention: str = self._config._attn_implementation  # noqa: SLF001 - no public name
        self._stock: list[Binding] = []
        self._fast: list[Binding] = []
        self.mixers = len(blocks)
        self.can_pack = kernels == "auto" and self._config.model_type in PACKS
        self.names = {"attention": self._stock_attention}
        if self.can_pack:
            AttentionInterface.register(packing.ATTENTION_NAME, packing.packed_attention)
            self.names["packed_attention"] = packing.attention_kernel(device, module.dtype)
        on_gpu = kernels == "auto" and device.type == "cuda"
        fuse = on_gpu if fuse is None else fuse
        self._bind_delta_nets(blocks, fla=on_gpu, fuse=fuse)
        if fuse:
            # What the final norm makes of the last block is not read, but NanoChat runs it before the first block too.
            parts = (*blocks, final_norm_module(module))
            fusions = fuse_blocks(parts, device, rebind=rebound_forward)
            self._fast.extend(fusions.bindings)
            self.names |= fusions.names

    @contextmanager
    def use(self, mode: Mode) -> Iterator[None]:
        """Run the model in one mode inside this context."""
        forwards = self._stock if mode == "stock" else self._fast
        for module, forward in forwards:
            module.forward = forward
        attention = packing.ATTENTION_NAME if mode == "packed" else self._stock_attention
        self._config._attn_implementation = attention  # noqa: SLF001 - as above
        try:
            yield
        finally:
            self._config._attn_implementation = self._stock_attention  # noqa: SLF001 - as above
            for module, _ in forwards:
                del module.forward

    def fall_back(self, to: Literal["padded", "reference"]) -> None:
        """Give up packing, or every fast kernel."""
        self.can_pack = False
        self.names.pop("packed_attention", None)
        if to == "reference":
            self._fast = self._stock
            stock = {"attention": self._stock_attention}
            torch_only = {name: "torch" for name in ("delta_rule", "convolution") if self._stock}
            self.names = stock | torch_only

    def _bind_delta_nets(self, blocks: Sequence[nn.Module], *, fla: bool, fuse: bool) -> None:
        nets = [net for block in blocks for net in block.modules() if _is_delta_net(net)]
        if not nets:
            return
        available, version = fla_kernels.available() if fla else (False, "")
        if fla and not available:
            log.get("kernels").warning(
                "fla cannot be used; the delta rule runs on slow torch code", reason=version
            )
        name = version if available else "torch"
        self.names |= {"delta_rule": name, "convolution": name}
        for net in nets:
            functions = inspect.unwrap(type(net).forward).__globals__
            # transformers wraps these and takes fla's kernel at import where it finds one; below is its own.
            rule = packing.delta_rule_by_sample(inspect.unwrap(functions[_DELTA_RULE]))
            convolution = packing.convolution_by_sample(inspect.unwrap(functions[_CONVOLUTION]))
            torch_functions: dict[str, Callable[..., Any]] = {
                _DELTA_RULE: rule,
                _CONVOLUTION: convolution,
            }
            self._stock.append((net, rebound_forward(net, torch_functions)))
            own = FlaKernels(net) if available else delta_net.TorchKernels(net, rule, convolution)
            if fuse and delta_net.fits(net):
                self._fast.append((net, delta_net.fused_forward(net, own)))
            elif isinstance(own, FlaKernels):
                fla_functions: dict[str, Callable[..., Any]] = {
                    _DELTA_RULE: own.stock_delta_rule,
                    _CONVOLUTION: own.stock_convolution,
                }
                self._fast.append((net, rebound_forward(net, fla_functions)))
            else:
                self._fast.append((net, rebound_forward(net, torch_functions)))


def _is_delta_net(module: nn.Module) -> bool:
    names = inspect.unwrap(type(module).forward).__code__.co_names
    return _DELTA_RULE in names and _CONVOLUTION in names


def rebound_forward(module: nn.Module, functions: dict[str, Callable[..., Any]]) -> Any:
    """The module's own forward with some of the global functions that it calls replaced, for this instance.

    Raises ModelError when the forward does not call one of them by that name (another transformers).
    """
    forward: Any = inspect.unwrap(type(module).forward)
    absent = [name for name in functions if name not in forward.__code__.co_names]
    if absent:
        msg = f"{type(module).__name__} does not call {', '.join(absent)}; this transformers is not supported"
        raise ModelError(msg)
    function = FunctionType(
        forward.__code__,
        {**forward.__globals__, **functions},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    function.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(function, module)
