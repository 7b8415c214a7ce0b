"""Relative terms of attention on the Triton kernels: every term and dtype, blocks and their edges, far tiles, holes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_cases import differentiate, make, needs_triton
from full import left_to_full, thinned
from relative_cases import ROWS, TERMS, check, holes, longest_of, make_terms, run
from seeds import manual_seed

from fastbert.ops import Relative, attention
from fastbert.ops.attention.relative_triton import _tile
from fastbert.testing import reference
from fastbert.testing.cases import Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

pytestmark = needs_triton
# About blocks of 16, 32 and 64; in fp32 they are 16 always.
SHORT = Lengths("short", (1, 15, 0, 17))
MIDDLE = Lengths("middle", (33, 65), padding_rows=3)
FEW = Lengths("few", (7, 40, 1), padding_rows=3)
each_dtype = pytest.mark.parametrize(
    "dtype", (torch.float32, torch.bfloat16, torch.float16), ids=lambda d: str(d).removeprefix("torch.")
)
each_term = pytest.mark.parametrize("terms", TERMS)


@left_to_full(lambda p: p["terms"] != "all" or p["case"] is not SHORT)
@thinned(5)
@pytest.mark.parametrize(("case", "heads", "head_dim"), ((SHORT, 2, 32), (MIDDLE, 1, 16)), ids=("short", "middle"))
@each_term
@each_dtype
def test_terms(dtype, terms, case, heads, head_dim):
    relative = make_terms(case, terms, "buckets", heads, head_dim, dtype)
    check("triton", case, make(case, heads, head_dim, dtype), relative)


@pytest.mark.full
@left_to_full(lambda p: (p["kind"], p["dtype"]) not in (("clamped", torch.bfloat16), ("any", torch.float16)))
@pytest.mark.parametrize("kind", ROWS)
@each_dtype
def test_rows_of_any_kind(dtype, kind):
    """With tiles of which all is beyond the last change of the rows, before and behind the others, or everywhere."""
    for case, places in ((Lengths("", (150, 3)), None), (FEW, holes(FEW))):
        relative = make_terms(case, "all", kind, 1, 16, dtype, places)
        check("triton", case, make(case, 1, 16, dtype), relative)


@pytest.mark.full
@thinned(5)
@each_term
def test_every_tile_is_far(terms):
    """One row: no product with a table anywhere but in the tile at the ends."""
    case = Lengths("", (50,))
    check("triton", case, make(case, 1, 16), make_terms(case, terms, "two", 1, 16, torch.float32))
    one = make_terms(case, terms, "two", 1, 16, torch.float32)
    check("triton", case, make(case, 1, 16), one._replace(rows=torch.zeros_like(one.rows)))


@pytest.mark.full
@left_to_full(lambda p: p["head_dim"] != 20)  # in `make test` the table of ops has others
@pytest.mark.parametrize("head_dim", (2, 20, 80))
def test_any_head_dim(head_dim):
    for places in (None, holes(FEW)):
        relative = make_terms(FEW, "all", "buckets", 1, head_dim, torch.bfloat16, places)
        check("triton", FEW, make(FEW, 1, head_dim, torch.bfloat16), relative)


@pytest.mark.full
@thinned(3)
@pytest.mark.parametrize("window_size", ((0, 0), (9, 20), (-1, 10)), ids=str)
@pytest.mark.parametrize("kind", ("places", "holes", "positions"))
def test_windows(kind, window_size):
    """By places, by tokens where there are holes, and by positions."""
    places = None if kind == "places" else holes(FEW)
    relative = make_terms(FEW, "both", "buckets", 1, 16, torch.float32, places)
    by = {"window_positions": places} if kind == "positions" else {}
    check("triton", FEW, make(FEW, 1, 16), relative, window_size=window_size, **by)


@pytest.mark.full
@left_to_full(lambda p: p["softmax_scale"] == 1e-40)  # as 0
@pytest.mark.parametrize("softmax_scale", (0.0, -0.25, 1e-40))
def test_any_scale(softmax_scale):
    relative = make_terms(FEW, "all", "buckets", 1, 16, torch.float32)
    check("triton", FEW, make(FEW, 1, 16), relative, softmax_scale=softmax_scale)


def kept(case: Lengths, heads: int, dropout_p: float, seed: int, positions=None, max_seqlen=None) -> torch.Tensor:
    """(query, head, key): whether `seed` keeps a probability. All keys are alike; values tell them apart."""
    width = max(case.lengths)  # in 16 bits, which have wider heads
    place = torch.cat([torch.arange(n) for n in (*case.lengths, case.padding_rows)])
    values = torch.nn.functional.one_hot(place, width)[:, None].expand(-1, heads, -1).bfloat16()
    longest = max(longest_of(case, positions), max_seqlen or 0)
    relative = Relative(torch.zeros(2 * longest - 1).int(), bias=torch.zeros(1, heads), positions=positions)
    manual_seed(seed)
    q = torch.zeros(case.total_tokens, heads, width, dtype=torch.bfloat16)
    options = {"dropout_p": dropout_p, "relative": relative, "backend": "triton"}
    return attention(q, q, values, case.cu_seqlens, max_seqlen or width, **options) != 0


@pytest.mark.full
@thinned(3)
@pytest.mark.parametrize("has_holes", (False, True), ids=("places", "holes"))
@each_dtype
def test_dropout(dtype, has_holes):
    """Forward and all gradients have one mask, and it is the same with any other terms."""
    places = holes(FEW) if has_holes else None
    keep = kept(FEW, 1, 0.25, 7, places)
    relative = make_terms(FEW, "all", "buckets", 1, 32, dtype, places)
    check("triton", FEW, make(FEW, 1, 32, dtype), relative, keep=keep, dropout_p=0.25, seed=7)


@pytest.mark.full
def test_the_mask_goes_by_places_and_not_by_blocks():
    case = Lengths("", (16, 7, 16))
    masks = [kept(case, 3, 0.5, 3, max_seqlen=n) for n in (16, 17, 64)]
    tiles = [_tile(16, n, False) for n in (16, 17, 64)]
    assert tiles == [16, 32, 64] and torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0][:16, 0, :16], masks[0][23:, 0, :16])  # of two sequences
    assert not torch.equal(masks[0][:, 0], masks[0][:, 1])


@pytest.mark.full
def test_float16_scores_beyond_its_largest_number():
    """Sums of products are in fp32 until softmax_scale has made them small."""
    case, scale = Lengths("", (70,)), 2e-5
    q, k, v = make(case, 1, 64, torch.float16)
    relative = make_terms(case, "both", "buckets", 1, 64, torch.float16)
    large = relative._replace(key=relative.key * 50, query=relative.query * 50)
    assert (q * 100).float().matmul((k * 100).float().transpose(1, 2)).abs().max() > 65504
    formula = partial(reference.attention, cu_seqlens=case.cu_seqlens, softmax_scale=scale)
    tensors, f32 = (q * 100, k * 100, v), large.to(torch.float32)
    out = attention(*tensors, case.cu_seqlens, 70, softmax_scale=scale, relative=large, backend="triton")
    oracle = formula(*(t.double() for t in tensors), relative=large.to(torch.float64))
    assert_close_to_reference(out, oracle, formula(*(t.float() for t in tensors), relative=f32).half(), OUTPUT_FACTOR)


@pytest.mark.full
@left_to_full(lambda p: not p["has_holes"])  # the same sums, in the same order
@pytest.mark.parametrize("has_holes", (False, True), ids=("places", "holes"))
def test_the_same_bits_in_every_run(has_holes):
    case = Lengths("", (5, 20), padding_rows=1)
    places = holes(case) if has_holes else None
    tensors = make(case, 1, 16, torch.bfloat16)
    relative = make_terms(case, "all", "buckets", 1, 16, torch.bfloat16, places)
    first, second = (run("triton", case, tensors, relative, tensors[0], dropout_p=0.1) for _ in range(2))
    assert all(torch.equal(t, second[name]) for name, t in first.items())


@pytest.mark.full
@left_to_full(lambda p: p["n"] == 70 and not p["has_holes"])  # as 9, in more tiles
@pytest.mark.parametrize("n, has_holes", ((70, False), (9, False), (30, True)))
def test_nothing_crosses_from_one_sequence_to_another(n, has_holes):
    """But by the tables' gradients, to which all add. Slack is zeros."""
    case, end = Lengths("", (7, n, 9), padding_rows=2), n + 7
    tensors = make(case, 1, 16, torch.bfloat16)
    relative = make_terms(case, "all", "buckets", 1, 16, torch.bfloat16, holes(case) if has_holes else None)
    spoiled = tuple(t.clone() for t in tensors)
    for t in spoiled:
        t[7:end:2], t[8:end:2], t[end + 9 :] = float("nan"), float("inf"), float("nan")
    clean = [*range(7), *range(end, end + 11)]
    found, expected = (run("triton", case, each, relative, tensors[0]) for each in (spoiled, tensors))
    for name in ("out", "q", "k", "v"):
        assert torch.equal(found[name][clean], expected[name][clean]) and not found[name][end + 9 :].any()


@pytest.mark.full
@pytest.mark.usefixtures("products_of_a_gpu")
@left_to_full(lambda p: p["dtype"] is torch.float16)  # as bfloat16, with more digits
@each_dtype
def test_with_products_of_a_gpu_the_error_rule_holds(dtype):
    relative = make_terms(FEW, "all", "buckets", 1, 32, dtype)
    check("triton", FEW, make(FEW, 1, 32, dtype), relative)


@pytest.mark.full
@pytest.mark.usefixtures("products_of_a_gpu")
def test_one_key_leaves_nothing_for_what_makes_scores_in_fp32():
    case = Lengths("", (1,) * 5)
    tensors = tuple(30 * t for t in make(case, 2, 64))
    relative = make_terms(case, "all", "two", 2, 64, torch.float32)
    found = run("triton", case, tensors, relative, tensors[0])
    assert not any(found[name].any() for name in ("q", "k", "key", "query", "bias")) and found["v"].any()


@pytest.mark.full
def test_plain_attention_is_the_same_without_terms_that_count():
    """Zeros in all tables: the formula is plain attention's, by the error rule."""
    manual_seed(0)
    tensors, zeros = make(MIDDLE, 1, 64), torch.zeros(2, 1, 64)
    relative = Relative(torch.zeros(2 * 65 - 1).int(), zeros, zeros)
    formula = partial(reference.attention, cu_seqlens=MIDDLE.cu_seqlens)

    def ours(*qkv):
        return attention(*qkv, MIDDLE.cu_seqlens, 65, relative=relative, backend="triton")

    found, baseline = (differentiate(f, tensors, tensors[0]) for f in (ours, formula))
    oracle = differentiate(formula, tuple(t.double() for t in tensors), tensors[0])
    for each, factor in zip(
        zip(found, oracle, baseline, strict=True), (OUTPUT_FACTOR, *3 * [GRADIENT_FACTOR]), strict=True
    ):
        assert_close_to_reference(*each, factor)
