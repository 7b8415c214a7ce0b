"""Windows, positions, grouped keys and rotary embedding together: torch and the CPU against the float64 oracle."""

from __future__ import annotations

from functools import partial

import pytest
import test_attention
import torch
from attention_terms import assert_close_in_units, attention_terms
from full import halved, left_to_full
from isas import OF_FLOATS
from layouts import assert_same_results
from seeds import manual_seed
from test_attention import RAGGED, SLACK, each_dtype, needs_extension

from fastbert.ops import Rotary, attention, attention_probs
from fastbert.testing import reference
from fastbert.testing.cases import LENGTHS, Lengths
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference

backend = test_attention.backend  # the fixture
each_backend = pytest.mark.parametrize("backend", ("torch", *OF_FLOATS), indirect=True)
in_torch_and_cpu = pytest.mark.parametrize("backend", ("torch", "cpu"), indirect=True)
each_isa = pytest.mark.parametrize("backend", OF_FLOATS, indirect=True)
# Before and after blocks of 16, 32 and 64 queries, and keys of more than one block of 256 and 1024.
EDGES = Lengths("", (1, 15, 16, 17, 63, 64, 65, 0, 129))
LONG = Lengths("", (1100, 2))
KINDS = {
    "halves": (False, False),
    "pairs": (True, False),
    "halves-by-token": (False, True),
    "pairs-by-token": (True, True),
}
Tensors = tuple[torch.Tensor, ...]


def make(case: Lengths, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 32, dtype=torch.float32) -> Tensors:
    return tuple(
        torch.randn(case.total_tokens, heads, head_dim).to(dtype) for heads in (num_heads, *[num_kv_heads] * 2)
    )


def rotary(case: Lengths, head_dim: int, interleaved: bool = False, by_token: bool = False) -> Rotary:
    angles = 6 * torch.rand(case.total_tokens if by_token else max(case.lengths) + 5, head_dim // 2)
    return Rotary(angles.cos(), angles.sin(), interleaved, by_token)


def positions(case: Lengths, largest_step: int = 4) -> torch.Tensor:
    """Those of padded columns, where a mask has holes; slack has any."""
    pieces = [torch.randint(1, largest_step + 1, (n,)).cumsum(0) - 1 for n in case.lengths]
    return torch.cat([*pieces, torch.randint(-9, 9, (case.slack,))]).int()


def differentiate(f, tensors: Tensors, dout: torch.Tensor) -> Tensors:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = f(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


def check(backend, case: Lengths, tensors: Tensors, keep=None, seed=0, in_units=False, **options) -> None:
    """Output and gradients, the latter together: dq and dk are differences that cancel (docs/attention.md).

    in_units: each error counts by the terms of its element, where few elements would have nearly all of the error.
    """

    def ours(q, k, v):
        manual_seed(seed)
        return attention(q, k, v, case.cu_seqlens, max(case.lengths) + 5, backend=backend, **options)

    dout = torch.randn_like(tensors[0])
    literal = partial(reference.attention, cu_seqlens=case.cu_seqlens, keep=keep, **options)
    results = [differentiate(ours, tensors, dout), differentiate(literal, tensors, dout)]
    results.append(differentiate(literal, tuple(t.double() for t in tensors), dout))
    actual, baseline, oracle = ((out, torch.cat([g.flatten() for g in grads])) for out, *grads in results)
    if in_units:
        terms = attention_terms(*(t.double() for t in (*tensors, dout)), case.cu_seqlens, keep=keep, **options)
        terms = (terms["out"], torch.cat([terms[name].flatten() for name in ("dq", "dk", "dv")]))
        for *of_one, factor in zip(actual, oracle, baseline, terms, (OUTPUT_FACTOR, GRADIENT_FACTOR), strict=True):
            assert_close_in_units(*of_one, factor)
        return
    for i, (name, factor) in enumerate((("out", OUTPUT_FACTOR), ("dqkv", GRADIENT_FACTOR))):
        assert_close_to_reference(actual[i], oracle[i], baseline[i], factor, name)


@halved
@pytest.mark.parametrize("window_size", ((0, 0), (7, 16), (-1, 2), (20, -1), (64, 64)), ids=str)
@each_dtype
@each_backend
def test_windows(backend, dtype, window_size):
    for case in (RAGGED, EDGES, SLACK):
        for places in (None, positions(case)):
            check(backend, case, make(case, 2, 2, 16, dtype), window_size=window_size, window_positions=places)


@halved
@pytest.mark.parametrize("heads", ((6, 2), (3, 1)), ids=str)
@each_dtype
@each_backend
def test_grouped_keys(backend, dtype, heads):
    for case in (RAGGED, EDGES, *LENGTHS[4:6]):
        check(backend, case, make(case, *heads, 32, dtype))
    check(backend, RAGGED, make(RAGGED, *heads, 7, dtype), window_size=(5, 9))


@halved
@pytest.mark.parametrize("kind", KINDS)
@each_dtype
@each_backend
def test_rotary(backend, dtype, kind):
    for case, head_dim in ((RAGGED, 80), (EDGES, 64), (SLACK, 2), (RAGGED, 130)):
        check(backend, case, make(case, 2, 2, head_dim, dtype), rotary=rotary(case, head_dim, *KINDS[kind]))


@halved
@pytest.mark.parametrize("kind", KINDS)
@each_dtype
@each_backend
def test_all_together(backend, dtype, kind):
    for case in (RAGGED, EDGES, SLACK):
        for places in (None, positions(case)):
            options = {"window_size": (9, 20), "window_positions": places, "softmax_scale": -0.3}
            check(backend, case, make(case, dtype=dtype), rotary=rotary(case, 32, *KINDS[kind]), **options)


@left_to_full(lambda p: p["window_size"] != ((-1, 10) if p["dtype"] is torch.bfloat16 else (40, 64)))
@left_to_full(lambda p: p["backend"] == "torch")  # which has no blocks
@pytest.mark.parametrize("window_size", ((-1, -1), (40, 64), (-1, 10)), ids=str)
@each_dtype
@each_backend
def test_sequences_longer_than_a_block_of_keys(backend, dtype, window_size):
    """With steps up to 100 a block of keys may hold none that a query sees, and a later one the first."""
    options = {"window_size": window_size, "rotary": rotary(LONG, 32)}
    for places in (None, positions(LONG, 100)):
        check(backend, LONG, make(LONG, 2, 1, dtype=dtype), window_positions=places, **options)


@halved
@each_dtype
@each_isa
def test_large_logits_and_scales_of_nothing(backend, dtype):
    options = {"window_size": (30, 5), "window_positions": positions(EDGES)}
    for factor, softmax_scale in ((30.0, 0.5), (30.0, -0.5), (1.0, 0.0), (1.0, -1e-40)):
        q, k, v = make(EDGES, dtype=dtype)
        check(backend, EDGES, (factor * q, factor * k, v), in_units=True, softmax_scale=softmax_scale, **options)


def kept(backend, case: Lengths, num_heads: int, dropout_p: float, seed: int, dtype) -> torch.Tensor:
    """(query, head, key): whether a probability is kept where every query sees every key."""
    width = max(case.lengths)
    place = torch.cat([torch.arange(n) for n in case.lengths])
    v = torch.nn.functional.one_hot(place, width)[:, None].expand(-1, num_heads, -1).to(dtype)
    manual_seed(seed)
    q = torch.zeros_like(v)
    return attention(q, q, v, case.cu_seqlens, width, dropout_p=dropout_p, backend=backend) != 0


@each_dtype
@each_isa
def test_dropout_goes_by_token_head_and_key(backend, dtype):
    """The mask is the same whatever a query sees, and whoever shares keys."""
    for case in (RAGGED, Lengths("", (130, 3))):
        keep = kept(backend, case, 4, 0.25, 7, dtype)
        options = {"window_size": (20, 9), "window_positions": positions(case), "rotary": rotary(case, 32)}
        check(backend, case, make(case, dtype=dtype), keep=keep, dropout_p=0.25, seed=7, **options)


@halved
@pytest.mark.parametrize("window_size", ((-1, -1), (70, 20)), ids=str)
@each_dtype
@each_isa
def test_threads_do_not_change_bits(backend, dtype, window_size):
    before = torch.get_num_threads()
    for case, heads in ((Lengths("", (900, 3, 190)), (2, 1)), (Lengths("", (40, 61) * 9), (6, 2))):
        tensors = make(case, *heads, 32, dtype)
        options = {"window_size": window_size, "rotary": rotary(case, 32), "dropout_p": 0.1, "backend": backend}

        def f(*qkv, case=case, options=options):
            manual_seed(1)
            return attention(*qkv, case.cu_seqlens, max(case.lengths), **options)

        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(differentiate(f, tensors, tensors[0]))
        torch.set_num_threads(before)
        assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@each_isa
def test_a_window_that_hides_nothing_changes_no_bit(backend):
    tensors = make(RAGGED)
    plain = partial(attention, cu_seqlens=RAGGED.cu_seqlens, max_seqlen=41, backend=backend)
    for wide in ({"window_size": (40, 40)}, {"window_size": (2**31, -1)}, {"window_positions": positions(RAGGED)}):
        for pair in zip(*(differentiate(partial(plain, **o), tensors, tensors[0]) for o in ({}, wide)), strict=True):
            assert torch.equal(*pair)


@each_dtype
@each_backend
def test_nothing_crosses_from_one_sequence_to_another(backend, dtype):
    case = Lengths("", (7, 165, 9), slack=70)
    options = {"window_size": (20, 9), "window_positions": positions(case), "rotary": rotary(case, 32, True, True)}
    f = partial(attention, cu_seqlens=case.cu_seqlens, max_seqlen=165, backend=backend, **options)
    tensors = make(case, dtype=dtype)
    spoiled = tuple(t.clone() for t in tensors)
    for t in spoiled:
        t[7:172] = torch.tensor([float("nan"), float("inf")]).repeat(16)
        t[181:] = float("nan")
    dout = torch.randn_like(tensors[0])
    clean = [*range(7), *range(172, 251)]
    for found, expected in zip(*(differentiate(f, x, dout) for x in (spoiled, tensors)), strict=True):
        assert torch.equal(found[clean], expected[clean]) and not found[181:].any()


@each_dtype
@each_isa
def test_what_is_far_outside_of_the_window_is_not_visited(backend, dtype):
    """A NaN there would be seen: its product with a probability of 0 is NaN."""
    case, n = Lengths("", (4096,)), 4096
    options = {"window_size": (64, 64), "rotary": rotary(case, 32)}
    f = partial(attention, cu_seqlens=case.cu_seqlens, max_seqlen=n, backend=backend, **options)
    tensors = make(case, 2, 1, dtype=dtype)
    spoiled = tuple(t.clone() for t in tensors)
    for t in spoiled:
        t[2048] = float("nan")
    dout = torch.randn_like(tensors[0])
    # A query's NaN is in the gradients of all its keys; and the next block of 64 may be visited.
    far = (torch.arange(n) - 2048).abs() > 64 + 64 + 64
    for found, expected in zip(*(differentiate(f, x, dout) for x in (spoiled, tensors)), strict=True):
        assert torch.equal(found[far], expected[far]) and found[2048].isnan().all()


@in_torch_and_cpu
def test_slices_and_tables_are_read_where_they_lie(backend):
    """Of a fused projection, of a wider table, or with no row in one piece."""
    case, places = RAGGED, positions(RAGGED)
    tensors, tables = make(case), rotary(case, 32, True)
    fused = torch.cat(tensors, 1)
    wide = Rotary(*(torch.cat([t, t], -1)[:, :16] for t in tables[:2]), True)
    turned = Rotary(*(t.t().contiguous().t() for t in tables[:2]), True)

    def run(layout, dtype=torch.float32):
        t, table = layout
        f = partial(attention, cu_seqlens=case.cu_seqlens, max_seqlen=41, rotary=table, backend=backend)
        strided = torch.stack([places, places], 1)[:, 0] if table is wide else places
        leaf = t.to(dtype).detach().requires_grad_()
        out = f(*leaf.split((4, 2, 2), 1), window_size=(9, 12), window_positions=strided)
        return out, *torch.autograd.grad(out, leaf, torch.ones_like(out))

    layouts = (fused, tables), (fused.transpose(1, 2).contiguous().transpose(1, 2), wide), (fused, turned)
    assert_same_results(backend, run, layouts)


def test_probs_are_those_of_the_output():
    case = Lengths("", (5, 0, 29, 1))
    qkv = make(case)
    options = {"window_size": (3, 9), "window_positions": positions(case), "rotary": rotary(case, 32, True, True)}
    probs = attention_probs(*qkv[:2], case.cu_seqlens, 30, **options)
    exact, near = (
        attention(*(t.to(dtype) for t in qkv), case.cu_seqlens, 30, backend="torch", **options)
        for dtype in (torch.float64, torch.float32)
    )
    for i, (start, n) in enumerate(((0, 5), (5, 0), (5, 29), (34, 1))):
        values, rows = qkv[2][start : start + n].repeat_interleave(2, 1).transpose(0, 1), slice(start, start + n)
        out = (probs[i, :, :n, :n] @ values).transpose(0, 1)
        assert_close_to_reference(out, exact[rows], near[rows])
        assert probs[i].sum() == pytest.approx(4 * n)


@left_to_full(lambda p: p["backend"] == "torch")  # a rectangle's graph takes a minute; test_rotary.py has one
@in_torch_and_cpu
def test_compiles_into_one_graph(backend):
    options = {"window_size": (9, 20), "backend": backend}

    def f(q, k, v, places, cos, sin, cu_seqlens, max_seqlen):
        tables = Rotary(cos, sin, True, True)
        return attention(q, k, v, cu_seqlens, max_seqlen, window_positions=places, rotary=tables, **options)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for case in (RAGGED, SLACK):
        tensors, (cos, sin, *_) = make(case), rotary(case, 32, True, True)
        where = {"places": positions(case), "cos": cos, "sin": sin, "cu_seqlens": case.cu_seqlens}
        where["max_seqlen"] = max(case.lengths)
        dout = torch.randn_like(tensors[0])
        found, expected = (differentiate(partial(g, **where), tensors, dout) for g in (compiled, f))
        assert all(map(torch.equal, found, expected))


@needs_extension
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
def test_opcheck(dropout_p):
    (q, k, v), (cos, sin, *kind) = make(SLACK), rotary(SLACK, 32, True, True)
    philox = torch.tensor([2**61 + 5, 2**40 + 1]) if dropout_p else None
    forward, backward = (getattr(torch.ops.fastbert, f"attention_{d}_cpu").default for d in ("fwd", "bwd"))
    form = (positions(SLACK), cos, sin, 0.2, dropout_p, 2, 3, *kind)
    for return_stats in (True, False):
        torch.library.opcheck(forward, (q, k, v, SLACK.cu_seqlens, philox, *form, return_stats))
    out, stats = forward(q, k, v, SLACK.cu_seqlens, philox, *form, True)
    torch.library.opcheck(backward, (q, q, k, v, out, stats, SLACK.cu_seqlens, philox, *form))
