"""The choice of a backend for each op, and the reasons for it.

A backend is chosen before anything is launched, from shapes, dtypes and devices alone (docs/design.md, Ops). `auto`
takes the first backend of `ORDER` whose `supports` function gives no reason against it. A backend that is asked for by
name and cannot serve raises `BackendError` with its reason. `torch` serves every call.

An op that stands for several others is a fused op (docs/design.md, Ops): no caller names it. Before a layer runs
the others, it asks `try_fused`, which answers with something to call or with the reason why they run one by one. The
torch backend is those others, so `use_backend("torch")` never meets a fused op.
"""

from __future__ import annotations

import enum
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fastbert.errors import BackendError
from fastbert.native.availability import extension_error


class Backend(str, enum.Enum):
    TORCH = "torch"
    CPU = "cpu"
    TRITON = "triton"
    CUDA = "cuda"


# What `auto` tries, by the tensors' device. CUDA's kernels come first where a GPU has shown that they are faster
# (docs/cuda.md). Triton's interpreter serves CPU tensors too, but only when asked by name.
ORDER = {"cuda": (Backend.TRITON, Backend.CUDA), "cpu": (Backend.CPU,)}

Supports = Callable[..., "str | None"]
SUPPORTS: dict[str, dict[Backend, Supports]] = {}  # op -> backend -> why not, or None when it can serve
Probe = Callable[[torch.Tensor, torch.Tensor], tuple]
# Of the fused ops: what their backends ask of operands, and the function that runs on them.
FUSED: dict[str, dict[Backend, tuple[Supports, Callable[..., Any]]]] = {}
PROBES: dict[str, Probe] = {}  # op -> what `backends()` asks its `supports` with, where that is not the usual


def parse_backend(name: str | Backend | None) -> Backend | None:
    """`None` and "auto" mean the documented order. Raises ValueError, listing the valid names."""
    if name is None or name == "auto":
        return None
    try:
        return Backend(name)
    except ValueError:
        valid = ", ".join(["auto", *(b.value for b in Backend)])
        raise ValueError(f"unknown backend {name!r}; valid names: {valid}") from None


def _start_value() -> Backend | None:
    try:
        return parse_backend(os.environ.get("FASTBERT_BACKEND"))
    except ValueError as error:
        raise ValueError(f"FASTBERT_BACKEND: {error}") from None


class _Choice:
    """The process-wide choice. torch.compile guards on an object's attribute, while torch 2.11 bakes in a class's."""

    def __init__(self) -> None:
        self.forced: Backend | None = _start_value()


_choice = _Choice()


BUILD_KERNELS = "fastbert build"  # for the torch that is there, from the sources that every installation has

_has_warned = False


def missing_kernels() -> str | None:
    """None when the C++ kernels are there, else why not, what that costs and what to do, in one line."""

    if extension_error() is None:
        return None
    return (
        f"{extension_error()}: models run several times slower on CPUs; with a C++ compiler, this builds it:"
        f" {BUILD_KERNELS}"
    )


def warn_of_missing_kernels() -> None:
    """Warn, once a process, where the C++ kernels are missing and no other backend was asked for."""
    global _has_warned
    if not _has_warned and _choice.forced not in (Backend.TORCH, Backend.TRITON):
        _has_warned = True
        if (missing := missing_kernels()) is not None:
            warnings.warn(f"fastbert: {missing}", stacklevel=3)


def register(op: str, backend: Backend, supports: Supports, probe: Probe | None = None) -> None:
    """Declare that `backend` has kernels for `op`; `supports(*args, **options)` returns None or a reason.

    `probe` makes arguments for `supports` from a (2, 64) and a (64,) tensor; without it they are (x, None, vector,
    vector), those of an op over (total_tokens, hidden_size).
    """
    SUPPORTS.setdefault(op, {})[backend] = supports
    if probe is not None:
        PROBES[op] = probe


def register_fused(
    op: str,
    backend: Backend,
    supports: Callable[[torch.Tensor], str | None],
    accepts: Callable[[torch.Tensor, Any], str | None],
    run: Callable[..., Any],
) -> None:
    """Declare that `backend` has kernels for `op`, which stands for several ops.

    supports(x) returns None or a reason, from the tensor and the modes of the process (gradients, autocast) alone;
    accepts(x, operands) likewise, from what it would run on; run(x, operands, *rest) runs it.
    """
    register(op, backend, supports, lambda x, vector: (x,))
    FUSED.setdefault(op, {})[backend] = accepts, run


@contextmanager
def use_backend(name: str | Backend) -> Iterator[None]:
    """Within the block every op runs the kernels of backend `name`, or raises `BackendError` if they cannot serve it.

    Ops for which that backend has no kernel at all run in torch; `backends()` shows which they are. The choice holds
    for the whole process, like torch.set_num_threads. The environment variable FASTBERT_BACKEND sets its start value.
    """
    previous, _choice.forced = _choice.forced, parse_backend(name)
    try:
        yield
    finally:
        _choice.forced = previous


def asked_for(name: str | Backend | None) -> Backend | None:
    """The backend that a call asks for by its `backend=`, or else use_backend() for all; None: the choice is open."""
    return (parse_backend(name) if name is not None else None) or _choice.forced


_TRANSFORMED = "forward-mode derivatives and torch.func's transforms go through torch's own operations alone"


def transform_unsupported() -> str | None:
    """Why no kernel may run now: within forward_ad.dual_level() or a transform of torch.func (jvp, grad, vmap, ...).

    Kernels hand on no tangent and know nothing of batched tensors. Two integers of the process are looked at, no
    tensor; a trace has its own tensors, and what it records is transformed as a whole.
    """
    if torch.compiler.is_compiling():
        return None
    if torch.autograd.forward_ad._current_level < 0 and torch._C._functorch.maybe_current_level() is None:
        return None
    return _TRANSFORMED


def check_differentiated_once(gradients: Sequence[torch.Tensor | None]) -> None:
    """Raise BackendError, in the backward of a kernel that gets `gradients`, where its own are to be differentiated or
    transformed, or are asked for of several at once (is_grads_batched=True, vectorize=True).

    PyTorch's own once_differentiable makes constants of them with create_graph=True. A caller that then asks for
    the derivative by certain tensors, as torch.autograd.functional's jvp and hvp do, finds no path and takes it for 0.
    In graphs of torch.compile PyTorch itself refuses create_graph=True.
    """
    if torch.compiler.is_compiling():
        return
    reason = "create_graph=True" if torch.is_grad_enabled() else transform_unsupported()
    if reason is None and any([g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients]):
        reason = "is_grads_batched=True, or vectorize=True"
    if reason is not None:
        raise BackendError(
            f"the backward of fastbert's kernels cannot be differentiated or transformed ({reason}): compute the"
            ' forward pass within `with fastbert.use_backend("torch"):`'
        )


def select(op: str, asked: str | Backend | None, x: torch.Tensor, *args) -> Backend:
    """The backend that will serve this call of `op`; `x` and `args` are what the op's `supports` functions take.

    `asked` is the caller's `backend=`; None follows use_backend(). Raises BackendError.
    """
    table = SUPPORTS[op]
    explicit = parse_backend(asked) if asked is not None else None
    backend = explicit or _choice.forced
    if backend is None:
        return first_to_serve(op, x, *args) or Backend.TORCH
    if backend is Backend.TORCH or (explicit is None and backend not in table):
        return Backend.TORCH
    if backend not in table:
        reason: str | None = f"there is no {backend.value} kernel for {op}"
    else:
        reason = transform_unsupported() or table[backend](x, *args)
    if reason is not None:
        raise BackendError(f"backend {backend.value!r} cannot serve {op}: {reason}")
    return backend


def _order(x: torch.Tensor) -> tuple[Backend, ...]:
    if _choice.forced is not None:
        return (_choice.forced,)
    return ORDER["cpu"] if x.is_cpu else ORDER.get(x.device.type, ())  # a tensor's device is made at each look


def first_to_serve(op: str, x: torch.Tensor, *args) -> Backend | None:
    """The backend whose kernels would serve this call; None where none would, or torch was asked for."""
    if transform_unsupported() is not None:
        return None
    table = SUPPORTS[op]
    for backend in _order(x):
        if backend in table and table[backend](x, *args) is None:
            return backend
    return None


def try_fused(op: str, x: torch.Tensor, find_operands: Callable[[], Any]) -> Callable[..., Any] | str:
    """`op`, which stands for several ops, bound to x and to what `find_operands()` returns; or why they run one by one.

    `find_operands()` finds out what the op would run on, or gives a reason, a str, which takes most of the time. It is
    asked only where x, the modes of the process and the choice of a backend leave it open.
    """
    if (transformed := transform_unsupported()) is not None:
        return transformed
    table, operands, reason = SUPPORTS[op], None, None
    for backend in _order(x):
        if backend not in table:
            continue
        unsupported = table[backend](x)
        if unsupported is None:
            operands = find_operands() if operands is None else operands
            if isinstance(operands, str):
                return operands
            accepts, run = FUSED[op][backend]
            unsupported = accepts(x, operands)
            if unsupported is None:
                return partial(run, x, operands)
        reason = unsupported
    if reason is not None:
        return reason
    if _choice.forced is None:
        return f"no backend has it for tensors on {x.device.type}"
    return f"{_choice.forced.value}, the backend that was asked for, does not have it"
