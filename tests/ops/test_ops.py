"""What is special to ops in torch and to losses, against the oracle (what every op promises: test_contract.py)."""

from __future__ import annotations

import pytest
import torch
from full import left_to_full
from seeds import torch_generator

from fastbert import ops
from fastbert.native.availability import extension_error, triton_error
from fastbert.ops.attention import torch_backend
from fastbert.ops.attention.attention import AttentionOptions
from fastbert.testing import reference
from fastbert.testing.cases import DTYPES, LENGTHS, Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

lengths_axis = pytest.mark.parametrize("case", LENGTHS, ids=lambda c: c.id)
dtype_axis = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def check(
    op, formula, tensors: dict[str, torch.Tensor], dtype: torch.dtype, joint: bool = False, device: str = "cpu"
) -> None:
    """`op` in `dtype` against `formula` in float64, with `formula` in `dtype` as the baseline; all gradients too.

    `joint` compares the gradients as one tensor, stacked. The op's tensors are on `device`.
    """
    results = []
    for function, kind, place in ((op, dtype, device), (formula, torch.float64, "cpu"), (formula, dtype, "cpu")):
        leaves = {name: t.to(dtype).to(place, kind).detach().requires_grad_() for name, t in tensors.items()}
        out = function(**leaves)
        dout = torch.randn(out.shape, generator=torch_generator(1)).to(dtype).to(out)
        if function is op or out.requires_grad:  # the formula of nothing at all has no graph; the op's must have one
            out.backward(dout)
        results.append((out, {n: t.grad if t.grad is not None else torch.zeros_like(t) for n, t in leaves.items()}))
    (actual, grads), (oracle, oracle_grads), (baseline, baseline_grads) = results
    # A loss comes out in fp32 whatever went in; the baseline's has the inputs' dtype.
    assert_close_to_reference(actual.to(baseline.dtype), oracle, baseline, OUTPUT_FACTOR, "out")
    if joint:
        grads, oracle_grads, baseline_grads = (
            {"qkv": torch.stack(list(g.values()))} for g in (grads, oracle_grads, baseline_grads)
        )
    for name in grads:
        assert_close_to_reference(grads[name], oracle_grads[name], baseline_grads[name], GRADIENT_FACTOR, f"d{name}")


def check_attention(op, formula, tensors, dtype):
    """dq and dk are differences that cancel (to 0 in a one-token sequence): their scale is that of all of dqkv."""
    check(op, formula, tensors, dtype, joint=True)


def qkv(case: Lengths, num_heads: int = 3, head_dim: int = 32) -> dict[str, torch.Tensor]:
    return {name: torch.randn(case.total_tokens, num_heads, head_dim) for name in "qkv"}


@lengths_axis
@dtype_axis
def test_attention_as_it_is_traced(case, dtype):
    """The form that torch.compile takes is another: one padded rectangle."""
    cu_seqlens, longest = case.cu_seqlens, max(case.lengths)
    check_attention(
        lambda q, k, v: torch_backend._attention_padded(
            q, k, v, cu_seqlens, longest, None, None, AttentionOptions(32**-0.5), None
        ),
        lambda q, k, v: reference.attention(q, k, v, cu_seqlens),
        qkv(case),
        dtype,
    )


@dtype_axis
def test_attention_with_scores_in_several_pieces(dtype, monkeypatch):
    """Scores are written down in pieces that fit the cache: here two heads at a time, and a remainder."""
    case = LENGTHS[3]
    monkeypatch.setattr(torch_backend, "_SCORE_BYTES", 2 * 41 * 41 * dtype.itemsize)
    check_attention(
        lambda q, k, v: ops.attention(q, k, v, case.cu_seqlens, max(case.lengths), backend="torch"),
        lambda q, k, v: reference.attention(q, k, v, case.cu_seqlens),
        qkv(case),
        dtype,
    )


@left_to_full(lambda p: p["dtype"] is not torch.bfloat16)  # which goes the same way
@dtype_axis
def test_attention_of_long_sequences(dtype):
    """SDPA runs beyond the lengths at which scores are written down: both sides of the limits, masked and not."""
    case = Lengths("long", (257, 250, 513, 513, 520))
    with torch.profiler.profile() as profile:
        check_attention(
            lambda q, k, v: ops.attention(q, k, v, case.cu_seqlens, max(case.lengths), backend="torch"),
            lambda q, k, v: reference.attention(q, k, v, case.cu_seqlens),
            qkv(case, num_heads=1, head_dim=16),
            dtype,
        )
    assert "aten::scaled_dot_product_attention" in {event.key for event in profile.key_averages()}


def test_attention_probs_are_those_of_the_output():
    case = Lengths("", (5, 0, 9, 1))
    t = qkv(case)
    probs = ops.attention_probs(t["q"].double(), t["k"].double(), case.cu_seqlens, 9)
    out = reference.attention(*(x.double() for x in t.values()), case.cu_seqlens)
    for i, (start, n) in enumerate(((0, 5), (5, 0), (5, 9), (14, 1))):
        v = t["v"].double()[start : start + n].transpose(0, 1)
        found, oracle = (probs[i, :, :n, :n] @ v).transpose(0, 1), out[start : start + n]
        assert_close_to_reference(found, oracle, oracle)
        assert not probs[i, :, n:].any() and not probs[i, :, :, n:].any()  # nothing outside the sequence


def test_buckets_hold_every_sequence_once_and_waste_little():
    lengths = [int(n) for n in torch.randint(0, 300, (200,))]
    buckets = torch_backend.make_buckets(lengths, torch.device("cpu"))
    tokens = torch.cat([b.tokens for b in buckets])
    assert sorted(tokens.tolist()) == list(range(sum(lengths)))
    assert sum(b.num_sequences * b.width for b in buckets) <= 1.15 * sum(lengths)
    assert len(buckets) < 20


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "relu", "tanh", "silu"))
def test_without_backward_the_activation_runs_in_place_with_the_same_bits(activation):
    x, weight, bias = torch.randn(9, 32), torch.randn(48, 32), torch.randn(48)
    kept = x.clone()
    expected = ops.linear(x.requires_grad_(), weight, bias, activation=activation, backend="torch")
    with torch.no_grad():
        assert torch.equal(ops.linear(x, weight, bias, activation=activation, backend="torch"), expected)
    assert torch.equal(x, kept)
    down, options = torch.randn(16, 24), {"activation": activation, "gated": True, "backend": "torch"}
    expected = ops.feed_forward(x, weight, None, down, **options)
    with torch.no_grad():
        assert torch.equal(ops.feed_forward(x, weight, None, down, **options), expected)


def test_erf_and_tanh_gelu_are_not_swapped():
    """They differ by 4.7e-4 at |x| = 2.7: the exact one must be 100 times closer to erf than that."""
    x = torch.tensor([[2.7]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    exact = ops.linear(x, one, None, activation="gelu")
    tanh = ops.linear(x, one, None, activation="gelu_tanh")
    apart = (exact - tanh).abs()
    assert 4e-4 < apart.item() < 5e-4
    assert 100 * (exact - reference.activation(x, "gelu")).abs() < apart
    assert 100 * (tanh - reference.activation(x, "gelu_tanh")).abs() < apart


def test_padding_rows_take_no_gradient():
    word = torch.randn(5, 8, requires_grad=True)
    position = torch.randn(5, 8, requires_grad=True)
    ids = torch.tensor([0, 1, 2])
    options = {"padding_idx": 1, "position_padding_idx": 2}
    out = ops.embed_layer_norm(ids, ids, None, word, position, None, None, None, **options)
    out.sum().backward()
    assert [row.any().item() for row in word.grad] == [True, False, True, False, False]
    assert [row.any().item() for row in position.grad] == [True, True, False, False, False]


@pytest.mark.parametrize("backend", ("torch", "cpu", "triton"))
def test_a_large_z_loss_keeps_the_small_probabilities(backend):
    """exp(x - log_sum_exp), which is torch's own gradient of it, loses what rounding takes of 300."""
    error = {"cpu": extension_error, "triton": triton_error}.get(backend, lambda: None)()
    if error is not None:
        pytest.skip(error)
    weight, bias, labels = torch.randn(30, 16) / 4, torch.zeros(30), torch.randint(0, 30, (12,))
    weight[:2], bias[1] = 1.0, -9.0  # of two classes alone it is not 0: nearly 1, and 1e-4
    check(
        lambda x: ops.cross_entropy(x, weight.to(x), bias.to(x), labels, z_loss=0.01, backend=backend),
        lambda x: reference.cross_entropy(x, weight.to(x), bias.to(x), labels, z_loss=0.01),
        {"x": 25 * torch.randn(12, 16).abs()},
        torch.float32,
    )


@pytest.mark.parametrize("labelled", (0, 12))
@pytest.mark.parametrize("backend", ("torch", "cpu", "triton"))
def test_cross_entropy_of_some_tokens_and_none(backend, labelled):
    """Tokens without a label change nothing, wherever they stand, and take no gradient."""
    error = {"cpu": extension_error, "triton": triton_error}.get(backend, lambda: None)()
    if error is not None:
        pytest.skip(error)
    count = 2 * labelled + 3
    shapes = ((count, 16), (30, 16), (30,))
    hidden, weight, bias = [torch.randn(shape, requires_grad=True) for shape in shapes]
    at = torch.randperm(count)[:labelled]
    labels = torch.full((count,), -100)
    labels[at] = torch.randint(0, 30, (labelled,))
    options = {"label_smoothing": 0.1, "z_loss": 0.01}

    def gradients(rows, labels):
        loss = ops.cross_entropy(rows, weight, bias, labels, backend=backend, **options)
        with torch.no_grad():
            assert torch.equal(ops.cross_entropy(rows, weight, bias, labels, backend=backend, **options), loss)
        return loss, *torch.autograd.grad(loss, (hidden, weight, bias))

    expected, found = gradients(hidden[at], labels[at]), gradients(hidden, labels)
    others = torch.ones(count, dtype=torch.bool).index_fill(0, at, False)
    assert found[1][others].eq(0).all()
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    assert labelled or all(not t.any() for t in found)


def test_sequence_cross_entropy_of_logits_far_from_zero():
    """What all logits have in common must not take the digits of the small logarithm."""
    check(
        lambda x: ops.sequence_cross_entropy(x, torch.tensor([0, 64], dtype=torch.int32), torch.tensor([17])),
        lambda x: reference.sequence_cross_entropy(x, torch.tensor([0, 64]), torch.tensor([17])),
        {"x": torch.randn(64, generator=torch_generator(0)) + 1000},
        torch.float32,
    )
