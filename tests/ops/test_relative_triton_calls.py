"""Relative terms of attention on the Triton kernels: operands as they come, what layers share, what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from attention_cases import SLACK, make, needs_triton
from full import thinned
from interpreted_like_a_gpu import unordered_accesses
from relative_cases import TERMS, check_operands_where_they_lie, holes, make_terms, run

from fastbert.backend import BackendError, use_backend
from fastbert.ops import Relative, attention
from fastbert.ops.attention.relative_triton import _places, _where
from fastbert.testing.cases import Lengths

pytestmark = needs_triton
FEW = Lengths("few", (7, 20, 1), padding_rows=3)
each_term = pytest.mark.parametrize("terms", TERMS)


@pytest.mark.full
def test_gradients_of_tables_alone():
    """Frozen projections of tokens; one table of two; rows that no distance reaches have a gradient, and it is 0."""
    tensors, relative = make(FEW, 2), make_terms(FEW, "both", "buckets", 2, 32, torch.float32)
    key = torch.cat([relative.key, torch.randn(3, 2, 32)]).requires_grad_()
    query = torch.cat([relative.query, torch.randn(3, 2, 32)])
    out = attention(*tensors, FEW.cu_seqlens, 20, relative=relative._replace(key=key, query=query), backend="triton")
    (dkey,) = torch.autograd.grad(out, key, tensors[0])
    expected = run("triton", FEW, tensors, relative, tensors[0])["key"]
    assert torch.equal(dkey[:-3], expected) and not dkey[-3:].any()


@pytest.mark.full
def test_operands_are_read_where_they_lie():
    check_operands_where_they_lie("triton", FEW, 20)


@pytest.mark.full
def test_what_does_not_fit_reads_nothing_beyond_the_tensors():
    """The host cannot see it. A row that the tables do not have is NaN."""
    tensors, relative = make(SLACK, 1, 16), make_terms(SLACK, "all", "two", 1, 16, torch.float32)
    beyond = relative._replace(rows=torch.where(relative.rows == 0, -1, 2).int())
    assert run("triton", SLACK, tensors, beyond, tensors[0])["out"][:10].isnan().all()
    short = relative._replace(rows=relative.rows[2:-2])  # max_seqlen is no bound
    out = attention(*tensors, SLACK.cu_seqlens, 2, relative=short, backend="triton")
    assert torch.isfinite(out[4:]).all()
    positions = torch.tensor([5, 900, -4, 7, 0, 0, 0, 3, 3, 3, 9, 9, 9]).int()
    attention(*tensors, SLACK.cu_seqlens, 6, relative=relative._replace(positions=positions), backend="triton")
    offsets, index = _places(positions, SLACK.cu_seqlens, SLACK.total_tokens, relative.longest)
    assert offsets[-1] <= 3 * relative.longest == len(index) and index.max() < SLACK.total_tokens


@pytest.mark.parametrize("head_dim, dtype", ((80, torch.float32), (130, torch.float16)))
def test_large_heads_are_refused_by_name(head_dim, dtype):
    """The kernels would spill registers. No family has them: where no backend is named, torch serves."""
    tensors, relative = make(FEW, 1, head_dim, dtype), make_terms(FEW, "all", "two", 1, head_dim, dtype)
    f = partial(attention, *tensors, FEW.cu_seqlens, 20, relative=relative)
    with pytest.raises(BackendError, match=f"relative terms in {dtype} with a head_dim of {head_dim}"):
        f(backend="triton")
    with use_backend("auto"):
        assert torch.isfinite(f()).all()


@pytest.mark.full
def test_layers_share_what_is_made_of_a_batch():
    case, cache = FEW, {}
    tensors = make(case, 1, 16)
    positions = holes(case)
    for places in (None, positions, positions):
        relative = make_terms(case, "bias", "buckets", 1, 16, torch.float32, places)
        attention(*tensors, case.cu_seqlens, 20, relative=relative, cache=cache, backend="triton")
    assert list(cache) == [("triton_tiles", 16), ("triton_places", 16)]
    known = _where(relative, case.cu_seqlens, case.total_tokens, 16, cache)
    assert known[2] is cache["triton_places", 16][3]
    tokens = known[2][known[2] >= 0]
    assert torch.equal(tokens, torch.arange(28).int()) and known[1][-1] == (known[2] >= 0).nonzero().max() + 1


@pytest.mark.full
@pytest.mark.parametrize(
    "case", (Lengths("", (0, 0)), Lengths("", ()), Lengths("", (0,), 3), Lengths("", (1, 1))), ids=str
)
def test_nothing_to_see_has_no_gradient(case):
    """Nor has the only score of a query."""
    relative = Relative(torch.zeros(1).int(), *torch.randn(2, 1, 2, 16), torch.randn(1, 2))
    found = run("triton", case, make(case, 2, 16), relative, torch.ones(case.total_tokens, 2, 16))
    assert not any(t.any() for name, t in found.items() if name not in ("out", "v"))


@pytest.mark.full
def test_no_program_stores_what_another_thread_reads():
    relative = make_terms(FEW, "all", "buckets", 1, 16, torch.float32, holes(FEW))
    tensors = make(FEW, 1, 16)
    with unordered_accesses() as found:
        run("triton", FEW, tensors, relative, tensors[0], dropout_p=0.1)
    assert found == []


@pytest.mark.full
@thinned(5)
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
@each_term
def test_opcheck(terms, dropout_p):
    tensors, relative = make(SLACK, 2, 16), make_terms(SLACK, terms, "buckets", 2, 16, torch.float32, holes(SLACK))
    philox = torch.tensor([2**61 + 5, 2**40 + 1]) if dropout_p else None
    forward, backward = (getattr(torch.ops.fastbert, f"attention_relative_{d}_triton").default for d in ("fwd", "bwd"))
    where = _where(relative, SLACK.cu_seqlens, SLACK.total_tokens, 16, None)
    given = (*relative[:4], *where, philox, None, 16, 0.2, dropout_p, [2, 3])
    for return_stats in (True, False):
        torch.library.opcheck(forward, (*tensors, *given, return_stats))
    out, stats = forward(*tensors, *given, True)
    needs = [t is not None and dropout_p == 0 for t in relative[1:4]]
    torch.library.opcheck(backward, (tensors[0], *tensors, out, stats, *given, needs))


@pytest.mark.full
def test_under_autocast_the_tables_are_cast():
    tensors, relative = make(FEW, 2), make_terms(FEW, "all", "buckets", 2, 32, torch.float32)
    f = partial(attention, cu_seqlens=FEW.cu_seqlens, max_seqlen=20, backend="triton")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = f(*tensors, relative=relative)
    low = relative.to(torch.bfloat16)
    assert torch.equal(out, f(*(t.bfloat16() for t in tensors), relative=low))
