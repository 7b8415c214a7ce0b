"""The steps that write a model's weights, in every way that PyTorch has."""

from __future__ import annotations

import torch
from draw import Draw
from fuzz_subject import Subject, changed, draw_leaf, draw_weight
from torch import nn

import fastbert
from fastbert import ops
from fastbert.native.availability import extension_error


@torch.no_grad()
def in_place(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    if draw.flag():
        p[draw.integer(0, len(p) - 1)] = 0.7
    else:
        p.copy_(changed(draw, p))


def data_write(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    p.data.copy_(changed(draw, p))
    tell_or_not(draw, subject)


def data_replaced(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    p.data = changed(draw, p)


def numpy_write(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    if p.dtype is not torch.bfloat16:
        p.detach().numpy()[...] *= 0.5
        tell_or_not(draw, subject)


def tell_or_not(draw: Draw, subject: Subject) -> None:
    """Of a write that PyTorch does not record. Calls outside of inference mode see it all the same."""
    if draw.flag():
        fastbert.repack(subject.model)
        subject.is_untold = False
    else:
        subject.is_untold = True


def untold_write(draw: Draw, subject: Subject) -> None:
    """After so many calls with the weight in inference mode its copies must be new; after one outside of it, too."""
    _, leaf = draw_leaf(draw, subject, nn.Linear)
    weight = leaf.weight.detach()
    alias = weight.data if draw.flag() else torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(weight))
    alias[draw.integer(0, len(weight) - 1), draw.integer(0, weight.shape[1] - 1)] = 0.7
    is_packed = extension_error() is None and weight.dtype in (torch.float32, torch.bfloat16)
    if not is_packed or hasattr(leaf, "parametrizations") or subject.is_inference:  # which are compared at each call
        return
    x = torch.ones(1, weight.shape[1], dtype=weight.dtype)
    if draw.flag():
        subject.is_untold = True
        return
    with torch.inference_mode():
        for _ in range(fastbert._C.packed_check_calls):
            ops.linear(x, weight, None, backend="cpu")


def load_state_dict(draw: Draw, subject: Subject) -> None:
    state = {name: changed(draw, t) if draw.flag(4) else t for name, t in subject.model.state_dict().items()}
    subject.model.load_state_dict(state, assign=draw.flag(3))


def optimizer_step(draw: Draw, subject: Subject) -> None:
    """Of all elements, or of one in a parameter: whatever else is compared, few elements are sampled at a call."""
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    # AdamW's eps is 0 in float16: what has no gradient becomes NaN.
    is_half = any(p.dtype is torch.float16 for p in parameters)
    kind = draw.choice((torch.optim.SGD,) if is_half else (torch.optim.SGD, torch.optim.AdamW))
    generator = torch.Generator().manual_seed(draw.seed())
    one = draw.integer(0, 999) if draw.flag() else None
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if one is not None:
            p.grad *= 0
            p.grad.view(-1)[one % p.numel()] = 30
    how = draw.choice(({}, {"foreach": True}, {"foreach": False}, {"fused": True}))
    draw.note(f"  {kind.__name__}, {how}")
    optimizer = kind(parameters, lr=0.03, weight_decay=0.0, **how)
    if draw.flag(3):
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad())
    optimizer.step()
    subject.model.zero_grad()


def vector_to_parameters(draw: Draw, subject: Subject) -> None:
    parameters = list(subject.model.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector * 0.9, parameters)


def swap_tensors(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    torch.utils.swap_tensors(p, nn.Parameter(changed(draw, p)))


def offload(draw: Draw, subject: Subject) -> None:
    """Memory given back and taken anew, as FSDP and offloading do."""
    p = draw_weight(draw, subject)
    value, storage = changed(draw, p), p.untyped_storage()
    size = storage.nbytes()
    others = [q for q in subject.model.parameters() if q.untyped_storage().data_ptr() == storage.data_ptr()]
    # torch 2.13 dies where shared memory that was resized to 0 is to grow again.
    if len(others) == 1 and size == p.numel() * p.element_size() and storage.resizable() and not storage.is_shared():
        storage.resize_(0)
        storage.resize_(size)
        with torch.no_grad():
            p.copy_(value)


@torch.inference_mode()
def in_inference_mode(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    p.copy_(changed(draw, p))
