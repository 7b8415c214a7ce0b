"""Attention as torch traces it: one graph of any shape, and what its operators say of themselves."""

from __future__ import annotations

from functools import partial

import attention_cases
import pytest
import torch
from attention_cases import KINDS, RAGGED, SLACK, backends, differentiate, make, needs_extension, positions, rotary_of
from full import left_to_full
from relative_cases import differentiate as differentiate_relative
from relative_cases import holes, make_terms

from fastbert.ops import Relative, Rotary, attention
from fastbert.testing.cases import Lengths

backend = attention_cases.backend  # the fixture
FEW = Lengths("few", (20, 70, 1), padding_rows=3)


@left_to_full(lambda p: p["backend"] == "torch")  # a rectangle's graph takes a minute
@backends("torch", "cpu")
def test_compiles_into_one_graph(backend):
    """Of any shape: the second case is traced with sizes that vary."""
    options = {"window_size": (9, 20), "backend": backend}

    def f(q, k, v, places, cos, sin, cu_seqlens, max_seqlen):
        rotary = Rotary(cos, sin, *KINDS["pairs-by-token"])
        return attention(q, k, v, cu_seqlens, max_seqlen, window_positions=places, rotary=rotary, **options)

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for case in (RAGGED, SLACK):
        tensors, (cos, sin, *_) = make(case, (4, 2)), rotary_of(case, 32, "pairs-by-token")
        where = {"places": positions(case), "cos": cos, "sin": sin, "cu_seqlens": case.cu_seqlens}
        where["max_seqlen"] = max(case.lengths)
        dout = torch.randn_like(tensors[0])
        found, expected = (differentiate(partial(g, **where), tensors, dout) for g in (compiled, f))
        assert all(map(torch.equal, found, expected))


@needs_extension
@left_to_full(lambda p: p["dropout_p"] == 0)  # an operand less
@pytest.mark.parametrize("dropout_p", (0.0, 0.1))
def test_opcheck(dropout_p):
    """Of all options; tests/ops/test_contract.py checks the operators as ops call them."""
    (q, k, v), (cos, sin, *kind) = make(SLACK, (4, 2)), rotary_of(SLACK, 32, "pairs-by-token")
    philox = torch.tensor([2**61 + 5, 2**40 + 1]) if dropout_p else None
    forward, backward = (getattr(torch.ops.fastbert, f"attention_{d}_cpu").default for d in ("fwd", "bwd"))
    num_keys = torch.tensor(SLACK.lengths, dtype=torch.int32) // 2
    form = (positions(SLACK), num_keys, cos, sin, 0.2, dropout_p, 2, 3, *kind)
    for return_stats in (True, False):
        torch.library.opcheck(forward, (q, k, v, SLACK.cu_seqlens, philox, *form, return_stats))
    out, stats = forward(q, k, v, SLACK.cu_seqlens, philox, *form, True)
    torch.library.opcheck(backward, (q, q, k, v, out, stats, SLACK.cu_seqlens, philox, *form))


@needs_extension
def test_relative_terms_compile_into_one_graph():
    """Of any shape: the second case is traced with sizes that vary."""

    def f(q, k, v, rows, key, query, bias, positions, cu_seqlens, max_seqlen):
        relative = Relative(rows, key, query, bias, positions)
        return attention(q, k, v, cu_seqlens, max_seqlen, relative=relative, window_size=(9, 20), backend="cpu")

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for case in (FEW, SLACK):
        relative = make_terms(case, "all", "buckets", 2, 16, torch.float32, holes(case))
        given = {"cu_seqlens": case.cu_seqlens, "max_seqlen": max(case.lengths)}
        tensors = make(case, 2, 16)

        def called(g, *qkv, relative, given=given):
            return g(*qkv, *relative, **given)

        found, expected = (
            differentiate_relative(partial(called, g), tensors, relative, tensors[0]) for g in (compiled, f)
        )
        assert all(torch.equal(t, expected[name]) for name, t in found.items())


@needs_extension
@left_to_full(lambda p: p["terms"] != "all")  # which has every operand
@pytest.mark.parametrize(("terms", "dropout_p"), (("all", 0.1), ("key", 0.0), ("bias", 0.1)))
def test_opcheck_of_relative_terms(terms, dropout_p):
    tensors, relative = make(SLACK, 2, 16), make_terms(SLACK, terms, "buckets", 2, 16, torch.float32, holes(SLACK))
    philox = torch.tensor([2**61 + 5, 2**40 + 1]) if dropout_p else None
    forward, backward = (getattr(torch.ops.fastbert, f"attention_relative_{d}_cpu").default for d in ("fwd", "bwd"))
    num_keys = torch.tensor(SLACK.lengths, dtype=torch.int32) // 2
    given = (SLACK.cu_seqlens, philox, None, num_keys, *relative, 0.2, dropout_p, 2, 3)
    for return_stats in (True, False):
        torch.library.opcheck(forward, (*tensors, *given, return_stats))
    out, stats = forward(*tensors, *given, True)
    torch.library.opcheck(backward, (tensors[0], *tensors, out, stats, *given))
