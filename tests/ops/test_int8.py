"""int8 products: every backend and ISA against the oracle, and the layer that holds their weights."""

from __future__ import annotations

import copy

import pytest
import torch
from full import halved
from isas import CPU_BACKENDS, backend_with_isa
from torch import nn

from fastbert import ops
from fastbert.layers.quantized import QuantizedLinear
from fastbert.native.availability import extension_error
from fastbert.testing import reference
from fastbert.testing.cases import DTYPES
from fastbert.testing.numerics import assert_close_to_reference

if extension_error() is None:
    from fastbert import _C

# (rows, in_features, out_features): nothing, one row, sizes off the four bytes of a step and off vectors and panels.
SHAPES = ((0, 64, 64), (1, 64, 64), (1, 1, 1), (5, 3, 17), (7, 130, 63), (13, 97, 65), (6, 384, 100), (3, 3072, 16))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
each_scale = pytest.mark.parametrize("input_scale", (0.0, 0.015625), ids=("dynamic", "static"))


@pytest.fixture(params=("torch", *CPU_BACKENDS))
def backend(request):
    """The backend's name, after its ISA is set; a visible skip where this machine cannot run it."""
    with backend_with_isa(request.param) as name:
        yield name


def make_x(rows, in_features, dtype, *input_scales):
    """Away from ties of rounding, by each of the scales: there the last bit of x / scale decides on a whole step."""
    x = torch.randn(rows, in_features).to(dtype).double()
    largest = x.abs().amax(-1, keepdim=True)
    for input_scale in input_scales or (0.0,):
        steps = x / (largest / 127 if input_scale == 0 else input_scale)
        x = torch.where((steps.frac().abs() - 0.5).abs() < 1e-3, 0.0, x)
    return x.to(dtype)


def make_weight(out_features, in_features):
    return torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8), torch.rand(out_features) / 99 + 1e-4


def check(actual, x, weight, bias, weight_scale, input_scale, name, label):
    def literal(dtype):
        return reference.linear_int8(x.to(dtype), weight, bias, weight_scale, input_scale, name)

    assert_close_to_reference(actual, literal(torch.float64), literal(torch.float32).to(x.dtype), name=label)


@halved
@each_scale
@each_dtype
def test_linears_against_oracle(backend, dtype, input_scale):
    for rows, k, n in SHAPES:
        x = make_x(rows, k, dtype, input_scale)
        weights, scales = zip(*(make_weight(size, k) for size in (n, n + 3)), strict=True)
        biases = [torch.randn(n).to(dtype), None]
        for name in ("none", "gelu", "gelu_tanh", "relu"):
            options = {"weight_scales": scales, "input_scales": [torch.tensor(input_scale)] * 2, "activation": name}
            outs = ops.linears(x, weights, biases, backend=backend, **options)
            for i, out in enumerate(outs):
                operands = (weights[i], biases[i], scales[i], input_scale)
                check(out, x, *operands, name, f"{rows} x {k} x {n} {name}")
                alone = {"weight_scale": scales[i], "input_scale": torch.tensor(input_scale), "activation": name}
                assert torch.equal(out, ops.linear(x, weights[i], biases[i], backend=backend, **alone))


def extreme_weights(out_features, in_features):
    """Those of which two products have more than 16 bits, everywhere and here and there, at both ends."""
    low, high = torch.full((out_features, in_features), -128), torch.full((out_features, in_features), 127)
    mixed = torch.where(torch.rand(out_features, in_features) < 0.5, low, high)
    alternating = torch.where(torch.arange(in_features) % 4 < 2, low, high)
    few = torch.where(torch.rand(out_features, in_features) < 0.05, mixed, torch.randint(-9, 10, low.shape))
    return [weight.to(torch.int8) for weight in (low, high, mixed, alternating, few)]


@pytest.mark.parametrize("rows", (1, 7, 8, 9, 33, 65, 200))
def test_sums_are_exact_whatever_the_numbers(backend, rows):
    for in_features, out_features in ((1, 1), (2, 70), (3, 64), (67, 9), (130, 129)):
        signs = torch.randint(0, 2, (rows, in_features)) * 2 - 1
        for x in (signs * 127, torch.full_like(signs, 127), signs * torch.randint(0, 128, signs.shape)):
            for weight in extreme_weights(out_features, in_features):
                options = {"weight_scale": torch.ones(out_features), "input_scale": torch.tensor(1.0)}
                out = ops.linear(x.float(), weight, None, backend=backend, **options)
                assert torch.equal(out, (x.double() @ weight.double().T).float()), (in_features, out_features)


@pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))
def test_a_weight_may_meet_another_instruction_set():
    """Where its panels are packed in another way."""
    weight, x = extreme_weights(70, 130)[2], torch.randint(-127, 128, (9, 130)).float()
    options = {"weight_scale": torch.ones(70), "input_scale": torch.tensor(1.0), "backend": "cpu"}
    results = []
    for _ in range(2):
        for isa in CPU_BACKENDS:
            if isa.removeprefix("cpu-") in _C.isas():
                with backend_with_isa(isa):
                    results.append(ops.linear(x, weight, None, **options))
    assert all(torch.equal(result, results[0]) for result in results)


@each_dtype
def test_one_x_for_weights_of_every_kind(backend, dtype):
    """int8 beside a kept layer, and two static scales: x is converted anew for each."""
    x = make_x(5, 67, dtype, 0.0)
    (a, a_scale), (b, b_scale), kept = make_weight(70, 67), make_weight(70, 67), torch.randn(9, 67).to(dtype)
    steps = torch.tensor([0.0, 0.0, 0.0625, 0.03125]).unbind()
    options = {"weight_scales": [a_scale, None, b_scale, a_scale], "input_scales": steps}
    outs = ops.linears(x, [a, kept, b, a], [None] * 4, backend=backend, **options)
    for i, (w, scale) in {0: (a, a_scale), 2: (b, b_scale), 3: (a, a_scale)}.items():
        alone = ops.linear(x, w, None, weight_scale=scale, input_scale=steps[i], backend=backend)
        assert torch.equal(outs[i], alone), i
    assert torch.equal(outs[1], ops.linear(x, kept, None, backend=backend))


@halved
@each_scale
@each_dtype
def test_feed_forward_is_its_two_products(backend, dtype, input_scale):
    for rows, hidden, inner in ((0, 64, 128), (1, 67, 130), (200, 33, 65)):
        x, options = (
            make_x(rows, hidden, dtype, input_scale),
            {"backend": backend, "input_scale": torch.tensor(input_scale)},
        )
        (up, up_scale), (down, down_scale) = make_weight(inner, hidden), make_weight(hidden, inner)
        bias = torch.randn(inner).to(dtype)
        scales = {"weight_scales": (up_scale, down_scale), "input_scales": (options["input_scale"],) * 2}
        out = ops.feed_forward(x, up, bias, down, backend=backend, **scales)
        middle = ops.linear(x, up, bias, weight_scale=up_scale, activation="gelu", **options)
        assert torch.equal(out, ops.linear(middle, down, None, weight_scale=down_scale, **options))


def literal_gated(x, dtype, ups, biases, up_scales, down, down_scale, input_scales):
    """The result, and inner, which the second product quantises: in the dtype in which it is handed on."""
    operands = zip(ups, biases, up_scales, input_scales[:2], ("silu", "none"), strict=True)
    gate, up = [reference.linear_int8(x.to(dtype), w, b.to(dtype), s, i, name) for w, b, s, i, name in operands]
    inner = (gate * up).to(x.dtype).to(dtype)
    return reference.linear_int8(inner, down, None, down_scale, input_scales[2]), inner


def rows_away_from_ties(inner, input_scale):
    """Of float32, where the last bits of inner are rounding's: a step more or less is no error there, but luck."""
    steps = inner / (inner.abs().amax(-1, keepdim=True) / 127 if input_scale == 0 else input_scale)
    return ((steps.frac().abs() - 0.5).abs() > 1e-3).all(-1)


@halved
@each_dtype
@pytest.mark.parametrize("input_scales", ((0.0, 0.0, 0.0), (0.03, 0.03, 0.01), (0.03, 0.02, 0.0)), ids=str)
def test_gated_feed_forward(backend, dtype, input_scales):
    """Gate and up in two weights and, where one scale serves both, in one: the same bits."""
    hidden, inner = 67, 130
    for rows in (0, 1, 17, 300):
        x, (down, down_scale) = make_x(rows, hidden, dtype, *input_scales[:2]), make_weight(hidden, inner)
        ups, scales = zip(*(make_weight(inner, hidden) for _ in range(2)), strict=True)
        biases = [torch.randn(inner).to(dtype) for _ in range(2)]
        options = {"activation": "silu", "gated": True, "backend": backend}
        out = ops.feed_forward(
            x,
            ups[1],
            biases[1],
            down,
            gate_weight=ups[0],
            gate_bias=biases[0],
            weight_scales=(*scales, down_scale),
            input_scales=torch.tensor(input_scales).unbind(),
            **options,
        )
        operands = (ups, biases, scales, down, down_scale, input_scales)
        (oracle, exact), (baseline, _) = (literal_gated(x, t, *operands) for t in (torch.float64, torch.float32))
        sure = rows_away_from_ties(exact, input_scales[2]) if dtype is torch.float32 else slice(None)
        assert_close_to_reference(out[sure], oracle[sure], baseline.to(dtype)[sure], name=f"{rows} rows")
        if input_scales[0] == input_scales[1]:
            steps = torch.tensor(input_scales[1:]).unbind()
            options |= {"weight_scales": (torch.cat(scales), down_scale), "input_scales": steps}
            assert torch.equal(ops.feed_forward(x, torch.cat(ups), torch.cat(biases), down, **options), out)


@each_dtype
@pytest.mark.parametrize("quantized", (0, 1), ids=("gate", "up"))
def test_gate_or_up_was_kept(backend, dtype, quantized):
    """Each product converts x as its own weight wants it."""
    hidden, inner = 40, 72
    x, down = make_x(21, hidden, dtype), (torch.randn(hidden, inner) / inner**0.5).to(dtype)
    ups = [(torch.randn(inner, hidden) / hidden**0.5).to(dtype) for _ in range(2)]
    scales: list[torch.Tensor | None] = [None, None, None]
    ups[quantized], scales[quantized] = make_weight(inner, hidden)
    options = {"weight_scales": scales, "gated": True, "activation": "silu", "backend": backend}
    with torch.no_grad():
        out = ops.feed_forward(x, ups[1], None, down, gate_weight=ups[0], **options)

    def literal(dtype):
        products = [
            reference.linear(x.to(dtype), up.to(dtype), None)
            if scale is None
            else reference.linear_int8(x.to(dtype), up, None, scale)
            for up, scale in zip(ups, scales, strict=False)
        ]
        return (reference.activation(products[0], "silu") * products[1]) @ down.to(dtype).T

    assert_close_to_reference(out, literal(torch.float64), literal(dtype))


@halved
@each_scale
@each_dtype
def test_odd_rows_stay_alone(backend, dtype, input_scale):
    """Zeros give the bias; what is not finite poisons its own row, wherever it stands in it."""
    x, (weight, scale) = make_x(40, 70, dtype, input_scale), make_weight(66, 70)
    step = torch.tensor(input_scale)
    bias, options = torch.randn(66).to(dtype), {"weight_scale": scale, "input_scale": step, "backend": backend}
    x[1] = 0
    clean, poisoned = ops.linear(x, weight, bias, **options), {}
    assert torch.equal(clean[1], bias)
    for row, column, value in ((3, 0, "nan"), (9, 69, "inf"), (17, 33, "-inf"), (39, 64, "nan")):
        x[row, column] = float(value)
        poisoned[row] = True
    out = ops.linear(x, weight, bias, **options)
    for row in range(40):
        assert out[row].isnan().all() if row in poisoned else torch.equal(out[row], clean[row]), row


def test_autocast(backend):
    x, (weight, scale) = make_x(5, 70, torch.float32), make_weight(66, 70)
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.linear(x, weight, None, weight_scale=scale, backend=backend)
    plain = ops.linear(x, weight, None, weight_scale=scale, backend=backend)
    assert out.dtype == torch.bfloat16 and torch.equal(out, plain.bfloat16())


@each_dtype
def test_quantized_linear(dtype):
    linear = nn.Linear(70, 33).to(dtype)
    linear.weight.data[4] = 0
    layer = QuantizedLinear.from_linear(linear).eval()
    assert layer.weight.dtype == torch.int8 and layer.weight_scale[4] == 1
    assert layer.weight.abs().amax(1).tolist() == [0 if row == 4 else 127 for row in range(33)]
    error = (layer.weight * layer.weight_scale[:, None] - linear.weight.float()).abs()
    assert (error <= layer.weight_scale[:, None] * (0.5 + 127 * torch.finfo(torch.float32).eps)).all()
    x = make_x(6, 70, dtype)
    check(layer(x), x, layer.weight, layer.bias, layer.weight_scale, 0.0, "none", "QuantizedLinear")
    assert torch.equal(layer(x.view(2, 3, 70)), layer(x).view(2, 3, 33))
    # A cast keeps the meaning of the integers; a copy and a state dict hold all there is.
    static = QuantizedLinear.from_linear(linear, 1 / 3)
    scales = static.weight_scale.clone(), static.input_scale.clone()
    other = QuantizedLinear(70, 33, dtype=dtype)
    other.load_state_dict(static.bfloat16().to(dtype).state_dict())
    for same in (static, other, copy.deepcopy(static)):
        assert torch.equal(same.weight_scale, scales[0]) and torch.equal(same.input_scale, scales[1])
        assert same.bias.dtype == dtype
    with pytest.raises(RuntimeError, match=r"weight is torch\.\w*float\w*; int8 layers have torch\.int8"):
        other.load_state_dict(linear.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match="weight_scale holds a value that is not positive"):
        other.load_state_dict({**static.state_dict(), "weight_scale": -scales[0]})
    for value in (torch.nan, torch.inf):
        with pytest.raises(RuntimeError, match="weight_scale holds a value that is not positive and finite"):
            other.load_state_dict({**static.state_dict(), "weight_scale": torch.full((33,), value)})


def test_a_channel_that_is_not_finite_stays_so(backend):
    """fastbert.quantize refuses such a weight; no way of making the layer gives it an ordinary number."""
    linear = nn.Linear(70, 66)
    linear.weight.data[3, 5], linear.weight.data[40, 69], linear.weight.data[65, 0] = torch.nan, torch.inf, -torch.inf
    layer, x = QuantizedLinear.from_linear(linear).eval(), make_x(9, 70, torch.float32)
    weight, bias, scale, _ = layer.operands()
    out = ops.linear(x, weight, bias, weight_scale=scale, backend=backend)
    is_finite = out.isfinite()
    assert not is_finite[:, [3, 40, 65]].any() and is_finite.sum() == 9 * 63


@each_dtype
def test_a_row_too_small_for_a_scale_is_a_row_of_zeros(backend, dtype):
    """1 / scale would be infinite, and 0 times it no integer."""
    x = torch.zeros(1, 19)
    x[0, 0] = 1e-37
    weight, scale = torch.full((2, 19), 100, dtype=torch.int8), torch.ones(2)
    out = ops.linear(x.to(dtype), weight, None, weight_scale=scale, backend=backend)
    assert (out.abs() <= 1.001e-35).all() and (out >= 0).all()


def test_a_weight_that_is_too_wide_to_be_summed(backend):
    """132,103 products of 127 and -128 fit into int32, and the CPU's kernels multiply no more."""
    limit = 2**31 // (127 * 128) - 1
    options = {"weight_scale": torch.ones(2), "backend": backend}
    out = ops.linear(torch.ones(1, limit), torch.full((2, limit), -128, dtype=torch.int8), None, **options)
    expected = torch.full((1, 2), -128.0 * limit)
    assert_close_to_reference(out, expected.double(), expected)
    wide = torch.ones(1, limit + 1), torch.full((2, limit + 1), -128, dtype=torch.int8)
    if backend == "torch":
        assert_close_to_reference(ops.linear(*wide, None, **options), expected.double() - 128, expected - 128)
    else:
        with pytest.raises(RuntimeError, match=f"an int8 weight has {limit + 1} columns"):
            ops.linear(*wide, None, **options)
