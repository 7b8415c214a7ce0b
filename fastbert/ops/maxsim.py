"""maxsim: the score of late interaction, over packed token vectors (Khattab & Zaharia 2020, "ColBERT", eq. 3)."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, register, select
from fastbert.native.availability import extension_error
from fastbert.ops._common import (
    Differentiable,
    Rule,
    at_least_fp32,
    check_devices,
    define,
    define_triton,
    needs_grad,
    triton_unsupported,
)
from fastbert.ops.packing import check_offsets_on_cpu, int32_offsets, sequence_sums, token_sequences

NO_DOCUMENT = -1e9  # what a document without tokens scores, as sentence-transformers has it
_CHUNK = 1 << 24  # products that the torch backend holds at once

# winners, int32: of each document and query token the row of `documents` with the largest product, -1 for none. Of the
# CPU's kernels without pairs (documents, query tokens), else of each pair its query's tokens, one pair after the other;
# of Triton's, which take pairs always, (pairs, longest), `longest` being the longest query. No rows unless
# return_winners. Where documents are int8, queries are, too, and both have a scale a token.


def _fwd_fake(queries, cu_seqlens_q, documents, cu_seqlens_d, query_scales, scales, pairs, return_winners):
    num_queries, num_documents = cu_seqlens_q.shape[0] - 1, cu_seqlens_d.shape[0] - 1
    float32, int32 = {"dtype": torch.float32}, {"dtype": torch.int32}
    if pairs is not None:
        count = torch.library.get_ctx().new_dynamic_size() if return_winners else 0
        return queries.new_empty(pairs.shape[1], **float32), queries.new_empty(count, **int32)
    winners = queries.new_empty(num_documents if return_winners else 0, queries.shape[0], **int32)
    return queries.new_empty(num_queries, num_documents, **float32), winners


def _bwd_fake(dscores, queries, cu_seqlens_q, documents, cu_seqlens_d, pairs, winners, needs_dq, needs_dd):
    dqueries = queries.new_empty(queries.shape[0] if needs_dq else 0, queries.shape[1])
    return dqueries, documents.new_empty(documents.shape[0] if needs_dd else 0, documents.shape[1])


_FWD = define(
    "maxsim_fwd_cpu",
    "(Tensor queries, Tensor cu_seqlens_q, Tensor documents, Tensor cu_seqlens_d, Tensor? query_scales, Tensor? scales,"
    " Tensor? pairs, bool return_winners) -> (Tensor scores, Tensor winners)",
    _fwd_fake,
)
_BWD = define(
    "maxsim_bwd_cpu",
    "(Tensor dscores, Tensor queries, Tensor cu_seqlens_q, Tensor documents, Tensor cu_seqlens_d, Tensor? pairs,"
    " Tensor winners, bool needs_dqueries, bool needs_ddocuments) -> (Tensor, Tensor)",
    _bwd_fake,
)


_FWD_TRITON = define_triton(
    "maxsim_fwd",
    "(Tensor queries, Tensor cu_seqlens_q, Tensor documents, Tensor cu_seqlens_d, Tensor? query_scales, Tensor? scales,"
    " Tensor pairs, SymInt longest, bool return_winners) -> (Tensor scores, Tensor winners)",
    "maxsim",
    lambda queries, cu_seqlens_q, documents, cu_seqlens_d, query_scales, scales, pairs, longest, return_winners: (
        queries.new_empty(pairs.shape[1], dtype=torch.float32),
        queries.new_empty(pairs.shape[1] if return_winners else 0, longest, dtype=torch.int32),
    ),
)
_BWD_TRITON = define_triton(
    "maxsim_bwd",
    "(Tensor dscores, Tensor queries, Tensor cu_seqlens_q, Tensor documents, Tensor cu_seqlens_d, Tensor pairs,"
    " Tensor winners, SymInt longest, bool needs_dqueries, bool needs_ddocuments) -> (Tensor, Tensor)",
    "maxsim",
    lambda dscores, queries, cu_q, documents, cu_d, pairs, winners, longest, needs_dq, needs_dd: _bwd_fake(
        dscores, queries, cu_q, documents, cu_d, pairs, winners, needs_dq, needs_dd
    ),
)


def _rule_forward(backend, longest, queries, cu_seqlens_q, documents, cu_seqlens_d, pairs):
    given = (queries, cu_seqlens_q, documents, cu_seqlens_d)
    if backend is Backend.CPU:
        scores, winners = _FWD(*given, None, None, pairs, True)
    else:
        scores, winners = _FWD_TRITON(*given, None, None, pairs, longest, True)
    return scores, (*given, pairs, winners)


def _rule_backward(backend, longest, needed, saved, dscores):
    if backend is Backend.CPU:
        dqueries, ddocuments = _BWD(dscores, *saved, needed[0], needed[2])
    else:
        dqueries, ddocuments = _BWD_TRITON(dscores, *saved, longest, needed[0], needed[2])
    return dqueries, None, ddocuments, None, None


_RULE = Rule(_rule_forward, _rule_backward)


# --------------------------------------------------------------------------------------------------------------------
# torch


def _first_largest(products: torch.Tensor) -> torch.Tensor:
    """(..., tokens) -> (...,): the largest, whose gradient goes to the first of several."""
    return products.gather(-1, products.argmax(-1, keepdim=True)).squeeze(-1)


def _all_torch(queries, cu_seqlens_q, documents, cu_seqlens_d):
    """(queries, documents), chunk by chunk of query tokens."""
    tokens, num_documents = documents.shape[0], cu_seqlens_d.shape[0] - 1
    document, inside = token_sequences(cu_seqlens_d, tokens)
    query, real = token_sequences(cu_seqlens_q, queries.shape[0])
    # Rows beyond the last text are in no score, but backward multiplies them by gradients of 0, and 0 times NaN is NaN.
    queries, documents = torch.where(real[:, None], queries, 0.0), torch.where(inside[:, None], documents, 0.0)
    place, best = torch.arange(tokens, device=documents.device), []
    for some in queries.split(max(1, _CHUNK // max(1, tokens))):
        products = torch.where(inside, some @ documents.T, -torch.inf)
        owner = document.expand_as(products)
        empty = products.new_full((some.shape[0], num_documents), -torch.inf)
        with torch.no_grad():
            top = empty.scatter_reduce(1, owner, products, "amax")
            has_it = ((products == top.gather(1, owner)) | products.isnan()) & inside
            first = torch.where(has_it, place, tokens)
            winner = torch.full_like(top, tokens, dtype=torch.int64).scatter_reduce(1, owner, first, "amin")
        best.append(torch.where(winner < tokens, products.gather(1, winner.clamp(max=tokens - 1)), 0.0))
    return sequence_sums(torch.where(real[:, None], torch.cat(best), 0.0), query, cu_seqlens_q.shape[0] - 1)


def _padded(rows: torch.Tensor, cu_seqlens: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the chosen sequences: (chosen, longest, width), and which of it is there. The rest is 0: backward meets no NaN
    of another sequence's.
    """
    first, lengths = cu_seqlens[:-1][chosen].long(), (cu_seqlens[1:] - cu_seqlens[:-1])[chosen]
    column = torch.arange(int(lengths.max()), device=rows.device)
    inside = column < lengths[:, None]
    return torch.where(inside[..., None], rows[torch.where(inside, first[:, None] + column, 0)], 0.0), inside


def _pairs_torch(queries, cu_seqlens_q, documents, cu_seqlens_d, pairs):
    """(pairs,), padded in chunks."""
    longest = [int((offsets[1:] - offsets[:-1]).max()) for offsets in (cu_seqlens_q, cu_seqlens_d)]
    each = max(1, longest[0] * longest[1] + sum(longest) * queries.shape[1])
    scores = []
    for query, document in zip(*(side.split(max(1, _CHUNK // each)) for side in pairs), strict=True):
        of_queries, is_query = _padded(queries, cu_seqlens_q, query)
        of_documents, is_document = _padded(documents, cu_seqlens_d, document)
        products = torch.where(is_document[:, None], of_queries @ of_documents.mT, -torch.inf)
        if products.shape[-1] == 0:
            scores.append(products.sum((1, 2)))
            continue
        has_any = is_query & is_document.any(1, keepdim=True)
        scores.append(torch.where(has_any, _first_largest(products), 0.0).sum(1))
    return torch.cat(scores)


def _check_pairs(pairs, num_queries, num_documents) -> None:
    """As kernels check them. Values are looked at on a CPU alone, where that is no wait."""
    if not pairs.is_cpu or torch.compiler.is_compiling() or not pairs.shape[1]:
        return
    for name, side, count in (("query", pairs[0], num_queries), ("document", pairs[1], num_documents)):
        low, high = side.aminmax()
        if low < 0 or high >= count:
            bad = int(low if low < 0 else high)
            raise IndexError(f"maxsim: pairs have {name} {bad}, there are {count}")


def _maxsim_torch(queries, cu_seqlens_q, documents, cu_seqlens_d, query_scales, scales, pairs):
    check_offsets_on_cpu("maxsim", cu_seqlens_q, queries.shape[0])
    check_offsets_on_cpu("maxsim", cu_seqlens_d, documents.shape[0])
    if scales is not None:
        queries, documents = (t.double() * s[:, None] for t, s in ((queries, query_scales), (documents, scales)))
    dtype = torch.promote_types(at_least_fp32(queries).dtype, at_least_fp32(documents).dtype)
    queries, documents = queries.to(dtype), documents.to(dtype)
    is_empty = cu_seqlens_d[1:] == cu_seqlens_d[:-1]
    num_queries = cu_seqlens_q.shape[0] - 1
    if pairs is not None:
        _check_pairs(pairs, num_queries, is_empty.shape[0])
        is_empty = is_empty[pairs[1]]
    if pairs is None and documents.shape[0] * queries.shape[0]:
        scores = _all_torch(queries, cu_seqlens_q, documents, cu_seqlens_d)
    elif pairs is not None and pairs.shape[1] and documents.shape[0] * queries.shape[0]:
        scores = _pairs_torch(queries, cu_seqlens_q, documents, cu_seqlens_d, pairs)
    else:  # keeps the graph: gradients are defined, and zero
        shape = (num_queries, cu_seqlens_d.shape[0] - 1) if pairs is None else pairs.shape[1:]
        scores = queries[:0].sum() + documents[:0].sum() + queries.new_zeros(shape)
    scores = torch.where(is_empty, NO_DOCUMENT, scores)
    return scores if scales is None else scores.float()


# --------------------------------------------------------------------------------------------------------------------
# The op


def _supports_cpu(queries, documents) -> str | None:
    if not queries.is_cpu:
        return f"tensors are on {queries.device.type}"
    if queries.dtype not in (torch.float32, torch.bfloat16):
        return f"queries are {queries.dtype} (has float32 and bfloat16)"
    if documents.dtype not in (torch.float32, torch.bfloat16, torch.int8):
        return f"documents are {documents.dtype} (has float32, bfloat16 and int8)"
    if needs_grad(queries, documents) and queries.dtype is not documents.dtype:
        return f"queries are {queries.dtype} and documents {documents.dtype}, which has no backward"
    return extension_error()


def _supports_triton(queries, documents) -> str | None:
    if documents.dtype is not torch.int8 and documents.dtype is not queries.dtype:
        return f"queries are {queries.dtype} and documents {documents.dtype}"
    return triton_unsupported(queries)


def _probe(x, vector):
    return x, x


register("maxsim", Backend.CPU, _supports_cpu, probe=_probe)
register("maxsim", Backend.TRITON, _supports_triton, probe=_probe)


def in_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of (tokens, width) in whole numbers within +-127, int8, and what one of them stands for, float32.

    No number stands for what is not finite: such a row is zeros with the scale NaN.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1) if wide.shape[0] else wide.new_zeros(0)
    is_finite, scales = largest.isfinite(), largest / 127
    scales = torch.where(scales > 0, scales, 1.0)
    # Clamped: a scale below float32's normal numbers has lost its digits.
    numbers = torch.where(is_finite[:, None], wide / scales[:, None], 0.0).round_().clamp_(-127, 127).to(torch.int8)
    return numbers, torch.where(is_finite, scales, torch.nan)


def _every_pair(cu_seqlens_q, cu_seqlens_d):
    """int64 (2, queries * documents), a query's beside each other."""
    counts = [offsets.shape[0] - 1 for offsets in (cu_seqlens_q, cu_seqlens_d)]
    query, document = (torch.arange(count, device=cu_seqlens_q.device) for count in counts)
    return torch.stack([query.repeat_interleave(counts[1]), document.repeat(counts[0])])


def _longest(cu_seqlens) -> int:
    return int(cu_seqlens.diff().max()) if cu_seqlens.shape[0] > 1 else 0


def _check(queries, documents, scales, pairs) -> None:
    for name, rows in (("queries", queries), ("documents", documents)):
        if rows.dim() != 2:
            raise ValueError(f"maxsim: {name} have shape {tuple(rows.shape)}, expected (tokens, width)")
    if queries.shape[1] != documents.shape[1]:
        raise ValueError(f"maxsim: queries have width {queries.shape[1]}, documents {documents.shape[1]}")
    if not queries.shape[1]:
        raise ValueError("maxsim: vectors have width 0")
    if (documents.dtype is torch.int8) != (scales is not None):
        raise ValueError(f"maxsim: scales go with int8 documents, and with no others; documents are {documents.dtype}")
    if scales is not None and (scales.shape != documents.shape[:1] or scales.dtype is not torch.float32):
        raise ValueError(f"maxsim: scales are {scales.dtype} {tuple(scales.shape)}, expected float32, one a token")
    if pairs is not None and (pairs.dim() != 2 or pairs.shape[0] != 2 or pairs.dtype is not torch.int64):
        raise ValueError(f"maxsim: pairs are {pairs.dtype} {tuple(pairs.shape)}, expected int64 (2, pairs)")


def maxsim(
    queries: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    documents: torch.Tensor,
    cu_seqlens_d: torch.Tensor,
    *,
    pairs: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    length_normalize: bool = False,
    max_seqlen_q: int | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The sum over a query's tokens of the largest product with a document's (Khattab & Zaharia 2020, eq. 3).

    Args:
        queries, documents: (tokens, width), the tokens of all of them one after the other, float32 or bfloat16;
            documents may be int8 with `scales`.
        cu_seqlens_q, cu_seqlens_d: int32 (queries + 1,) and (documents + 1,): where each begins and ends. Tokens that a
            mask leaves out are not there.
        pairs: int64 (2, pairs): which query is scored with which document; None: all with all.
        scales: float32 (document tokens,): a token's vector is its int8 numbers times its scale. The queries' vectors
            are rounded to int8, too, each by its own scale (`in_int8`), and have no gradient.
        length_normalize: divide by the number of the query's tokens (MeanMaxSim).
        max_seqlen_q: an upper bound of the queries' lengths, by which a GPU is not waited for.

    Returns:
        float32 (queries, documents), or (pairs,). A document without tokens scores -1e9, as in sentence-transformers; a
        query without tokens 0. Sums are in float32 or wider. A NaN stays in the scores of its query or document. The
        gradient of a largest product goes to the first token that has it.

    Raises:
        ValueError: widths that differ, scales or pairs of another form; ValueError by torch, RuntimeError by a kernel:
        offsets that do not fit the tokens; RuntimeError by a CPU's kernels: int8 vectors of more than 132,103 numbers,
        whose sums int32 does not hold; IndexError: a pair of what is not there (looked at on a CPU); BackendError:
        the backend that was asked for cannot serve the call.
    """
    _check(queries, documents, scales, pairs)
    check_devices("maxsim", queries=queries, documents=documents, scales=scales, pairs=pairs)
    check_devices("maxsim", queries=queries, cu_seqlens_q=cu_seqlens_q, cu_seqlens_d=cu_seqlens_d)
    cu_seqlens_q, cu_seqlens_d = int32_offsets("maxsim", cu_seqlens_q), int32_offsets("maxsim", cu_seqlens_d)
    chosen, query_scales = select("maxsim", backend, queries, documents), None
    if scales is not None:
        queries, query_scales = in_int8(queries.detach())
    given, all_pairs = (queries, cu_seqlens_q, documents, cu_seqlens_d), pairs is None
    longest = 0
    if chosen is Backend.TRITON:
        pairs = _every_pair(cu_seqlens_q, cu_seqlens_d) if pairs is None else pairs
        longest = _longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
    if chosen is Backend.TORCH:
        scores = _maxsim_torch(*given, query_scales, scales, pairs)
    elif needs_grad(queries, documents):
        scores = Differentiable.apply(_RULE, chosen, longest, *given, pairs)
    elif chosen is Backend.TRITON:
        scores, _ = _FWD_TRITON(*given, query_scales, scales, pairs, longest, False)
    else:
        scores, _ = _FWD(*given, query_scales, scales, pairs, False)
    if all_pairs and chosen is Backend.TRITON:
        scores, pairs = scores.view(cu_seqlens_q.shape[0] - 1, cu_seqlens_d.shape[0] - 1), None
    if not length_normalize:
        return scores
    lengths = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).clamp(min=1)
    return scores / (lengths[:, None] if pairs is None else lengths[pairs[0]])
