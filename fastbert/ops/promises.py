"""Words that a training loop of our own gives, inside of which ops may do less: that nobody writes a weight behind
PyTorch's back, and that nobody but `backward()` asks for gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import nn

from fastbert.native.availability import extension_error


@contextmanager
def only_recorded_writes() -> Iterator[None]:
    """Inside, and in this thread, PyTorch records every write to a weight: optimizers, operations in place.

    The kernels then need not read all of every weight at each call to see whether it is still what they have packed
    (docs/gemm.md). For loops of our own; in torch.inference_mode it is so anyway.
    """
    if extension_error() is not None:  # nothing is packed
        yield
        return
    from fastbert import _C

    before = _C.only_recorded_writes()
    _C.set_only_recorded_writes(True)
    try:
        yield
    finally:
        _C.set_only_recorded_writes(before)


class _Here(threading.local):
    only_backward = False


_here = _Here()
_hooks = attrgetter("_backward_hooks")
_hooks_behind = attrgetter("_post_accumulate_grad_hooks")


@contextmanager
def only_backward(holds: bool = True) -> Iterator[None]:
    """A loss that is made inside, and in this thread, gets a `backward()` and nothing else, and in between nobody has
    to do with a parameter's gradient. holds: False takes that word back.

    An op that makes the gradients of many parameters at once, those of all layers, then adds them to `.grad` itself.
    Autograd would take 2 to 3 us of the host for each of them, and BERT-base has 192 there; but it does not know of
    them now: torch.autograd.grad does not find these parameters. Parameters that have hooks are left to autograd. For
    loops of our own.
    """
    before, _here.only_backward = _here.only_backward, holds
    try:
        yield
    finally:
        _here.only_backward = before


def may_add_gradients(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether an op may add to these parameters' gradients in its backward: nobody could tell it from autograd."""
    if not _here.only_backward or set(map(type, parameters)) != {nn.Parameter}:
        return False
    return not any(map(_hooks, parameters)) and not any(map(_hooks_behind, parameters))


def add_gradients(parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor]) -> None:
    """As backward() does: the first gradient of a parameter becomes its `.grad`, others are added to that."""
    for p, gradient in zip(parameters, gradients, strict=True):
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad.add_(gradient)
