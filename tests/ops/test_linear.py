"""linears on the CPU: every instruction set, forward and backward, against the float64 oracle."""

from __future__ import annotations

import threading

import pytest
import torch
from full import thinned
from isas import OF_FLOATS, PACKED, backend_with_isa

from fastbert import ops
from fastbert.backend import Backend, select
from fastbert.errors import BackendError
from fastbert.native.availability import extension_error
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "tanh", "silu")
# (tokens, in, out): nothing, one, around the tile's 6 rows and 64 columns, odd everywhere, longer than a summing chain.
SHAPES = ((0, 16, 24), (1, 64, 64), (5, 63, 65), (6, 64, 128), (7, 30, 70), (193, 33, 129), (20, 1030, 31))
each_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))


@pytest.fixture(params=OF_FLOATS)
def isa(request):
    with backend_with_isa(request.param):
        yield request.param


def oracle_activation(name: str):
    return (lambda y: y) if name == "none" else lambda y: reference.activation(y, name)


def run(function, operands: list[torch.Tensor], douts: list[torch.Tensor]):
    """(outputs, gradients) of `function` over leaves made of the operands."""
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    outs = function(*leaves)
    torch.autograd.backward(outs, [d.to(outs[0].dtype) for d in douts])
    return [out.detach() for out in outs], [leaf.grad for leaf in leaves]


def check(ours, literal, operands, douts) -> None:
    """Outputs and gradients by the error rule; the weights' and biases' of one call are judged as one tensor."""
    actual = run(ours, operands, douts)
    baseline = run(literal, operands, douts)
    oracle = run(literal, [t.double() for t in operands], [d.double() for d in douts])
    for i in range(len(oracle[0])):
        assert_close_to_reference(actual[0][i], oracle[0][i], baseline[0][i], OUTPUT_FACTOR, f"out {i}")
    for i in range(len(oracle[1])):
        assert_close_to_reference(actual[1][i], oracle[1][i], baseline[1][i], GRADIENT_FACTOR, f"gradient {i}")


@thinned(6)
@each_dtype
@each_shape
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linears(isa, dtype, shape, activation):
    tokens, width, out = shape
    x = torch.randn(tokens, width).to(dtype)
    weights = [(torch.randn(n, width) / width**0.5).to(dtype) for n in (out, out + 3)]
    # Away from ReLU's kink, where rounding decides about a whole gradient.
    biases = [(torch.randn(len(w)).sign() * (4 if activation == "relu" else 1)).to(dtype) for w in weights]
    act = oracle_activation(activation)
    check(
        lambda x, *wb: ops.linears(x, wb[:2], wb[2:], activation=activation, backend="cpu"),
        lambda x, *wb: [act(x @ w.T + b) for w, b in zip(wb[:2], wb[2:], strict=True)],
        [x, *weights, *biases],
        [torch.randn(tokens, len(w)).to(dtype) for w in weights],
    )


@each_dtype
@pytest.mark.parametrize("isa", PACKED, indirect=True)
def test_a_row_has_the_same_bits_whatever_is_beside_it(isa, dtype):
    """Tiles of every height, alone and beside others; the float32 sums of 1030 channels are of three stretches."""
    torch.manual_seed(0)
    x, weight = torch.randn(193, 1030).to(dtype), torch.randn(70, 1030).to(dtype)
    together = ops.linear(x, weight, None)
    for rows in (*range(1, 27), 31, 32, 33, 48, 64, 192):
        assert torch.equal(ops.linear(x[:rows], weight, None), together[:rows]), rows


def test_two_threads_share_weights_that_neither_has_packed_yet():
    x = torch.randn(40, 64)
    weights = [torch.randn(96, 64) for _ in range(50)]
    expected = [x.double() @ w.double().T for w in weights]
    results: dict[int, list[torch.Tensor]] = {}

    def work(name: int) -> None:
        with torch.no_grad():
            results[name] = [ops.linear(x, w, None, backend="cpu") for w in weights]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i, w in enumerate(weights):
        assert torch.equal(results[0][i], results[1][i])
        assert_close_to_reference(results[0][i], expected[i], x @ w.T, OUTPUT_FACTOR)


def test_autocast_computes_in_bfloat16_from_float32_weights():
    x, weight, bias = torch.randn(20, 64), torch.randn(48, 64) / 8, torch.randn(48)
    dout = [torch.randn(20, 48)]

    def ours(*t):
        with torch.autocast("cpu", torch.bfloat16):
            return [ops.linear(*t, backend="cpu")]

    def literal(x, w, b):
        low = [t if t.dtype == torch.float64 else t.bfloat16() for t in (x, w, b)]
        return [low[0] @ low[1].T + low[2]]

    actual, baseline = (run(f, [x, weight, bias], dout) for f in (ours, literal))
    oracle = run(literal, [t.double() for t in (x, weight, bias)], [dout[0].double()])
    assert actual[0][0].dtype == torch.bfloat16 and actual[1][1].dtype == torch.float32
    assert_close_to_reference(actual[0][0], oracle[0][0], baseline[0][0], OUTPUT_FACTOR)
    for a, o, b in zip(actual[1], oracle[1], baseline[1], strict=True):
        assert_close_to_reference(a.bfloat16(), o, b.bfloat16(), GRADIENT_FACTOR)


def test_reasons_and_errors():
    x, weight = torch.randn(4, 64), torch.randn(8, 64)
    assert select("linears", None, x, weight) is Backend.CPU
    assert select("linears", None, x.double(), weight.double()) is Backend.TORCH
    with pytest.raises(BackendError, match="float64"):
        ops.linear(x.double(), weight.double(), None, backend="cpu")
    with pytest.raises(BackendError, match="3 dimensions"):
        ops.linear(x[None], weight, None, backend="cpu")
    with pytest.raises(RuntimeError, match="expected \\(out_features, 64\\)"):
        ops.linear(x, weight[:, :32], None, backend="cpu")
    with pytest.raises(RuntimeError, match="activation is 'swish'"):
        ops.linear(x, weight, None, activation="swish", backend="cpu")


def test_a_gradient_that_is_still_held_is_never_written_again():
    """The memory of a weight's gradient is used again, but only when nothing holds it any more."""
    x, weight = torch.randn(9, 64), torch.randn(80, 64, requires_grad=True)

    def gradient(scale: float) -> torch.Tensor:
        weight.grad = None
        ops.linear(x * scale, weight, None, backend="cpu").sum().backward()
        return weight.grad

    held = gradient(1.0)
    copy, memory = held.clone(), held.data_ptr()
    view = held[3:5]
    del held
    newer = gradient(2.0)
    assert newer.data_ptr() != memory and torch.equal(view, copy[3:5])
    memory = newer.data_ptr()
    del newer
    assert gradient(3.0).data_ptr() == memory
    accumulated = torch.autograd.grad(
        ops.linear(x, weight, None, backend="cpu").sum() + ops.linear(x, weight, None, backend="cpu").sum(), weight
    )[0]
    assert torch.equal(accumulated, copy + copy)
