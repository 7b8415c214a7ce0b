"""Other ways to call a model than by itself: by torch's transforms, and in the wrappers of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from fuzz_subject import Subject
from hf import random_like
from torch import distributed as dist
from torch import nn
from torch.autograd import forward_ad

import fastbert

Tensors = dict[str, torch.Tensor]

# ----------------------------------------------------------------------------------------------------------------------
# Transforms, by the weights; `run` gives outputs, `scalar` makes one number of them


class Called(nn.Module):
    """What `run` makes of a model, as a module's forward: its weights can be replaced for one call."""

    def __init__(self, model: nn.Module, run: Callable[[nn.Module], Tensors]):
        super().__init__()
        self.model, self.run = model, run

    def forward(self) -> Tensors:
        return self.run(self.model)


def forward_mode(model: nn.Module, run: Callable[[nn.Module], Tensors], scalar: Callable) -> tuple[Tensors, Tensors]:
    """The outputs, and their derivatives along a direction of all weights (torch.autograd.forward_ad)."""
    called = Called(model, run)
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(p.detach(), random_like(p.shape, i).to(p.dtype))
            for i, (name, p) in enumerate(called.named_parameters())
        }
        parts = {name: forward_ad.unpack_dual(t) for name, t in torch.func.functional_call(called, duals, ()).items()}
    return (
        {name: part.primal.detach() for name, part in parts.items()},
        {
            name: torch.zeros_like(part.primal) if part.tangent is None else part.tangent.detach()
            for name, part in parts.items()
        },
    )


def func_grad(model: nn.Module, run: Callable[[nn.Module], Tensors], scalar: Callable) -> tuple[Tensors, Tensors]:
    """The outputs, and the gradients of a number that is made of them (torch.func.grad)."""
    called = Called(model, run)
    weights = {name: p.detach() for name, p in called.named_parameters()}

    def loss(weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        outputs = torch.func.functional_call(called, weights, ())
        return scalar(outputs), outputs

    gradients, outputs = torch.func.grad(loss, has_aux=True)(weights)
    return outputs, gradients


TRANSFORMS = {way.__name__: way for way in (forward_mode, func_grad)}

# ----------------------------------------------------------------------------------------------------------------------
# Wrappers: called in the place of the model, and taken off afterwards


@contextmanager
def in_ddp(model: nn.Module) -> Iterator[nn.Module]:
    if not any(p.requires_grad for p in model.parameters()):  # which it refuses
        yield model
        return
    if not dist.is_initialized():  # once a process: a DDP that outlives its group can block
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


@contextmanager
def in_accelerate(model: nn.Module) -> Iterator[nn.Module]:
    """As Accelerator.prepare with mixed precision leaves a model, here to no other numbers: float32 outputs."""
    from accelerate.utils import extract_model_from_parallel
    from accelerate.utils.operations import convert_outputs_to_fp32

    before = model.__dict__.get("forward")
    model._original_forward = model.forward
    model.forward = convert_outputs_to_fp32(model.forward)
    try:
        yield model
        extract_model_from_parallel(model, keep_fp32_wrapper=False)
    finally:
        model.__dict__.pop("_original_forward", None)
        model.__dict__.pop("forward", None)
        if before is not None:
            model.forward = before


class Mine(nn.Module):
    """A user's own."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@contextmanager
def in_a_module(model: nn.Module) -> Iterator[nn.Module]:
    yield Mine(model)


WRAPPERS = {wrapper.__name__: wrapper for wrapper in (in_a_module, in_accelerate, in_ddp)}


def assert_same_status(subject: Subject, wrapped: nn.Module) -> None:
    """status says of a wrapper what it says of the model in it."""
    found, of_model = fastbert.status(wrapped), fastbert.status(subject.model)
    assert (found.packed, found.others) == (of_model.packed, of_model.others), f"{found} in a wrapper, {of_model}"
