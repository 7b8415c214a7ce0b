"""Callables that stand in the place of a module's forward, on the instance."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fastbert.layers.guard import forget_all
from fastbert.layers.leaves import FORWARD
from fastbert.models.tree import PLACED


def _signature_of(cls: Any) -> inspect.Signature:
    signature = inspect.signature(cls.forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self


def _argument_names(cls: Any) -> tuple[str, ...]:
    return tuple(name for name in _signature(cls).parameters if name != "kwargs")


# With their types written out: to mypy a class is not hashable, which lru_cache asks for.
_signature: Callable[[Any], inspect.Signature] = lru_cache(maxsize=64)(_signature_of)
argument_names: Callable[[Any], tuple[str, ...]] = lru_cache(maxsize=64)(_argument_names)


class OnInstance:
    """The forward of one module, which it holds weakly: dropping the module frees its weights at once.

    A copy of the module (deepcopy, pickle, torch.save) gets one bound to the copy, made of the same settings.
    """

    def __init__(self, module: nn.Module, *settings: Any):
        self._module, self._settings = weakref.ref(module), settings
        self._class_name = type(module).__name__

    @property
    def module(self) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the accelerated {self._class_name} is gone; only its forward was kept")
        return module

    @property
    def __signature__(self) -> inspect.Signature:
        """transformers' own: the Trainer, PEFT and sentence-transformers choose arguments by it."""
        return _signature(type(self.module))

    @property
    def __func__(self) -> Callable:
        """What a method would have here. Accelerate wraps that and binds it, so that a copy gets its own."""
        return _method_of(type(self.module))

    __code__ = property(lambda self: type(self).__call__.__code__)  # torch.export names a base model's graph by it

    def __reduce__(self):
        return type(self), (self.module, *self._settings)

    @staticmethod
    def is_recorded() -> bool:
        """Whether torch.jit.trace or torch.export records this call."""
        is_exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()  # 2.11 mixes them up
        return torch.jit.is_tracing() or is_exporting


def _method_of_class(cls: Any) -> Callable:
    def forward(module, *args, **kwargs):
        return module.__dict__[PLACED](*args, **kwargs)

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return forward


_method_of: Callable[[Any], Callable] = lru_cache(maxsize=64)(_method_of_class)


def put(module: nn.Module, forward: OnInstance) -> None:
    """Place it; the module keeps it under a second name, too, where it is found behind wrappers of other libraries."""
    module.__dict__.update({FORWARD: forward, PLACED: forward})


def put_by_us(module: nn.Module) -> OnInstance | None:
    """What we have put in the place of a module's forward, even if it was wrapped since."""
    return module.__dict__.get(PLACED) if FORWARD in module.__dict__ else None


def is_wrapped(module: nn.Module) -> bool:
    """Whether another library's function stands where we have put a forward; it may call that, or not."""
    placed, now = put_by_us(module), module.__dict__.get(FORWARD)
    return placed is not None and now is not placed and getattr(now, "__func__", None) is not placed.__func__


def is_free(module: nn.Module) -> bool:
    """Whether a forward may be put: there is no other one, and ours is not wrapped."""
    return FORWARD not in module.__dict__ or (put_by_us(module) is not None and not is_wrapped(module))


def take_away(module: nn.Module) -> None:
    """What `put` did is undone. Raises ValueError where it is wrapped: what calls it would be lost."""
    if put_by_us(module) is None:
        return
    if is_wrapped(module):
        raise ValueError(
            f"the accelerated forward of {type(module).__name__} has been wrapped since by"
            f" {_home(module.__dict__[FORWARD])}: undo that first (Accelerate: unwrap_model(model,"
            " keep_fp32_wrapper=False))"
        )
    for name in (FORWARD, PLACED, "extra_repr"):
        module.__dict__.pop(name, None)
    for each in module.modules():
        forget_all(each)


def _home(function: Any) -> str:
    return str(getattr(function, "__module__", None) or type(function).__module__)
