"""Attributes and buffers of transformers' modules, and other values for them: what a user may have set by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_NAMES = ("full_attention", "sliding_attention", "absolute", "rotary")
# What PyTorch or fastbert keeps on a module for itself.
_NOT_VALUES = {"training", "forward", "extra_repr"}


def other_values(value: Any) -> list:
    """Of the same kind; none for what is no plain value."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(value - 1, 0)]
    if isinstance(value, float):
        return [2 * value + 0.125]
    if isinstance(value, str):
        return [name for name in _NAMES if name != value]
    if isinstance(value, tuple):
        return [value[:-1]]
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            return [value * 0.5]
        return [value.flip(-1)] if value.any() else [torch.ones_like(value)]
    if value is None:
        return [3, 0.5]
    return [torch.tanh] if callable(value) and not isinstance(value, type) else []


def values_on(module: nn.Module) -> dict[str, Any]:
    plain = {name: value for name, value in vars(module).items() if name[0] != "_" and name not in _NOT_VALUES}
    return plain | {name: t for name, t in module._buffers.items() if t is not None}


def places(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """(path of a module, name, another value), of one module a class and name."""
    seen = set()
    for path, module in model.named_modules():
        for name, value in values_on(module).items():
            if (type(module), name) not in seen:
                seen.add((type(module), name))
                yield from ((path, name, other) for other in other_values(value))


def set_value(model: nn.Module, path: str, name: str, value: Any) -> None:
    module = model.get_submodule(path)
    if name in module._buffers:
        module._buffers[name].copy_(value)
    else:
        module.__dict__[name] = value


@contextmanager
def changed(model: nn.Module, path: str, name: str, value: Any) -> Iterator[None]:
    """Set, and then again what it was: a copy of a model, with its config, takes longer than a call of a small one.
    Tensors, too, get back what they held: with a max_norm, a call writes to its table.
    """
    kept = [(t.detach(), t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    attributes = vars(model.get_submodule(path))
    before = attributes.get(name)
    set_value(model, path, name, value)
    try:
        yield
    finally:
        if name in attributes:
            attributes[name] = before
        for tensor, old in kept:
            tensor.copy_(old)
