"""Late interaction (Khattab & Zaharia 2020, "ColBERT", eq. 3): scores of pairs of a query and a document.

    score = sum over the query's tokens i of max over the document's tokens j of q_i d_j

A program takes one pair, and of its query BLOCK_Q tokens after the other; it walks over the document in blocks of
BLOCK_D tokens, and keeps of each token of the query the largest product and where it was: nothing of tokens x tokens is
written. Backward goes by these winners. A program makes the gradient of one token of a query, over all pairs of that
query, or of BLOCK_D tokens of a document, over all pairs of that one, which pair by pair are a product of the winners'
places with the query: no two programs add to the same memory, and every run gives the same bits.

Legend: W the vectors' width, which is taken BLOCK_W numbers at a time.
"""

import torch
import triton
import triton.language as tl

from .sizes import next_power_of_2

_NO_DOCUMENT = tl.constexpr(-1e9)  # the score of a document without tokens: ops/maxsim.py
BLOCK_Q, BLOCK_D, BLOCK_W = 32, 64, 64  # the last at most: a narrower vector is one block
NUM_STAGES = 2  # with 3 the registers of bfloat16 spill


@triton.jit
def _span(cu_seqlens_ptr, i, count):
    """A sequence's first token and end, within the tokens that there are."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + i), 0), count)
    return begin, tl.maximum(tl.minimum(tl.load(cu_seqlens_ptr + i + 1), count), begin)


@triton.jit
def _products(
    queries_ptr, documents_ptr, first_query, end_query, first, end, width,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """[BLOCK_Q, BLOCK_D] of the tokens from first_query and from first on."""
    rows, columns = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_D)[:, None]
    inner = tl.arange(0, BLOCK_W)[None, :]
    queries_ptr += tl.cast(first_query, tl.int64) * width
    documents_ptr += tl.cast(first, tl.int64) * width
    products = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(0, width, BLOCK_W):
        inside = start + inner < width
        q = tl.load(queries_ptr + rows * width + start + inner, mask=inside & (rows < end_query - first_query), other=0)
        d = tl.load(documents_ptr + columns * width + start + inner, mask=inside & (columns < end - first), other=0)
        if q.dtype == tl.int8:  # whole numbers, which float16 holds, and float32 their sums
            q, d = q.to(tl.float16), d.to(tl.float16)
        products = tl.dot(q, tl.trans(d), products, input_precision="ieee")
    return products


@triton.jit
def _first_largest(products, first, end, BLOCK_D: tl.constexpr):
    """Of each row the largest, a NaN being larger than any number, and the column that has it first."""
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = column < end - first
    is_nan = (products != products) & inside
    largest = tl.max(tl.where(inside & (products == products), products, float("-inf")), axis=1)
    has_nan = tl.max(is_nan.to(tl.int32), axis=1) > 0
    has_it = tl.where(has_nan[:, None], is_nan, (products == largest[:, None]) & inside)
    where = tl.min(tl.where(has_it, first + column, 2147483647), axis=1)
    return tl.where(has_nan, float("nan"), largest), where


@triton.jit(do_not_specialize=["num_query_tokens", "num_document_tokens", "longest"])
def _maxsim_fwd_kernel(
    queries_ptr, cu_seqlens_q_ptr, documents_ptr, cu_seqlens_d_ptr, query_scales_ptr, scales_ptr, pairs_ptr, scores_ptr,
    winners_ptr, num_query_tokens, num_document_tokens, longest, num_queries, num_documents, width,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr, IS_INT8: tl.constexpr,
    RETURN_WINNERS: tl.constexpr,
):  # fmt: skip
    pair, num_pairs = tl.program_id(0), tl.num_programs(0)
    query, document = tl.load(pairs_ptr + pair), tl.load(pairs_ptr + num_pairs + pair)
    is_there = (query >= 0) & (query < num_queries) & (document >= 0) & (document < num_documents)
    query, document = tl.where(is_there, query, 0), tl.where(is_there, document, 0)
    first_query, end_query = _span(cu_seqlens_q_ptr, query, num_query_tokens)
    end_query = tl.minimum(end_query, first_query + longest)
    first, end = _span(cu_seqlens_d_ptr, document, num_document_tokens)
    score = 0.0
    for at in range(first_query, end_query, BLOCK_Q):
        tokens = at + tl.arange(0, BLOCK_Q)
        best = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        winner = tl.full([BLOCK_Q], -1, tl.int32)
        for start in range(first, end, BLOCK_D):
            products = _products(
                queries_ptr, documents_ptr, at, end_query, start, end, width, BLOCK_Q, BLOCK_D, BLOCK_W
            )  # fmt: skip
            if IS_INT8:
                columns = start + tl.arange(0, BLOCK_D)
                products *= tl.load(scales_ptr + columns, mask=columns < end, other=0.0)[None, :]
            largest, where = _first_largest(products, start, end, BLOCK_D)
            takes = (largest > best) | ((largest != largest) & (best == best)) | (winner < 0)
            best = tl.where(takes, largest, best)
            winner = tl.where(takes, where, winner)
        if IS_INT8:
            best *= tl.load(query_scales_ptr + tokens, mask=tokens < end_query, other=0.0)
        score += tl.sum(tl.where(tokens < end_query, best, 0.0), axis=0)
        if RETURN_WINNERS:
            to = winners_ptr + tl.cast(pair, tl.int64) * longest + tokens - first_query
            tl.store(to, winner, mask=tokens < end_query)
    score = tl.where(first == end, _NO_DOCUMENT, score)
    tl.store(scores_ptr + pair, tl.where(is_there, score, float("nan")))


@triton.jit(do_not_specialize=["num_query_tokens", "longest"])
def _maxsim_dqueries_kernel(
    dscores_ptr, documents_ptr, winners_ptr, order_ptr, offsets_ptr, cu_seqlens_q_ptr, query_ptr, dqueries_ptr,
    num_query_tokens, longest, width, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Of one token of a query: the winners of all its query's pairs, which `order` has query by query."""
    token = tl.program_id(0)
    query = tl.load(query_ptr + token)  # -1: no query's
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    total = tl.zeros([BLOCK_W], tl.float32)
    if query >= 0:
        first, _ = _span(cu_seqlens_q_ptr, query, num_query_tokens)
        place = token - first
        for at in range(tl.load(offsets_ptr + query), tl.load(offsets_ptr + query + 1)):
            pair = tl.load(order_ptr + at)
            winner = tl.load(winners_ptr + pair * longest + place, mask=place < longest, other=-1)
            row = documents_ptr + tl.cast(tl.maximum(winner, 0), tl.int64) * width + columns
            vector = tl.load(row, mask=(columns < width) & (winner >= 0), other=0.0).to(tl.float32)
            total += vector * tl.load(dscores_ptr + pair)
    to = dqueries_ptr + tl.cast(token, tl.int64) * width + columns
    tl.store(to, total.to(dqueries_ptr.dtype.element_ty), mask=columns < width)


@triton.jit(do_not_specialize=["num_query_tokens", "num_document_tokens", "longest", "num_pairs"])
def _maxsim_ddocuments_kernel(
    dscores_ptr, queries_ptr, winners_ptr, pairs_ptr, order_ptr, offsets_ptr, cu_seqlens_q_ptr, cu_seqlens_d_ptr,
    ddocuments_ptr, num_query_tokens, num_document_tokens, longest, num_pairs, num_queries, width,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Of one document: the tokens of the queries of all its pairs, at the rows that they have won."""
    document = tl.program_id(0)
    first, end = _span(cu_seqlens_d_ptr, document, num_document_tokens)
    columns = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    for start in range(first, end, BLOCK_D):
        rows = start + tl.arange(0, BLOCK_D)
        total = tl.zeros([BLOCK_D, BLOCK_W], tl.float32)
        for at in range(tl.load(offsets_ptr + document), tl.load(offsets_ptr + document + 1)):
            pair = tl.load(order_ptr + at)
            query = tl.load(pairs_ptr + pair)
            dscore = tl.load(dscores_ptr + pair)
            first_query, end_query = _span(cu_seqlens_q_ptr, tl.minimum(query, num_queries - 1), num_query_tokens)
            end_query = tl.minimum(end_query, first_query + longest)
            for q in range(first_query, end_query, BLOCK_Q):
                tokens = q + tl.arange(0, BLOCK_Q)
                inside = tokens < end_query
                winner = tl.load(winners_ptr + pair * longest + tokens - first_query, mask=inside, other=-1)
                weight = tl.where(winner[None, :] == rows[:, None], dscore, 0.0)  # [BLOCK_D, BLOCK_Q]
                vectors = tl.load(
                    queries_ptr + tokens.to(tl.int64)[:, None] * width + columns[None, :],
                    mask=inside[:, None] & (columns < width)[None, :], other=0.0,
                )  # fmt: skip
                # A NaN in a vector that has won nothing here must not come here.
                hits = tl.max((winner[None, :] == rows[:, None]).to(tl.int32), axis=0) > 0
                vectors = tl.where(hits[:, None], vectors.to(tl.float32), 0.0)
                total = tl.dot(weight, vectors, total, input_precision="ieee")
        to = ddocuments_ptr + rows.to(tl.int64)[:, None] * width + columns[None, :]
        inside = (rows < end)[:, None] & (columns < width)[None, :]
        tl.store(to, total.to(ddocuments_ptr.dtype.element_ty), mask=inside)


def _block(width: int) -> int:
    return max(16, min(BLOCK_W, next_power_of_2(width)))


def maxsim_fwd(queries, cu_seqlens_q, documents, cu_seqlens_d, query_scales, scales, pairs, longest, return_winners):
    """-> scores (pairs,), winners (pairs, longest); the schema in ops/maxsim.py."""
    num_pairs, width = pairs.shape[1], queries.shape[1]
    scores = torch.empty(num_pairs, dtype=torch.float32, device=queries.device)
    winners = torch.empty(num_pairs if return_winners else 0, longest, dtype=torch.int32, device=queries.device)
    if not num_pairs:
        return scores, winners
    with torch.cuda.device_of(queries):
        _maxsim_fwd_kernel[(num_pairs,)](
            queries.contiguous(), cu_seqlens_q.contiguous(), documents.contiguous(), cu_seqlens_d.contiguous(),
            query_scales, scales, pairs.contiguous(), scores, winners, queries.shape[0], documents.shape[0], longest,
            cu_seqlens_q.shape[0] - 1, cu_seqlens_d.shape[0] - 1, width, BLOCK_Q=BLOCK_Q, BLOCK_D=BLOCK_D,
            BLOCK_W=_block(width), IS_INT8=scales is not None, RETURN_WINNERS=return_winners,
            num_stages=NUM_STAGES,
        )  # fmt: skip
    return scores, winners


def maxsim_bwd(
    dscores, queries, cu_seqlens_q, documents, cu_seqlens_d, pairs, winners, longest, needs_dqueries, needs_ddocuments
):  # fmt: skip
    """-> dqueries, ddocuments as queries and documents, without rows where they are not wanted."""
    width, num_queries, num_documents = queries.shape[1], cu_seqlens_q.shape[0] - 1, cu_seqlens_d.shape[0] - 1
    dqueries = queries.new_zeros(queries.shape[0] if needs_dqueries else 0, width)
    ddocuments = documents.new_zeros(documents.shape[0] if needs_ddocuments else 0, width)
    if not pairs.shape[1] or not longest:
        return dqueries, ddocuments
    dscores, queries, documents, pairs = (t.contiguous() for t in (dscores, queries, documents, pairs))
    cu_seqlens_q, cu_seqlens_d = cu_seqlens_q.contiguous(), cu_seqlens_d.contiguous()
    block_w, tokens = _block(width), (queries.shape[0], documents.shape[0])
    with torch.cuda.device_of(queries):
        if needs_dqueries and queries.shape[0]:
            order, offsets = _by_owner(pairs[0], num_queries)
            token = torch.arange(queries.shape[0], device=queries.device, dtype=cu_seqlens_q.dtype)
            query = torch.searchsorted(cu_seqlens_q, token, right=True) - 1
            query = torch.where(token < cu_seqlens_q[-1], query, -1)
            _maxsim_dqueries_kernel[(queries.shape[0], -(-width // block_w))](
                dscores, documents, winners, order, offsets, cu_seqlens_q, query, dqueries, tokens[0], longest, width,
                BLOCK_W=block_w,
            )  # fmt: skip
        if needs_ddocuments and num_documents:
            order, offsets = _by_owner(pairs[1], num_documents)
            _maxsim_ddocuments_kernel[(num_documents, -(-width // block_w))](
                dscores, queries, winners, pairs, order, offsets, cu_seqlens_q, cu_seqlens_d, ddocuments, *tokens,
                longest, pairs.shape[1], num_queries, width, BLOCK_Q=BLOCK_Q, BLOCK_D=BLOCK_Q, BLOCK_W=block_w,
            )  # fmt: skip
    return dqueries, ddocuments


def _by_owner(owner: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs, owner by owner in their order, and where each owner's begin, (count + 1,): int64."""
    order = torch.argsort(owner, stable=True)
    numbers = torch.arange(count + 1, device=owner.device)
    return order, torch.searchsorted(owner[order], numbers)
