"""attention with num_keys: tokens that attend, and that nothing attends to. On every backend, against the oracle."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import attention_cases
import pytest
import relative_cases
import torch
from attention_cases import (
    EDGES,
    SLACK,
    backends,
    check,
    each_backend,
    each_dtype,
    each_isa,
    in_torch_cpu_and_triton,
    is_interpreted_in_16_bits,
    kept,
    make,
    positions,
    rotary_of,
)
from full import left_to_full, thinned
from isas import OF_FLOATS

from fastbert.ops import attention, attention_from_probs, attention_probs
from fastbert.testing import reference
from fastbert.testing.cases import Lengths
from fastbert.testing.numerics import assert_close_to_reference

backend = attention_cases.backend  # the fixture

# All, none, one, and as many as blocks of 16 and 64 tokens have, beside them and between; slack behind.
CASE = Lengths("keys", (7, 5, 33, 64, 70, 0, 128, 1, 140), padding_rows=3)
KEYS = torch.tensor([7, 0, 1, 32, 64, 0, 64, 1, 77], dtype=torch.int32)
FEW = Lengths("few", (20, 5, 33), padding_rows=3)
FEW_KEYS = torch.tensor([13, 0, 33], dtype=torch.int32)
WINDOWS = ((-1, -1), (-1, 0), (3, 9), (70, 20))

is_slow = left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] is torch.bfloat16)


def of(backend: str) -> tuple[Lengths, torch.Tensor]:
    return (FEW, FEW_KEYS) if backend == "triton" else (CASE, KEYS)


@is_slow
@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@each_dtype
@each_backend
def test_against_oracle(backend, dtype, window_size):
    case, num_keys = of(backend)
    out = check(backend, case, make(case, (4, 2), 16, dtype), num_keys=num_keys, window_size=window_size)[0]
    offsets = case.cu_seqlens.tolist()
    assert not out[offsets[1] : offsets[2]].any()  # a sequence without keys


@left_to_full(is_interpreted_in_16_bits)
@left_to_full(lambda p: p["backend"] == "triton" and p["window_size"] != (3, 9))
@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@each_dtype
@each_backend
def test_with_rotation_holes_and_one_head_of_keys(backend, dtype, window_size):
    case, num_keys = of(backend)
    options = {"rotary": rotary_of(case, 32, "pairs"), "window_positions": positions(case), "softmax_scale": -0.3}
    check(backend, case, make(case, (3, 1), 32, dtype), num_keys=num_keys, window_size=window_size, **options)


@pytest.mark.parametrize("window_size", ((-1, -1), (3, 9)), ids=str)
@in_torch_cpu_and_triton
def test_dropout(backend, window_size):
    case, num_keys = of(backend)
    if backend == "torch":  # whose masks are torch's own
        return
    keep = kept(backend, case, 2, 0.4, 5)
    check(backend, case, make(case, 2, 16), keep, 5, num_keys=num_keys, window_size=window_size, dropout_p=0.4)


@thinned(3)
@pytest.mark.parametrize("window_size", WINDOWS, ids=str)
@pytest.mark.parametrize("terms", relative_cases.TERMS)
@each_dtype
@backends("torch", *OF_FLOATS)
def test_relative_terms(backend, dtype, terms, window_size):
    for places in (None, relative_cases.holes(CASE)):
        relative = relative_cases.make_terms(CASE, terms, "buckets", 2, 16, dtype, places)
        tensors = make(CASE, 2, 16, dtype)
        relative_cases.check(backend, CASE, tensors, relative, num_keys=KEYS, window_size=window_size)


@in_torch_cpu_and_triton
def test_where_all_tokens_are_keys_no_bit_changes(backend):
    case = FEW if backend == "triton" else EDGES
    tensors, lengths = make(case), torch.tensor(case.lengths, dtype=torch.int32)
    f = partial(attention, *tensors, case.cu_seqlens, max(case.lengths), backend=backend)
    if backend == "torch":  # which leaves its buckets
        torch.testing.assert_close(f(num_keys=lengths), f())
    else:
        assert torch.equal(f(num_keys=lengths), f())
    assert torch.equal(f(num_keys=lengths, window_size=(3, 5)), f(window_size=(3, 5)))


@in_torch_cpu_and_triton
def test_nothing_comes_from_a_token_that_is_no_key(backend):
    """Whatever it holds; and it takes no gradient of k and v."""
    case, num_keys = of(backend)
    is_key = torch.cat([torch.arange(n) < k for n, k in zip(case.lengths, num_keys.tolist(), strict=True)])
    is_key = torch.cat([is_key, torch.ones(case.padding_rows, dtype=torch.bool)])
    q, k, v = make(case)
    spoilt = [t.masked_fill(~is_key[:, None, None], float("nan")) for t in (k, v)]
    f = partial(attention, cu_seqlens=case.cu_seqlens, max_seqlen=max(case.lengths), backend=backend)
    for window_size in ((-1, -1), (3, 9)):
        out = f(q, k, v, num_keys=num_keys, window_size=window_size)
        if backend != "torch":
            assert torch.equal(f(q, *spoilt, num_keys=num_keys, window_size=window_size), out)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        f(*leaves, num_keys=num_keys, window_size=window_size).square().sum().backward()
        for leaf in leaves[1:]:
            assert not leaf.grad[~is_key].any() and leaf.grad.isfinite().all()


@each_dtype
@each_isa
def test_threads_do_not_change_bits(backend, dtype):
    tensors = make(CASE, 4, 32, dtype)

    def run(window_size):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = attention(*leaves, CASE.cu_seqlens, 140, num_keys=KEYS, window_size=window_size, backend=backend)
        out.float().square().sum().backward()
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    for window_size in ((-1, -1), (20, 9)):
        expected = run(window_size)
        for threads in (1, 3, 8):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                with ThreadPoolExecutor(1) as pool:
                    assert all(map(torch.equal, pool.submit(run, window_size).result(), expected))
            finally:
                torch.set_num_threads(before)


def test_probabilities():
    q, k, v = make(CASE, 2, 16)
    for window_size in WINDOWS:
        options = {"num_keys": KEYS, "window_size": window_size}
        leaves = [t.clone().requires_grad_() for t in (q, k)]
        probs = attention_probs(*leaves, CASE.cu_seqlens, 140, **options)
        out = attention_from_probs(probs, v, CASE.cu_seqlens)
        formula = partial(reference.attention, cu_seqlens=CASE.cu_seqlens, **options)
        assert_close_to_reference(out.detach(), formula(q.double(), k.double(), v.double()), formula(q, k, v))
        assert not probs[3, :, :, 32:].any() and not probs[1].any()
        out.sum().backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)


@backends("torch", "cpu")
def test_traced(backend):
    """In one graph, whatever the numbers of keys."""
    f = torch.compile(partial(attention, backend=backend), fullgraph=True, dynamic=True)
    case, num_keys = of(backend)
    q, k, v = make(case, 2, 16)
    for counts in (num_keys, num_keys // 2):
        expected = attention(q, k, v, case.cu_seqlens, max(case.lengths), num_keys=counts, backend=backend)
        torch.testing.assert_close(f(q, k, v, case.cu_seqlens, max(case.lengths), num_keys=counts), expected)


@in_torch_cpu_and_triton
def test_bad_input(backend):
    q, k, v = make(SLACK, 2, 16)
    f = partial(attention, q, k, v, SLACK.cu_seqlens, max(SLACK.lengths), backend=backend)
    lengths = torch.tensor(SLACK.lengths, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"num_keys is torch\.int64 of shape \(\d+,\); it must be torch\.int32"):
        f(num_keys=lengths.long())
    with pytest.raises(ValueError, match=r"num_keys is torch\.int32 of shape \(1,\)"):
        f(num_keys=lengths[:1])
    if backend == "triton":  # which does not look: all of it stays within the sequence
        assert torch.equal(f(num_keys=lengths + 5), f(num_keys=lengths))
        assert torch.equal(f(num_keys=-lengths), f(num_keys=0 * lengths))
        return
    for wrong in (lengths + 1, 0 * lengths - 1):
        with pytest.raises((ValueError, RuntimeError), match=r"num_keys\[0\] is -?\d+; the sequence has \d+ tokens"):
            f(num_keys=wrong)
