"""What attention has beside sequences: windows, the Triton kernels' list of tiles, their seeds and bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from full import halved, left_to_full
from seeds import manual_seed
from test_attention import RAGGED, SLACK, check, differentiate, make
from test_attention_dropout import dropped_probabilities

from fastbert.errors import BackendError
from fastbert.native.availability import triton_error
from fastbert.ops.attention import _tile, attention
from fastbert.testing import reference
from fastbert.testing.cases import DTYPES, LENGTHS, Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

needs_triton = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))
LONG = Lengths("", (130, 1))
MANY = Lengths("many", tuple(i * 37 % 50 for i in range(300)), slack=40)


@halved
@needs_triton
@pytest.mark.parametrize("case", (*LENGTHS, LONG, MANY), ids=lambda c: c.id)
@pytest.mark.parametrize("tile", (16, 64, 128))
def test_tiles_cover_every_token_once(case, tile):
    tiles = torch.ops.fastbert.attention_tiles_triton(case.cu_seqlens, case.total_tokens, tile)
    assert tiles.shape == (case.total_tokens // tile + len(case.lengths) + 1, 4) and tiles.dtype == torch.int32
    offsets, seen, lengths = case.cu_seqlens.tolist(), [], []
    for first, last, begin, end in tiles.tolist():
        seen += range(first, last)
        assert last - first <= tile
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


@left_to_full(lambda p: p["backend"] == "triton" and p["dtype"] is torch.bfloat16 and p["window_size"] != (16, 40))
@pytest.mark.parametrize("window_size", ((1, 1), (3, 3), (-1, 2), (17, -1), (16, 40)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ("torch", pytest.param("triton", marks=needs_triton)))
def test_windows(backend, dtype, window_size):
    for case in (RAGGED, SLACK, LONG):
        qkv = make(case, 1 if backend == "triton" else 2, dtype=dtype)
        dout = torch.randn_like(qkv[0])
        longest = max(case.lengths)
        ours = partial(
            attention, cu_seqlens=case.cu_seqlens, max_seqlen=longest, window_size=window_size, backend=backend
        )
        literal = partial(reference.attention, cu_seqlens=case.cu_seqlens, window_size=window_size)
        actual, baseline = differentiate(ours, qkv, dout), differentiate(literal, qkv, dout)
        oracle = differentiate(literal, qkv.double(), dout)
        assert_close_to_reference(actual[0], oracle[0], baseline[0], OUTPUT_FACTOR, "out")
        assert_close_to_reference(actual[1], oracle[1], baseline[1], GRADIENT_FACTOR, "dqkv")


@needs_triton
def test_float16():
    for case in (RAGGED, LONG):
        check("triton", make(case, 1, dtype=torch.float16), case)


@needs_triton
def test_heads_in_turn_and_dropout_in_windows():
    """Short sequences: several heads a program, an odd number of them. A window begins where the mask's counters do."""
    check("triton", make(LENGTHS[1], num_heads=5), LENGTHS[1])
    manual_seed(0)
    q = torch.zeros(70, 1, 16)
    v = torch.nn.functional.one_hot(torch.arange(70) % 16, 16).float()[:, None]
    whole = dropped_probabilities("triton", Lengths("", (70,)), 1, 0.5, 9)[0] != 0
    manual_seed(9)
    cu_seqlens = torch.tensor([0, 70], dtype=torch.int32)
    out = attention(q, q, v, cu_seqlens, 70, window_size=(2, 1), dropout_p=0.5, backend="triton")
    formula = partial(reference.attention, cu_seqlens=cu_seqlens, keep=whole, dropout_p=0.5, window_size=(2, 1))
    assert_close_to_reference(out, formula(q.double(), q.double(), v.double()), formula(q, q, v))


@needs_triton
@pytest.mark.parametrize("dropout_p", (0.0, 0.2))
def test_the_same_bits_every_time(dropout_p):
    qkv = make(LONG, num_heads=1, dtype=torch.bfloat16)

    def f(q, k, v):
        manual_seed(1)
        return attention(q, k, v, LONG.cu_seqlens, 130, dropout_p=dropout_p, backend="triton")

    first, second = (differentiate(f, qkv, qkv[0]) for _ in range(2))
    assert all(map(torch.equal, first, second))


@needs_triton
def test_layers_share_the_list_of_tiles():
    cache: dict = {}
    qkv = make(RAGGED)
    for _ in range(2):
        attention(*qkv, RAGGED.cu_seqlens, 41, cache=cache, backend="triton")
    assert list(cache) == [("triton_tiles", 32)]
    assert [_tile(64, n, False) for n in (1, 16, 17, 64, 65, 128, 129, 4000)] == [16, 16, 32, 64, 128, 128, 128, 128]
    assert [_tile(d, 4000, False) for d in (32, 80, 128, 160)] == [128, 64, 64, 32]


@needs_triton
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
def test_opcheck(dropout_p):
    q, k, v = make(SLACK)
    philox = torch.tensor([2**61 + 5, 2**40 + 1]) if dropout_p else None
    ops = torch.ops.fastbert
    torch.library.opcheck(ops.attention_tiles_triton.default, (SLACK.cu_seqlens, SLACK.total_tokens, 16))
    tiles = ops.attention_tiles_triton(SLACK.cu_seqlens, SLACK.total_tokens, 16)
    arguments = (tiles, philox, None, 16, 0.2, dropout_p, [2, -1])
    for return_stats in (True, False):
        torch.library.opcheck(ops.attention_fwd_triton.default, (q, k, v, *arguments, return_stats))
    out, stats = ops.attention_fwd_triton(q, k, v, *arguments, True)
    torch.library.opcheck(
        ops.attention_bwd_triton.default, (q, q, k, v, out, stats, *arguments, None, None, False, False)
    )


def test_what_cannot_be_served_raises_with_the_reason():
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32)
    if triton_error() is None:
        with pytest.raises(BackendError, match="head_dim is 257"):
            attention(*(torch.zeros(4, 2, 257),) * 3, cu_seqlens, 4, backend="triton")
