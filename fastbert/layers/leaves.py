"""Leaves: the Linear, LayerNorm and Embedding modules of a tree, found by path when they are used.

A family's module tree has Hugging Face's names, so state dicts, parameter names and PEFT's target names are theirs. The
layers know the leaves by role and look them up by path on every call: what another library has put in a leaf's place
(LoRA, a quantised Linear, a hook) is called, never bypassed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fastbert import ops
from fastbert.layers.quantized import QuantizedLinear
from fastbert.layers.sharded import call_sharded, is_sharded

Leaf = TypeVar("Leaf", bound=nn.Module)


class Container(nn.Module):
    """A name in the paths of leaves (BERT's `embeddings`, `attention.self`); it computes nothing of its own.

    Layers look leaves up and pass their containers by. Only where a container has hooks, it is called, with packed
    tensors as arguments and what it stands for as `run`: the hooks see, and may change, what goes in and comes out.
    A user may call those that are a `part`, as transformers' modules are called.
    """

    part: Callable[..., Any] | None = None  # part(module, *args): what a user's call computes

    def forward(self, *args: Any, run: Callable[..., Any] | None = None, **options: Any) -> Any:
        return called_alone(self, *args, **options) if run is None else run(*args)


def called_alone(module: nn.Module, *args: Any, **options: Any) -> Any:
    """A user's call of a part of a model. Raises TypeError where the module is none."""
    part: Any = module.part
    if part is None:
        raise TypeError(
            f"this {type(module).__name__} holds leaves and cannot be called by itself. Call the embeddings, the"
            " encoder, one of its layers, the pooler or the head instead; or a leaf (Linear, LayerNorm, Embedding)"
        )
    return part(module, *args, **options)


def is_called(root: nn.Module, path: str) -> bool:
    """Whether the container at `path` below `root` has hooks, or is one of PEFT's copies, so that it must be called.

    Raises TypeError where something else has taken its place: passing it by would ignore what it computes.
    """
    module = get_leaf(root, path)
    container = in_use(module)
    if type(container) is not Container or FORWARD in container.__dict__:
        if is_sharded(container):
            return True
        raise TypeError(
            f"{path} is a {type(container).__name__} with a forward of its own, which fastbert's models never call:"
            " they compute what a container of leaves stands for themselves. Replace the leaves (Linear, LayerNorm,"
            " Embedding) instead, or use transformers' model and fastbert.accelerate"
        )
    return module is not container or has_hooks(container)


def within(root: nn.Module, path: str | None, run: Callable[..., Any], *args: torch.Tensor | None) -> Any:
    """run(*args), by way of the container at `path` below `root` if that is_called. `path` None: there is none."""
    if path is None or not is_called(root, path):
        return run(*args)
    container = get_leaf(root, path)
    if is_sharded(container):
        return call_sharded(container, run, *args)
    if not torch.compiler.is_compiling() and (has_hooks(container) or has_hooks(in_use(container))):
        warnings.warn(
            f"fastbert: {type(root).__name__}: {path} has hooks: they see packed tensors (total_tokens, ...), and what"
            " is otherwise one fused op runs step by step",
            stacklevel=2,
        )
    return container(*args, run=run)


def parent_of(path: str) -> str | None:
    """The container that holds the leaf at `path`; None where the root does."""
    return path.rpartition(".")[0] or None


def get_leaf(root: nn.Module, path: str) -> nn.Module:
    """The module at `path` ("attention.self.query") below `root`. Raises KeyError."""
    for name in path.split("."):
        modules = root._modules
        if "modules_to_save" in modules:  # not in_use of each: leaves are looked up before every op of every layer
            modules = in_use(root)._modules
        root = modules[name]  # type: ignore[assignment]
    return root


def child_of(module: nn.Module, name: str) -> nn.Module:
    """The module `name` right below what is in use of `module`. Raises KeyError."""
    return in_use(module)._modules[name]  # type: ignore[return-value]


def in_use(module: nn.Module) -> nn.Module:
    """What calling `module` calls: where PEFT's modules_to_save stands in its place, the copy of the adapter in use."""
    copies = module._modules.get("modules_to_save")
    if copies is None:
        return module
    active: Any = [] if module.disable_adapters else module.active_adapters
    kept: Any = copies._modules[active[0]] if active and active[0] in copies._modules else module.original_module
    return kept


def originals_of(module: nn.Module) -> list[nn.Module]:
    """A module; where PEFT's modules_to_save stands in its place, what that holds: the original, and every copy."""
    copies = module._modules.get("modules_to_save")
    held: Any = [module] if copies is None else [module._modules["original_module"], *copies._modules.values()]
    return held


def set_module(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` at `path` below `root`, making containers (lists before a number) on the way."""
    *parents, last = names = path.split(".")
    for name, following in zip(parents, names[1:], strict=True):
        if name not in root._modules:
            root.add_module(name, nn.ModuleList() if following.isdigit() else Container())
        root = root._modules[name]  # type: ignore[assignment]
    root.add_module(last, module)


# What decides what calling a module does, beside its class, its tensors and the modules below it: the one list of what
# makes a leaf plain, and of what a ModuleGuard watches.
FORWARD = "forward"  # on the instance
FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOKS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
ATTRIBUTES = ("eps", "variance_epsilon", "p", "max_norm")  # of norms, a Dropout, an Embedding
# Those of every module of a process (torch.nn.modules.module.register_module_forward_hook and its kin).
_GLOBAL_HOOKS: tuple[dict, ...] = tuple(getattr(torch_module, f"_global{name}") for name in HOOKS)


def is_plain(module: nn.Module, leaf_type: type[Leaf]) -> TypeGuard[Leaf]:
    """Whether calling `module` does exactly what its weights say: nothing subclassed, patched or hooked."""
    return type(module) is leaf_type and FORWARD not in module.__dict__ and not has_hooks(module)


def has_global_hooks() -> bool:
    return any(_GLOBAL_HOOKS)


def has_hooks(module: nn.Module) -> bool:
    """Whether calling `module` calls something beside its forward: hooks of its own, or those of every module."""
    return bool(  # HOOKS, written out: this is asked of each leaf before each op
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or any(_GLOBAL_HOOKS)
    )


def home_of(hook: Any) -> str:
    """The module that a hook is defined in."""
    return getattr(hook.func if isinstance(hook, partial) else hook, "__module__", None) or ""


def is_linear(module: nn.Module) -> bool:
    """Whether `weights_of` describes all that calling `module` does."""
    return is_plain(module, nn.Linear) or is_plain(module, QuantizedLinear)


def weights_of(module: nn.Module) -> ops.LinearWeights:
    """What a product with a leaf that is_linear takes."""
    if type(module) is QuantizedLinear:
        return ops.LinearWeights(*module.operands())
    parameters = module._parameters
    return ops.LinearWeights(parameters["weight"], parameters["bias"], None, None)  # type: ignore[arg-type]


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
