"""Gradients of the tables of relative terms, without adding to memory that another program writes.

    dkey[r] = softmax_scale sum of ds[i, j] q_i,   dquery[r] = softmax_scale sum of ds[i, j] k_j,   dbias[r] = sum of ds

over all i and j whose row is r. A program owns a head and a diagonal: all square tiles of scores whose corners are at
one distance, in all sequences of its group, which it goes over in order. Each tile is made once: its distances below
the diagonal's (LO) and from it on (HI) are sums of their own. A second kernel folds them: a program owns 16 rows of the
tables and adds up what all diagonals and groups have of them, in order. The same bits in every run.
"""

import triton
import triton.language as tl

from .attention import strides
from .attention_relative import (
    clamped_scores,
    dscores_of,
    load_bias,
    load_places,
    load_slab,
    nothing_at,
    one_row,
    records_of,
    relative_arguments,
    slab_of,
    tile_probs,
    unclamped_scores,
    variant_of,
)
from .blocks import relative_blocks
from .relative_shift import settled, unshift_columns, unshift_rows_across
from .sizes import cdiv


@triton.jit
def _load_span(offsets_ptr, sequence, num_places):
    """Of a sequence, within the batch whatever the offsets."""
    begin, end = tl.load(offsets_ptr + sequence), tl.load(offsets_ptr + sequence + 1)
    return tl.maximum(begin, 0), tl.minimum(end, num_places)


@triton.jit
def _tile(
    q_ptr, k_ptr, v_ptr, dout_ptr, records_ptr, key_slab, query_slab, bias, key_ptr, query_ptr,
    bias_ptr, stride_qt, stride_kt, stride_vt, stride_dt, query, key, begin, end, index_ptr, philox_ptr, positions_ptr,
    head, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, IS_UNCLAMPED: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_HOLES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """q, k and ds of the tile of the queries and the keys from these places on. Not IS_UNCLAMPED: all at the distance
    of the pointers of the slabs."""
    nothing = nothing_at(query, end) * 16
    q = load_places(q_ptr, stride_qt + nothing, index_ptr, query, end, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    k = load_places(k_ptr, stride_kt + nothing, index_ptr, key, end, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    if IS_UNCLAMPED:
        scores = unclamped_scores(q, k, key_slab, query_slab, bias, scale_log2e, HAS_KEY, HAS_QUERY, HAS_BIAS)
    else:
        of_key = tl.zeros([BLOCK], tl.float32)
        of_query = of_key
        if HAS_KEY:
            of_key = one_row(q, key_ptr, BLOCK_D)
        if HAS_QUERY:
            of_query = one_row(k, query_ptr, BLOCK_D)
        scores = clamped_scores(q, k, of_key, of_query, bias_ptr, scale_log2e, HAS_KEY, HAS_QUERY, HAS_BIAS)
    dout = load_places(dout_ptr, stride_dt + nothing, index_ptr, query, end, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    v = load_places(v_ptr, stride_vt + nothing, index_ptr, key, end, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    shift, inverse, delta = records_of(records_ptr, index_ptr, query, end, BLOCK, HAS_HOLES)
    probs = tile_probs(
        scores, shift, inverse, query, key, index_ptr, philox_ptr, positions_ptr, begin, end, head, threshold,
        window_left, window_right,
        q.dtype == tl.float32, BLOCK, False, False, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS, HAS_DROPOUT,
    )  # fmt: skip
    dprobs = tl.dot(dout, tl.trans(v), input_precision="ieee")
    dscores = dscores_of(probs, dprobs, delta, keep_scale, HAS_DROPOUT)
    return q, k, dscores


@triton.jit(
    do_not_specialize=["threshold", "total_tokens", "num_places", "batch_size", "reach", "window_left", "window_right"]
)
def _relative_sums_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, records_ptr, dkey_ptr, dquery_ptr, dbias_ptr, key_slab_ptr, query_slab_ptr,
    bias_slab_ptr, ends_ptr, offsets_ptr, index_ptr, philox_ptr, positions_ptr, stride_qt, stride_qh, stride_kt,
    stride_kh, stride_vt, stride_vh, stride_dt, stride_dh, total_tokens, num_places, num_heads, batch_size, reach,
    scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HAS_KEY: tl.constexpr,
    HAS_QUERY: tl.constexpr, HAS_BIAS: tl.constexpr, NEEDS_KEY: tl.constexpr, NEEDS_QUERY: tl.constexpr,
    NEEDS_BIAS: tl.constexpr, HAS_HOLES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Sums of ds q, ds k and ds: fp32 (groups, num_heads, diagonals, 2 BLOCK, BLOCK_D), of a bias without BLOCK_D.

    Diagonals with the most tiles come first. One whose distances all have one row has their sum at its own.
    """
    pid, num_diagonals = tl.program_id(0), tl.num_programs(0)
    diagonal = tl.where(pid % 2 == 1, (pid + 1) // 2, -(pid // 2))
    distance = diagonal * BLOCK
    head, group, num_groups = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    h = head.to(tl.int64)
    q_ptr += h * stride_qh
    k_ptr += h * stride_kh
    v_ptr += h * stride_vh
    dout_ptr += h * stride_dh
    records_ptr += h * total_tokens * 4
    key_ptr, query_ptr = slab_of(key_slab_ptr, h, reach, BLOCK_D), slab_of(query_slab_ptr, h, reach, BLOCK_D)
    bias_ptr = slab_of(bias_slab_ptr, h, reach, 1)
    lower, upper = tl.load(ends_ptr), tl.load(ends_ptr + 1)
    is_high, is_low = distance - BLOCK + 1 >= upper, distance + BLOCK - 1 <= lower
    clamped = tl.where(is_high, upper, lower)
    sequence, stop = group * batch_size // num_groups, (group + 1) * batch_size // num_groups
    if HAS_WINDOW and not HAS_HOLES:  # a diagonal that no window reaches
        stop = tl.where((distance - BLOCK < window_left) & (distance + BLOCK > -window_right), stop, sequence)
    clamped_stop = tl.where(is_high | is_low, stop, sequence)
    unclamped_stop = tl.where(is_high | is_low, sequence, stop)

    dkey_lo = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dkey_hi, dquery_lo, dquery_hi = dkey_lo, dkey_lo, dkey_lo
    dbias_lo = tl.zeros([BLOCK], tl.float32)
    dbias_hi = dbias_lo
    is_corner = tl.arange(0, BLOCK) == 0
    for s in range(sequence, clamped_stop):
        begin, end = _load_span(offsets_ptr, s, num_places)
        for query in range(begin + tl.maximum(distance, 0), end + tl.minimum(distance, 0), BLOCK):
            q, k, dscores = _tile(
                q_ptr, k_ptr, v_ptr, dout_ptr, records_ptr, dkey_lo, dkey_lo, dbias_lo, key_ptr + clamped * BLOCK_D,
                query_ptr + clamped * BLOCK_D, bias_ptr + clamped, stride_qt, stride_kt, stride_vt, stride_dt, query,
                query - distance, begin, end, index_ptr, philox_ptr, positions_ptr, head, scale_log2e, threshold,
                keep_scale, window_left, window_right,
                HEAD_DIM, BLOCK_D, BLOCK, False, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS,
                HAS_DROPOUT,
            )  # fmt: skip
            of_queries = tl.sum(dscores, axis=1)
            if NEEDS_BIAS:
                dbias_hi += tl.where(is_corner, tl.sum(of_queries, axis=0), 0.0)
            if NEEDS_KEY:
                total = tl.sum(of_queries[:, None] * q.to(tl.float32), axis=0)
                dkey_hi += tl.where(is_corner[:, None], total[None, :], 0.0)
            if NEEDS_QUERY:
                total = tl.sum(tl.sum(dscores, axis=0)[:, None] * k.to(tl.float32), axis=0)
                dquery_hi += tl.where(is_corner[:, None], total[None, :], 0.0)
    key_slab, bias = tl.zeros([2 * BLOCK, BLOCK_D], q_ptr.dtype.element_ty), tl.zeros([2 * BLOCK], tl.float32)
    query_slab = key_slab
    if HAS_KEY:
        key_slab = load_slab(key_ptr, distance - BLOCK, reach, 2 * BLOCK, BLOCK_D)
    if HAS_QUERY:
        query_slab = load_slab(query_ptr, distance - BLOCK, reach, 2 * BLOCK, BLOCK_D)
    if HAS_BIAS:
        bias = load_bias(bias_ptr, distance - BLOCK, reach, 2 * BLOCK)
    for s in range(sequence, unclamped_stop):
        begin, end = _load_span(offsets_ptr, s, num_places)
        for query in range(begin + tl.maximum(distance, 0), end + tl.minimum(distance, 0), BLOCK):
            q, k, dscores = _tile(
                q_ptr, k_ptr, v_ptr, dout_ptr, records_ptr, key_slab, query_slab, bias, key_ptr, query_ptr, bias_ptr,
                stride_qt, stride_kt, stride_vt, stride_dt, query, query - distance, begin, end,
                index_ptr, philox_ptr, positions_ptr, head, scale_log2e, threshold, keep_scale, window_left,
                window_right,
                HEAD_DIM, BLOCK_D, BLOCK, True, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS,
                HAS_DROPOUT,
            )  # fmt: skip
            if NEEDS_BIAS:
                lo, hi = unshift_rows_across(dscores)
                dbias_lo += tl.sum(lo, axis=1)
                dbias_hi += tl.sum(hi, axis=1)
            dscores = dscores.to(q.dtype)
            if NEEDS_KEY:
                lo, hi = unshift_rows_across(dscores)
                dkey_lo = settled(tl.dot(lo, q, dkey_lo, input_precision="ieee"))
                dkey_hi = settled(tl.dot(hi, q, dkey_hi, input_precision="ieee"))
            if NEEDS_QUERY:
                lo, hi = unshift_columns(dscores)
                dquery_lo = settled(tl.dot(lo, k, dquery_lo, input_precision="ieee"))
                dquery_hi = settled(tl.dot(hi, k, dquery_hi, input_precision="ieee"))
    at = (group.to(tl.int64) * num_heads + head) * num_diagonals + diagonal + num_diagonals // 2
    at = at * (2 * BLOCK) + tl.arange(0, BLOCK)
    at_rows = at[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    if NEEDS_KEY:
        tl.store(dkey_ptr + at_rows, dkey_lo)
        tl.store(dkey_ptr + BLOCK * BLOCK_D + at_rows, dkey_hi)
    if NEEDS_QUERY:
        tl.store(dquery_ptr + at_rows, dquery_lo)
        tl.store(dquery_ptr + BLOCK * BLOCK_D + at_rows, dquery_hi)
    if NEEDS_BIAS:
        tl.store(dbias_ptr + at, dbias_lo)
        tl.store(dbias_ptr + BLOCK + at, dbias_hi)


@triton.jit(do_not_specialize=["num_rows", "reach", "num_diagonals", "num_groups"])
def _relative_fold_kernel(
    sums_ptr, rows_ptr, table_ptr, scale, num_rows, num_heads, reach, num_diagonals, num_groups,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, IS_BIAS: tl.constexpr,
):  # fmt: skip
    """The gradient of BLOCK_R rows of a table, (num_rows, num_heads, HEAD_DIM), from all sums of their distances."""
    mine = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    head = tl.program_id(1)
    total = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if IS_BIAS:
        total = tl.zeros([BLOCK_R], tl.float32)
    offsets = tl.arange(0, 2 * BLOCK)
    for i in range(0, num_diagonals):
        distance = (i - num_diagonals // 2) * BLOCK + offsets - BLOCK
        inside = (distance < reach) & (distance > -reach)
        row = tl.load(rows_ptr + reach - 1 + distance, mask=inside, other=-1)
        is_mine = mine[:, None] == row[None, :]  # [BLOCK_R, 2 BLOCK]
        if tl.max(tl.max(is_mine.to(tl.int32), axis=1), axis=0) > 0:
            for group in range(0, num_groups):
                at = ((tl.cast(group, tl.int64) * num_heads + head) * num_diagonals + i) * 2 * BLOCK
                if IS_BIAS:
                    sums = tl.load(sums_ptr + at + offsets)
                    total += tl.sum(tl.where(is_mine, sums[None, :], 0.0), axis=1)
                else:
                    ptr = sums_ptr + at * BLOCK_D
                    sums = tl.load(ptr + offsets[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :])
                    total = tl.dot(is_mine.to(tl.float32), sums, total, input_precision="ieee")
    at = (mine.to(tl.int64) * num_heads + head) * HEAD_DIM
    if IS_BIAS:
        tl.store(table_ptr + at, (total * scale).to(table_ptr.dtype.element_ty), mask=mine < num_rows)
    else:
        columns = tl.arange(0, BLOCK_D)
        tl.store(
            table_ptr + at[:, None] + columns[None, :], (total * scale).to(table_ptr.dtype.element_ty),
            mask=(mine < num_rows)[:, None] & (columns < HEAD_DIM)[None, :],
        )  # fmt: skip


def table_gradients(
    dout, q, k, v, records, rows, needed, offsets, tile, slabs, index, philox, positions, softmax_scale, dropout_p,
    window_size,
):  # fmt: skip
    """Of `needed`, the tables of key, query and bias; for None an empty tensor."""
    gradients = [q.new_empty(0) if t is None else t.new_empty(t.shape) for t in needed]
    if not any(t is not None for t in needed):
        return gradients
    blocks = relative_blocks("tables", q, tile, variant_of(slabs, index, window_size))
    _, shared = relative_arguments(
        q, offsets, tile, philox, positions, softmax_scale, dropout_p, window_size, blocks, slabs, index
    )  # fmt: skip
    del shared["tiles_ptr"], shared["BLOCK_TILE"]
    block, block_d, batch_size = blocks.tile, shared["BLOCK_D"], offsets.shape[0] - 1
    num_places, (num_heads, head_dim) = len(q if index is None else index), q.shape[1:]
    num_diagonals = 2 * cdiv(slabs.reach, block) - 1
    # Groups of sequences: enough programs for a GPU, by sizes alone.
    num_groups = max(1, min(batch_size, 512 // (num_heads * num_diagonals)))
    shape = (num_groups, num_heads, num_diagonals, 2 * block)
    new = records.new_empty
    sums = [None if t is None else new(*shape, *((block_d,) if t.dim() == 3 else ())) for t in needed]
    operands = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "dout_ptr": dout, "records_ptr": records, "offsets_ptr": offsets}
    operands |= strides(q=q, k=k, v=v, d=dout)
    grid = (num_diagonals, num_heads, num_groups)
    for wanted in blocks.launches:
        names = [name for name, t in zip(("key", "query", "bias"), needed, strict=True) if t is not None]
        flags = {f"NEEDS_{name.upper()}": name in wanted and name in names for name in ("key", "query", "bias")}
        if any(flags.values()):
            dkey, dquery, dbias = (records if t is None else t for t in sums)
            _relative_sums_kernel[grid](
                dkey_ptr=dkey, dquery_ptr=dquery, dbias_ptr=dbias, batch_size=batch_size, num_places=num_places,
                **operands, **flags, **shared,
            )  # fmt: skip
    for table, gradient, parts in zip(needed, gradients, sums, strict=True):
        if table is not None:
            is_bias = table.dim() == 2
            _relative_fold_kernel[(cdiv(table.shape[0], 16), num_heads)](
                parts, rows, gradient, 1.0 if is_bias else softmax_scale, table.shape[0], num_heads, slabs.reach,
                num_diagonals, num_groups, HEAD_DIM=1 if is_bias else head_dim,
                BLOCK_D=1 if is_bias else block_d, BLOCK=block, BLOCK_R=16, IS_BIAS=is_bias,
            )  # fmt: skip
    return gradients
