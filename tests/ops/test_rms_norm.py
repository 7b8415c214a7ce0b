"""add_rms_norm and rms_norm: every backend, forward and backward, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from full import halved, left_to_full
from isas import WITHOUT_PRODUCTS
from norms import check, differentiate, everything, keep_mask, make, run, serving

from fastbert import ops
from fastbert.backend import Backend, select, use_backend
from fastbert.errors import BackendError
from fastbert.testing.cases import DTYPES, ROWS

# (residual, x_bias, prenorm): every pair of these choices in every combination.
VARIANTS = ((1, 1, 1), (0, 0, 1), (1, 0, 0), (0, 1, 0))
BACKENDS = ("torch", *WITHOUT_PRODUCTS, "triton")


@pytest.fixture
def backend(request):
    with serving(request.param) as name:
        yield name


def make_rms(*args, **kinds):
    return make(*args, bias=False, **kinds)


each_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
each_kernel = pytest.mark.parametrize("backend", BACKENDS[1:], indirect=True)
each_isa = pytest.mark.parametrize("backend", WITHOUT_PRODUCTS, indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] is torch.bfloat16 and p["rows"] not in (2, 17))
@pytest.mark.parametrize("rows,hidden_size", ROWS, ids=lambda n: str(n))
@each_dtype
@each_backend
def test_against_oracle(backend, dtype, rows, hidden_size):
    for residual, x_bias, prenorm in VARIANTS:
        operands = make_rms(rows, hidden_size, dtype, backend, residual=residual, x_bias=x_bias)
        check(backend, operands, prenorm=bool(prenorm), rms=True)


@pytest.mark.parametrize("backend", ("triton",), indirect=True)
def test_float16(backend):
    check(backend, make_rms(5, 80, torch.float16, backend), eps=1e-5, rms=True)


ADVERSARIAL = {
    "large": lambda t: t * 30,
    "large-mean": lambda t: t + 1e4,
    "constant-rows": lambda t: 0 * t + 0.1,
    "zero-rows": lambda t: 0 * t,
    "one-large-column": lambda t: torch.cat([t[..., :1] * 1e4, t[..., 1:]], -1),
}


@halved
@pytest.mark.parametrize("kind", ADVERSARIAL)
@each_dtype
@each_backend
def test_adversarial_inputs(backend, dtype, kind):
    operands = make_rms(4, 768, dtype, backend)
    spoiled = {name: ADVERSARIAL[kind](operands[name]) for name in ("x", "residual", "x_bias")}
    check(backend, operands | spoiled, rms=True)


@each_kernel
def test_strided_and_sliced_operands(backend):
    operands = make_rms(6, 160, torch.float32, backend)
    check(backend, {name: None if t is None else t[..., ::2] for name, t in operands.items()}, rms=True)


@halved
@pytest.mark.parametrize("rows,hidden_size", ((17, 33), (5, 768)), ids=lambda n: str(n))
@each_dtype
@each_backend
def test_dropout_against_oracle(backend, dtype, rows, hidden_size):
    """The mask is add_layer_norm's for the same seed."""
    keep = keep_mask(backend, rows, hidden_size, 0.25, seed=7, dtype=dtype)
    for residual, x_bias, prenorm in VARIANTS[:2]:
        operands = make_rms(rows, hidden_size, dtype, backend, residual=residual, x_bias=x_bias)
        check(backend, operands, prenorm=bool(prenorm), keep=keep, dropout_p=0.25, seed=7, rms=True)


@each_dtype
@each_kernel
def test_repeats_bit_for_bit(backend, dtype):
    first, second = (everything(backend, dtype=dtype, rms=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


@each_dtype
@each_isa
def test_threads_do_not_change_bits(backend, dtype):
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(everything(backend, rows=1000, dtype=dtype, rms=True))
    torch.set_num_threads(before)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


@each_isa
def test_writes_all_that_it_allocates(backend):
    """Which is filled with NaN, by backend_with_isa and conftest.py."""
    assert all(torch.isfinite(t).all() for t in everything(backend, rows=33, hidden_size=33, rms=True))


@each_backend
def test_rms_norm_is_add_rms_norm_of_x_alone(backend):
    x, _, weight, _, _ = make_rms(5, 80, torch.float32, backend).values()
    out = ops.rms_norm(x, weight, eps=1e-5, backend=backend)
    assert torch.equal(out, ops.add_rms_norm(x, None, weight, eps=1e-5, backend=backend))
    again, summed = ops.add_rms_norm(x, None, weight, eps=1e-5, prenorm=True, backend=backend)
    assert torch.equal(out, again) and torch.equal(summed, x)


@halved
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
@pytest.mark.parametrize("backend", ("cpu", "triton"), indirect=True)
def test_opcheck(backend, dropout_p):
    x, residual, weight, _, x_bias = make_rms(3, 64, torch.float32, backend).values()
    philox = torch.tensor([2**61 + 5, 2**40 + 1], device=x.device)
    forward = getattr(torch.ops.fastbert, f"add_layer_norm_fwd_{backend}").default
    backward = getattr(torch.ops.fastbert, f"add_layer_norm_bwd_{backend}").default
    torch.library.opcheck(forward, (x, x_bias, residual, weight, None, philox, dropout_p, 1e-6, True, True, True))
    torch.library.opcheck(forward, (x, None, None, weight, None, None, 0.0, 1e-6, False, False, True))
    _, summed, mean, rstd = forward(x, x_bias, residual, weight, None, philox, dropout_p, 1e-6, True, True, True)
    assert mean.numel() == 0
    torch.library.opcheck(backward, (x, residual, summed, mean, rstd, weight, philox, dropout_p, True, True))
    torch.library.opcheck(backward, (x, None, summed, mean, rstd, weight, None, 0.0, False, True))


@pytest.mark.parametrize("backend", ("torch", "cpu", "triton"), indirect=True)
def test_the_backend_that_was_asked_for_runs(backend):
    x, residual, weight, _, _ = make_rms(2, 64, torch.float32, backend).values()
    assert select("add_rms_norm", backend, x, residual, weight, None) is Backend(backend)
    with use_backend(backend), torch.profiler.profile() as profile:
        ops.add_rms_norm(x, residual, weight)
    ours = [event.name for event in profile.events() if event.name.startswith("fastbert::")]
    assert ours == ([] if backend == "torch" else [f"fastbert::add_layer_norm_fwd_{backend}"])


def test_what_cannot_be_served_raises_with_the_reason():
    x, residual, weight, _, _ = make_rms(2, 64, torch.float64).values()
    with pytest.raises(BackendError, match=r"add_rms_norm: dtype torch.float64 \(has float32"):
        ops.add_rms_norm(x, residual, weight, backend="cpu")
    with pytest.raises(BackendError, match="cuda"):
        ops.rms_norm(x, weight, backend="cuda")


@pytest.mark.parametrize("backend", ("cpu",), indirect=True)
def test_the_kernel_refuses_a_bias(backend):
    x, weight = torch.ones(2, 64), torch.ones(64)
    with pytest.raises(RuntimeError, match="RMSNorm has no bias"):
        torch.ops.fastbert.add_layer_norm_fwd_cpu(x, None, None, weight, weight, None, 0.0, 1e-6, False, False, True)


@pytest.mark.parametrize("backend", ("cpu", "triton"), indirect=True)
def test_autocast_and_vectors_in_fp32(backend):
    """Under autocast fp32 comes out, as of LayerNorm, and bf16 of the Triton kernels."""
    operands = make_rms(21, 48, torch.float32, backend)
    rounded = {name: t if name != "x" else t.bfloat16() for name, t in operands.items()}
    with torch.autocast("cpu", torch.bfloat16):
        out = run(rounded, rms=True, backend=backend)
    assert out.dtype is (torch.bfloat16 if backend == "triton" else torch.float32)
    narrow = {name: t if t is None or t.dim() == 1 else t.bfloat16() for name, t in operands.items()}
    if backend == "cpu":
        wide = {name: None if t is None else t.float() for name, t in rounded.items()}
        assert torch.equal(out, run(wide, rms=True, backend=backend))
        with pytest.raises(BackendError, match=r"weight is torch\.float32, x is torch\.bfloat16"):
            run(narrow, rms=True, backend=backend)
    else:
        assert torch.equal(out, run(narrow, rms=True, backend=backend))


@pytest.mark.parametrize("backend", ("cpu",), indirect=True)
def test_compiles_into_one_graph(backend):
    operands = make_rms(5, 64, torch.float32)
    cotangents = [torch.randn(5, 64) for _ in range(2)]

    def f(o):
        return run(o, rms=True, prenorm=True, backend=backend)

    eager, _ = differentiate(f, operands, cotangents)
    compiled, _ = differentiate(torch.compile(f, fullgraph=True), operands, cotangents)
    assert all(map(torch.equal, eager, compiled))
