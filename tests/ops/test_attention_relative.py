"""Attention with relative terms: every term, rows of every kind, holes, windows and dropout against the oracle."""

from __future__ import annotations

from functools import partial

import attention_cases
import pytest
import torch
from attention_cases import (
    backends,
    each_dtype,
    each_isa,
    is_met_in_the_other_dtype,
    kept,
    make,
    needs_extension,
)
from full import left_to_full, thinned
from isas import OF_FLOATS
from relative_cases import (
    ROWS,
    TERMS,
    check,
    check_operands_where_they_lie,
    holes,
    longest_of,
    make_terms,
    rows_of,
    run,
)
from seeds import manual_seed

from fastbert.ops import Relative, attention, attention_probs
from fastbert.testing.cases import Lengths

backend = attention_cases.backend  # the fixture
each_backend = backends("torch", *OF_FLOATS)
each_term = pytest.mark.parametrize("terms", TERMS)

# About the widths of vectors and tiles, and of one panel, up to which the CPU's kernels have a way of their own.
SHORT = Lengths("short", (1, 2, 15, 0, 16, 17, 31, 32, 33))
MIDDLE = Lengths("middle", (63, 64, 65, 129), padding_rows=3)
LONG = Lengths("long", (300, 5))
FEW = Lengths("few", (20, 70, 1), padding_rows=3)


@thinned(6)
@each_term
@each_dtype
@each_backend
def test_terms(backend, dtype, terms):
    for case, heads, head_dim in ((SHORT, 2, 32), (MIDDLE, 1, 16)):
        relative = make_terms(case, terms, "buckets", heads, head_dim, dtype)
        check(backend, case, make(case, heads, head_dim, dtype), relative)


@thinned(6)
@pytest.mark.parametrize("kind", ROWS)
@each_dtype
@each_backend
def test_rows_of_any_kind(backend, dtype, kind):
    """With tiles of which all is beyond the last bucket, on one side or on both."""
    for case, places in ((LONG, None), (FEW, holes(FEW))):
        relative = make_terms(case, "all", kind, 1, 8, dtype, places)
        check(backend, case, make(case, 1, 8, dtype), relative)


@left_to_full(lambda p: p["terms"] != "all" or p["dtype"] is torch.bfloat16)
@pytest.mark.parametrize("terms", ("both", "all", "key", "query"))
@each_dtype
@each_backend
def test_sequences_far_beyond_the_span(backend, dtype, terms):
    """More keys than a block has, most of which are far."""
    case = Lengths("", (1100,))
    check(backend, case, make(case, 1, 4, dtype), make_terms(case, terms, "clamped", 1, 4, dtype))


@thinned(6)
@pytest.mark.parametrize("head_dim", (2, 8, 20, 32, 64, 80, 130))
@each_dtype
@each_backend
def test_any_head_dim(backend, dtype, head_dim):
    for places in (None, holes(FEW)):
        relative = make_terms(FEW, "all", "buckets", 2, head_dim, dtype, places)
        check(backend, FEW, make(FEW, 2, head_dim, dtype), relative)


@thinned(6)
@each_term
@each_dtype
@each_backend
def test_places_with_holes(backend, dtype, terms):
    """With steps up to 60 a tile's distances are more than the kernels take at once."""
    for case, step in ((SHORT, 4), (FEW, 3), (FEW, 60)):
        relative = make_terms(case, terms, "buckets", 2, 16, dtype, holes(case, step))
        check(backend, case, make(case, 2, 16, dtype), relative)
    case = Lengths("", (5, 40))
    places = holes(case, 60)
    distances = 2 * longest_of(case, places) - 1
    tables = (0.5 * torch.randn(distances, 1, 8).to(dtype) for _ in range(2))
    check(backend, case, make(case, 1, 8, dtype), Relative(torch.arange(distances).int(), *tables, None, places))


@thinned(6)
@pytest.mark.parametrize("window_size", ((0, 1), (9, 20), (-1, 10), (70, 3)), ids=str)
@each_dtype
@each_backend
def test_windows(backend, dtype, window_size):
    for case, places in ((LONG, None), (FEW, None), (FEW, holes(FEW))):
        options = {"window_size": window_size, "window_positions": places}
        relative = make_terms(case, "all", "buckets", 1, 8, dtype, places)
        check(backend, case, make(case, 1, 8, dtype), relative, **options)


@thinned(6)
@pytest.mark.parametrize("softmax_scale", (0.0, -0.25, 1e-40, -1e-300), ids=str)
@each_dtype
@each_backend
def test_any_scale(backend, dtype, softmax_scale):
    for terms in ("both", "all"):
        relative = make_terms(FEW, terms, "buckets", 1, 16, dtype)
        check(backend, FEW, make(FEW, 1, 16, dtype), relative, softmax_scale=softmax_scale)


@each_dtype
@each_isa
def test_large_terms(backend, dtype):
    for case in (SHORT, FEW):
        relative = make_terms(case, "all", "buckets", 2, 16, dtype)
        large = relative._replace(**{name: 5 * getattr(relative, name) for name in TERMS["all"]})
        check(backend, case, make(case, 2, 16, dtype), large)


@each_dtype
@each_isa
def test_dropout(backend, dtype):
    for case, places in ((SHORT, None), (FEW, None), (FEW, holes(FEW))):
        options = {"keep": kept(backend, case, 2, 0.25, 7, dtype), "dropout_p": 0.25, "seed": 7}
        relative = make_terms(case, "all", "buckets", 2, 16, dtype, places)
        check(backend, case, make(case, 2, 16, dtype), relative, **options)


@each_isa
def test_places_without_holes_change_no_bit(backend):
    for case in (SHORT, MIDDLE):
        tensors, relative = make(case), make_terms(case, "all", "buckets", 3, 32, torch.float32)
        starts = torch.cat([torch.arange(n) + 5 * i for i, n in enumerate((*case.lengths, case.padding_rows))]).int()
        results = [
            run(backend, case, tensors, relative._replace(positions=places), tensors[0]) for places in (None, starts)
        ]
        assert all(torch.equal(t, results[1][name]) for name, t in results[0].items())


@left_to_full(lambda p: is_met_in_the_other_dtype(p, 0))
@each_dtype
@each_isa
def test_threads_and_runs_do_not_change_bits(backend, dtype):
    """The tables' gradients are sums over all sequences, by groups that do not depend on the threads."""
    before = torch.get_num_threads()
    ends_without_tokens = Lengths("", (20, 40, 0, 0), padding_rows=2)  # which may not be left with a group of their own
    cases = (Lengths("", (520, 3, 190)), Lengths("", (40, 61) * 9), ends_without_tokens, LONG)
    for case, places in zip(cases, (None, None, None, holes(LONG)), strict=True):
        tensors = make(case, 2, 8, dtype)
        relative = make_terms(case, "all", "buckets", 2, 8, dtype, places)
        results = []
        for threads in (1, 3, 8, 1):
            torch.set_num_threads(threads)
            results.append(run(backend, case, tensors, relative, tensors[0], dropout_p=0.1))
        torch.set_num_threads(before)
        assert all(torch.equal(t, other[name]) for other in results[1:] for name, t in results[0].items())


@each_dtype
@each_backend
def test_nothing_crosses_from_one_sequence_to_another(backend, dtype):
    """But by the tables' gradients, to which all add."""
    for n, places in ((70, None), (9, None), (70, holes)):
        case, end = Lengths("", (7, n, 9), padding_rows=2), n + 7
        positions = None if places is None else places(case)
        tensors, relative = make(case, 2, 32, dtype), make_terms(case, "all", "buckets", 2, 32, dtype, positions)
        dout = torch.randn_like(tensors[0])
        spoiled = tuple(t.clone() for t in tensors)
        for t in spoiled:
            t[7:end:2], t[8:end:2], t[end + 9 :] = float("nan"), float("inf"), float("nan")
        clean = [*range(7), *range(end, end + 11)]
        found, expected = (run(backend, case, each, relative, dout) for each in (spoiled, tensors))
        for name in ("out", "q", "k", "v"):
            assert torch.equal(found[name][clean], expected[name][clean]) and not found[name][end + 9 :].any()


@each_isa
def test_operands_are_read_where_they_lie(backend):
    check_operands_where_they_lie(backend, MIDDLE, 129)


@each_isa
def test_gradients_of_tables_alone(backend):
    """Frozen projections of tokens, and rows that no distance reaches: these have a gradient, and it is 0."""
    tensors, relative = make(FEW, 2), make_terms(FEW, "both", "buckets", 2, 32, torch.float32)
    key = torch.cat([relative.key, torch.randn(3, 2, 32)]).requires_grad_()
    query = torch.cat([relative.query, torch.randn(3, 2, 32)])
    out = attention(*tensors, FEW.cu_seqlens, 70, relative=relative._replace(key=key, query=query), backend=backend)
    (dkey,) = torch.autograd.grad(out, key, tensors[0])
    expected = run(backend, FEW, tensors, relative, tensors[0])["key"]
    assert torch.equal(dkey[:-3], expected) and not dkey[-3:].any()


@pytest.mark.parametrize(
    "case", (Lengths("", (0, 0)), Lengths("", ()), Lengths("", (0,), 3), Lengths("", (1, 1))), ids=str
)
@each_backend
def test_nothing_to_see_has_no_gradient(backend, case):
    """Nor has the only score of a query."""
    relative = Relative(torch.zeros(1).int(), *torch.randn(2, 1, 2, 16), torch.randn(1, 2))
    found = run(backend, case, make(case, 2, 16), relative, torch.ones(case.total_tokens, 2, 16))
    assert not any(t.any() for name, t in found.items() if name not in ("out", "v"))


@each_backend
def test_under_autocast_the_tables_are_cast(backend):
    tensors, relative = make(FEW, 2), make_terms(FEW, "all", "buckets", 2, 32, torch.float32)
    f = partial(attention, cu_seqlens=FEW.cu_seqlens, max_seqlen=70, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = f(*tensors, relative=relative)
    low = relative.to(torch.bfloat16)
    assert torch.equal(out, f(*(t.bfloat16() for t in tensors), relative=low))


def test_probs_are_those_of_the_output():
    """With the identity for values, which needs heads as wide as the longest sequence."""
    places = holes(FEW)
    q, k, _ = make(FEW, 2, 70)
    relative = make_terms(FEW, "all", "buckets", 2, 70, torch.float32, places)
    probs = attention_probs(q, k, FEW.cu_seqlens, 70, relative=relative)
    place = torch.cat([torch.arange(n) for n in FEW.lengths])
    values = torch.nn.functional.one_hot(torch.nn.functional.pad(place, (0, 3)), 70)[:, None].expand(-1, 2, -1).float()
    out = attention(q, k, values, FEW.cu_seqlens, 70, relative=relative, backend="torch")
    for i, (start, n) in enumerate(((0, 20), (20, 70), (90, 1))):
        torch.testing.assert_close(probs[i, :, :n].transpose(0, 1), out[start : start + n])


REFUSED = [
    ({"rows": torch.tensor([0, 4, 1, 0, 0]).int()}, r"relative.rows\[1\] is 4; the tables have 3 rows|out of range"),
    ({"rows": torch.tensor([0, 1, -1, 0, 0]).int()}, r"relative.rows\[2\] is -1; the tables have 3|out of range"),
    ({"rows": torch.zeros(3).int()}, "relative.rows serves 2 places, max_seqlen is 3"),
    ({"rows": torch.zeros(4).int()}, "relative.rows is torch.int32 of shape"),
    ({"rows": torch.zeros(5).long()}, "relative.rows is torch.int64 of shape"),
    ({"positions": torch.tensor([0, 2, 2]).int()}, "relative.positions falls or stands still at token 2"),
    ({"positions": torch.tensor([0, 2, 3]).int()}, "places 3 apart in a sequence; relative.rows serves 3 places"),
    ({"key": torch.zeros(3, 2, 8)}, r"relative.key has shape \(3, 2, 8\)"),
    ({"key": torch.zeros(3, 2, 16).double()}, "relative.key is torch.float64, q is torch.float32"),
    ({"bias": torch.zeros(3, 1)}, r"relative.bias has shape \(3, 1\)"),
]


@needs_extension
@pytest.mark.parametrize("changed, reason", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
@backends("torch", "cpu")
def test_what_does_not_fit_is_refused(backend, changed, reason):
    q, key = torch.zeros(3, 2, 16), torch.zeros(3, 2, 16)
    relative = Relative(torch.zeros(5).int(), key)._replace(**changed)
    with pytest.raises((ValueError, RuntimeError, IndexError), match=reason):
        attention(q, q, q, torch.tensor([0, 3]).int(), 3, relative=relative, backend=backend)


@needs_extension
def test_plain_attention_is_the_same_without_terms_that_count():
    """Zeros in all tables, in a dtype and a scale in which they cost no digit."""
    manual_seed(0)
    tensors = make(MIDDLE, 2)
    zeros = Relative(rows_of("buckets", 140), torch.zeros(32, 2, 32), torch.zeros(32, 2, 32))
    f = partial(attention, *tensors, MIDDLE.cu_seqlens, 129, backend="cpu")
    assert torch.equal(f(relative=zeros), f())
