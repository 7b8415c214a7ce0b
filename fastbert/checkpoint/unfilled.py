"""Modules without memory: a checkpoint brings every tensor that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
