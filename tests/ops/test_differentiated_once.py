"""Kernels have first derivatives only: to differentiate or transform their backward is an error, and no 0."""

from __future__ import annotations

import math

import pytest
import torch
from full import thinned
from seeds import manual_seed
from torch.autograd import forward_ad, functional

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.errors import BackendError
from fastbert.native.availability import extension_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

W = 16
CU_SEQLENS = torch.tensor([0, 3, 7], dtype=torch.int32)
IDS = torch.tensor([4, 2, 4, 0, 6, 2, 4])


def weights(x, *shape):
    return torch.arange(math.prod(shape)).sin().view(*shape).to(x.dtype)


def heads(x):
    return [x.view(7, 2, W // 2) * scale for scale in (1.0, 0.5, 2.0)]


def embedded(x, **options):
    return ops.embed_layer_norm(IDS, None, None, x, None, None, *(weights(x, W),) * 2, **options)


# {name: a function of x (7, W)}; without dropout, so that each is one function
SMOOTH = {
    "linear": lambda x: ops.linear(x, weights(x, W, W), weights(x, W), activation="gelu"),
    "linears": lambda x: torch.cat(ops.linears(x, [weights(x, W, W)] * 2, [None, None]), 1).sin(),
    "feed_forward": lambda x: ops.feed_forward(x, weights(x, W, W), weights(x, W), weights(x, W, W)),
    "attention": lambda x: ops.attention(*heads(x), CU_SEQLENS, 4),
    "add_layer_norm": lambda x: ops.add_layer_norm(x, x.sin(), *(weights(x, W),) * 2),
    "add_rms_norm": lambda x: ops.add_rms_norm(x, x.sin(), weights(x, W)),
    "embed_layer_norm": embedded,
    "cross_entropy": lambda x: ops.cross_entropy(x, weights(x, 9, W), None, IDS),
    "pooling": lambda x: ops.pooling(x, CU_SEQLENS).sin(),
    "pack": lambda x: ops.pack(x, torch.tensor([1, 3, 4])).sin(),
    "unpack": lambda x: ops.unpack(x.sin(), torch.tensor([0, 1, 3, 4, 5, 7, 8]), 9).sin(),
}
DROPPING = {
    "dropout": lambda x: ops.dropout(x, 0.5),
    "feed_forward, dropout": lambda x: ops.feed_forward(x, *(weights(x, W, W), None, weights(x, W, W)), dropout_p=0.5),
    "attention, dropout": lambda x: ops.attention(*heads(x), CU_SEQLENS, 4, dropout_p=0.5),
    "add_layer_norm, dropout": lambda x: ops.add_layer_norm(x, x.sin(), *(weights(x, W),) * 2, dropout_p=0.5),
    "sparse rows": lambda x: embedded(x, sparse=True),
}
OF_TRITON = ("attention", "add_layer_norm", "embed_layer_norm", "cross_entropy", "pooling", "pack", "unpack")
OF_CPU = tuple(name for name in (*SMOOTH, *DROPPING) if name not in ("pooling", "pack", "unpack"))


def jvp(f, x, v):
    return functional.jvp(f, x, v)[1]


def vjp_again(f, x, v):
    u = torch.ones_like(f(x))
    return functional.jvp(lambda u: functional.vjp(f, x, u, create_graph=True)[1], u, u)[1]


def hvp(f, x, v):
    return functional.hvp(lambda x: f(x).square().sum(), x, v)[1]


def hessian(f, x, v):
    return functional.hessian(lambda x: f(x).square().sum(), x)


def penalty(f, x, v):
    """Beside the op there is another way for the derivative, and the op's own gradient needs none."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x).sum() + x.square().sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), x)[0]


def backward_of(f, x):
    x = x.clone().requires_grad_()
    out = f(x)
    return torch.ones_like(out), lambda u: torch.autograd.grad(out, x, u, retain_graph=True)[0]


def dual(f, x, v):
    u, backward = backward_of(f, x)
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(backward(forward_ad.make_dual(u, u))).tangent


def jvp_of_backward(f, x, v):
    u, backward = backward_of(f, x)
    return torch.func.jvp(backward, (u,), (u,))[1]


def each_of_a_batch(f, x, v):
    u, backward = backward_of(f, x)
    return torch.vmap(backward)(torch.stack([u, 2 * u]))


def batched_gradients(f, x, v):
    x = x.clone().requires_grad_()
    out = f(x)
    ones = torch.ones_like(out)
    return torch.autograd.grad(out, x, torch.stack([ones, 2 * ones]), is_grads_batched=True)[0]


def jacobian(f, x, v):
    return functional.jacobian(f, x, vectorize=True)


WAYS = (jvp, vjp_again, hvp, hessian, penalty, dual, jvp_of_backward, each_of_a_batch, batched_gradients, jacobian)


def operands():
    manual_seed(0)
    return torch.randn(7, W), torch.randn(7, W)


@thinned(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend, op", [("cpu", name) for name in OF_CPU] + [("triton", name) for name in OF_TRITON])
def test_kernels_say_so(backend, op, way, monkeypatch):
    if backend == "cpu" and extension_error() is not None:
        pytest.skip(extension_error())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    message = r'fastbert\'s kernels cannot be .*: compute the forward pass within `with fastbert.use_backend\("torch"\)'
    with use_backend(backend), pytest.raises(BackendError, match=message):
        way((SMOOTH | DROPPING)[op], *operands())


@pytest.mark.parametrize("op", SMOOTH)
def test_torch_has_batched_gradients(op):
    """What the error names: the same as a gradient for each."""
    function, (x, _) = SMOOTH[op], operands()
    with use_backend("torch"):
        found, baseline = (functional.jacobian(function, x, vectorize=vectorize) for vectorize in (True, False))
        oracle = functional.jacobian(function, x.double())
    assert_close_to_reference(found, oracle, baseline, GRADIENT_FACTOR)


@pytest.mark.parametrize("op", SMOOTH)
def test_torch_has_second_derivatives(op):
    """Against finite differences, and by way of a second derivative what forward mode gives."""
    function, (x, v) = SMOOTH[op], operands()
    with use_backend("torch"):
        found = jvp(function, x, v)
        baseline, oracle = (torch.func.jvp(function, (x.to(d),), (v.to(d),))[1] for d in (x.dtype, torch.float64))
        assert torch.autograd.gradgradcheck(function, x.double().requires_grad_(), fast_mode=True)
    assert oracle.abs().max() > 0
    assert_close_to_reference(found, oracle, baseline.to(found.dtype), GRADIENT_FACTOR)
