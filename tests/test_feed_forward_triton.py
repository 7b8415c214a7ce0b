"""feed_forward's Triton kernels, as a GEMM's epilogue and after torch's GEMM, against the float64 oracle."""

from __future__ import annotations

from functools import partial

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
    monkeypatch.setattr(feed_forward, "feed_forward_plan", lambda x, intermediate_size, gated: chosen)
    return request.param


def make(
    rows: int, hidden_size: int, intermediate_size: int, dtype, bias: bool = True, gated: bool = False
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    up_size = 2 * intermediate_size if gated else intermediate_size
    tensors = {
        "x": torch.randn(rows, hidden_size),
        "up_weight": torch.randn(up_size, hidden_size) / hidden_size**0.5,
        "down_weight": torch.randn(hidden_size, intermediate_size) / intermediate_size**0.5,
    }
    if bias:
        tensors["up_bias"] = torch.randn(up_size)
    return {name: t.to(dtype) for name, t in tensors.items()}


def run(function, tensors, dout):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    bias = leaves.get("up_bias")
    out = function(leaves["x"], leaves["up_weight"], bias, leaves["down_weight"])
    out.backward(dout.to(out.dtype))
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def check(tensors, activation, gated=False):
    dout = torch.randn(tensors["x"].shape[0], tensors["down_weight"].shape[0])

    def ours(x, up_weight, up_bias, down_weight):
        return ops.feed_forward(
            x, up_weight, up_bias, down_weight, activation=activation, gated=gated, backend="triton"
        )

    def literal(*operands):
        return reference.feed_forward(*operands, activation, gated)

    dout = dout.to(tensors["x"].dtype)
    actual, baseline = run(ours, tensors, dout), run(literal, tensors, dout)
    oracle = run(literal, {name: t.double() for name, t in tensors.items()}, dout)
    for name, found in actual.items():
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(found, oracle[name], baseline[name], factor, f"{name} {activation}")
    with torch.no_grad():
        inference = ours(tensors["x"], tensors["up_weight"], tensors.get("up_bias"), tensors["down_weight"])
    assert torch.equal(inference, actual["out"])


each_gating = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))


@each_gating
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_oracle(plan, activation, dtype, gated):
    check(make(40, 48, 72, dtype, gated=gated), activation, gated)


SHAPES = ((1, 16, 16), (17, 33, 31), (32, 16, 64), (5, 16, 1), (3, 8, 17), (2, 16, 100))


@each_gating
@pytest.mark.parametrize("rows,hidden_size,intermediate_size", SHAPES, ids=str)
def test_shapes_around_the_blocks(plan, rows, hidden_size, intermediate_size, gated):
    for bias in (True, False):
        check(make(rows, hidden_size, intermediate_size, torch.float32, bias, gated), "gelu", gated)


@each_gating
def test_no_tokens(plan, gated):
    tensors = make(0, 16, 32, torch.float32, gated=gated)
    found = run(lambda *t: ops.feed_forward(*t, gated=gated, backend="triton"), tensors, torch.zeros(0, 16))
    assert found["out"].shape == (0, 16)
    assert all(not grad.any() and grad.shape == tensors[name].shape for name, grad in found.items() if name != "out")


@each_gating
def test_large_values_stay_finite(plan, gated):
    tensors = make(16, 16, 32, torch.float32, gated=gated)
    tensors["x"] *= 10
    for activation in ACTIVATIONS:
        check(tensors, activation, gated)


@each_gating
def test_operands_with_gaps_give_the_same_and_stay_as_they_are(plan, gated):
    tensors = make(24, 16, 48, torch.float32, gated=gated)
    spread = {name: torch.stack((t, torch.full_like(t, torch.nan)), -1)[..., 0] for name, t in tensors.items()}
    assert not any(t.is_contiguous() for t in spread.values())
    ours = partial(ops.feed_forward, gated=gated, backend="triton")
    with torch.no_grad():
        assert torch.equal(ours(**spread), ours(**tensors))
    assert all(torch.equal(spread[name], t) for name, t in tensors.items())
    dout = torch.randn(1, 16).expand(24, 16)
    dense, expanded = (run(lambda *t: ours(*t), tensors, d) for d in (dout.contiguous(), dout))
    assert all(torch.equal(dense[name], expanded[name]) for name in dense)


def test_inference_makes_no_second_wide_matrix():
    x, up, down, bias = make(64, 16, 256, torch.float32).values()
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        ops.feed_forward(x, up, bias, down, backend="triton")
    wide = [event.name for event in profile.events() if event.self_cpu_memory_usage >= 64 * 256 * 4]
    assert wide == ["aten::addmm"]


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


@each_gating
def test_the_same_bits_every_time(plan, gated):
    tensors, dout = make(40, 48, 72, torch.bfloat16, gated=gated), torch.randn(40, 48)
    ours = partial(ops.feed_forward, gated=gated, backend="triton")
    first, second = (run(lambda *t: ours(*t), tensors, dout) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@each_gating
def test_opcheck(plan, gated):
    x, up, down, bias = make(8, 16, 32, torch.float32, gated=gated).values()
    forward, backward = (
        torch.ops.fastbert.feed_forward_triton.default,
        torch.ops.fastbert.feed_forward_bwd_triton.default,
    )
    for return_pre in (True, False):
        torch.library.opcheck(forward, (x, up, bias, down, "gelu", gated, return_pre))
    _, pre = forward(x, up, bias, down, "gelu", gated, True)
    for needs in ((True, True, True), (False, True, False)):
        torch.library.opcheck(backward, (x, x, pre, up, down, "gelu", gated, *needs))


def test_what_cannot_be_served_raises_with_the_reason():
    x, up, down, _ = make(8, 16, 32, torch.float32).values()
    with pytest.raises(BackendError, match=r"a weight is torch\.bfloat16, x is torch\.float32"):
        ops.feed_forward(x, up.bfloat16(), None, down, backend="triton")
    with pytest.raises(BackendError, match=r"a weight is torch\.int8"):
        ops.feed_forward(x, up.to(torch.int8), None, down, backend="triton")
