"""Callables that stand in the place of a module's forward, on the instance."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import nn


def _signature_of(kind: Any) -> inspect.Signature:
    signature = inspect.signature(kind.forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self


def _argument_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in _signature(kind).parameters if name != "kwargs")


# With their types written out: to mypy a class is not hashable, which lru_cache asks for.
_signature: Callable[[Any], inspect.Signature] = lru_cache(maxsize=64)(_signature_of)
argument_names: Callable[[Any], tuple[str, ...]] = lru_cache(maxsize=64)(_argument_names)


class OnInstance:
    """The forward of one module, which it holds weakly: dropping the module frees its weights at once.

    A copy of the module (deepcopy, pickle, torch.save) gets one bound to the copy, made of the same settings.
    """

    def __init__(self, module: nn.Module, *settings: Any):
        self._module, self._settings = weakref.ref(module), settings
        self._kind = type(module).__name__

    @property
    def module(self) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the accelerated {self._kind} is gone; only its forward was kept")
        return module

    @property
    def __signature__(self) -> inspect.Signature:
        """transformers' own: the Trainer, PEFT and sentence-transformers choose arguments by it."""
        return _signature(type(self.module))

    __code__ = property(lambda self: type(self).__call__.__code__)  # torch.export names a base model's graph by it

    def __reduce__(self):
        return type(self), (self.module, *self._settings)

    @staticmethod
    def is_recorded() -> bool:
        """Whether torch.jit.trace or torch.export records this call."""
        is_exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()  # 2.11 mixes them up
        return torch.jit.is_tracing() or is_exporting


def put_by_us(module: nn.Module) -> OnInstance | None:
    """What stands in the place of a module's forward, if it is one of these."""
    forward = module.__dict__.get("forward")
    forward = getattr(forward, "__func__", forward)  # HF accelerate binds what it unwraps
    return forward if isinstance(forward, OnInstance) else None
