"""Rotary embedding in attention: sizes of heads, the rotation alone, transformers' own, tables that layers share."""

from __future__ import annotations

from functools import partial

import attention_cases
import pytest
import torch
from attention_cases import (
    FEW,
    LONG,
    RAGGED,
    check,
    each_dtype,
    in_torch_cpu_and_triton,
    is_interpreted_in_16_bits,
    make,
    rotary_of,
    tables,
)
from full import halved, left_to_full, thinned, triton_left_to_full

from fastbert import ops
from fastbert.ops import Rotary
from fastbert.ops.attention.rotary import rotary_torch
from fastbert.ops.packing import token_positions
from fastbert.testing import reference
from fastbert.testing.cases import LENGTHS, Lengths
from fastbert.testing.numerics import assert_close_to_reference

backend = attention_cases.backend  # the fixture


@triton_left_to_full
@halved
@left_to_full(lambda p: is_interpreted_in_16_bits(p) and p["case"].id not in ("ragged", "slack"))
@pytest.mark.parametrize("case", LENGTHS, ids=lambda c: c.id)
@each_dtype
@in_torch_cpu_and_triton
def test_against_oracle(backend, dtype, case):
    check(backend, case, make(case, dtype=dtype), rotary=rotary_of(case, 32))


# One pair, padded, not padded; in 16 bits one of them.
@triton_left_to_full
@thinned(4)
@left_to_full(
    lambda p: (
        p["backend"] == "triton" and p["head_dim"] not in ((80,) if is_interpreted_in_16_bits(p) else (2, 80, 128))
    )
)
@pytest.mark.parametrize("head_dim", (2, 16, 32, 64, 80, 96, 128))
@each_dtype
@in_torch_cpu_and_triton
def test_head_dims(backend, dtype, head_dim):
    case = FEW if backend == "triton" else RAGGED
    for num_heads in (5, 0) if backend != "torch" else (5,):  # heads are rotated four in turn
        check(backend, case, make(case, num_heads, head_dim, dtype), rotary=rotary_of(case, head_dim))


@triton_left_to_full
@each_dtype
@in_torch_cpu_and_triton
def test_long_sequences(backend, dtype):
    """Tiles of 32 to 128 tokens, cut into blocks of 16 and 32 for the rotation."""
    for head_dim in (64, 160):
        check(backend, LONG, make(LONG, 1, head_dim, dtype), rotary=rotary_of(LONG, head_dim))


def test_float64_runs_in_torch():
    (q, k, v), rotary = (t.double() for t in make(RAGGED)), tables(41, 32)
    out = ops.attention(q, k, v, RAGGED.cu_seqlens, 41, rotary=rotary)
    rotated = [reference.rotary(t, *rotary[:2], RAGGED.cu_seqlens) for t in (q, k)]
    assert torch.equal(out, ops.attention(*rotated, v, RAGGED.cu_seqlens, 41))


@each_dtype
def test_the_rotation_alone(dtype):
    """And back, in fp32 and rounded once: attention's softmax hides where it errs by a little. The Triton kernels':
    test_attention_triton.py."""
    rotary, positions = tables(41, 80), token_positions(RAGGED.cu_seqlens, RAGGED.total_tokens)
    q, k, _ = make(RAGGED, head_dim=80, dtype=dtype)
    cos, sin = (t[positions] for t in rotary[:2])
    for sign in (1, -1):
        literal = partial(reference.rotary, cos=rotary[0], sin=sign * rotary[1], cu_seqlens=RAGGED.cu_seqlens)
        for x in (q, k):
            out = rotary_torch(x, cos, sign * sin)
            assert_close_to_reference(out, literal(x.double()), literal(x))
            assert torch.equal(out, literal(x.float()).to(dtype)) and out.is_contiguous()


@triton_left_to_full
@in_torch_cpu_and_triton
def test_only_distances_count(backend):
    """What rotary embedding is for: a shift of all positions does not change the output."""
    qkv, rotary = make(RAGGED), tables(141, 32)
    shifted = Rotary(*(t[100:] for t in rotary[:2]))
    out = ops.attention(*qkv, RAGGED.cu_seqlens, 41, rotary=shifted, backend=backend)
    literal = partial(reference.attention, cu_seqlens=RAGGED.cu_seqlens)
    oracle = literal(*(t.double() for t in qkv), rotary=rotary)
    assert_close_to_reference(out, oracle, literal(*qkv, rotary=shifted))


@triton_left_to_full
@in_torch_cpu_and_triton
@pytest.mark.parametrize("layer_type", ("full_attention", "sliding_attention"))  # their bases differ
def test_parity_with_modernbert(backend, layer_type):
    modeling = pytest.importorskip("transformers.models.modernbert.modeling_modernbert")
    case, head_dim = Lengths("", (9, 40)), 64
    config = modeling.ModernBertConfig(hidden_size=3 * head_dim, num_attention_heads=3)
    embedding = modeling.ModernBertRotaryEmbedding(config)
    q, k, v = make(case, head_dim=head_dim)
    wide = embedding(q, torch.arange(40)[None], layer_type)  # cos and sin, (1, 40, head_dim)
    positions = torch.cat([torch.arange(n) for n in case.lengths])
    theirs = modeling.apply_rotary_pos_emb(q[None], k[None], *(t[:, positions] for t in wide), unsqueeze_dim=2)
    rotated = [t[0] for t in theirs]
    rotary = Rotary(*(t[0, :, : head_dim // 2] for t in wide))
    out = ops.attention(q, k, v, case.cu_seqlens, 40, rotary=rotary, backend=backend)
    oracle = reference.attention(*(t.double() for t in (*rotated, v)), case.cu_seqlens)
    assert_close_to_reference(out, oracle, reference.attention(*rotated, v, case.cu_seqlens))


def test_probs_are_those_of_rotated_queries_and_keys():
    case = Lengths("", (5, 0, 9, 1))
    q, k, _ = (t.double() for t in make(case))
    rotary = tables(9, 32)
    probs = ops.attention_probs(q, k, case.cu_seqlens, 9, rotary=rotary)
    rotated = [reference.rotary(t, *rotary[:2], case.cu_seqlens) for t in (q, k)]
    assert torch.equal(probs, ops.attention_probs(*rotated, case.cu_seqlens, 9))


@triton_left_to_full
@in_torch_cpu_and_triton
def test_layers_share_what_is_made_of_cu_seqlens(backend):
    cache: dict = {}
    qkv, rotary = make(RAGGED), tables(41, 32)
    outs = [ops.attention(*qkv, RAGGED.cu_seqlens, 41, rotary=rotary, cache=cache, backend=backend) for _ in range(2)]
    assert torch.equal(*outs)
    made = {"torch": {"torch_positions", "torch_buckets"}, "cpu": set(), "triton": {("triton_tiles", 32)}}
    assert set(cache) == made[backend]
