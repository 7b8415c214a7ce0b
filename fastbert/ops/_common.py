"""What all ops share: whether a backend's kernels are there, how they are registered, and autograd around them.

The backend stands in a registered op's name, so the choice is visible in profiles and compiled graphs, and each name
has one kernel per dispatch key (docs/design.md, Ops). The C++ extension registers its kernels when it is loaded; a
Triton kernel is imported by its first call.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch

from fastbert.backend import Backend, check_differentiated_once
from fastbert.native.availability import cuda_error, triton_error

# --------------------------------------------------------------------------------------------------------------------
# What kernels take


def triton_unsupported(x: torch.Tensor) -> str | None:
    """Why Triton's kernels cannot run on x: no GPU and no interpreter, no Triton, or a dtype that they do not have."""
    if x.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"tensors are on {x.device.type}"
    if x.device.type != "cuda" and torch.compiler.is_compiling():
        return "the Triton interpreter does not run under torch.compile"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype} (has float32, bfloat16 and float16)"
    return triton_error()


def cuda_unsupported(x: torch.Tensor, max_columns: int | None = 8192) -> str | None:
    """Why the CUDA kernels cannot run on x (total_tokens, width); max_columns None: they do not keep whole rows."""
    if x.device.type != "cuda":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype} (has float32, bfloat16 and float16)"
    if max_columns is not None and x.shape[-1] > max_columns:
        return f"rows have {x.shape[-1]} columns, the kernels keep up to {max_columns} in registers"
    return cuda_error()


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd must record this call."""
    if torch.is_grad_enabled():
        for t in tensors:  # not any(): a generator takes longer than all of them
            if t is not None and t.requires_grad:
                return True
    return False


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of a product of x: autocast's where it is on, as F.linear has it."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """Sums and losses run in fp32, or in fp64 where that is what came in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def check_devices(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError, naming both devices, unless all of an op's tensors are where the first of them is."""
    device = None
    for name, t in tensors.items():
        if t is None:
            continue
        if device is None:
            device, first = t.device, name
        elif t.device != device:
            raise ValueError(f"{op}: {name} is on {t.device}, {first} on {device}; all must be on one device")


# --------------------------------------------------------------------------------------------------------------------
# Weights of which nothing is left but what the CPU's products read (packed_only.py makes them)


def _refuse(*arguments: Any, **options: Any) -> NoReturn:
    from fastbert import _C

    raise RuntimeError(_C.packed_only_error)


class PackedOnly(torch.Tensor):
    """Has a weight's sizes, dtype and device. Whoever wants its values, or to write or copy them, gets a RuntimeError
    that says that they are gone. Kernels are handed `packed`: what is a weight to them (csrc/ops/packed_only.h).
    """

    packed: torch.Tensor

    # Each call reads the versions and dtypes of all weights: torch is not to ask Python whether it may.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    # Every operator.
    __torch_dispatch__ = classmethod(_refuse)  # type: ignore[assignment]

    # What reads the memory, or copies the object, without an operator.
    numpy = tolist = data_ptr = untyped_storage = storage = share_memory_ = is_shared = _refuse
    __array__ = __dlpack__ = __deepcopy__ = __reduce_ex__ = __copy__ = _refuse
    data = property(_refuse, _refuse)


def for_kernels(weights: Iterable[Any]) -> list[Any]:
    """Weights as the CPU's products take them; None, too, stays."""
    return [t.packed if type(t) is PackedOnly else t for t in weights]


# --------------------------------------------------------------------------------------------------------------------
# Registration


# For as long as this lives the schemas are there. One for all: torch.library.define makes one for each.
_library = torch.library.Library("fastbert", "FRAGMENT")


def define(name: str, schema: str, fake: Callable | None) -> Callable[..., Any]:
    """Register fastbert::{name}, whose kernels the C++ extension brings, and return it. `fake`: what traces run."""
    _library.define(name + schema)
    if fake is not None:
        torch.library.register_fake(f"fastbert::{name}", fake, lib=_library)
    return getattr(torch.ops.fastbert, name)


def define_triton(op: str, schema: str, module: str, fake: Callable) -> Callable[..., Any]:
    """Register fastbert::{op}_triton, function `op` of fastbert.kernels.{module}, and return it.

    Its CPU key is for TRITON_INTERPRET=1, which tests the kernels without a GPU.
    """
    kernel = None

    def implementation(*args):
        nonlocal kernel
        if kernel is None:
            kernel = getattr(importlib.import_module(f"fastbert.kernels.{module}"), op)
        return kernel(*args)

    registered = define(f"{op}_triton", schema, fake)
    for key in ("CUDA", "CPU"):
        _library.impl(f"{op}_triton", implementation, key)
    return registered


# --------------------------------------------------------------------------------------------------------------------
# Autograd


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the backward of an autograd.Function that runs kernels: see `check_differentiated_once`."""

    @functools.wraps(backward)
    def checked(ctx, *douts):
        check_differentiated_once(douts)
        return backward(ctx, *douts)

    return checked


class Rule(NamedTuple):
    """How an op is differentiated, for every backend that has kernels of it.

    forward(backend, options, *tensors) returns the result, or a tuple of results, and the tensors that backward wants.
    backward(backend, options, needed, saved, *gradients of the results) returns a gradient for each of `tensors`;
    `needed` says which of them take one, what stands at the others' places does not matter.
    """

    forward: Callable[..., tuple]
    backward: Callable[..., Any]
    materialize_grads: bool = True  # False: the gradient of a result that nobody used is None, not a tensor of zeros


class Differentiable(torch.autograd.Function):
    """Autograd around the registered forward and backward of any op: apply(rule, backend, options, *tensors)."""

    @staticmethod
    def forward(ctx, rule: Rule, backend: Backend, options, *tensors):
        results, saved = rule.forward(backend, options, *tensors)
        ctx.save_for_backward(*saved)
        if not rule.materialize_grads:
            ctx.set_materialize_grads(False)
        ctx.call = (rule, backend, options)
        return results

    @staticmethod
    @differentiable_once
    def backward(ctx, *douts):
        rule, backend, options = ctx.call
        needed = ctx.needs_input_grad[3:]
        gradients = rule.backward(backend, options, needed, ctx.saved_tensors, *douts)
        return None, None, None, *[g if wanted else None for g, wanted in zip(gradients, needed, strict=True)]
