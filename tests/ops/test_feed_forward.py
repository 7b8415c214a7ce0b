"""feed_forward on the CPU, plain and gated, its gate and up in one weight or in two, with dropout: every instruction
set, forward and backward, against the float64 oracle. int8 is in test_int8.py."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from full import halved, left_to_full, thinned
from isas import CPU_BACKENDS, backend_with_isa
from remembered import remembered
from seeds import manual_seed

from fastbert import ops
from fastbert.native.availability import extension_error
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)

FORMS = ("plain", "merged", "apart")  # one product; gate and up in one weight; in two
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")
each_form = pytest.mark.parametrize("form", FORMS)
each_gated = pytest.mark.parametrize("form", FORMS[1:])
each_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
# What takes whole panels, what has a rest of one, what is less than a vector, and more than a chain of sums.
SIZES = ((32, 128), (30, 70), (5, 3), (1030, 31))


@pytest.fixture(params=CPU_BACKENDS)
def isa(request):
    with backend_with_isa(request.param):
        yield request.param


def make(form, rows, hidden, inner, dtype=torch.float32, bias=True, kink=False) -> dict[str, torch.Tensor | None]:
    """Operands by name. kink: no product is near 0, where rounding decides about a whole gradient of ReLU."""
    size = 2 * inner if form == "merged" else inner
    named = {"x": torch.randn(rows, hidden), "up_weight": torch.randn(size, hidden) / hidden**0.5, "up_bias": None}
    named["down_weight"] = torch.randn(hidden, inner) / inner**0.5
    if form == "apart":
        named |= {"gate_weight": torch.randn(size, hidden) / hidden**0.5, "gate_bias": None}
    for name in [name for name in named if name.endswith("bias") and (bias or kink)]:
        named[name] = torch.randn(size).sign() * 8 if kink else torch.randn(size)
    return {name: None if t is None else t.to(dtype) for name, t in named.items()}


def ours(form, activation="gelu", **options):
    return partial(ops.feed_forward, activation=activation, gated=form != "plain", backend="cpu", **options)


def run(function, named, dout, wanted=None) -> dict[str, torch.Tensor]:
    """The output, and the gradients of `wanted`, or of all operands."""
    names = [name for name, t in named.items() if t is not None and (wanted is None or name in wanted)]
    leaves = {name: t if t is None else t.detach().clone().requires_grad_(name in names) for name, t in named.items()}
    out = function(**leaves)
    gradients = torch.autograd.grad(out, [leaves[name] for name in names], dout.to(out.dtype)) if names else ()
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def check(function, literal, named, dout) -> dict[str, torch.Tensor]:
    actual = run(function, named, dout)
    oracle, baseline = remembered(literals, named, dout, **literal.keywords)
    for name, found in actual.items():
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(found, oracle[name], baseline[name], factor, name)
    return actual


def literals(named, dout, **options) -> list[dict[str, torch.Tensor]]:
    """In float64, and in the operands' dtype."""
    literal = partial(reference.feed_forward, **options)
    doubles = {name: None if t is None else t.double() for name, t in named.items()}
    return [run(literal, doubles, dout.double()), run(literal, named, dout)]


def literal_of(form, activation="gelu", **options):
    return partial(reference.feed_forward, name=activation, gated=form != "plain", **options)


@thinned(6)
@each_dtype
@each_form
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_against_the_oracle(isa, form, activation, dtype):
    for i, (hidden, inner) in enumerate(SIZES):
        named = make(form, 17, hidden, inner, dtype, i % 2 == 0, activation == "relu")  # every second one has biases
        dout = torch.randn(17, hidden).to(dtype)
        actual = check(ours(form, activation), literal_of(form, activation), named, dout)
        with torch.no_grad():
            assert torch.equal(ours(form, activation)(**named), actual["out"])


@thinned(3)
@each_dtype
@each_form
@pytest.mark.parametrize("rows", (0, 1, 15, 16, 200, 1000))
def test_numbers_of_rows(isa, rows, form, dtype):
    """Few share each product over the threads, many go through both products in blocks: a row gets the same bits."""
    named = make(form, rows, 40, 72, dtype)
    actual = check(ours(form, "silu"), literal_of(form, "silu"), named, torch.randn(rows, 40).to(dtype))
    parts = [ours(form, "silu")(**{**named, "x": part}) for part in named["x"].split(37)]
    if isa != "cpu-generic":  # whose products are torch's
        assert torch.equal(torch.cat(parts), actual["out"])


@each_gated
def test_the_gradients_that_are_asked_for_are_those_of_all(form):
    named, dout = make(form, 23, 40, 72), torch.randn(23, 40)
    whole = run(ours(form), named, dout)
    names = list(named)
    for pattern in product((False, True), repeat=len(names)):
        wanted = [name for name, is_wanted in zip(names, pattern, strict=True) if is_wanted]
        some = run(ours(form), named, dout, wanted)
        assert set(some) == {"out", *wanted} and all(torch.equal(t, whole[name]) for name, t in some.items())


@each_dtype
def test_one_weight_and_two_give_the_same_bits(isa, dtype):
    named = make("merged", 50, 40, 72, dtype)
    halves = {"gate_weight": named["up_weight"][:72], "up_weight": named["up_weight"][72:]}
    halves |= {"gate_bias": named["up_bias"][:72], "up_bias": named["up_bias"][72:]}
    dout = torch.randn(50, 40)
    merged, apart = run(ours("merged"), named, dout), run(ours("apart"), {**named, **halves}, dout)
    assert torch.equal(merged["out"], apart["out"]) and torch.equal(merged["down_weight"], apart["down_weight"])
    for name in ("weight", "bias"):
        assert torch.equal(merged[f"up_{name}"], torch.cat([apart[f"gate_{name}"], apart[f"up_{name}"]]))


def test_a_bias_of_one_product_alone():
    for left_out in ("up_bias", "gate_bias"):
        named = make("apart", 9, 16, 40) | {left_out: None}
        check(ours("apart"), literal_of("apart"), named, torch.randn(9, 16))


@halved
@each_form
@each_dtype
@pytest.mark.parametrize("rows", (17, 1000))
def test_dropout_has_its_ops_mask_in_both_directions(isa, rows, dtype, form):
    named, options = make(form, rows, 24, 70, dtype), {"dropout_p": 0.25}
    manual_seed(3)
    keep = ops.dropout(torch.ones(rows, 70), 0.25, backend="cpu") != 0
    assert abs(keep.double().mean() - 0.75) < 6 * (0.1875 / keep.numel()) ** 0.5

    def seeded(**named):
        manual_seed(3)
        return ours(form, "silu", **options)(**named)

    actual = check(seeded, literal_of(form, "silu", keep=keep, **options), named, torch.randn(rows, 24).to(dtype))
    with torch.no_grad():
        assert torch.equal(seeded(**named), actual["out"])


@each_form
def test_dropout_of_nothing_and_of_all(form):
    named, dout = make(form, 9, 16, 40), torch.randn(9, 16)
    state = torch.get_rng_state()
    none, plain = run(ours(form, dropout_p=0.0), named, dout), run(ours(form), named, dout)
    assert all(torch.equal(none[name], plain[name]) for name in plain) and torch.equal(torch.get_rng_state(), state)
    assert not any(t.any() for t in run(ours(form, dropout_p=1.0), named, dout).values())


@each_form
def test_torch_drops_the_same_share_out_and_its_gradient_goes_through(form):
    named = make(form, 200, 16, 64)
    named["down_weight"] = torch.eye(64)
    out = partial(ours(form, "tanh", dropout_p=0.25), backend="torch")(**named)
    assert abs((out != 0).double().mean() - 0.75) < 6 * (0.1875 / out.numel()) ** 0.5
    leaf = named["x"].requires_grad_()
    partial(ours(form, dropout_p=1.0), backend="torch")(**named).sum().backward()
    assert not leaf.grad.any()


@halved
@each_dtype
@each_gated
@pytest.mark.parametrize("rows", (300, 1600))
def test_bits_do_not_depend_on_threads_or_runs(dtype, form, rows):
    named, dout = make(form, rows, 64, 200, dtype), torch.randn(rows, 64)

    def call(threads):
        torch.set_num_threads(threads)
        manual_seed(4)
        return run(ours(form, dropout_p=0.1), named, dout)

    before = torch.get_num_threads()
    try:
        expected = call(1)
        for threads in (2, 3, 3):
            actual = call(threads)
            assert all(torch.equal(actual[name], t) for name, t in expected.items()), threads
    finally:
        torch.set_num_threads(before)


@each_form
def test_autocast_computes_in_bfloat16_from_float32_weights(form):
    named, dout = make(form, 20, 64, 48), torch.randn(20, 64)

    def autocast(**named):
        with torch.autocast("cpu", torch.bfloat16):
            return ours(form)(**named)

    def literal(**named):
        is_double = named["x"].dtype is torch.float64
        return literal_of(form)(**{n: t if is_double or t is None else t.bfloat16() for n, t in named.items()})

    actual, baseline = run(autocast, named, dout), run(literal, named, dout)
    oracle = run(literal, {name: t.double() for name, t in named.items()}, dout)
    assert actual["out"].dtype is torch.bfloat16 and actual["up_weight"].dtype is torch.float32
    for name, found in actual.items():
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(found.bfloat16(), oracle[name], baseline[name].bfloat16(), factor, name)


@left_to_full(lambda p: p["form"] != "apart")  # which has the most operands
@each_form
def test_compiled_as_one_graph_with_dropout(form):
    named, dout = make(form, 24, 16, 48), torch.randn(24, 16)
    function = ours(form, dropout_p=0.25)
    torch.compiler.reset()
    found = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        manual_seed(2)
        found.append(run(call, named, dout))
    assert all(torch.equal(found[0][name], t) for name, t in found[1].items())


def test_tensors_on_two_devices_are_refused():
    named = make("apart", 5, 16, 24)
    for name in ("gate_weight", "gate_bias"):
        with pytest.raises(ValueError, match=f"feed_forward: {name} is on meta, x on cpu"):
            ops.feed_forward(**{**named, name: named[name].to("meta")}, gated=True)
