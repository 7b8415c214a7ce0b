"""feed_forward's Triton kernels, as a GEMM's epilogue and after torch's GEMM, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from fastbert import ops
from fastbert.backend import BackendError
from fastbert.ops._library import triton_error
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")


@pytest.fixture(params=("epilogue", "elementwise"))
def plan(request, monkeypatch):
    """Each of the two ways, with blocks that small cases fill and overhang."""
    from fastbert.kernels import blocks, feed_forward

    small = blocks.gemm_blocks(16, 32, 16, 4, 2)
    chosen = blocks.FeedForwardPlan(small, small) if request.param == "epilogue" else blocks.FeedForwardPlan()
    monkeypatch.setattr(feed_forward, "feed_forward_plan", lambda x, intermediate_size: chosen)
    return request.param


def make(rows: int, hidden_size: int, intermediate_size: int, dtype, bias: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        "x": torch.randn(rows, hidden_size),
        "up_weight": torch.randn(intermediate_size, hidden_size) / hidden_size**0.5,
        "down_weight": torch.randn(hidden_size, intermediate_size) / intermediate_size**0.5,
    }
    if bias:
        tensors["up_bias"] = torch.randn(intermediate_size)
    return {name: t.to(dtype) for name, t in tensors.items()}


def run(function, tensors, dout):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    bias = leaves.get("up_bias")
    out = function(leaves["x"], leaves["up_weight"], bias, leaves["down_weight"])
    out.backward(dout.to(out.dtype))
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def check(tensors, activation):
    dout = torch.randn(tensors["x"].shape[0], tensors["down_weight"].shape[0])

    def ours(x, up_weight, up_bias, down_weight):
        return ops.feed_forward(x, up_weight, up_bias, down_weight, activation=activation, backend="triton")

    def literal(*operands):
        return reference.feed_forward(*operands, activation)

    dout = dout.to(tensors["x"].dtype)
    actual, baseline = run(ours, tensors, dout), run(literal, tensors, dout)
    oracle = run(literal, {name: t.double() for name, t in tensors.items()}, dout)
    for name, found in actual.items():
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(found, oracle[name], baseline[name], factor, f"{name} {activation}")
    with torch.no_grad():
        inference = ours(tensors["x"], tensors["up_weight"], tensors.get("up_bias"), tensors["down_weight"])
    assert torch.equal(inference, actual["out"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_oracle(plan, activation, dtype):
    check(make(40, 48, 72, dtype), activation)


@pytest.mark.parametrize("rows,hidden_size,intermediate_size", ((1, 16, 16), (17, 33, 31), (32, 16, 64)), ids=str)
def test_shapes_around_the_blocks(plan, rows, hidden_size, intermediate_size):
    for bias in (True, False):
        check(make(rows, hidden_size, intermediate_size, torch.float32, bias), "gelu")


def test_no_tokens(plan):
    tensors = make(0, 16, 32, torch.float32)
    found = run(lambda *t: ops.feed_forward(*t, backend="triton"), tensors, torch.zeros(0, 16))
    assert found["out"].shape == (0, 16)
    assert all(not grad.any() and grad.shape == tensors[name].shape for name, grad in found.items() if name != "out")


def test_large_values_stay_finite(plan):
    tensors = make(16, 16, 32, torch.float32)
    tensors["x"] *= 10
    for activation in ACTIVATIONS:
        check(tensors, activation)


def test_autocast_and_frozen_weights(plan):
    tensors = make(24, 16, 48, torch.float32)
    x, frozen = tensors["x"].requires_grad_(), tensors["up_weight"]
    down = tensors["down_weight"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.feed_forward(x, frozen, None, down, backend="triton")
    out.float().square().sum().backward()
    assert out.dtype is torch.bfloat16 and x.grad.dtype is down.grad.dtype is torch.float32 and frozen.grad is None
    low = {name: tensors[name].detach().bfloat16() for name in ("x", "up_weight", "down_weight")}
    operands = (low["x"], low["up_weight"], None, low["down_weight"], "gelu")
    exact = reference.feed_forward(*(t.double() if isinstance(t, torch.Tensor) else t for t in operands))
    assert_close_to_reference(out, exact, reference.feed_forward(*operands))


def test_the_same_bits_every_time(plan):
    tensors, dout = make(40, 48, 72, torch.bfloat16), torch.randn(40, 48)
    first, second = (run(lambda *t: ops.feed_forward(*t, backend="triton"), tensors, dout) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_opcheck(plan):
    x, up, down, bias = make(8, 16, 32, torch.float32).values()
    forward, backward = (
        torch.ops.fastbert.feed_forward_triton.default,
        torch.ops.fastbert.feed_forward_bwd_triton.default,
    )
    for return_pre in (True, False):
        torch.library.opcheck(forward, (x, up, bias, down, "gelu", return_pre))
    _, pre = forward(x, up, bias, down, "gelu", True)
    for needs in ((True, True, True), (False, True, False)):
        torch.library.opcheck(backward, (x, x, pre, up, down, "gelu", *needs))


def test_what_cannot_be_served_raises_with_the_reason():
    x, up, down, _ = make(8, 16, 32, torch.float32).values()
    with pytest.raises(BackendError, match=r"a weight is torch\.bfloat16, x is torch\.float32"):
        ops.feed_forward(x, up.bfloat16(), None, down, backend="triton")
    with pytest.raises(BackendError, match=r"a weight is torch\.int8"):
        ops.feed_forward(x, up.to(torch.int8), None, down, backend="triton")
