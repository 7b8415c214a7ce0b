"""add_layer_norm: every backend, forward and backward, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from full import halved, left_to_full
from isas import WITHOUT_PRODUCTS, device_of
from norms import check, differentiate, everything, keep_mask, make, serving, skip_unless_served
from shares import assert_share

from fastbert.backend import Backend, select, use_backend
from fastbert.errors import BackendError
from fastbert.native.availability import extension_error
from fastbert.ops.layer_norm import add_layer_norm
from fastbert.testing.cases import DTYPES, ROWS

# (residual, x_bias, bias, prenorm): every pair of these choices in every combination.
VARIANTS = ((1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1))
BACKENDS = ("torch", *WITHOUT_PRODUCTS, "triton")
KERNELS = BACKENDS[1:]


@pytest.fixture
def backend(request):
    with serving(request.param) as name:
        yield name


each_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
each_kernel = pytest.mark.parametrize("backend", KERNELS, indirect=True)
each_isa = pytest.mark.parametrize("backend", WITHOUT_PRODUCTS, indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] is torch.bfloat16 and p["rows"] not in (2, 17))
@pytest.mark.parametrize("rows,hidden_size", ROWS, ids=lambda n: str(n))
@each_dtype
@each_backend
def test_against_oracle(backend, dtype, rows, hidden_size):
    for residual, x_bias, bias, prenorm in VARIANTS:
        check(backend, make(rows, hidden_size, dtype, backend, residual, x_bias, bias), prenorm=bool(prenorm))


@pytest.mark.parametrize("backend", ("triton",), indirect=True)
def test_float16(backend):
    check(backend, make(5, 80, torch.float16, backend))


ADVERSARIAL = {
    "large": lambda x, residual, x_bias, mean: (x * 30, residual, x_bias),
    "large-mean": lambda x, residual, x_bias, mean: (x + mean, residual, x_bias),
    "constant-rows": lambda x, residual, x_bias, mean: (x[:, :1] + 0 * x, residual[:, :1] + 0 * x, 0 * x_bias + 0.1),
    "zero-rows": lambda x, residual, x_bias, mean: (0 * x, 0 * residual, 0 * x_bias),
}
# The backward of torch's own LayerNorm subtracts multiples of the mean from each other, in float32. That costs more
# digits than the rule allows: with means of 1000 for most seeds, on every CPU. In bfloat16 it adds up in 16 bits
# before, and of means of 10,000 nothing is left of what differs between columns.
LARGE_MEAN, TORCH_LARGE_MEAN = 1e4, 30.0


@halved
@pytest.mark.parametrize("kind", ADVERSARIAL)
@each_dtype
@each_backend
def test_adversarial_inputs(backend, dtype, kind):
    operands = make(4, 768, dtype, backend)
    names = ("x", "residual", "x_bias")
    mean = TORCH_LARGE_MEAN if backend == "torch" else LARGE_MEAN
    spoiled = ADVERSARIAL[kind](*(operands[name] for name in names), mean)
    check(backend, operands | dict(zip(names, spoiled, strict=True)))


@each_isa
def test_bfloat16_rounds_to_nearest_even(backend):
    x, residual, weight, _, _ = make(64, 96, torch.bfloat16).values()
    x[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    summed = add_layer_norm(x, residual, weight, None, prenorm=True, backend=backend)[1]
    torch.testing.assert_close(summed, (x.float() + residual.float()).bfloat16(), rtol=0, atol=0, equal_nan=True)


@each_kernel
def test_strided_and_sliced_operands(backend):
    operands = make(6, 160, torch.float32, backend)
    check(backend, {name: t[..., ::2] for name, t in operands.items()})


@halved
@pytest.mark.parametrize("dropout_p", (0.1, 0.6))
@each_backend
def test_dropout_keeps_its_share(backend, dropout_p):
    keep = keep_mask(backend, 64, 4096, dropout_p, seed=0)
    assert_share(keep, 1 - dropout_p, (0,), (1,))  # neither rows nor columns are favoured


@each_backend
def test_dropout_follows_the_seed(backend):
    masks = [keep_mask(backend, 9, 80, 0.3, seed) for seed in (1, 1, 2)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@halved
@pytest.mark.parametrize("rows,hidden_size", ((3, 80), (17, 33), (5, 768)), ids=lambda n: str(n))
@each_dtype
@each_backend
def test_dropout_against_oracle(backend, dtype, rows, hidden_size):
    keep = keep_mask(backend, rows, hidden_size, 0.25, seed=7, dtype=dtype)
    for residual, x_bias, bias, prenorm in VARIANTS[:3]:
        operands = make(rows, hidden_size, dtype, backend, residual, x_bias, bias)
        check(backend, operands, prenorm=bool(prenorm), keep=keep, dropout_p=0.25, seed=7)


@each_backend
def test_dropping_everything_leaves_the_residual(backend):
    x, residual, weight, bias, x_bias = make(3, 64, torch.float32, backend).values()
    out, summed = add_layer_norm(x, residual, weight, bias, x_bias=x_bias, dropout_p=1.0, prenorm=True, backend=backend)
    assert torch.equal(summed, residual)
    assert torch.isfinite(out).all()


def test_cpu_and_triton_drop_the_same_elements():
    masks = []
    for name in ("cpu", "triton"):
        skip_unless_served(name)
        philox = torch.tensor([2**61 + 5, 2**40 + 1], device=device_of(name))
        x = torch.ones(7, 33, device=device_of(name))
        forward = getattr(torch.ops.fastbert, f"add_layer_norm_fwd_{name}")
        masks.append(forward(x, None, None, x[0], None, philox, 0.5, 1e-12, True, False)[1].cpu() != 0)
    assert torch.equal(*masks)


@each_dtype
@each_kernel
def test_repeats_bit_for_bit(backend, dtype):
    assert all(map(torch.equal, everything(backend, dtype=dtype), everything(backend, dtype=dtype)))


@each_dtype
@each_isa
def test_threads_do_not_change_bits(backend, dtype):
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(everything(backend, rows=1000, dtype=dtype))
    torch.set_num_threads(before)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


@each_isa
def test_writes_all_that_it_allocates(backend):
    """Which is filled with NaN, by backend_with_isa and conftest.py."""
    assert all(torch.isfinite(t).all() for t in everything(backend, rows=33, hidden_size=33))


@halved
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
@pytest.mark.parametrize("backend", ("cpu", "triton"), indirect=True)
def test_opcheck(backend, dropout_p):
    x, residual, weight, bias, x_bias = make(3, 64, torch.float32, backend).values()
    philox = torch.tensor([2**61 + 5, 2**40 + 1], device=x.device)
    forward = getattr(torch.ops.fastbert, f"add_layer_norm_fwd_{backend}").default
    backward = getattr(torch.ops.fastbert, f"add_layer_norm_bwd_{backend}").default
    torch.library.opcheck(forward, (x, x_bias, residual, weight, bias, philox, dropout_p, 1e-12, True, True))
    torch.library.opcheck(forward, (x, None, None, weight, None, None, 0.0, 1e-12, False, False))
    _, summed, mean, rstd = forward(x, x_bias, residual, weight, bias, philox, dropout_p, 1e-12, True, True)
    torch.library.opcheck(backward, (x, residual, summed, mean, rstd, weight, philox, dropout_p, True))
    torch.library.opcheck(backward, (x, None, summed, mean, rstd, weight, None, 0.0, False))


@pytest.mark.parametrize("backend", ("torch", "cpu", "triton"), indirect=True)
def test_the_backend_that_was_asked_for_runs(backend):
    x, residual, weight, bias, _ = make(2, 64, torch.float32, backend).values()
    assert select("add_layer_norm", backend, x, residual, weight, bias) is Backend(backend)
    with use_backend(backend), torch.profiler.profile() as profile:
        add_layer_norm(x, residual, weight, bias)
    ours = [event.name for event in profile.events() if event.name.startswith("fastbert::")]
    assert ours == ([] if backend == "torch" else [f"fastbert::add_layer_norm_fwd_{backend}"])


def test_what_cannot_be_served_raises_with_the_reason():
    x, residual, weight, bias, _ = make(2, 64, torch.float64).values()
    with pytest.raises(BackendError, match=r"float64 \(has float32"):
        add_layer_norm(x, residual, weight, bias, backend="cpu")
    with pytest.raises(BackendError, match="cuda"):
        add_layer_norm(x, residual, weight, bias, backend="cuda")
    with use_backend("cpu"), pytest.raises(BackendError, match="float64"):
        add_layer_norm(x, residual, weight, bias)


@pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))
def test_the_kernel_names_the_wrong_value():
    x, weight = torch.ones(2, 64), torch.ones(63)
    with pytest.raises(RuntimeError, match=r"weight has shape \[63\], expected \[64\]"):
        torch.ops.fastbert.add_layer_norm_fwd_cpu(x, None, None, weight, None, None, 0.0, 1e-12, False, False)


@pytest.mark.parametrize("backend", ("cpu",), indirect=True)
def test_compiles_into_one_graph(backend):
    operands = make(5, 64, torch.float32)
    cotangents = [torch.randn(5, 64) for _ in range(2)]

    def f(o):
        x, residual, weight, bias, x_bias = o.values()
        return add_layer_norm(x, residual, weight, bias, x_bias=x_bias, prenorm=True, backend=backend)

    eager, _ = differentiate(f, operands, cotangents)
    compiled, _ = differentiate(torch.compile(f, fullgraph=True), operands, cotangents)
    assert all(map(torch.equal, eager, compiled))
