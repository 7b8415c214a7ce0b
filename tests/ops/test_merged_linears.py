"""Query, key and value as one product, which is how they run on a GPU; here on a CPU, as the interpreter has it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from test_ops import check, dtype_axis
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.backend_report import backends
from fastbert.testing import reference

MERGING = "triton"
WIDTHS = (24, 8, 16)
ROWS = 11


@pytest.fixture(autouse=True)
def merged(monkeypatch) -> Iterator[ModuleType]:
    """The module, where inference merges few rows too; the fused op is Triton's: on a CPU it has to be asked for."""
    module = sys.modules["fastbert.ops.linear.linear"]  # the package's attribute of this name is the function
    monkeypatch.setattr(module, "_MERGED_TOKENS", ROWS)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with use_backend(MERGING):
        yield module


class Calls(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def operands(has_bias: bool = True) -> dict[str, torch.Tensor]:
    found = {"x": torch.randn(ROWS, 32), **{f"w{i}": torch.randn(n, 32) for i, n in enumerate(WIDTHS)}}
    return found | ({f"b{i}": torch.randn(n) for i, n in enumerate(WIDTHS)} if has_bias else {})


def split(tensors):
    return [tensors.get(f"w{i}") for i in range(3)], [tensors.get(f"b{i}") for i in range(3)]


def product(x, **tensors):
    """The three results side by side, from three tensors that are no neighbours in backward."""
    weights, biases = split(tensors)
    return torch.cat(ops.linears(x, weights, biases), 1)


def formula(x, **tensors):
    return torch.cat([reference.linear(x, w, b) for w, b in zip(*split(tensors), strict=True)], 1)


@dtype_axis
@pytest.mark.parametrize("has_bias", (True, False))
def test_against_oracle(dtype, has_bias):
    check(product, formula, operands(has_bias), dtype)


def test_it_is_one_product_forward_and_backward():
    tensors = {name: t.requires_grad_() for name, t in operands().items()}
    with Calls() as calls:
        product(**tensors).sum().backward()
    assert sum(name in ("mm", "addmm") for name in calls.names) == 3


def test_gradients_that_are_neighbours_are_not_copied(merged):
    matrix = torch.randn(ROWS, sum(WIDTHS))
    columns = matrix.split(WIDTHS, 1)
    assert merged._side_by_side(columns).data_ptr() == matrix.data_ptr()
    assert torch.equal(merged._side_by_side(columns), matrix)
    a, b, c = columns
    wide = torch.randn(ROWS, 2 * sum(WIDTHS))
    for parts in (
        (b, a, c),
        (a, c),
        (a, a),
        (a, b.clone(), c),
        (a.clone(), b, c),
        (a, b[:, :4]),
        wide.split(24, 1)[:2],
        tuple(t[:1].expand(ROWS, -1) for t in columns),
        (a.t()[:ROWS], c.t()[:ROWS]),
    ):
        assert torch.equal(merged._side_by_side(parts), torch.cat(parts, 1))
    parts = (a, torch.randn_like(matrix).split(WIDTHS, 1)[1], c)  # each in its place, of two matrices
    assert torch.equal(merged._side_by_side(parts), torch.cat(parts, 1))


def test_attentions_gradients_are_such_neighbours():
    pytest.importorskip("triton", reason="Triton is not installed")
    x = torch.randn(ROWS, 32, requires_grad=True)
    weights, biases = [torch.randn(32, 32) for _ in range(3)], [torch.randn(32) for _ in range(3)]
    q, k, v = (t.view(-1, 2, 16) for t in ops.linears(x, weights, biases))
    out = ops.attention(q, k, v, torch.tensor([0, 7, ROWS], dtype=torch.int32), 7)
    with Calls() as calls:
        out.sum().backward()
    assert calls.names.count("cat") == 1  # the weights, in backward


@pytest.mark.parametrize("frozen", ("x", "weights", "biases"))
def test_only_what_is_wanted_gets_a_gradient(frozen):
    tensors = operands()
    wanted = {name: t.requires_grad_(name[0] != frozen[0]) for name, t in tensors.items()}
    product(**tensors).sum().backward()
    assert all((t.grad is not None) == t.requires_grad for t in wanted.values())


@pytest.mark.parametrize("has_grad", (True, False))
def test_autocast(has_grad):
    tensors = {name: t.requires_grad_(has_grad) for name, t in operands().items()}
    with torch.autocast("cpu", torch.bfloat16):
        out = product(**tensors)
    assert out.dtype is torch.bfloat16
    rounded = {name: t.detach().bfloat16() for name, t in tensors.items()}
    assert torch.equal(out, product(**rounded))
    if has_grad:
        out.float().sum().backward()
        assert all(t.grad is not None and t.grad.dtype is torch.float32 for t in tensors.values())


def test_what_stays_apart():
    """A few rows without gradients, an activation, one weight, operands of several dtypes, int8 weights."""
    tensors = operands()
    weights, biases = split(tensors)
    x = tensors["x"]

    def products(*args, **options):
        with Calls() as calls:
            ops.linears(*args, **options)
        return sum(name in ("mm", "addmm") for name in calls.names)

    assert products(x, weights, biases) == 1
    assert products(x[1:], weights, biases) == 3
    assert products(x, weights, biases, activation="gelu") == 3
    assert products(x, weights[:1], biases[:1]) == 1
    assert products(x, weights, [None, *biases[1:]]) == 3
    scale = torch.ones(24)
    integers = [torch.ones(24, 32, dtype=torch.int8)] * 2
    assert products(x, integers, [None, None], weight_scales=[scale, scale]) == 2
    with pytest.raises(RuntimeError, match="dtype"):
        ops.linears(x.bfloat16(), weights, biases, backend="torch")


def test_traced():
    torch._dynamo.reset()
    tensors = {name: t.requires_grad_() for name, t in operands().items()}
    expected = product(**tensors)
    expected.sum().backward()
    gradients = {name: t.grad for name, t in tensors.items()}
    for t in tensors.values():
        t.grad = None
    out = torch.compile(product, fullgraph=True, backend="aot_eager")(**tensors)
    out.sum().backward()
    assert torch.equal(out, expected)
    assert all(torch.equal(t.grad, gradients[name]) for name, t in tensors.items())


def test_on_torch_there_are_three_products():
    """By name for the call, or for all calls; they are differentiable twice, the merged product is once."""
    weights, biases = split(tensors := {name: t.requires_grad_() for name, t in operands().items()})
    for name, backend in (("auto", "torch"), ("torch", None), (MERGING, "torch")):
        with use_backend(name), Calls() as calls:
            outs = ops.linears(tensors["x"], weights, biases, backend=backend)
        assert sum(name in ("mm", "addmm") for name in calls.names) == 3
        (dx,) = torch.autograd.grad(sum(out.square().sum() for out in outs), tensors["x"], create_graph=True)
        dx.square().sum().backward()
    with use_backend("torch"):
        row = backends()["merged_linears"]
    assert row["selected"] == "torch" and row[MERGING] == "only when asked for by name"


def test_a_model_in_training():
    """The same gradients, to the last bits of a sum in another order, as with three products."""
    from attention_terms import assert_zero_but_for_rounding, key_bias_terms
    from training_step import layer_of, make, step

    from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

    model, batch = make()
    model.eval()
    with key_bias_terms(ops) as terms:
        oracle = step(model.double(), batch, "torch")
    model.float()
    ours, baseline = step(model, batch, "triton"), step(model, batch, "torch")
    for name, found in ours.items():
        if "key.bias" in name:
            assert_zero_but_for_rounding(found, terms[layer_of(name)], torch.float32, name)
        else:
            assert_close_to_reference(found, oracle[name], baseline[name], GRADIENT_FACTOR, name)
