"""The torch backend's products beside an oneDNN that mixes rows: its fault with AMX, emulated by what is known of it.

Where a row has more than 32 columns and no multiple of that, blocks of 32 columns are read whole, and where it has an
odd number below that, pairs: behind a row's last column lies the next row, which meets zeros. That is nothing, unless
the next row holds NaN or infinity.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastbert import ops
from fastbert.native.availability import triton_error
from fastbert.ops.linear import torch_backend
from fastbert.testing import reference
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference


def mixing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, with the fault."""
    rows, columns = a.shape
    beyond = -columns % (32 if columns > 32 else 2)
    flat = torch.cat([a.flatten(), a.new_zeros(beyond)])
    read = flat.as_strided((rows, columns + beyond), (columns, 1))
    return read @ torch.cat([b, b.new_zeros(beyond, b.shape[1])])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        out = mixing(x, weight.t())
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        return mixing(dout, weight), dout.t() @ x, dout.sum(0) if ctx.needs_input_grad[2] else None


@pytest.fixture
def mixing_linear(monkeypatch):
    monkeypatch.setattr(torch_backend, "_HAS_AMX", True)
    monkeypatch.setattr(F, "linear", _Linear.apply)


SIZES = ((33, 40), (40, 33), (32, 64), (31, 17), (64, 100), (70, 32))
each_size = pytest.mark.parametrize("hidden_size,inner", SIZES, ids=str)
each_bias = pytest.mark.parametrize("has_bias", (True, False), ids=("bias", "no-bias"))


def make(hidden_size: int, inner: int, has_bias: bool, dtype: torch.dtype) -> dict[str, torch.Tensor | None]:
    return {
        "x": torch.randn(17, hidden_size).to(dtype),
        "up_weight": (torch.randn(inner, hidden_size) / hidden_size**0.5).to(dtype),
        "up_bias": torch.randn(inner).to(dtype) if has_bias else None,
        "down_weight": (torch.randn(hidden_size, inner) / inner**0.5).to(dtype),
    }


def differentiate(function, tensors, dout) -> dict[str, torch.Tensor]:
    leaves = {n: None if t is None else t.detach().clone().requires_grad_() for n, t in tensors.items()}
    out = function(**leaves)
    out.backward(dout.to(out.dtype))
    return {"out": out.detach(), **{f"d{n}": t.grad for n, t in leaves.items() if t is not None}}


def ours(**tensors):
    return ops.feed_forward(**tensors, activation="gelu", backend="torch")


@each_bias
@each_size
def test_rows_stay_apart(mixing_linear, hidden_size, inner, has_bias):
    tensors = make(hidden_size, inner, has_bias, torch.bfloat16)
    spoiled = {**tensors, "x": tensors["x"].clone()}
    spoiled["x"][8] = float("nan")
    dout = torch.randn(17, hidden_size)
    clean, dirty = (differentiate(ours, t, dout) for t in (tensors, spoiled))
    others = torch.arange(17) != 8
    assert torch.equal(clean["out"][others], dirty["out"][others])
    assert torch.equal(clean["dx"][others], dirty["dx"][others])
    with torch.no_grad():
        assert torch.equal(ours(**spoiled)[others], dirty["out"][others])


@pytest.mark.parametrize("columns", (15, 33))
def test_the_emulated_fault_is_one(mixing_linear, columns):
    x, weight = torch.randn(4, columns), torch.randn(8, columns)
    x[2] = float("nan")
    assert F.linear(x, weight, None).isnan().any(1).tolist() == [False, True, True, False]


@each_bias
@each_size
def test_numbers_with_the_zeros(monkeypatch, hidden_size, inner, has_bias):
    monkeypatch.setattr(torch_backend, "_HAS_AMX", True)
    tensors, dout = make(hidden_size, inner, has_bias, torch.bfloat16), torch.randn(17, hidden_size).bfloat16()

    def literal(x, up_weight, up_bias, down_weight):
        return reference.feed_forward(x, up_weight, up_bias, down_weight, "gelu")

    doubles = {name: None if t is None else t.double() for name, t in tensors.items()}
    results = [differentiate(f, t, dout) for f, t in ((ours, tensors), (literal, doubles), (literal, tensors))]
    for name, actual in results[0].items():
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        assert_close_to_reference(actual, results[1][name], results[2][name], factor, name)


@pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
def test_what_lies_behind_a_row_of_logits_is_zero():
    """The logits' gradients are rows of wider memory, and the next product may read all of it."""
    from fastbert.kernels.cross_entropy import _cross_entropy_kernel

    memory = torch.full((3, 128), float("nan")).half()
    memory[:, :101] = logits = torch.randn(3, 101).half()
    labels, losses, share = torch.tensor([7, 100, 0]), torch.empty(3), torch.ones(1)
    _cross_entropy_kernel[(3,)](
        memory, labels, losses, share, 101, 128, -100, 0.0, 0.0, NEEDS_GRAD=True, BLOCK_V=128, num_warps=1
    )
    expected = logits.double().softmax(1) - F.one_hot(labels, 101)
    assert (memory[:, :101] - expected).abs().max() < torch.finfo(torch.half).eps
    assert torch.equal(memory[:, 101:], torch.zeros(3, 27).half())
