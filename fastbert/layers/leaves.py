"""Leaves: the Linear, LayerNorm and Embedding modules of a tree, found by path when they are used.

A family's module tree has Hugging Face's names, so state dicts, parameter names and PEFT's target names are theirs. The
layers know the leaves by role and look them up by path on every call: what another library has put in a leaf's place
(LoRA, a quantised Linear, a hook) is called, never bypassed.
"""

from __future__ import annotations

from typing import TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

Leaf = TypeVar("Leaf", bound=nn.Module)


def get_leaf(root: nn.Module, path: str) -> nn.Module:
    """The module at `path` ("attention.self.query") below `root`."""
    for name in path.split("."):
        root = root._modules[name]  # type: ignore[assignment]
    return root


def place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` at `path` below `root`, making bare containers (lists before a number) on the way."""
    *parents, last = names = path.split(".")
    for name, following in zip(parents, names[1:], strict=True):
        if name not in root._modules:
            root.add_module(name, nn.ModuleList() if following.isdigit() else nn.Module())
        root = root._modules[name]  # type: ignore[assignment]
    root.add_module(last, module)


def is_plain(module: nn.Module, kind: type[Leaf]) -> TypeGuard[Leaf]:
    """Whether calling `module` does exactly what its weights say: nothing subclassed, patched or hooked."""
    return type(module) is kind and "forward" not in module.__dict__ and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def linear(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """x (total_tokens, in_features) -> (total_tokens, out_features), bias included."""
    return F.linear(x, module.weight, module.bias) if is_plain(module, nn.Linear) else module(x)


def projection(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Like `linear`, but a plain Linear leaves its bias to the op that comes next."""
    return (F.linear(x, module.weight), module.bias) if is_plain(module, nn.Linear) else (module(x), None)
