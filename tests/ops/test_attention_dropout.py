"""attention's dropout: its share, the same mask in backward, and the numbers under a known mask."""

from __future__ import annotations

import functools

import attention_cases
import pytest
import torch
from attention_cases import (
    RAGGED,
    check,
    differentiate,
    dropped_probabilities,
    each_backend,
    each_dtype,
    each_isa,
    is_met_in_the_other_dtype,
    kept,
    make,
    needs_extension,
    rotary_of,
)
from full import left_to_full, triton_left_to_full
from isas import OF_FLOATS, backend_with_isa
from seeds import manual_seed
from shares import assert_share

from fastbert.ops import attention
from fastbert.testing.cases import DTYPES, Lengths

backend = attention_cases.backend  # the fixture


# Triton's interpreter takes a minute for float32, whose mask is that of bfloat16: the same words, compared alike.
each_share = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param(backend, dtype, marks=[pytest.mark.full] if (backend, dtype) == ("triton", torch.float32) else [])
        for backend in ("torch", *OF_FLOATS, "triton")
        for dtype in DTYPES
    ],
    indirect=["backend"],
)


@left_to_full(lambda p: is_met_in_the_other_dtype(p, 0))
@triton_left_to_full
@each_share
def test_dropout_keeps_its_share_and_backward_the_mask(backend, dtype):
    case = Lengths("", (64,))
    num_heads, shares = (16, (0.25,)) if backend == "triton" else (64, (0.25, 0.6))
    for p in shares:
        forward, backward = dropped_probabilities(backend, case, num_heads, p, 3, dtype)
        assert torch.equal(forward, backward)
        is_kept = forward != 0
        assert (forward[is_kept].double() * 64 * (1 - p) - 1).abs().max() <= 2 * torch.finfo(dtype).eps
        assert_share(is_kept, 1 - p, (0, 1), (0, 2), (1, 2))  # neither queries nor heads nor keys are favoured
        assert torch.equal(forward, dropped_probabilities(backend, case, num_heads, p, 3, dtype)[0])
        assert not torch.equal(is_kept, kept(backend, case, num_heads, p, 4, dtype))


@left_to_full(lambda p: is_met_in_the_other_dtype(p, 0))
@triton_left_to_full
@each_share
def test_dropout_against_oracle(backend, dtype):
    longest = 66 if backend == "triton" else 130  # two tiles of 64 in either
    for case in (RAGGED, Lengths("", (longest, 3, 0, 17))):
        options = {"keep": kept(backend, case, 2, 0.25, 7, dtype), "dropout_p": 0.25, "seed": 7}
        check(backend, case, make(case, 2, max(case.lengths), dtype), **options)
    # Rotated, and with a scale of nothing and of another sign, the mask is the same.
    options["keep"] = kept(backend, RAGGED, 2, 0.25, 7, dtype)
    for other in ({"rotary": rotary_of(RAGGED, 32)}, {"softmax_scale": 0.0}, {"softmax_scale": -0.25}):
        check(backend, RAGGED, make(RAGGED, 2, 32, dtype), **options, **other)


# About the widths of vectors and panels, up to which the CPU's kernels have their own way of short sequences.
EDGES = Lengths("", (1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 81))


@needs_extension
@each_dtype
@each_isa
def test_edges_against_oracle(backend, dtype):
    options = {"keep": kept(backend, EDGES, 2, 0.25, 7, dtype), "dropout_p": 0.25, "seed": 7}
    for head_dim in (20, 32):
        check(backend, EDGES, make(EDGES, 2, head_dim, dtype), **options)


def philox(counter, offset, seed):
    """The four words of Philox4x32-10 (Salmon et al. 2011)."""
    c, k = [counter % 2**32, counter >> 32, offset % 2**32, offset >> 32], [seed % 2**32, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b % 2**32, a >> 32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@functools.cache
def words_of_sequence(first_token, n, num_heads, offset, seed):
    """Which decide, (query, head, key): csrc/cpu/attention.h."""
    rows = ((first_token + i) * num_heads + head for i in range(n) for head in range(num_heads))
    words = [[philox((row << 32) + i, offset, seed) for i in range(-(-n // 4))] for row in rows]
    return torch.tensor(words).view(n, num_heads, -1)[..., :n]


@needs_extension
@each_dtype
@each_isa
def test_the_mask_is_that_of_the_counters(backend, dtype):
    num_heads, head_dim, (seed, offset), p = 2, 32, (2**61 + 5, 2**40 + 1), 0.25
    form = (None, None, None, None, 1.0, p, -1, -1, False, False)
    given, width = torch.tensor([seed, offset]), max(EDGES.lengths)
    position = torch.cat([torch.arange(n) for n in EDGES.lengths])
    q = torch.zeros(EDGES.total_tokens, num_heads, head_dim, dtype=dtype)
    forward, backward = (torch.zeros(EDGES.total_tokens, num_heads, width + head_dim) for _ in range(2))
    for first in range(0, width, head_dim):  # what the columns of v, and those of dout, single out
        v = (position[:, None] - first == torch.arange(head_dim)).to(dtype)[:, None].expand(-1, num_heads, -1)
        out, stats = torch.ops.fastbert.attention_fwd_cpu(q, q, v, EDGES.cu_seqlens, given, *form, True)
        _, _, dv = torch.ops.fastbert.attention_bwd_cpu(v, q, q, v, out, stats, EDGES.cu_seqlens, given, *form)
        forward[..., first : first + head_dim], backward[..., first : first + head_dim] = out, dv
    for token, n in zip(EDGES.cu_seqlens.tolist(), EDGES.lengths, strict=False):
        keep = words_of_sequence(token, n, num_heads, offset, seed) >= p * 2**32
        assert torch.equal(forward[token : token + n, :, :n] != 0, keep)
        assert torch.equal(backward[token : token + n, :, :n].transpose(0, 2) != 0, keep)


@triton_left_to_full
@each_backend
def test_dropping_everything_leaves_zeros(backend):
    def f(q, k, v):
        return attention(q, k, v, RAGGED.cu_seqlens, 41, dropout_p=1.0, backend=backend)

    assert not any(t.any() for t in differentiate(f, make(RAGGED), make(RAGGED)[0]))


@needs_extension
def test_every_isa_drops_the_same_elements():
    here = kept("cpu", RAGGED, 2, 0.4, 11)
    with backend_with_isa("cpu-generic"):
        assert torch.equal(kept("cpu", RAGGED, 2, 0.4, 11), here)


@needs_extension
@each_dtype
@each_isa
def test_nothing_is_left_of_the_batch_before(backend, dtype, one_thread):
    """Kernels keep their memory from call to call: what a batch of NaN leaves there is no number of the next one."""
    case, spoiled = Lengths("", (5, 17, 3, 33)), Lengths("", (300,))
    qkv, nans = make(case, dtype=dtype), tuple(t * float("nan") for t in make(spoiled, dtype=dtype))

    def run(case, qkv):
        manual_seed(5)
        options = {"dropout_p": 0.25, "backend": backend}
        return differentiate(lambda *t: attention(*t, case.cu_seqlens, max(case.lengths), **options), qkv, qkv[0])

    before = run(case, qkv)
    run(spoiled, nans)
    for old, new in zip(before, run(case, qkv), strict=True):
        assert torch.isfinite(new).all() and torch.equal(old, new)
