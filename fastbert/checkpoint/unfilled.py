"""Modules without memory: a checkpoint brings every tensor that they need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# What draws the first values of a weight: torch.nn's own resets, and init_weights of our models.
_DRAWS: frozenset[Callable] = frozenset(
    (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_, torch.Tensor.normal_, torch.Tensor.uniform_)
)


class _WithoutDraws(TorchFunctionMode):
    """Skips them: a tensor on the meta device has no values, and torch would import torch._dynamo (1.2 s) for them."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def unfilled() -> Iterator[None]:
    """Modules that are made inside have their parameters on the meta device: shapes, and no values."""
    with torch.device("meta"), _WithoutDraws():
        yield


_MADE_UNFILLED: ContextVar[bool] = ContextVar("_MADE_UNFILLED", default=False)


@contextmanager
def unfilled_models() -> Iterator[None]:
    """Models of ours that are made inside are unfilled. What a user's subclass adds to them has its values, on the CPU:
    a checkpoint need not bring it, and only the subclass's constructor knows what they are.
    """
    token = _MADE_UNFILLED.set(True)
    try:
        with torch.device("cpu"):
            yield
    finally:
        _MADE_UNFILLED.reset(token)


def may_be_unfilled(init: Callable[..., None]) -> Callable[..., None]:
    """Of the constructors of our models, which `unfilled_models` speaks of."""

    @functools.wraps(init)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        if not _MADE_UNFILLED.get():
            return init(*args, **kwargs)
        token = _MADE_UNFILLED.set(False)  # a model with a head makes its base model in here
        try:
            with unfilled():
                return init(*args, **kwargs)
        finally:
            _MADE_UNFILLED.reset(token)

    return wrapper
