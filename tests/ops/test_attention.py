"""attention: what is special to it beside the ops' contract, on every backend, against the float64 oracle."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import attention_cases
import pytest
import torch
from attention_cases import (
    FEW,
    RAGGED,
    SLACK,
    backends,
    check,
    differentiate,
    each_backend,
    each_dtype,
    each_isa,
    each_kernel,
    is_interpreted_in_16_bits,
    is_met_in_the_other_dtype,
    make,
    positions,
    results_of,
    rotary_of,
    tables,
)
from full import halved, left_to_full, triton_left_to_full

from fastbert.ops import attention, attention_from_probs, attention_probs
from fastbert.testing import reference
from fastbert.testing.cases import LENGTHS, Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

backend = attention_cases.backend  # the fixture


@triton_left_to_full
@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["case"].id not in ("ragged", "slack", "all-empty"))
@left_to_full(lambda p: is_met_in_the_other_dtype(p, LENGTHS.index(p["case"])))
@pytest.mark.parametrize("case", LENGTHS, ids=lambda c: c.id)
@each_dtype
@each_backend
def test_against_oracle(backend, dtype, case):
    num_heads, head_dims = (2, (16, 80)) if backend == "triton" else (3, (16, 32, 80))
    for head_dim in head_dims:  # below, at and between the sizes kernels are tuned for
        check(backend, case, make(case, num_heads, head_dim, dtype))


HEAD_DIMS = (2, 7, 33, 64, 96, 128, 256)


@triton_left_to_full
@left_to_full(
    lambda p: (
        p["backend"] == "triton"
        and p["head_dim"] not in {torch.float32: (7, 128), torch.bfloat16: (2, 96, 256)}[p["dtype"]]
    )
)
@left_to_full(lambda p: is_met_in_the_other_dtype(p, HEAD_DIMS.index(p["head_dim"])))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@each_dtype
@each_kernel
def test_any_head_dim(backend, dtype, head_dim):
    case = FEW if backend == "triton" else RAGGED
    for num_heads in (2, 0):
        check(backend, case, make(case, num_heads, head_dim, dtype))


@triton_left_to_full
@left_to_full(lambda p: p["backend"] == "triton" and (max(p["lengths"]) > 500) != (p["dtype"] is torch.bfloat16))
@left_to_full(lambda p: is_met_in_the_other_dtype(p, len(p["lengths"])))
@pytest.mark.parametrize("lengths", ((5, 6, 7, 11, 12, 13, 23, 24, 25), (63, 64, 65, 129), (511, 513, 1030)), ids=str)
@each_dtype
@each_kernel
def test_lengths_around_the_tiles(backend, dtype, lengths):
    """Tiles have 6, 8 or 12 rows and 16 to 64 columns, blocks 24 and 64 queries and 64 and 512 keys."""
    if backend == "triton" and max(lengths) > 500:
        lengths = (257, 130)  # the interpreter takes a minute for a thousand tokens
    case = Lengths("", lengths)
    check(backend, case, make(case, 1, 64, dtype))


ADVERSARIAL = {
    "large-logits": lambda q, k, v: (30 * q, 30 * k, v),
    "dominant-key": lambda q, k, v: (q, torch.cat([k[:5], 50 * k[5:6], k[6:]]), v),
    "constant": lambda q, k, v: (q, torch.ones_like(k), v),
}


@triton_left_to_full
@halved
@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["softmax_scale"] < 0)
@pytest.mark.parametrize("softmax_scale", (0.5, -0.5))
@pytest.mark.parametrize("kind", ADVERSARIAL)
@each_dtype
@each_backend
def test_adversarial_inputs(backend, dtype, kind, softmax_scale):
    qkv = ADVERSARIAL[kind](*make(RAGGED, dtype=dtype))
    check(backend, RAGGED, qkv, in_units=True, softmax_scale=softmax_scale)


@each_isa
@each_dtype
def test_keys_and_values_with_a_mean(backend, dtype):
    """dP is as large as delta then, and dS what is left of them: the rounding of the output, which rowsum(dO O) has in
    it, is alike for all keys of a query, and so their mean brings it to dq."""
    q, k, v = make(RAGGED, head_dim=64, dtype=dtype)
    found = results_of(backend, RAGGED, (q, k + 3, v + 3), torch.randn_like(q))
    for name, *compared in zip(("dq", "dk", "dv"), *(each[1:] for each in found), strict=True):
        assert_close_to_reference(*compared, GRADIENT_FACTOR, name)


SCALES = (0.0, -0.0, -1e-300, 1e-45, -0.25)  # fp32 has no 1e-300, and 1e-45 is its smallest number


@left_to_full(lambda p: p["backend"] == "triton" and (p["dtype"], str(p["softmax_scale"])) != (torch.float32, "0.0"))
@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["softmax_scale"] not in (0.0, -0.25))
@left_to_full(lambda p: is_met_in_the_other_dtype(p, SCALES.index(p["softmax_scale"])))
@pytest.mark.parametrize("softmax_scale", SCALES)
@each_dtype
@each_backend
def test_any_scale(backend, dtype, softmax_scale):
    for case in (RAGGED, SLACK):
        check(backend, case, make(case, 1, dtype=dtype), softmax_scale=softmax_scale)


@triton_left_to_full
@left_to_full(is_interpreted_in_16_bits)
@each_dtype
@each_kernel
def test_a_scale_of_zero_is_the_mean_and_q_and_k_take_no_gradient(backend, dtype):
    qkv = tuple(30 * t for t in make(RAGGED, 1, dtype=dtype))

    def f(q, k, v):
        return attention(q, k, v, RAGGED.cu_seqlens, 41, softmax_scale=0.0, backend=backend)

    out, dq, dk, dv = differentiate(f, qkv, qkv[0])
    means = [v.mean(0, keepdim=True).expand_as(v) for v in qkv[2].double().split(RAGGED.lengths)]
    literal = [v.mean(0, keepdim=True).expand_as(v) for v in qkv[2].split(RAGGED.lengths)]
    assert_close_to_reference(out, torch.cat(means), torch.cat(literal))
    assert not dq.any() and not dk.any() and dv.any()


NOTHING = (Lengths("none", (0, 0)), Lengths("no-sequence", ()), Lengths("slack", (0,), 3), Lengths("rest", (), 3))


# One of the cases is compiled.
@left_to_full(lambda p: p["compiled"] and (p["dropout_p"], p["case"].id, p["backend"]) != (0.1, "none", "cpu"))
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
@pytest.mark.parametrize("compiled", (False, True), ids=("eager", "compiled"))
@pytest.mark.parametrize("case", NOTHING, ids=lambda c: c.id)
@backends("torch", "cpu")
def test_nothing_to_see_gives_zeros(backend, case, compiled, dropout_p):
    """No sequence, none with a token, or slack alone."""
    qkv = make(case)
    assert not attention_probs(*qkv[:2], case.cu_seqlens, 5).any()
    for max_seqlen in (0, 5):
        for options in ({}, {"rotary": tables(8, 32)}, {"window_size": (2, 1)}):
            if "window_size" in options and backend == "cpu":
                continue

            def f(q, k, v, max_seqlen=max_seqlen, options=options):
                options = {"dropout_p": dropout_p, **options, "backend": backend}
                return attention(q, k, v, case.cu_seqlens, max_seqlen, **options)

            if compiled:
                torch.compiler.reset()
            called = torch.compile(f, backend="eager") if compiled else f
            out, *gradients = differentiate(called, qkv, torch.ones_like(qkv[0]))
            assert out.shape == qkv[0].shape and not out.any() and not any(t.any() for t in gradients)


def test_probs_are_those_of_the_output():
    case = Lengths("", (5, 0, 29, 1))
    qkv, rotary = make(case, (4, 2)), rotary_of(case, 32, "pairs-by-token")
    options = {"window_size": (3, 9), "window_positions": positions(case), "rotary": rotary}
    probs = attention_probs(*qkv[:2], case.cu_seqlens, 30, **options)
    exact, near = (
        attention(*(t.to(dtype) for t in qkv), case.cu_seqlens, 30, backend="torch", **options)
        for dtype in (torch.float64, torch.float32)
    )
    out = attention_from_probs(probs, qkv[2], case.cu_seqlens)
    assert_close_to_reference(out, exact, near)
    slack = attention_from_probs(probs, torch.cat([qkv[2], torch.full_like(qkv[2][:3], torch.nan)]), case.cu_seqlens)
    assert torch.equal(slack[:-3], out) and not slack[-3:].any()
    for i, (start, n) in enumerate(((0, 5), (5, 0), (5, 29), (34, 1))):
        values, rows = qkv[2][start : start + n].repeat_interleave(2, 1).transpose(0, 1), slice(start, start + n)
        out = (probs[i, :, :n, :n] @ values).transpose(0, 1)
        assert_close_to_reference(out, exact[rows], near[rows])
        assert probs[i].sum() == pytest.approx(4 * n)


@triton_left_to_full
@each_backend
def test_under_autocast_it_runs_in_the_lower_dtype(backend):
    for case in (LENGTHS[1], RAGGED):
        qkv = make(case)
        low, rotary = [t.bfloat16() for t in qkv], tables(41, 32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = attention(*qkv, case.cu_seqlens, max(case.lengths), rotary=rotary, backend=backend)
        expected = reference.attention(*(t.double() for t in low), case.cu_seqlens, rotary=rotary)
        assert_close_to_reference(
            out, expected, reference.attention(*low, case.cu_seqlens, rotary=rotary), name=case.id
        )


@backends("cpu")
def test_python_threads_share_the_kernels(backend):
    qkv = [make(RAGGED, 4, 64) for _ in range(4)]

    def run(x):
        with torch.no_grad():
            return [attention(*x, RAGGED.cu_seqlens, 41, backend=backend) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        for found, x in zip(pool.map(run, qkv), qkv, strict=True):
            assert all(map(torch.equal, found, run(x)))
