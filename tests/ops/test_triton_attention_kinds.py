"""The Triton kernels of grouped heads, windows by position and every kind of rotary embedding, against the oracle."""

from __future__ import annotations

from functools import partial

import pytest
import test_attention
import torch
from full import halved, left_to_full
from seeds import manual_seed, torch_generator
from test_attention_dropout import dropped_probabilities

from fastbert import ops
from fastbert.native.availability import triton_error
from fastbert.ops.attention import _tiles
from fastbert.ops.rotary import Rotary
from fastbert.testing import reference
from fastbert.testing.cases import DTYPES, LENGTHS, Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

backend = test_attention.backend  # the fixture
in_triton = pytest.mark.parametrize("backend", ("triton",), indirect=True)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
needs_triton = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
RAGGED, SLACK, FEW, LONG = LENGTHS[3], LENGTHS[5], Lengths("few", (5, 33, 1)), Lengths("long", (130, 1))


def make(case: Lengths, num_heads: int, num_kv_heads: int, head_dim: int, dtype=torch.float32) -> torch.Tensor:
    """q, k and v beside each other, as a merged projection makes them."""
    return torch.randn(case.total_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)


def differentiate(function, qkv, num_kv_heads, dout):
    leaf = qkv.detach().clone().requires_grad_()
    out = function(*leaf.split((dout.shape[1], num_kv_heads, num_kv_heads), 1))
    out.backward(dout.to(out.dtype))
    return out.detach(), leaf.grad


def check(backend, case, heads=(6, 2), head_dim=32, dtype=torch.float32, keep=None, seed=0, qkv=None, **options):
    num_heads, num_kv_heads = heads
    qkv = make(case, *heads, head_dim, dtype) if qkv is None else qkv
    dout = torch.randn(case.total_tokens, num_heads, head_dim).to(dtype)

    def ours(q, k, v):
        manual_seed(seed)
        return ops.attention(q, k, v, case.cu_seqlens, max(case.lengths) + 5, backend=backend, **options)

    literal = partial(reference.attention, cu_seqlens=case.cu_seqlens, keep=keep, **options)
    actual, baseline = (differentiate(f, qkv, num_kv_heads, dout) for f in (ours, literal))
    oracle = differentiate(literal, qkv.double(), num_kv_heads, dout)
    for i, (name, factor) in enumerate((("out", OUTPUT_FACTOR), ("dqkv", GRADIENT_FACTOR))):
        assert_close_to_reference(actual[i], oracle[i], baseline[i], factor, name)
    return actual


def positions_of(case: Lengths) -> torch.Tensor:
    """Columns of a padded batch with holes: each of the tokens' is 1 to 3 behind the one before."""
    steps = torch.randint(1, 4, (case.total_tokens,), generator=torch_generator(1))
    parts = [steps[a:b].cumsum(0) for a, b in zip(case.cu_seqlens[:-1], case.cu_seqlens[1:], strict=True)]
    return torch.cat([*parts, steps[case.cu_seqlens[-1] :]]).int()


def tables(case: Lengths, head_dim: int, interleaved=False, by_token=False) -> Rotary:
    """By position of a sequence, or for each token of the batch: then no two sequences begin alike."""
    rows = case.total_tokens if by_token else max(case.lengths) + 5
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * 100.0 ** -torch.linspace(0, 1, head_dim // 2).double()
    return Rotary(angles.cos().float(), angles.sin().float(), interleaved, by_token)


@left_to_full(lambda p: p["heads"] != ((6, 2) if p["dtype"] is torch.bfloat16 else (5, 1)))
@pytest.mark.parametrize("heads", ((6, 2), (5, 1), (8, 4)), ids=str)
@each_dtype
@in_triton
def test_grouped_heads(backend, dtype, heads):
    for case in (RAGGED, SLACK):
        check(backend, case, heads, dtype=dtype)


@each_dtype
@in_triton
def test_grouped_heads_of_long_sequences(backend, dtype):
    """Tiles of 32 and 128 tokens, and of 32 with a head_dim that is padded."""
    for head_dim in (64, 160):
        check(backend, LONG, (2, 1), head_dim, dtype)


@needs_triton
def test_float16():
    check("triton", RAGGED, (4, 2), dtype=torch.float16, rotary=tables(RAGGED, 32, interleaved=True))


@each_dtype
@in_triton
def test_grouped_heads_with_dropout(backend, dtype):
    """The mask is by the heads of q."""
    keep = dropped_probabilities(backend, FEW, 4, 0.25, 7, dtype)[0] != 0
    check(backend, FEW, (4, 2), dtype=dtype, keep=keep, dropout_p=0.25, seed=7)


@left_to_full(lambda p: (p["window_size"] == (16, 40)) != (p["dtype"] is torch.bfloat16))
@pytest.mark.parametrize("window_size", ((3, 3), (-1, 2), (16, 40), (0, 0)), ids=str)
@each_dtype
@in_triton
def test_windows_by_position(backend, dtype, window_size):
    for case, heads in ((RAGGED, (2, 2)), (SLACK, (2, 1))):
        check(backend, case, heads, dtype=dtype, window_size=window_size, window_positions=positions_of(case))


@each_dtype
@in_triton
def test_windows_by_position_in_long_sequences(backend, dtype):
    check(backend, LONG, (1, 1), 64, dtype, window_size=(20, 9), window_positions=positions_of(LONG))


@in_triton
def test_the_positions_of_no_holes_are_the_places(backend):
    places = torch.cat([*(torch.arange(n) for n in RAGGED.lengths)]).int()
    qkv, options = make(RAGGED, 4, 2, 32), {"window_size": (4, 7)}
    manual_seed(2)
    expected = check(backend, RAGGED, (4, 2), qkv=qkv, **options)
    manual_seed(2)
    strided = torch.stack([places, places], 1)[:, 0]
    found = check(backend, RAGGED, (4, 2), qkv=qkv, window_positions=strided, **options)
    assert all(map(torch.equal, found, expected))


@halved
@left_to_full(lambda p: p["dtype"] is torch.bfloat16 and not p["interleaved"])
@pytest.mark.parametrize("by_token", (False, True), ids=("by-position", "by-token"))
@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
@each_dtype
@in_triton
def test_kinds_of_rotary(backend, dtype, interleaved, by_token):
    for case, heads, head_dim in ((RAGGED, (4, 2), 32), (SLACK, (5, 5), 80), (SLACK, (6, 1), 2)):
        check(backend, case, heads, head_dim, dtype, rotary=tables(case, head_dim, interleaved, by_token))


@halved
@pytest.mark.parametrize("by_token", (False, True), ids=("by-position", "by-token"))
@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
@each_dtype
@needs_triton
def test_the_rotation_alone(dtype, interleaved, by_token):
    """And back, in fp32 and rounded once, with k of fewer heads, five of q, which are rotated four in turn."""
    from fastbert.kernels.rotary import rotate_back

    cos, sin, *kind = tables(RAGGED, 80, interleaved, by_token)
    q, k, _ = make(RAGGED, 5, 1, 80, dtype).split((5, 1, 1), 1)
    tiles = _tiles(RAGGED.cu_seqlens, RAGGED.total_tokens, 16, None)
    rotated = torch.ops.fastbert.rotary_triton(q, k, cos, sin, tiles, 16, *kind)
    rotate_back(*(back := (q.contiguous(), k.contiguous())), cos, sin, tiles, 16, *kind)
    for found, sign in ((rotated, 1), (back, -1)):
        for x, out in zip((q, k), found, strict=True):
            expected = reference.rotary(x.float(), cos, sign * sin, RAGGED.cu_seqlens, *kind).to(dtype)
            assert torch.equal(out, expected) and out.is_contiguous()


@in_triton
def test_everything_at_once(backend):
    options = {"window_size": (6, 6), "window_positions": positions_of(FEW), "rotary": tables(FEW, 32, True, True)}
    keep = dropped_probabilities(backend, FEW, 4, 0.25, 7)[0] != 0
    check(backend, FEW, (4, 2), keep=keep, dropout_p=0.25, seed=7, softmax_scale=-0.3, **options)


@in_triton
def test_nothing_crosses_from_one_sequence_to_another(backend):
    """Neither values nor positions nor rows of the tables."""
    case, kind = Lengths("", (9, 20, 7)), {"window_size": (4, 5), "backend": backend}
    positions, rotary, qkv = positions_of(case), tables(case, 32, by_token=True), make(case, 4, 2, 32)
    middle = slice(9, 29)

    def run(qkv, positions, rotary):
        options = {"window_positions": positions, "rotary": rotary, **kind}
        return ops.attention(*qkv.split((4, 2, 2), 1), case.cu_seqlens, 20, **options)

    expected = run(qkv, positions, rotary)
    qkv, cos = qkv.clone(), rotary.cos.clone()
    qkv[middle], cos[middle], positions[middle] = float("nan"), float("nan"), positions[middle] + 1000
    found = run(qkv, positions, rotary._replace(cos=cos))
    assert found[middle].isnan().all()
    assert torch.equal(found[:9], expected[:9]) and torch.equal(found[29:], expected[29:])


@left_to_full(lambda p: p["dropout_p"] == 0)  # a part of what it does with dropout
@needs_triton
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
def test_repeats_bit_for_bit(dropout_p):
    """dk and dv are sums over the heads of a group, in a fixed order."""
    qkv, dout = make(LONG, 4, 1, 64, torch.bfloat16), torch.randn(LONG.total_tokens, 4, 64).bfloat16()

    def f(q, k, v):
        manual_seed(1)
        return ops.attention(q, k, v, LONG.cu_seqlens, 130, dropout_p=dropout_p, backend="triton")

    first, second = (differentiate(f, qkv, 1, dout) for _ in range(2))
    assert all(map(torch.equal, first, second))


@needs_triton
def test_opcheck():
    q, k, v = make(SLACK, 4, 2, 16).split((4, 2, 2), 1)
    cos, sin, *kind = tables(SLACK, 16, True, True)
    tiles = _tiles(SLACK.cu_seqlens, SLACK.total_tokens, 16, None)
    namespace = torch.ops.fastbert
    torch.library.opcheck(namespace.rotary_triton.default, (q, k, cos, sin, tiles, 16, *kind))
    options = (tiles, None, positions_of(SLACK), 16, 0.2, 0.0, [2, -1])
    torch.library.opcheck(namespace.attention_fwd_triton.default, (q, k, v, *options, True))
    out, stats = namespace.attention_fwd_triton(q, k, v, *options, True)
    backward = (torch.randn_like(out), q, k, v, out, stats, *options, cos, sin, *kind)
    torch.library.opcheck(namespace.attention_bwd_triton.default, backward)
    assert namespace.attention_bwd_triton(*backward).shape == (SLACK.total_tokens, 8, 16)
