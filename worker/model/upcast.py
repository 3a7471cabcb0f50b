"""Run modules in float32 one at a time, and put their own weights back afterwards, bit by bit the same."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def upcast(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside this context each module holds float32 copies of its weights while it runs, and only then."""
    kept: dict[nn.Parameter, torch.Tensor] = {}

    def widen(module: nn.Module, _args: Any) -> None:
        for parameter in module.parameters():
            kept[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, _args: Any = None, _output: Any = None) -> None:
        for parameter in module.parameters():
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    handles = [
        handle
        for module in modules
        for handle in (
            module.register_forward_pre_hook(widen),
            module.register_forward_hook(restore),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        # A pass that failed half-way leaves one module wide.
        for module in modules:
            restore(module)
