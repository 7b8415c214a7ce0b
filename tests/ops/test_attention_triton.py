"""The Triton kernels of attention: their list of tiles, float16, and products that err as a GPU's do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_cases import (
    LONG,
    RAGGED,
    SLACK,
    check,
    differentiate,
    each_dtype,
    kept,
    make,
    needs_triton,
    positions,
    rotary_of,
    tables,
)
from full import halved, left_to_full
from seeds import manual_seed
from test_attention import ADVERSARIAL

from fastbert.ops import attention
from fastbert.ops.attention.attention import _tile
from fastbert.ops.attention.tiles import tiles_of
from fastbert.testing import reference
from fastbert.testing.cases import LENGTHS, Lengths
from fastbert.testing.numerics import assert_close_to_reference

pytestmark = [needs_triton, pytest.mark.full]
MANY = Lengths("many", tuple(i * 37 % 50 for i in range(300)), padding_rows=40)
ONES = Lengths("ones", (1,) * 8)


@halved
@pytest.mark.parametrize("case", (*LENGTHS, LONG, MANY), ids=lambda c: c.id)
@pytest.mark.parametrize("tile", (16, 64, 128))
def test_tiles_cover_every_token_once(case, tile):
    tiles = torch.ops.fastbert.attention_tiles_triton(case.cu_seqlens, case.total_tokens, tile)
    assert tiles.shape == (case.total_tokens // tile + len(case.lengths) + 1, 8) and tiles.dtype == torch.int32
    offsets, seen, lengths = case.cu_seqlens.tolist(), [], []
    for first, last, begin, end, queries_end, *unused in tiles.tolist():
        seen += range(first, last)
        assert last - first <= tile and queries_end == end and unused == [0] * 3
        if first == last:
            continue
        if first >= offsets[-1]:
            assert begin == end  # slack sees no key
            continue
        sequence = max(i for i, offset in enumerate(offsets) if offset <= first)
        assert (begin, end) == (offsets[sequence], offsets[sequence + 1]) and last <= end
        assert (first - begin) % tile == 0
        lengths.append(end - begin)
    assert sorted(seen) == list(range(case.total_tokens))
    assert lengths == sorted(lengths, reverse=True)  # the longest first


@halved
@pytest.mark.parametrize("case", (*LENGTHS, LONG, MANY), ids=lambda c: c.id)
@pytest.mark.parametrize("tile", (16, 64, 128))
def test_tiles_of_keys_and_of_queries_alone(case, tile):
    """A tile has one of them: all see the keys, and queries alone are seen by none."""
    counts = [min(n, 3 * i % 71) for i, n in enumerate(case.lengths)]
    num_keys = torch.tensor(counts, dtype=torch.int32)
    tiles = torch.ops.fastbert.attention_tiles_triton(case.cu_seqlens, case.total_tokens, tile, num_keys)
    assert tiles.shape == (case.total_tokens // tile + 2 * len(case.lengths) + 1, 8)
    offsets, seen = case.cu_seqlens.tolist(), []
    for first, last, begin, end, queries_end, *_ in tiles.tolist():
        seen += range(first, last)
        assert last - first <= tile
        if first == last or first >= offsets[-1]:
            assert first == last or begin == end == queries_end
            continue
        sequence = max(i for i, offset in enumerate(offsets) if offset <= first)
        assert (begin, end) == (offsets[sequence], offsets[sequence] + counts[sequence])
        are_keys = first < end
        assert last <= end if are_keys else (first - end) % tile == 0 and last <= offsets[sequence + 1]
        assert queries_end == (offsets[sequence + 1] if are_keys else begin)
    assert sorted(seen) == list(range(case.total_tokens))


def test_layers_share_the_list_of_tiles():
    cache: dict = {}
    for _ in range(2):
        attention(*make(RAGGED), RAGGED.cu_seqlens, 41, cache=cache, backend="triton")
    assert list(cache) == [("triton_tiles", 32)]
    assert [_tile(64, n, False) for n in (1, 16, 17, 64, 65, 128, 129, 4000)] == [16, 16, 32, 64, 128, 128, 128, 128]
    assert [_tile(d, 4000, False) for d in (32, 80, 128, 160)] == [128, 64, 64, 32]


def test_float16():
    for case in (RAGGED, LONG):
        check("triton", case, make(case, 1, dtype=torch.float16))
    for case, kind in ((RAGGED, "pairs"), (SLACK, "halves"), (LONG, "halves")):
        check("triton", case, make(case, (4, 2), dtype=torch.float16), rotary=rotary_of(case, 32, kind))


def test_heads_in_turn_and_dropout_in_windows():
    """Short sequences: several heads a program, an odd number of them. A window begins where the mask's counters do."""
    check("triton", LENGTHS[1], make(LENGTHS[1], 5))
    case, q = Lengths("", (70,)), torch.zeros(70, 1, 16)
    v = torch.nn.functional.one_hot(torch.arange(70) % 16, 16).float()[:, None]
    whole = kept("triton", case, 1, 0.5, 9)
    manual_seed(9)
    out = attention(q, q, v, case.cu_seqlens, 70, window_size=(2, 1), dropout_p=0.5, backend="triton")
    formula = partial(reference.attention, cu_seqlens=case.cu_seqlens, keep=whole, dropout_p=0.5, window_size=(2, 1))
    assert_close_to_reference(out, formula(q.double(), q.double(), v.double()), formula(q, q, v))


@halved
@pytest.mark.parametrize("by_token", (False, True), ids=("by-position", "by-token"))
@pytest.mark.parametrize("interleaved", (False, True), ids=("halves", "interleaved"))
@each_dtype
def test_the_rotation_alone(dtype, interleaved, by_token):
    """And back, in fp32 and rounded once, with k of fewer heads, five of q, which are rotated four in turn."""
    from fastbert.kernels.rotary import rotate_back

    cos, sin, *kind = tables(RAGGED.total_tokens if by_token else 41, 80, interleaved, by_token)
    q, k, _ = torch.cat(make(RAGGED, (5, 1), 80, dtype), 1).split((5, 1, 1), 1)  # with a stride
    tiles = tiles_of(RAGGED.cu_seqlens, RAGGED.total_tokens, 16, None)
    rotated = torch.ops.fastbert.rotary_triton(q, k, cos, sin, tiles, 16, *kind)
    rotate_back(*(back := (q.contiguous(), k.contiguous())), cos, sin, tiles, 16, *kind)
    for found, sign in ((rotated, 1), (back, -1)):
        for x, out in zip((q, k), found, strict=True):
            expected = reference.rotary(x.float(), cos, sign * sin, RAGGED.cu_seqlens, *kind).to(dtype)
            assert torch.equal(out, expected) and out.is_contiguous()


def test_a_position_beyond_the_tables_is_not_read():
    """max_seqlen was no bound: the host cannot see that, but nothing may be read from beyond the tables' ends."""
    q = torch.randn(20, 2, 32)
    tiles = tiles_of(torch.tensor([0, 18], dtype=torch.int32), 20, 16, None)
    rotated, _ = torch.ops.fastbert.rotary_triton(q, q, *tables(10, 32)[:2], tiles, 16)
    assert torch.isfinite(rotated[:10]).all() and rotated[10:18].isnan().all() and not rotated[18:].any()


@left_to_full(lambda p: p["dropout_p"] == 0)  # an operand less
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
def test_opcheck(dropout_p):
    """Of all options, and of slices; tests/ops/test_contract.py checks the operators as ops call them."""
    q, k, v = torch.cat(make(SLACK, (4, 2), 16), 1).split((4, 2, 2), 1)
    cos, sin, *kind = rotary_of(SLACK, 16, "pairs-by-token")
    namespace, philox = torch.ops.fastbert, torch.tensor([2**61 + 5, 2**40 + 1]) if dropout_p else None
    num_keys = torch.tensor(SLACK.lengths, dtype=torch.int32) // 2
    for rest in ((), (num_keys,)):
        arguments = (SLACK.cu_seqlens, SLACK.total_tokens, 16, *rest)
        torch.library.opcheck(namespace.attention_tiles_triton.default, arguments)
    tiles = tiles_of(SLACK.cu_seqlens, SLACK.total_tokens, 16, None)
    torch.library.opcheck(namespace.rotary_triton.default, (q, k, cos, sin, tiles, 16, *kind))
    options = (tiles, philox, positions(SLACK), 16, 0.2, dropout_p, [2, -1])
    for return_stats in (True, False):
        torch.library.opcheck(namespace.attention_fwd_triton.default, (q, k, v, *options, return_stats))
    out, stats = namespace.attention_fwd_triton(q, k, v, *options, True)
    backward = (torch.randn_like(out), q, k, v, out, stats, *options, cos, sin, *kind)
    torch.library.opcheck(namespace.attention_bwd_triton.default, backward)
    assert namespace.attention_bwd_triton(*backward).shape == (SLACK.total_tokens, 8, 16)


with_products_of_a_gpu = pytest.mark.usefixtures("products_of_a_gpu")
each_16_and_32 = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)


@with_products_of_a_gpu
@each_16_and_32
def test_with_products_of_a_gpu_the_error_rule_holds(dtype):
    for case, head_dim in ((RAGGED, 32), (LONG, 64)):
        check("triton", case, make(case, 1, head_dim, dtype))


@with_products_of_a_gpu
@left_to_full(lambda p: (p["dtype"] is not torch.float32 or p["softmax_scale"] < 0) and p["kind"] != "dominant-key")
@left_to_full(lambda p: p["dtype"] is torch.float16 and p["softmax_scale"] < 0)  # 16 bits err alike
@pytest.mark.parametrize("softmax_scale", (0.5, -0.5))
@pytest.mark.parametrize("kind", ADVERSARIAL)
@each_16_and_32
def test_with_products_of_a_gpu_the_error_rule_holds_for_adversarial_inputs(dtype, kind, softmax_scale):
    """Where one key has all of the probability, gradients are differences that cancel, times large keys: the largest
    error is that of a few tokens. Of one head, in 24 draws, ours was 0.12 to 8 times the baseline's, and mostly below
    it; torch 2.11 draws other numbers than 2.13. So the rule looks at four.
    """
    qkv = ADVERSARIAL[kind](*make(RAGGED, 4, 64, dtype))
    check("triton", RAGGED, qkv, softmax_scale=softmax_scale)


@with_products_of_a_gpu
@each_16_and_32
def test_one_key_leaves_nothing_for_q_and_k_in_fp32_alone(dtype):
    """In 16 bits something is left: else these tests would test nothing."""
    qkv = tuple(30 * t for t in make(ONES, head_dim=64, dtype=dtype))

    def f(q, k, v):  # the upper bound makes the tiles those of long sequences
        return attention(q, k, v, ONES.cu_seqlens, 128, backend="triton")

    _, dq, dk, dv = differentiate(f, qkv, qkv[0])
    assert (dq.any() or dk.any()) == (dtype is not torch.float32) and dv.any()
