"""Gradients reach weights by autograd's own nodes: a hook there, in C++ too, sees each of them once.

DDP's reducer, FSDP2 and optimizers that step in backward stand at AccumulateGrad nodes. So do hooks there, and what
`backward(inputs=...)` asks for. Of each op, and of whole models, whose layers and heads are one op each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from family_configs import config_for
from full import left_to_full
from op_cases import OPS
from seeds import manual_seed
from test_contract import ONCE, drawn
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.optim import _apply_optimizer_in_backward

import fastbert
from fastbert.backend import use_backend
from fastbert.models.classes import CLASSES
from fastbert.native.availability import triton_error

Loss = Callable[[], torch.Tensor]
FAMILIES = ("bert", "modernbert")  # post-norm and plain; pre-norm, gated, with one Linear for three roles
RATE = 0.5


def taken(loss: Loss, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What AccumulateGrad nodes hand to their hooks, each once."""
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in leaves}
    nodes = []  # a node lives as long as somebody has it
    for name, leaf in leaves.items():
        node = get_gradient_edge(leaf).node

        def hook(given: Any, received: Any, name: str = name) -> None:
            seen[name].append(received[0].detach().clone())

        node.register_hook(hook)
        nodes.append(node)
    loss().backward()
    assert all(len(gradients) == 1 for gradients in seen.values()), {name: len(g) for name, g in seen.items()}
    assert all(torch.equal(leaves[name].grad, gradient) for name, (gradient,) in seen.items())
    return {name: gradient for name, (gradient,) in seen.items()}


def cleared(leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for leaf in leaves.values():
        leaf.grad = None
    return leaves


def check(loss: Loss, leaves: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but an optimizer in backward; the gradients. loss() computes it anew, with the same numbers."""
    found = torch.autograd.grad(loss(), list(leaves.values()), allow_unused=True)
    expected = {name: g for name, g in zip(leaves, found, strict=True) if g is not None}
    there = {name: leaves[name] for name in expected}
    for name, gradient in taken(loss, cleared(there)).items():
        assert torch.equal(gradient, expected[name]), name
    first, *others = cleared(there)
    loss().backward(inputs=[there[first]])
    assert torch.equal(there[first].grad, expected[first])
    assert all(there[name].grad is None for name in others), "backward(inputs=...) has not asked for it"
    made = loss()
    cleared(there)[first].requires_grad_(False)
    made.backward()
    there[first].requires_grad_(True)
    assert there[first].grad is None, f"{first} was frozen behind forward"
    assert all(torch.equal(there[name].grad, expected[name]) for name in others)
    return expected


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        *(pytest.param(*case, marks=pytest.mark.full if case[1] == "triton" else ()) for case in ONCE),
        *((op, "torch") for op in OPS),
    ],
)
def test_of_an_op(op, backend):
    with drawn(op, backend, torch.float32) as cases:
        for one in cases[:1]:
            leaves = {name: t.requires_grad_() for name, t in one.case.make(one.seed).items()}

            def loss(one: Any = one, leaves: dict[str, torch.Tensor] = leaves) -> torch.Tensor:
                out = one.case.op(**leaves)
                return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()

            if loss().requires_grad:
                check(loss, leaves)


def model_of(model_type: str, backend: str) -> tuple[nn.Module, Loss]:
    manual_seed(0)
    layers = 1 if backend == "triton" else 2  # a layer more takes the interpreter as long as all the rest
    shape = {"num_hidden_layers": layers, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    model = CLASSES[model_type, "MaskedLM"](config_for(model_type, "MaskedLM", 0, **shape)).train()
    rows, labels = [[5, 6, 7, 8], [9, 10, 11]], [[-100, 6, -100, 8], [9, -100, -100]]
    packed = fastbert.pack_inputs(rows, labels=labels)
    return model, lambda: model(**packed).loss


@pytest.fixture(params=("torch", "cpu", "triton"))
def backend(request) -> Iterator[str]:
    if request.param == "triton" and triton_error() is not None:
        pytest.skip(triton_error())
    with use_backend(request.param):
        yield request.param


by_family = pytest.mark.parametrize("model_type", FAMILIES)
one_family = left_to_full(lambda given: given["backend"] == "torch" or given["model_type"] != "bert")


@one_family
@by_family
def test_of_a_model(model_type, backend):
    model, loss = model_of(model_type, backend)
    leaves = dict(model.named_parameters())
    expected = check(loss, leaves)
    assert len(expected) > len(leaves) / 2
    before = {name: leaf.detach().clone() for name, leaf in cleared(leaves).items()}
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": RATE})
    loss().backward()
    for name, leaf in leaves.items():
        step = RATE * expected[name] if name in expected else 0.0
        assert torch.equal(leaf.detach(), before[name] - step), f"{name}: the optimizer in its backward"


@one_family
@by_family
def test_of_a_model_under_ddp(model_type, backend, one_rank):
    """Three steps, the first behind one that adds up nothing: the second raises where a gradient missed its node."""
    model, loss = model_of(model_type, backend)
    found = torch.autograd.grad(loss(), list(model.parameters()), allow_unused=True)
    missing = any(g is None for g in found)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=missing)
    rows = fastbert.pack_inputs([[5, 6, 7, 8], [9, 10, 11]], labels=[[-100, 6, -100, 8], [9, -100, -100]])
    for step in range(3):
        model.zero_grad()
        if step == 0:
            with wrapped.no_sync():
                wrapped(**rows).loss.backward()
            model.zero_grad()
        wrapped(**rows).loss.backward()
        for (name, p), gradient in zip(model.named_parameters(), found, strict=True):
            assert (p.grad is None and gradient is None) or torch.equal(p.grad, gradient), name
