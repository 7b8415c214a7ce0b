"""Leaves: the Linear, LayerNorm and Embedding modules of a tree, found by path when they are used.

A family's module tree has Hugging Face's names, so state dicts, parameter names and PEFT's target names are theirs. The
layers know the leaves by role and look them up by path on every call: what another library has put in a leaf's place
(LoRA, a quantised Linear, a hook) is called, never bypassed.
"""

from __future__ import annotations

from functools import cache
from typing import TypeGuard, TypeVar

import torch
from torch import nn

from fastbert import ops
from fastbert.layers.quantized import QuantizedLinear

Leaf = TypeVar("Leaf", bound=nn.Module)


def get_leaf(root: nn.Module, path: str) -> nn.Module:
    """The module at `path` ("attention.self.query") below `root`."""
    for name in _names_of(path):
        root = root._modules[name]  # type: ignore[assignment]
    return root


@cache
def _names_of(path: str) -> list[str]:
    return path.split(".")


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


def is_linear(module: nn.Module) -> bool:
    """Whether `weights_of` describes all that calling `module` does."""
    return is_plain(module, nn.Linear) or is_plain(module, QuantizedLinear)


def is_norm(module: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Whether a LayerNorm's weight, bias and eps describe all that calling it does. The bias may be None, the weight
    not: ops take one of None for no LayerNorm at all.
    """
    return is_plain(module, nn.LayerNorm) and module.weight is not None


def weights_of(module: nn.Module) -> ops.LinearWeights:
    """What a product with a leaf that is_linear takes."""
    if type(module) is QuantizedLinear:
        return ops.LinearWeights(*module.operands())
    parameters = module._parameters
    return ops.LinearWeights(parameters["weight"], parameters["bias"], None, 0.0)  # type: ignore[arg-type]


def linear(module: nn.Module, x: torch.Tensor, activation: str = "none") -> torch.Tensor:
    """x (total_tokens, in_features) -> (total_tokens, out_features), bias and activation included."""
    if is_linear(module):
        weight, bias, scale, input_scale = weights_of(module)
        return ops.linear(x, weight, bias, weight_scale=scale, input_scale=input_scale, activation=activation)
    return module(x) if activation == "none" else ops.activation(module(x), activation)


def linears(modules: list[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    """`linear` of several leaves over the same x."""
    if all(is_linear(module) for module in modules):
        weights, biases, scales, input_scales = zip(*(weights_of(module) for module in modules), strict=True)
        return ops.linears(x, weights, biases, weight_scales=scales, input_scales=input_scales)
    return [linear(module, x) for module in modules]


def projection(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Like `linear`, but a plain leaf leaves its bias to the op that comes next."""
    if is_linear(module):
        weight, bias, scale, input_scale = weights_of(module)
        return ops.linear(x, weight, None, weight_scale=scale, input_scale=input_scale), bias
    return module(x), None
