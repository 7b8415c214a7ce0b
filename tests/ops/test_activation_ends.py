"""Activations and their slopes far from and close to 0, each range of magnitudes by itself: no large value next to it
hides an error. What matters of them near 1 is in the tests of the ops."""

from __future__ import annotations

import math

import cuda_kernels as cuda
import pytest
import torch
from full import halved, left_to_full
from isas import CPU_BACKENDS, backend_with_isa, device_of

from fastbert import ops
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR

BACKENDS = (*CPU_BACKENDS, "triton", "cuda-emulated")
each_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
emulated_left_to_full = left_to_full(lambda p: p["backend"] == "cuda-emulated")
each_activation = pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "relu", "tanh", "silu"))

# The powers of 2 at which a range begins: many where functions bend, every eighth one where they do not.
EXPONENTS = (*range(-126, -8, 8), *range(-8, 8), *range(8, 127, 8), 127)
RANGES = (torch.tensor(EXPONENTS, dtype=torch.float64).exp2()[:, None] * torch.linspace(1, 1.9, 16)).float()


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "cuda-emulated":
        yield request.param
    else:
        with backend_with_isa(request.param) as name:
            yield name


def truth(x, activation):
    """(value, slope, x times the slope's slope) in float64, by formulas in which nothing cancels."""
    x = x.double().requires_grad_()
    if activation == "gelu":
        y = 0.5 * x * torch.erfc(-x / math.sqrt(2.0))
    elif activation == "gelu_tanh":
        y = x * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))
    elif activation == "silu":
        y = x * torch.sigmoid(x)
    else:
        y = reference.activation(x, activation)
    if activation == "tanh":
        slope = 4.0 * torch.sigmoid(2.0 * x) * torch.sigmoid(-2.0 * x)
    else:
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    bend = torch.autograd.grad(slope.sum(), x)[0] if slope.requires_grad else torch.zeros_like(x)
    return y.detach(), slope.detach(), (x * bend).detach()


def literal(x, activation):
    leaf = x.detach().requires_grad_()
    y = reference.activation(leaf, activation)
    return y.detach(), torch.autograd.grad(y.sum(), leaf)[0]


def routes(x, activation, backend):
    """{name: (values, slopes or None)} of x, by every kernel of the backend that has an activation in it."""
    if backend == "cuda-emulated":
        pre = x.view(-1, 16)
        dpre, inner, _ = cuda.activation_bwd(torch.ones_like(pre), pre, activation)
        forward = cuda.activation_fwd(pre, activation).flatten()
        return {"forward": (forward, None), "backward": (inner.flatten(), dpre.flatten())}
    device = device_of(backend)
    column, found = x.to(device)[:, None], {}
    ones = torch.ones(64, 1, dtype=x.dtype, device=device)
    leaf, down = column.clone().requires_grad_(), ones[:1].clone()
    out = ops.feed_forward(leaf, ones[:1], None, down, activation=activation, backend=backend)
    (slope,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
    found["feed_forward"] = (out.detach()[:, 0], slope[:, 0])
    if backend == "cpu":
        out = ops.linear(leaf, ones[:1], None, activation=activation, backend=backend)
        (slope,) = torch.autograd.grad(out, leaf, torch.ones_like(out))
        found["linear"] = (out.detach()[:, 0], slope[:, 0])
        out = ops.linear(column, ones, None, activation=activation, backend=backend)  # whole panels
        assert torch.equal(out, out[:, :1].expand_as(out)) or out.isnan().any()
        found["inference"] = (out[:, 0], None)
    return {name: [None if t is None else t.cpu() for t in pair] for name, pair in found.items()}


@emulated_left_to_full
@left_to_full(lambda p: p["backend"] == "triton" and p["activation"] != "tanh")
@halved
@each_activation
@each_dtype
def test_every_range_of_magnitudes_by_itself(backend, dtype, activation):
    """The error rule, range by range. Where a function falls steeply its result is only as good as x, whose own
    rounding changes it by eps |x slope|; what is below the smallest normal number, or x times that, may be 0. The exact
    GELU is a difference of x/2 and x/2 erf, whose rounding it has until they are equal, before -8.
    """
    for sign in (1.0, -1.0):
        x = (sign * RANGES).to(dtype)
        value, slope, bend = truth(x, activation)
        baselines = [t.double().nan_to_num(0.0) for t in literal(x, activation)]
        info = torch.finfo(dtype)
        cancels = (activation == "gelu") * (x.double().abs() < 8) * 0.5
        flushed = info.tiny * x.double().abs().clamp(1.0, 128.0)
        for name, found in routes(x.flatten(), activation, backend).items():
            sensitivities = ((x.double() * slope).abs() + cancels * x.double().abs(), bend.abs() + cancels)
            rule = zip((value, slope), sensitivities, (OUTPUT_FACTOR, GRADIENT_FACTOR), strict=True)
            for what, actual, baseline, (oracle, sensitivity, factor) in zip(
                ("value", "slope"), found, baselines, rule, strict=True
            ):
                if actual is None:
                    continue
                error = (actual.double().view_as(x) - oracle).abs()
                inherent = (info.eps * (oracle.abs() + sensitivity)).nan_to_num(0.0)
                bound = factor * ((baseline - oracle).abs().amax(-1) + inherent.amax(-1)) + flushed.amax(-1)
                worst = int((error.amax(-1) / bound).nan_to_num(math.inf).argmax())
                assert (error.amax(-1) <= bound).all(), (
                    f"{name}: {what} from {x[worst, 0].item():.3g}: {error[worst].max():.3e} over {bound[worst]:.3e}"
                )


@emulated_left_to_full
@halved
@each_activation
@each_dtype
def test_limits_are_exact(backend, dtype, activation):
    """Of infinities, and of all that is nearer to them than to 0: 0, x or 1, and slopes of 0 and 1."""
    ends = torch.tensor([math.inf, torch.finfo(dtype).max, 1e38, 1e30, 1e20, 1e6, 1e3, 200.0]).to(dtype).repeat(2)
    one, zero = torch.ones_like(ends), torch.zeros_like(ends)
    above, below = (one, -one) if activation == "tanh" else (ends, zero)
    for name, (value, slope) in routes(ends, activation, backend).items():
        assert torch.equal(value, above), f"{name} {value}"
        assert slope is None or torch.equal(slope, zero if activation == "tanh" else one), f"{name} {slope}"
    for name, (value, slope) in routes(-ends, activation, backend).items():
        assert torch.equal(value, below), f"{name} {value}"
        assert slope is None or torch.equal(slope, zero), f"{name} {slope}"


@emulated_left_to_full
@halved
@each_activation
@each_dtype
def test_nan_stays_and_nothing_becomes_something(backend, dtype, activation):
    nan = torch.full((16,), math.nan, dtype=dtype)
    for name, (value, slope) in routes(nan, activation, backend).items():
        assert value.isnan().all(), name
        assert slope is None or slope.isnan().all() or (activation == "relu" and torch.equal(slope, slope * 0 + 1)), (
            name
        )
    tiny = torch.finfo(dtype).tiny
    least = torch.tensor([0.0, -0.0, tiny, -tiny, tiny / 2, -tiny / 2, tiny / 64, -tiny / 64]).to(dtype).repeat(2)
    for name, (value, slope) in routes(least, activation, backend).items():
        assert (value.abs() <= least.abs()).all(), f"{name} {value}"
        assert slope is None or torch.isfinite(slope).all(), name
