"""add_layer_norm and add_rms_norm: what is special to them, on every backend, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch
from full import halved, left_to_full, thinned, triton_left_to_full
from isas import WITHOUT_PRODUCTS, device_of
from norms import ZERO_CENTRED, check, everything, keep_mask, make, run, serving, skip_unless_served
from shares import assert_share

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.errors import BackendError
from fastbert.native.availability import extension_error
from fastbert.ops.layer_norm import add_layer_norm
from fastbert.testing import reference
from fastbert.testing.cases import DTYPES, ROWS

# (residual, x_bias, bias, prenorm): every pair of these choices in every combination. RMSNorm has no bias.
VARIANTS = ((1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 1, 1))
OF_RMS = ((1, 1, 0, 1), (0, 0, 0, 1), (1, 0, 0, 0), (0, 1, 0, 0))
BACKENDS = ("torch", *WITHOUT_PRODUCTS, "triton")


@pytest.fixture
def backend(request):
    with serving(request.param) as name:
        yield name


each_backend = pytest.mark.parametrize("backend", BACKENDS, indirect=True)
each_isa = pytest.mark.parametrize("backend", WITHOUT_PRODUCTS, indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
each_norm = pytest.mark.parametrize("rms", (False, True), ids=("layer", "rms"))
each_of_three = pytest.mark.parametrize("rms", (False, True, ZERO_CENTRED), ids=("layer", "rms", ZERO_CENTRED))


@triton_left_to_full
@thinned(4)
@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] is torch.bfloat16 and p["rows"] not in (2, 17))
@pytest.mark.parametrize("rows,hidden_size", ROWS, ids=lambda n: str(n))
@each_of_three
@each_dtype
@each_backend
def test_against_oracle(backend, dtype, rms, rows, hidden_size):
    for residual, x_bias, bias, prenorm in OF_RMS if rms else VARIANTS:
        operands = make(rows, hidden_size, dtype, backend, residual, x_bias, bias)
        check(backend, operands, prenorm=bool(prenorm), rms=rms)


@triton_left_to_full
@each_of_three
@pytest.mark.parametrize("backend", ("triton",), indirect=True)
def test_float16(backend, rms):
    check(backend, make(5, 80, torch.float16, backend, bias=not rms), eps=1e-5, rms=rms)


def test_a_zero_centred_weight_is_one_more_in_float32():
    """1 + weight has more digits than a 16-bit weight: its sum is not rounded to them."""
    operands = make(7, 80, torch.bfloat16, bias=False) | {"weight": torch.full((80,), 2.0**-9, dtype=torch.bfloat16)}
    exact = reference.rms_norm(operands["x"].double(), 1 + operands["weight"].double(), 1e-6)
    for backend in ("torch", "cpu") if extension_error() is None else ("torch",):
        out = ops.add_rms_norm(operands["x"], None, operands["weight"], zero_centered_weight=True, backend=backend)
        assert (out == exact.bfloat16()).double().mean() > 0.98  # one rounding, of the result


def test_cuda_leaves_a_zero_centred_weight_to_others():
    operands = make(2, 64, torch.float32, bias=False)
    with pytest.raises(BackendError, match="the weight is zero-centred"):
        run(operands, ZERO_CENTRED, backend="cuda")


ADVERSARIAL = {
    "large": lambda t, mean: t * 30,
    "large-mean": lambda t, mean: t + mean,
    "constant-rows": lambda t, mean: t[..., :1] + 0 * t,
    "zero-rows": lambda t, mean: 0 * t,
    "one-large-column": lambda t, mean: torch.cat([t[..., :1] * mean, t[..., 1:]], -1),
}
# The backward of torch's own LayerNorm subtracts multiples of the mean from each other, in float32. That costs more
# digits than the rule allows: with means of 1000 for most seeds, on every CPU. In bfloat16 it adds up in 16 bits
# before, and of means of 10,000 nothing is left of what differs between columns.
LARGE_MEAN, TORCH_LARGE_MEAN = 1e4, 30.0


ODD = [(rms, kind) for rms in (False, True) for kind in ADVERSARIAL if rms or kind != "one-large-column"]


@triton_left_to_full
@halved
@pytest.mark.parametrize(("rms", "kind"), ODD)
@each_dtype
@each_backend
def test_adversarial_inputs(backend, dtype, rms, kind):
    operands = make(4, 768, dtype, backend, bias=not rms)
    mean = TORCH_LARGE_MEAN if backend == "torch" and not rms else LARGE_MEAN
    names = ("x",) if kind == "large-mean" and not rms else ("x", "residual", "x_bias")
    check(backend, operands | {name: ADVERSARIAL[kind](operands[name], mean) for name in names}, rms=rms)


@each_isa
def test_bfloat16_rounds_to_nearest_even(backend):
    x, residual, weight, _, _ = make(64, 96, torch.bfloat16).values()
    x[0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    summed = add_layer_norm(x, residual, weight, None, prenorm=True, backend=backend)[1]
    torch.testing.assert_close(summed, (x.float() + residual.float()).bfloat16(), rtol=0, atol=0, equal_nan=True)


@triton_left_to_full
@halved
@pytest.mark.parametrize("dropout_p", (0.1, 0.6))
@each_backend
def test_dropout_keeps_its_share(backend, dropout_p):
    keep = keep_mask(backend, 64, 4096, dropout_p, seed=0)
    assert_share(keep, 1 - dropout_p, (0,), (1,))  # neither rows nor columns are favoured


@triton_left_to_full
@each_backend
def test_dropout_follows_the_seed(backend):
    masks = [keep_mask(backend, 9, 80, 0.3, seed) for seed in (1, 1, 2)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


@triton_left_to_full
@halved
@pytest.mark.parametrize("rows,hidden_size", ((3, 80), (17, 33), (5, 768)), ids=lambda n: str(n))
@each_norm
@each_dtype
@each_backend
def test_dropout_against_oracle(backend, dtype, rms, rows, hidden_size):
    """The same seed gives both norms the same mask."""
    keep = keep_mask(backend, rows, hidden_size, 0.25, seed=7, dtype=dtype)
    for residual, x_bias, bias, prenorm in OF_RMS[:2] if rms else VARIANTS[:3]:
        operands = make(rows, hidden_size, dtype, backend, residual, x_bias, bias)
        check(backend, operands, prenorm=bool(prenorm), keep=keep, dropout_p=0.25, seed=7, rms=rms)


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


@halved
@each_norm
@each_dtype
@each_isa
def test_threads_do_not_change_bits(backend, dtype, rms):
    """Of as many rows as each of them has several blocks of."""
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(everything(backend, rows=1000, dtype=dtype, rms=rms))
    torch.set_num_threads(before)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


@each_backend
def test_rms_norm_is_add_rms_norm_of_x_alone(backend):
    x, _, weight, _, _ = make(5, 80, torch.float32, backend).values()
    out = ops.rms_norm(x, weight, eps=1e-5, backend=backend)
    assert torch.equal(out, ops.add_rms_norm(x, None, weight, eps=1e-5, backend=backend))
    again, summed = ops.add_rms_norm(x, None, weight, eps=1e-5, prenorm=True, backend=backend)
    assert torch.equal(out, again) and torch.equal(summed, x)


@each_norm
def test_what_cannot_be_served_raises_with_the_reason(rms):
    operands = make(2, 64, torch.float64, bias=not rms)
    name = "add_rms_norm" if rms else "add_layer_norm"
    with pytest.raises(BackendError, match=rf"{name}: dtype torch.float64 \(has float32"):
        run(operands, rms, backend="cpu")
    with pytest.raises(BackendError, match="cuda"):
        run(operands, rms, backend="cuda")
    with use_backend("cpu"), pytest.raises(BackendError, match="float64"):
        run(operands, rms)


@pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))
def test_the_kernel_names_the_wrong_value():
    x, weight = torch.ones(2, 64), torch.ones(64)
    with pytest.raises(RuntimeError, match=r"weight has shape \[63\], expected \[64\]"):
        torch.ops.fastbert.add_layer_norm_fwd_cpu(x, None, None, weight[1:], None, None, 0.0, 1e-12, False, False)
    with pytest.raises(RuntimeError, match="RMSNorm has no bias"):
        torch.ops.fastbert.add_layer_norm_fwd_cpu(x, None, None, weight, weight, None, 0.0, 1e-6, False, False, True)


@pytest.mark.parametrize("backend", ("cpu", "triton"), indirect=True)
def test_autocast_and_vectors_in_fp32(backend):
    """Under autocast fp32 comes out, as of LayerNorm, and bf16 of the Triton kernels."""
    operands = make(21, 48, torch.float32, backend, bias=False)
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
