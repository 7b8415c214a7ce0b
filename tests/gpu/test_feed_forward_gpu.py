"""feed_forward on GPUs against the float64 oracle: Triton's kernels after torch's GEMM, in the interpreter where there
is no GPU, and the CUDA backend's operators over CPU tensors and emulated kernels."""

from __future__ import annotations

from functools import partial

import cuda_kernels
import pytest
import torch
from full import halved, left_to_full
from seeds import manual_seed
from torch._C._profiler import _EventType

import fastbert.backend
from fastbert import ops
from fastbert.backend import Backend
from fastbert.errors import BackendError
from fastbert.native.availability import triton_error
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

needs_triton = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")
# Of CUDA the operators, which take a while to compile here; test_cuda.py has their kernels.
CUDA = pytest.param("cuda", marks=pytest.mark.full)
WAYS = (pytest.param("triton", marks=needs_triton), CUDA)
# One weight, gated with gate and up in one weight, or in two.
each_form = pytest.mark.parametrize("form", ("plain", "merged", "apart"))


@pytest.fixture(scope="module")
def cuda_operators():
    with cuda_kernels.operators_on_the_cpu("feed_forward_cuda", "feed_forward_bwd_cuda"):
        yield


def choose_way(way: str, request, monkeypatch) -> str:
    """The backend whose kernels then run this way."""
    if way == "cuda":
        request.getfixturevalue("cuda_operators")
        monkeypatch.setitem(fastbert.backend.SUPPORTS["feed_forward"], Backend.CUDA, lambda *operands: None)
    return way


@pytest.fixture(params=WAYS)
def backend(request, monkeypatch):
    name = choose_way(request.param, request, monkeypatch)
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(name == "cuda")  # NaN in what C++ allocates; conftest.py does it for Python
    yield name
    torch.use_deterministic_algorithms(previous)


def make(
    rows: int, hidden_size: int, intermediate_size: int, dtype, bias: bool = True, form: str = "plain"
) -> dict[str, torch.Tensor]:
    manual_seed(0)
    up_size = 2 * intermediate_size if form == "merged" else intermediate_size
    tensors = {
        "x": torch.randn(rows, hidden_size),
        "up_weight": torch.randn(up_size, hidden_size) / hidden_size**0.5,
        "down_weight": torch.randn(hidden_size, intermediate_size) / intermediate_size**0.5,
    }
    if bias:
        tensors["up_bias"] = torch.randn(up_size)
    if form == "apart":
        tensors["gate_weight"] = torch.randn(up_size, hidden_size) / hidden_size**0.5
        if bias:
            tensors["gate_bias"] = torch.randn(up_size)
    return {name: t.to(dtype) for name, t in tensors.items()}


def feed_forward(form: str, backend: str, activation: str = "gelu"):
    """ops.feed_forward of tensors by name."""
    return partial(ops.feed_forward, activation=activation, gated=form != "plain", backend=backend)


def run(function, tensors, dout):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    out = function(**{"up_bias": None, **leaves})
    out.backward(dout.to(out.dtype))
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def check(backend, tensors, activation, form="plain"):
    dout = torch.randn(tensors["x"].shape[0], tensors["down_weight"].shape[0])
    ours = feed_forward(form, backend, activation)
    literal = partial(reference.feed_forward, name=activation, gated=form != "plain")
    dout = dout.to(tensors["x"].dtype)
    actual, baseline = run(ours, tensors, dout), run(literal, tensors, dout)
    oracle = run(literal, {name: t.double() for name, t in tensors.items()}, dout)
    for name, found in actual.items():
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(found, oracle[name], baseline[name], factor, f"{name} {activation}")
    with torch.no_grad():
        assert torch.equal(ours(**{"up_bias": None, **tensors}), actual["out"])


@halved
@left_to_full(lambda p: p["activation"] != "gelu" or p["dtype"] is not torch.bfloat16)
@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] is torch.float16 and p["activation"] != "gelu")
@each_form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_oracle(backend, activation, dtype, form):
    check(backend, make(40, 48, 72, dtype, form=form), activation, form)


SHAPES = ((1, 16, 16), (17, 33, 31), (32, 16, 64), (5, 16, 1), (3, 8, 17), (2, 16, 100))


@pytest.mark.full
@halved
@each_form
@pytest.mark.parametrize("rows,hidden_size,intermediate_size", SHAPES, ids=str)
def test_shapes_around_the_blocks(backend, rows, hidden_size, intermediate_size, form):
    for bias in (True, False):
        check(backend, make(rows, hidden_size, intermediate_size, torch.float32, bias, form), "gelu", form)


@each_form
def test_no_tokens(backend, form):
    tensors = make(0, 16, 32, torch.float32, form=form)
    found = run(feed_forward(form, backend), tensors, torch.zeros(0, 16))
    assert found["out"].shape == (0, 16)
    assert all(not grad.any() and grad.shape == tensors[name].shape for name, grad in found.items() if name != "out")


@pytest.mark.full
@each_form
def test_large_values_stay_finite(backend, form):
    tensors = make(16, 16, 32, torch.float32, form=form)
    tensors["x"] *= 10
    for activation in ACTIVATIONS:
        check(backend, tensors, activation, form)


@pytest.mark.full
@each_form
def test_operands_with_gaps_give_the_same_and_stay_as_they_are(backend, form):
    tensors = make(24, 16, 48, torch.float32, form=form)
    spread = {name: torch.stack((t, torch.full_like(t, torch.nan)), -1)[..., 0] for name, t in tensors.items()}
    assert not any(t.is_contiguous() for t in spread.values())
    ours = feed_forward(form, backend)
    with torch.no_grad():
        assert torch.equal(ours(**spread), ours(**tensors))
    assert all(torch.equal(spread[name], t) for name, t in tensors.items())
    dout = torch.randn(1, 16).expand(24, 16)
    dense, expanded = (run(ours, tensors, d) for d in (dout.contiguous(), dout))
    assert all(torch.equal(dense[name], expanded[name]) for name in dense)


@pytest.mark.parametrize("way", WAYS)
def test_inference_makes_no_second_wide_matrix(way, request, monkeypatch):
    backend = choose_way(way, request, monkeypatch)
    x, up, down, bias = make(64, 16, 256, torch.float32).values()
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        ops.feed_forward(x, up, bias, down, backend=backend)
    pending, sizes = profile.profiler.kineto_results.experimental_event_tree(), []
    for event in pending:  # which grows meanwhile
        pending.extend(event.children)
        if event.tag == _EventType.Allocation:
            sizes.append(event.extra_fields.alloc_size)  # below 0 where memory is freed
    assert [size for size in sizes if size >= 64 * 256 * 4] == [64 * 256 * 4]


@each_form
def test_the_backend_that_was_asked_for_ran(backend, form):
    tensors = make(4, 16, 32, torch.float32, form=form)
    with torch.profiler.profile() as profile:
        run(feed_forward(form, backend), tensors, tensors["x"])
    ran = {event.name for event in profile.events() if event.name.startswith("fastbert::")}
    assert ran == {f"fastbert::feed_forward_{backend}", f"fastbert::feed_forward_bwd_{backend}"}


@pytest.mark.full
def test_the_cuda_operators_compute_in_the_operands_dtype_under_autocast(request, monkeypatch):
    """As kernels read it: a product that autocast made narrower would end too early."""
    ours = partial(ops.feed_forward, backend=choose_way("cuda", request, monkeypatch))
    x, up, down, bias = make(24, 16, 48, torch.float32).values()
    leaves = [t.requires_grad_() for t in (x, up, bias, down)]
    expected = torch.autograd.grad(ours(*leaves), leaves, torch.ones(24, 16))
    out = ours(*leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(out, leaves, torch.ones(24, 16))
    assert all(map(torch.equal, found, expected))


@pytest.mark.full
@each_form
def test_the_same_bits_every_time(backend, form):
    tensors, dout = make(40, 48, 72, torch.bfloat16, form=form), torch.randn(40, 48)
    first, second = (run(feed_forward(form, backend), tensors, dout) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.full
@left_to_full(lambda p: p["form"] == "merged")  # takes the arguments of both others
@halved
@each_form
def test_opcheck(backend, form):
    x, up, down, bias, *gate = make(8, 16, 32, torch.float32, form=form).values()
    gate, gate_bias = gate or (None, None)
    names = (f"feed_forward_{backend}", f"feed_forward_bwd_{backend}")
    forward, backward = (getattr(torch.ops.fastbert, name).default for name in names)
    gated = form != "plain"
    for return_pre in (True, False):
        torch.library.opcheck(forward, (x, up, bias, down, gate, gate_bias, "gelu", gated, return_pre))
    _, pre = forward(x, up, bias, down, gate, gate_bias, "gelu", gated, True)
    for needs in ((True, True, True), (False, True, False), (True, False, True)):
        torch.library.opcheck(backward, (x, x, pre, up, down, gate, "gelu", gated, *needs))


@pytest.mark.full
@each_form
def test_compiled_as_one_graph(request, monkeypatch, form):
    """With the CUDA operators, forward and backward: the interpreter does not run under torch.compile."""
    ours = feed_forward(form, choose_way("cuda", request, monkeypatch))
    tensors, dout = make(24, 16, 48, torch.float32, form=form), torch.randn(24, 16)
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    eager, traced = (run(function, tensors, dout) for function in (ours, compiled))
    assert all(torch.equal(eager[name], traced[name]) for name in eager)


def test_what_cannot_be_served_raises_with_the_reason():
    x, up, down, _ = make(8, 16, 32, torch.float32).values()
    for name in ("triton", "cuda"):
        with pytest.raises(BackendError, match=r"a weight is torch\.bfloat16, x is torch\.float32"):
            ops.feed_forward(x, up.bfloat16(), None, down, backend=name)
        with pytest.raises(BackendError, match=r"a weight is torch\.int8"):
            ops.feed_forward(x, up.to(torch.int8), None, down, backend=name)
        with pytest.raises(BackendError, match="x has 3 dimensions"):
            ops.feed_forward(x[None], up, None, down, backend=name)
        with pytest.raises(BackendError, match="no dropout before the second product"):
            ops.feed_forward(x, up, None, down, dropout_p=0.1, backend=name)
    with pytest.raises(BackendError, match="tensors are on cpu"):
        ops.feed_forward(x, up, None, down, backend="cuda")
    assert fastbert.backends("cpu")["feed_forward"]["cuda"] == "tensors are on cpu"


def test_shapes_that_do_not_fit_and_unknown_activations_raise_before_anything_runs():
    x, up, down, bias = make(8, 16, 32, torch.float32).values()
    with pytest.raises(ValueError, match=r"up_weight is \(32, 16\), .* gated need \(64, 16\)"):
        ops.feed_forward(x, up, bias, down, gated=True)
    with pytest.raises(ValueError, match=r"up_weight is \(32, 8\), .* need \(32, 16\)"):
        ops.feed_forward(x, up[:, :8], bias, down)
    with pytest.raises(ValueError, match=r"up_bias is \(31,\), up_weight needs \(32,\)"):
        ops.feed_forward(x, up, bias[1:], down)
    with pytest.raises(ValueError, match="unknown activation 'swish'; valid names: gelu, "):
        ops.feed_forward(x, up, bias, down, activation="swish")
    with pytest.raises(ValueError, match=r"gate_weight is \(32, 8\), .* need \(32, 16\)"):
        ops.feed_forward(x, up, bias, down, gated=True, gate_weight=up[:, :8])
    with pytest.raises(ValueError, match=r"gate_bias is \(31,\), gate_weight needs \(32,\)"):
        ops.feed_forward(x, up, bias, down, gated=True, gate_weight=up, gate_bias=bias[1:])
    with pytest.raises(ValueError, match="gate_weight and gate_bias go with gated=True"):
        ops.feed_forward(x, up, bias, down, gate_weight=up)
    with pytest.raises(ValueError, match="gate_bias goes with gate_weight"):
        ops.feed_forward(x, up.repeat(2, 1), None, down, gated=True, gate_bias=bias)
    with pytest.raises(ValueError, match="have 2 and 3 elements, there are 3 weights"):
        ops.feed_forward(x, up, bias, down, gated=True, gate_weight=up, weight_scales=(None, None))
