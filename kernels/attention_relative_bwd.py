"""Attention with terms by distance, backward: one kernel, which makes dq, or dk and dv; see attention_relative.py.

With ds as in attention_bwd.py, and r the row of i and j,

    dq_i = softmax_scale sum_j ds[i, j] (k_j + key[r]),   dk_j = softmax_scale sum_i ds[i, j] (q_i + query[r])

The second terms are products of ds by distance, which relative_shift.py makes of a tile, with a slab.
relative_tables.py has the gradients of the tables.
"""

import torch
import triton
import triton.language as tl

from .attention import rows_whole, strides
from .attention_bwd import make_records
from .attention_relative import (
    clamped_scores,
    dscores_of,
    kept_of,
    load_bias,
    load_places,
    load_slab,
    load_tile,
    nothing_at,
    one_row,
    records_of,
    relative_arguments,
    slab_of,
    store_places,
    tile_probs,
    unclamped_scores,
    unclamped_steps,
    variant_of,
    walk_blocks,
)
from .blocks import relative_blocks
from .relative_shift import settled, unshift_columns_across, unshift_rows
from .relative_slabs import expand
from .relative_tables import table_gradients


@triton.jit
def _step(
    da, dv, weight, a, a_other, of_a, shift, inverse, delta, b_ptr, b_other_ptr, key_ptr, query_ptr, bias_ptr,
    records_ptr, stride_bt, stride_bo, start, first, begin, end, bound, clamped, index_ptr, philox_ptr, positions_ptr,
    head, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, IS_UNCLAMPED: tl.constexpr,
    OF_KEYS: tl.constexpr, HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_HOLES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One block from `start` on into da (and dv) of the block from `first` on. Not IS_UNCLAMPED: at the distance
    `clamped`, where weight is the sum of ds, and of_a the product of a with the one row."""
    # Offsets of rows are made in every step, not kept: 16 registers.
    nothing = nothing_at(start, end) * 16  # loads stay 16 bytes wide
    stride_bt += nothing
    stride_bo += nothing
    b = load_places(b_ptr, stride_bt, index_ptr, start, end, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    b_other = load_places(b_other_ptr, stride_bo, index_ptr, start, end, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    if OF_KEYS:
        q, dout, k, v, query, key = b, b_other, a, a_other, start, first
    else:
        q, dout, k, v, query, key = a, a_other, b, b_other, first, start
    key_slab, query_slab, bias = b, b, weight
    if IS_UNCLAMPED:
        lowest = query - key - BLOCK
        if HAS_KEY:
            key_slab = load_slab(key_ptr, lowest, bound, 2 * BLOCK, BLOCK_D)
        if HAS_QUERY:
            query_slab = load_slab(query_ptr, lowest, bound, 2 * BLOCK, BLOCK_D)
        if HAS_BIAS:
            bias = load_bias(bias_ptr, lowest, bound, 2 * BLOCK)
        scores = unclamped_scores(q, k, key_slab, query_slab, bias, scale_log2e, HAS_KEY, HAS_QUERY, HAS_BIAS)
    else:
        of_q, of_k = of_a, of_a
        if HAS_KEY and OF_KEYS:
            of_q = one_row(q, key_ptr + clamped * BLOCK_D, BLOCK_D)
        if HAS_QUERY and not OF_KEYS:
            of_k = one_row(k, query_ptr + clamped * BLOCK_D, BLOCK_D)
        scores = clamped_scores(q, k, of_q, of_k, bias_ptr + clamped, scale_log2e, HAS_KEY, HAS_QUERY, HAS_BIAS)
    if OF_KEYS:
        shift, inverse, delta = records_of(records_ptr, index_ptr, start, end, BLOCK, HAS_HOLES)
    probs = tile_probs(
        scores, shift, inverse, query, key, index_ptr, philox_ptr, positions_ptr, begin, end, head, threshold,
        window_left, window_right,
        q.dtype == tl.float32, BLOCK, not OF_KEYS, OF_KEYS, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS, HAS_DROPOUT,
    )  # fmt: skip
    if OF_KEYS:
        kept = kept_of(probs, keep_scale, HAS_DROPOUT).to(dout.dtype)
        dv = tl.dot(tl.trans(kept), dout, dv, input_precision="ieee")
    dprobs = tl.dot(dout, tl.trans(v), input_precision="ieee")
    dscores = dscores_of(probs, dprobs, delta, keep_scale, HAS_DROPOUT)
    if not IS_UNCLAMPED and (HAS_QUERY if OF_KEYS else HAS_KEY):
        weight += tl.sum(dscores, axis=0 if OF_KEYS else 1)
    dscores = dscores.to(q.dtype)
    if OF_KEYS:
        da = tl.dot(tl.trans(dscores), q, da, input_precision="ieee")
        if HAS_QUERY and IS_UNCLAMPED:
            da = tl.dot(unshift_columns_across(dscores), query_slab, da, input_precision="ieee")
    else:
        da = tl.dot(dscores, k, da, input_precision="ieee")
        if HAS_KEY and IS_UNCLAMPED:
            da = tl.dot(unshift_rows(dscores), key_slab, da, input_precision="ieee")
    return settled(da), settled(dv), weight


@triton.jit
def _clamped(
    da, dv, a, a_other, shift, inverse, delta, b_ptr, b_other_ptr, key_ptr, query_ptr, bias_ptr, records_ptr,
    stride_bt, stride_bo, low, inner_low, inner_high, high, first, begin, end, before, behind, index_ptr, philox_ptr,
    positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, HAS_KEY: tl.constexpr,
    HAS_QUERY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_HOLES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """All blocks from low to inner_low, which are at the distance `before`, and from inner_high to high, `behind`, in
    one loop."""
    HAS_ROW: tl.constexpr = HAS_QUERY if OF_KEYS else HAS_KEY
    row_ptr = query_ptr if OF_KEYS else key_ptr
    weight_before, weight_behind = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    of_before, of_behind = weight_before, weight_before
    if HAS_ROW:
        of_before = one_row(a, row_ptr + before * BLOCK_D, BLOCK_D)
        of_behind = one_row(a, row_ptr + behind * BLOCK_D, BLOCK_D)
    for at in range(low, high - (inner_high - inner_low), BLOCK):
        is_before = at < inner_low
        da, dv, weight = _step(
            da, dv, tl.zeros([BLOCK], tl.float32), a, a_other, tl.where(is_before, of_before, of_behind), shift,
            inverse, delta, b_ptr, b_other_ptr, key_ptr, query_ptr, bias_ptr, records_ptr, stride_bt, stride_bo,
            tl.where(is_before, at, at + (inner_high - inner_low)), first, begin, end, 0,
            tl.where(is_before, before, behind), index_ptr, philox_ptr, positions_ptr, head, scale_log2e, threshold,
            keep_scale, window_left, window_right,
            HEAD_DIM, BLOCK_D, BLOCK, False, OF_KEYS, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW,
            HAS_POSITIONS, HAS_DROPOUT,
        )  # fmt: skip
        weight_before += tl.where(is_before, weight, 0.0)
        weight_behind += tl.where(is_before, 0.0, weight)
    if HAS_ROW:
        columns = tl.arange(0, BLOCK_D)
        row = tl.load(row_ptr + before * BLOCK_D + columns, mask=(low < inner_low) & (columns < BLOCK_D), other=0.0)
        da += weight_before[:, None] * row.to(tl.float32)[None, :]
        row = tl.load(row_ptr + behind * BLOCK_D + columns, mask=(inner_high < high) & (columns < BLOCK_D), other=0.0)
        da += weight_behind[:, None] * row.to(tl.float32)[None, :]
    return da, dv


@triton.jit(do_not_specialize=["threshold", "total_tokens", "reach", "window_left", "window_right"])
def _attention_relative_bwd_kernel(
    a_ptr, a_other_ptr, b_ptr, b_other_ptr, records_ptr, da_ptr, dv_ptr, key_slab_ptr, query_slab_ptr, bias_slab_ptr,
    ends_ptr, tiles_ptr, index_ptr, philox_ptr, positions_ptr, stride_at, stride_ah, stride_aot, stride_aoh, stride_bt,
    stride_bh, stride_bot, stride_boh, stride_gt, total_tokens, num_heads, reach, softmax_scale, scale_log2e, threshold,
    keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TILE: tl.constexpr,
    OF_KEYS: tl.constexpr, HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_HOLES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries, a and a_other being q and dout, b and b_other k and v; or (OF_KEYS) dk and dv of one
    block of keys, with a and b changed for each other. The heads of a token lie beside each other."""
    first, last, begin, end = load_tile(tiles_ptr, BLOCK, BLOCK_TILE)
    if first >= last:
        return
    head = tl.program_id(1)
    h = head.to(tl.int64)
    key_ptr, query_ptr = slab_of(key_slab_ptr, h, reach, BLOCK_D), slab_of(query_slab_ptr, h, reach, BLOCK_D)
    bias_ptr = slab_of(bias_slab_ptr, h, reach, 1)
    b_ptr += h * stride_bh
    b_other_ptr += h * stride_boh
    records_ptr += h * total_tokens * 4
    a = load_places(a_ptr + h * stride_ah, stride_at, index_ptr, first, last, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    a_other = load_places(
        a_other_ptr + h * stride_aoh, stride_aot, index_ptr, first, last, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES
    )  # fmt: skip
    shift = tl.zeros([BLOCK], tl.float32)
    inverse, delta = shift, shift
    before, after = window_left, window_right
    if OF_KEYS:  # a key at j is seen by the queries from j - right to j + left
        before, after = window_right, window_left
    else:
        shift, inverse, delta = records_of(records_ptr, index_ptr, first, last, BLOCK, HAS_HOLES)
    da = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = da
    low, high = walk_blocks(begin, end, first, before, after, BLOCK, HAS_WINDOW, HAS_HOLES)
    inner_low, inner_high, before, behind = unclamped_steps(low, high, first, ends_ptr, BLOCK, OF_KEYS)
    bound = tl.maximum(1, tl.minimum(end - begin, reach))
    # What is unclamped is last: it has the most in registers.
    if (low < inner_low) | (inner_high < high):
        da, dv = _clamped(
            da, dv, a, a_other, shift, inverse, delta, b_ptr, b_other_ptr, key_ptr, query_ptr, bias_ptr, records_ptr,
            stride_bt, stride_bot, low, inner_low, inner_high, high, first, begin, end, before, behind, index_ptr,
            philox_ptr, positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
            HEAD_DIM, BLOCK_D, BLOCK, OF_KEYS, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS,
            HAS_DROPOUT,
        )  # fmt: skip
    for start in range(inner_low, inner_high, BLOCK):
        da, dv, _ = _step(
            da, dv, shift, a, a_other, shift, shift, inverse, delta, b_ptr, b_other_ptr, key_ptr, query_ptr, bias_ptr,
            records_ptr, stride_bt, stride_bot, start, first, begin, end, bound, 0, index_ptr, philox_ptr,
            positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
            HEAD_DIM, BLOCK_D, BLOCK, True, OF_KEYS, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW,
            HAS_POSITIONS, HAS_DROPOUT,
        )  # fmt: skip
    store_places(da_ptr + h * HEAD_DIM, stride_gt, index_ptr, first, last, da * softmax_scale, HEAD_DIM, HAS_HOLES)
    if OF_KEYS:
        store_places(dv_ptr + h * HEAD_DIM, stride_gt, index_ptr, first, last, dv, HEAD_DIM, HAS_HOLES)


def attention_relative_bwd(
    dout, q, k, v, out, softmax_stats, rows, key, query, bias, tiles, offsets, index, philox, window_positions, tile,
    softmax_scale, dropout_p, window_size, needs_tables,
):  # fmt: skip
    """dout as out -> dqkv (total_tokens, 3 num_heads, head_dim), and the gradients of key, query and bias, empty where
    needs_tables says that nobody wants them; the schema in ops/attention/relative_triton.py."""
    dout, q, k, v = (rows_whole(t) for t in (dout, q, k, v))
    total_tokens, num_heads, head_dim = q.shape
    new = q.new_empty if index is None else q.new_zeros
    dqkv = new(total_tokens, 3 * num_heads, head_dim)
    needed = [t if wanted else None for t, wanted in zip((key, query, bias), needs_tables, strict=True)]
    if q.numel() == 0:
        return dqkv, *(q.new_empty(0) if t is None else t.new_zeros(t.shape) for t in needed)
    rows = rows.contiguous()
    slabs = expand(rows, key, query, bias, head_dim)
    options = (philox, window_positions, softmax_scale, dropout_p, window_size)
    with torch.cuda.device_of(q):
        records = make_records(dout, out, softmax_stats, 1.0)
        dq, dk, dv = dqkv.split(num_heads, 1)
        of_queries = {"a_ptr": q, "a_other_ptr": dout, "b_ptr": k, "b_other_ptr": v, "da_ptr": dq}
        of_queries |= strides(a=q, ao=dout, b=k, bo=v)
        of_keys = {"a_ptr": k, "a_other_ptr": v, "b_ptr": q, "b_other_ptr": dout, "da_ptr": dk}
        of_keys |= strides(a=k, ao=v, b=q, bo=dout)
        for which, operands in (("dkdv", of_keys), ("dq", of_queries)):
            blocks = relative_blocks(which, q, tile, variant_of(slabs, index, window_size))
            grid, shared = relative_arguments(q, tiles, tile, *options, blocks, slabs, index)
            _attention_relative_bwd_kernel[grid](
                **operands, records_ptr=records, dv_ptr=dv, stride_gt=dqkv.stride(0), softmax_scale=softmax_scale,
                OF_KEYS=which == "dkdv", **shared,
            )  # fmt: skip
        tables = table_gradients(dout, q, k, v, records, rows, needed, offsets, tile, slabs, index, *options)
    return dqkv, *tables
