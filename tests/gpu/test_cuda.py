"""The kernels of csrc/cuda, run by an emulation of CUDA on the CPU, against the float64 oracle."""

from __future__ import annotations

import functools

import cuda_kernels as cuda
import norms
import pytest
import torch
from full import halved, left_to_full, thinned
from seeds import manual_seed

from fastbert.native.availability import extension_error
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.full  # test_cuda_smoke.py has each kernel once
each_dtype = pytest.mark.parametrize("dtype", cuda.DTYPES, ids=lambda d: str(d).removeprefix("torch."))
# Rows of one warp in every size of a thread's part, of several warps, of loads of 16 bytes and of single elements.
SHAPES = ((0, 64), (5, 1), (5, 33), (6, 80), (3, 384), (6, 768), (3, 1024), (2, 1500), (1, 8192))
each_shape = pytest.mark.parametrize("rows,width", SHAPES, ids=str)
EPS = {torch.float32: 1e-12, torch.bfloat16: 1e-12, torch.float16: 1e-5}  # 1e-12 is 0 in the formula's float16
PHILOX = torch.tensor([2**61 + 5, 2**40 + 1])
OPERANDS = ("x", "residual", "weight", "bias", "x_bias")


def make(rows, width, dtype, residual=True, x_bias=True, bias=True):
    shapes = {"x": (rows, width), "residual": (rows, width)}
    given = {"x": True, "residual": residual, "weight": True, "bias": bias, "x_bias": x_bias}
    return {n: torch.randn(shapes.get(n, (width,))).to(dtype) if given[n] else None for n in OPERANDS}


def keep_mask(rows, width, dropout_p):
    """The mask of the cpu backend: what is not zero of dropped ones."""
    if extension_error() is not None:
        pytest.skip(extension_error())
    ones = torch.ones(rows, width)
    forward = torch.ops.fastbert.add_layer_norm_fwd_cpu
    return forward(ones, None, None, ones.new_ones(width), None, PHILOX, dropout_p, 1e-12, True, False)[1] != 0


def literal(operands, cotangents, kind, rms=False, **options):
    """The formula in dtype `kind`: out, summed, and the gradients of all operands that are there."""
    leaves = {n: None if t is None else t.to(kind).requires_grad_() for n, t in operands.items()}
    results = norms.literal(leaves, rms, **options)
    used = [(r, c.to(kind)) for r, c in zip(results, cotangents, strict=True) if c is not None]
    inputs = {n: t for n, t in leaves.items() if t is not None}
    gradients = torch.autograd.grad([r for r, _ in used], list(inputs.values()), [c for _, c in used])
    named = dict(zip((f"d{n}" for n in inputs), gradients, strict=True))
    return {"out": results[0].detach(), "summed": results[1].detach(), **named}


def ours(operands, cotangents, dropout_p=0.0, rms=False, **options):
    """The same of the kernels, and the statistics."""
    x, residual, weight, bias, x_bias = operands.values()
    philox, eps = PHILOX if dropout_p > 0 else None, EPS[x.dtype]
    out, summed, mean, rstd = cuda.add_layer_norm_fwd(
        x, x_bias, residual, weight, bias, philox, dropout_p, eps, rms=rms, **options
    )
    dout, dsum = cotangents
    dx, dsummed, dx_bias, dweight, dbias = cuda.add_layer_norm_bwd(
        dout, dsum, summed, mean, rstd, weight, philox, dropout_p, x_bias is not None, **options
    )
    gradients = {"dx": dx, "dresidual": dsummed, "dweight": dweight, "dbias": dbias, "dx_bias": dx_bias}
    return {"out": out, "summed": summed, "mean": mean, "rstd": rstd, **gradients}


def check(operands, with_dsum=True, keep=None, dropout_p=0.0, rms=False, **options):
    x, eps = operands["x"], EPS[operands["x"].dtype]
    manual_seed(1)  # the same cotangents for the same shape
    cotangents = [torch.randn_like(x), torch.randn_like(x) if with_dsum else None]
    actual = ours(operands, cotangents, dropout_p, rms, **options)
    formula = {"keep": keep, "dropout_p": dropout_p, "eps": eps, "rms": rms}
    oracle = literal(operands, cotangents, torch.float64, **formula)
    baseline = literal(operands, cotangents, x.dtype, **formula)
    for name in oracle:
        factor = OUTPUT_FACTOR if name in ("out", "summed") else GRADIENT_FACTOR
        assert_close_to_reference(actual[name], oracle[name], baseline[name], factor, name)
    # mean and rstd by what backward makes of them: a mean is a difference that cancels, of no scale of its own.
    summed, one = actual["summed"], torch.ones(())
    mean = 0.0 if rms else actual["mean"].double()[:, None]
    xhat = (summed.double() - mean) * actual["rstd"].double()[:, None]
    norm = reference.rms_norm if rms else functools.partial(reference.layer_norm, bias=None)
    oracle, baseline = (norm(summed.to(kind), weight=one, eps=eps) for kind in (torch.float64, torch.float32))
    assert_close_to_reference(xhat.float(), oracle, baseline, name="mean and rstd")
    return actual


@thinned(3)
@each_shape
@each_dtype
def test_add_layer_norm(dtype, rows, width):
    check(make(rows, width, dtype))
    check(make(rows, width, dtype, residual=False, x_bias=False, bias=False), with_dsum=False)


# A row of one column is all direction: its gradient is a difference that cancels, of no scale of its own.
@thinned(3)
@pytest.mark.parametrize("rows,width", [shape for shape in SHAPES if shape[1] > 1], ids=str)
@each_dtype
def test_add_rms_norm(dtype, rows, width):
    check(make(rows, width, dtype, bias=False), rms=True)
    check(make(rows, width, dtype, residual=False, x_bias=False, bias=False), with_dsum=False, rms=True)


@thinned(3)
@pytest.mark.parametrize("absent", ("residual", "x_bias", "bias"))
@each_dtype
def test_each_operand_may_be_absent(dtype, absent):
    check(make(5, 80, dtype, **{absent: False}))


@each_dtype
def test_statistics_and_sum_are_optional_and_change_nothing(dtype):
    x, residual, weight, bias, x_bias = make(5, 80, dtype).values()
    everything = cuda.add_layer_norm_fwd(x, x_bias, residual, weight, bias, None, 0.0)
    out, *others = cuda.add_layer_norm_fwd(
        x, x_bias, residual, weight, bias, None, 0.0, return_sum=False, return_stats=False
    )
    assert torch.equal(out, everything[0]) and others == [None, None, None]


@each_dtype
def test_addresses_that_16_byte_loads_do_not_take_give_the_same(dtype):
    check(make(5, 80, dtype), offset=1)
    check(make(2, 1024, dtype), offset=1)


@thinned(3)
@pytest.mark.parametrize("rows,width", ((3, 80), (9, 33), (5, 768), (1, 8192)), ids=str)
@each_dtype
def test_dropout(dtype, rows, width):
    keep = keep_mask(rows, width, 0.25)
    ones = torch.ones(rows, width, dtype=dtype)
    _, summed, _, _ = cuda.add_layer_norm_fwd(ones, None, None, ones[0], None, PHILOX, 0.25)
    assert torch.equal(summed != 0, keep)
    check(make(rows, width, dtype), keep=keep, dropout_p=0.25)
    check(make(rows, width, dtype, bias=False), keep=keep, dropout_p=0.25, rms=True)


def test_dropping_everything_leaves_the_residual():
    x, residual, weight, bias, x_bias = make(3, 64, torch.float32).values()
    out, summed, _, _ = cuda.add_layer_norm_fwd(x, x_bias, residual, weight, bias, PHILOX, 1.0)
    assert torch.equal(summed, residual) and torch.isfinite(out).all()


@left_to_full(lambda p: p["width"] != 8 or len(p["orders"]) > 1)  # of fewer rows test_the_order_of_threads has both
@pytest.mark.parametrize("orders", (("down",), ("up", "down")), ids="-".join)
@pytest.mark.parametrize("rows,width", ((1100, 8), (280, 1600)), ids=str)
def test_blocks_of_backward_that_take_several_rows(rows, width, orders):
    operands = make(rows, width, torch.float32)
    first, *others = (check(operands, order=order) for order in orders)
    assert all(torch.equal(other[name], first[name]) for other in others for name in first)


@pytest.mark.parametrize("kind", ("large", "large-mean", "constant-rows", "zero-rows"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_adversarial_inputs(dtype, kind):
    operands = make(4, 768, dtype)
    x, residual, x_bias = operands["x"], operands["residual"], operands["x_bias"]
    spoiled = {
        "large": (x * 30, residual, x_bias),
        "large-mean": (x + 1e4, residual, x_bias),
        "constant-rows": (x[:, :1] + 0 * x, residual[:, :1] + 0 * x, 0 * x_bias + 0.1),
        "zero-rows": (0 * x, 0 * residual, 0 * x_bias),
    }
    check(operands | dict(zip(("x", "residual", "x_bias"), spoiled[kind], strict=True)))


@halved
@pytest.mark.parametrize("rows,width", ((7, 80), (3, 1500)), ids=str)
@each_dtype
def test_the_order_of_threads_and_blocks_does_not_show(dtype, rows, width):
    operands = make(rows, width, dtype)
    cotangents = [torch.randn(rows, width).to(dtype) for _ in range(2)]
    up, down, again = (ours(operands, cotangents, 0.1, order=order) for order in ("up", "down", "up"))
    for name in up:
        assert torch.equal(up[name], down[name]) and torch.equal(up[name], again[name]), name


ACTIVATION_SHAPES = ((0, 64), (1, 1), (5, 33), (6, 80), (35, 1032))
each_gating = pytest.mark.parametrize("gated", (False, True), ids=("plain", "gated"))


def make_pre(rows, columns, dtype, gated):
    # exp(-x) of the formula overflows float16 at -11.
    return (3 * torch.randn(rows, (2 if gated else 1) * columns)).clamp(-8, 8).to(dtype)


def is_taken_by_others(p) -> bool:
    """Activations and float16 differ in what a thread makes of a number, shapes in which numbers are whose."""
    return p["rows"] != 6 and (p["activation"] != "gelu" or p["dtype"] is torch.float16)


@left_to_full(is_taken_by_others)
@each_gating
@pytest.mark.parametrize("rows,columns", ACTIVATION_SHAPES, ids=str)
@pytest.mark.parametrize("activation", cuda.ACTIVATIONS)
@each_dtype
def test_activation(dtype, activation, rows, columns, gated):
    pre, dinner = make_pre(rows, columns, dtype, gated), torch.randn(rows, columns).to(dtype)
    inner = cuda.activation_fwd(pre, activation, gated)
    dpre, inner_again, dbias = cuda.activation_bwd(dinner, pre, activation, gated)
    assert torch.equal(inner, inner_again)

    def formula(kind):
        leaf = pre.to(kind).requires_grad_()
        zeros = torch.zeros(pre.shape[1], dtype=kind, requires_grad=True)
        first, *second = (leaf + zeros).chunk(2, -1) if gated else (leaf + zeros,)
        out = reference.activation(first, activation)
        out = out * second[0] if gated else out
        return out.detach(), *torch.autograd.grad(out, (leaf, zeros), dinner.to(kind))

    names, factors = ("inner", "dpre", "dbias"), (OUTPUT_FACTOR, GRADIENT_FACTOR, GRADIENT_FACTOR)
    results = zip((inner, dpre, dbias), formula(torch.float64), formula(dtype), factors, names, strict=True)
    for actual, oracle, baseline, factor, name in results:
        assert_close_to_reference(actual, oracle, baseline, factor, name)


@each_gating
@each_dtype
def test_activation_has_the_same_bits_in_place_unaligned_and_without_dbias(dtype, gated):
    pre, dinner = make_pre(6, 80, dtype, gated), torch.randn(6, 80).to(dtype)
    inner = cuda.activation_fwd(pre, "gelu", gated)
    assert torch.equal(inner, cuda.activation_fwd(pre, "gelu", gated, offset=1))
    assert gated or torch.equal(inner, cuda.activation_fwd(pre, "gelu", in_place=True))
    results = cuda.activation_bwd(dinner, pre, "gelu", gated)
    for options in ({"in_place": False}, {"offset": 1}, {"order": "down"}):
        assert all(map(torch.equal, results, cuda.activation_bwd(dinner, pre, "gelu", gated, **options))), options
    assert all(map(torch.equal, results[:2], cuda.activation_bwd(dinner, pre, "gelu", gated, needs_dbias=False)))


@halved
@each_gating
@each_dtype
def test_activation_bwd_of_many_rows(dtype, gated):
    x, dinner = make_pre(5000, 3, dtype, False), torch.randn(5000, 3).to(dtype)
    pre = torch.cat((x, torch.ones_like(x)), -1) if gated else x
    runs = [cuda.activation_bwd(dinner, pre, "relu", gated, order=order) for order in ("up", "down")]
    assert all(map(torch.equal, *runs))
    dx, relu = torch.where(x > 0, dinner, torch.zeros_like(x)), x.clamp(min=0)
    oracle = torch.cat((dx.double(), dinner.double() * relu.double()), -1) if gated else dx.double()
    assert torch.equal(runs[0][0], oracle.to(dtype)) and torch.equal(runs[0][1], relu)
    assert_close_to_reference(runs[0][2], oracle.sum(0), oracle.to(dtype).sum(0), GRADIENT_FACTOR, "dbias")


@thinned(3)
@each_shape
@each_dtype
def test_embed(dtype, rows, width):
    ids, positions = torch.randint(0, 50, (rows,)), torch.randint(0, 20, (rows,))
    types = torch.randint(0, 2, (rows,))
    word, position, token_type = (torch.randn(n, width).to(dtype) for n in (50, 20, 2))
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    for t_ids, place, table, w, b in (
        (types, position, token_type, weight, bias),
        (None, position, token_type, weight, None),
        (None, position, None, None, None),
        (None, None, None, weight, None),
    ):
        p_ids = None if place is None else positions
        actual = cuda.embed_fwd(ids, p_ids, t_ids, word, place, table, w, b, EPS[dtype])
        oracle, baseline = (
            reference.embed_layer_norm(
                ids,
                p_ids,
                t_ids,
                *(None if t is None else t.to(kind) for t in (word, place, table, w, b)),
                eps=EPS[dtype],
            )
            for kind in (torch.float64, dtype)
        )
        assert_close_to_reference(actual, oracle, baseline, name="out")
    rows_given = cuda.embed_fwd(None, positions, types, word[ids], position, token_type, weight, bias, 1e-12)
    looked_up = cuda.embed_fwd(ids, positions, types, word, position, token_type, weight, bias, 1e-12)
    assert torch.equal(rows_given, looked_up)


@thinned(3)
@pytest.mark.parametrize("width", (33, 80, 1500))
@each_dtype
def test_embed_makes_a_token_of_unknown_ids_nan(dtype, width):
    """And reads nothing for it: what lies beyond a table is poisoned memory."""
    ids = dict(zip(("words", "positions", "types"), torch.randint(3, (3, 6)), strict=True))
    tables = [torch.randn(3, width).to(dtype) for _ in range(3)]
    others = torch.arange(6) != 4
    for vector in (torch.ones(width, dtype=dtype), None):
        one = cuda.embed_fwd(*ids.values(), *tables, vector, None, 1e-5)
        for name, bad in (("words", 3), ("positions", -1), ("types", 2**32 + 1), ("words", -(2**62))):
            spoiled = {**ids, name: ids[name].clone()}
            spoiled[name][4] = bad
            other = cuda.embed_fwd(*spoiled.values(), *tables, vector, None, 1e-5)
            assert other[4].isnan().all() and torch.equal(one[others], other[others])
