"""Modules under torch's FSDP2 (torch.distributed.fsdp.fully_shard).

A sharded module has a class of its own, made from the module's, and hooks that gather its weights before each call and
let go of them after it. So it has to be called, also where packed execution passes such modules by.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastbert import ops

HOOKS_FROM = "torch.distributed.fsdp._fully_shard._fsdp_state"


def is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard was called on this very module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it was not imported nothing is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that a module was made with."""
    cls = type(module)
    return cls.__bases__[1] if is_sharded(module) else cls


def without_views(value: Any) -> Any:
    """A tensor of a sharded module's output, None, or a tuple of them: FSDP2 hangs what it does before backward on the
    tensors, and a view may lose it.
    """
    if isinstance(value, tuple):
        return tuple(map(without_views, value))
    return value.clone() if value is not None and value._is_view() else value


def call_sharded(module: nn.Module, run: Callable[..., Any], *args: Any) -> Any:
    """module(*args), hooks included, with `run` in the place of its forward."""

    def forward(*args: Any) -> Any:
        # Gathered weights come into the same tensors each time, and PyTorch is told not to record that they changed.
        ops.repack(module.parameters())
        return run(*args)

    module.__dict__["forward"] = forward
    try:
        return module(*args)
    finally:
        del module.__dict__["forward"]


def whole_beside(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, which every rank has whole, as an operand of an operation with `tensor`, whose ranks may have shards."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(tensor, distributed.DTensor):
        return value
    mesh = tensor.device_mesh
    return distributed.DTensor.from_local(value, mesh, [distributed.Replicate()] * mesh.ndim, run_check=False)
