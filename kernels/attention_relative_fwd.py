"""Attention with terms by distance, forward: the online softmax of attention_fwd.py; see attention_relative.py."""

import torch
import triton
import triton.language as tl

from .attention import in_window, rows_whole, strides
from .attention_relative import (
    clamped_scores,
    dropout_signs,
    is_token,
    kept_of,
    load_bias,
    load_places,
    load_slab,
    load_tile,
    nothing_at,
    one_row,
    relative_arguments,
    scaled,
    slab_of,
    store_places,
    tokens_at,
    unclamped_steps,
    variant_of,
    walk_blocks,
    window_keys,
)
from .blocks import relative_blocks
from .relative_shift import beside, settled, shift_columns, shift_rows, shift_vector
from .relative_slabs import expand


@triton.jit
def _fwd_step(
    acc, row_max, row_sum, hi_product, q, of_key, k_ptr, v_ptr, key_ptr, query_ptr, bias_ptr, stride_kt, stride_vt,
    rows, places, start, first, begin, end, bound, clamped, index_ptr, philox_ptr, positions_ptr, head, scale_log2e,
    threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, IS_UNCLAMPED: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_HOLES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One block of keys into the online softmax. Not IS_UNCLAMPED: all at the distance `clamped`, of_key being q
    key[clamped]."""
    k = load_places(k_ptr, stride_kt, index_ptr, start, end, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    if IS_UNCLAMPED:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK, BLOCK]
        distance = first - start
        if HAS_KEY:
            lo = load_slab(key_ptr, distance - BLOCK, bound, BLOCK, BLOCK_D)
            lo_product = tl.dot(q, tl.trans(lo), input_precision="ieee")
            scores += shift_rows(beside(lo_product, hi_product))
            hi_product = lo_product  # the next block's distances are BLOCK less
        if HAS_QUERY:
            slab = load_slab(query_ptr, distance - BLOCK, bound, 2 * BLOCK, BLOCK_D)
            scores += shift_columns(tl.dot(slab, tl.trans(k), input_precision="ieee"))
        shift = 0.0
        if HAS_BIAS:
            shift = shift_vector(load_bias(bias_ptr, distance - BLOCK, bound, 2 * BLOCK), BLOCK)
        scores = scaled(scores, scale_log2e, shift)
    else:
        of_query = row_sum
        if HAS_QUERY:
            of_query = one_row(k, query_ptr + clamped * BLOCK_D, BLOCK_D)
        scores = clamped_scores(q, k, of_key, of_query, bias_ptr + clamped, scale_log2e, HAS_KEY, HAS_QUERY, HAS_BIAS)
    seen = is_token(index_ptr, start, end, BLOCK, HAS_HOLES)[None, :]
    if HAS_WINDOW:
        keys = window_keys(positions_ptr, index_ptr, start, end, BLOCK, HAS_POSITIONS, HAS_HOLES)
        seen = seen & in_window(places[:, None], keys[None, :], window_left, window_right)
    scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    finite = new_max
    if HAS_WINDOW or HAS_HOLES:  # a query that has seen no key yet
        finite = tl.where(new_max == float("-inf"), 0.0, new_max)
    probs = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(row_max - finite)
    row_sum = row_sum * shrink + tl.sum(probs, axis=1)
    if HAS_DROPOUT:
        signs = dropout_signs(
            philox_ptr, first, start - begin, head, nothing_at(start, end), threshold, BLOCK
        )  # fmt: skip
        probs = kept_of(probs * signs, keep_scale, True)
    v = load_places(v_ptr, stride_vt, index_ptr, start, end, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return settled(acc), new_max, row_sum, hi_product


@triton.jit
def _fwd_clamped(
    acc, row_max, row_sum, q, k_ptr, v_ptr, key_ptr, query_ptr, bias_ptr, stride_kt, stride_vt, rows, places, low, high,
    first, begin, end, clamped, index_ptr, philox_ptr, positions_ptr, head, scale_log2e, threshold, keep_scale,
    window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_HOLES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """All blocks from low to high, which are at one distance."""
    of_key = row_sum
    if HAS_KEY:
        of_key = one_row(q, key_ptr + clamped * BLOCK_D, BLOCK_D)
    for start in range(low, high, BLOCK):
        acc, row_max, row_sum, _ = _fwd_step(
            acc, row_max, row_sum, 0.0, q, of_key, k_ptr, v_ptr, key_ptr, query_ptr, bias_ptr, stride_kt, stride_vt,
            rows, places, start, first, begin, end, 0, clamped, index_ptr, philox_ptr, positions_ptr, head, scale_log2e,
            threshold, keep_scale, window_left, window_right,
            HEAD_DIM, BLOCK_D, BLOCK, False, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS,
            HAS_DROPOUT,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _fwd_head(
    q_ptr, k_ptr, v_ptr, out_ptr, row_max_ptr, row_sum_ptr, key_ptr, query_ptr, bias_ptr, ends_ptr, index_ptr,
    philox_ptr, positions_ptr, stride_qt, stride_kt, stride_vt, stride_ot, head, first, last, begin, end, reach,
    scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_HOLES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, RETURN_STATS: tl.constexpr,
):  # fmt: skip
    rows = first + tl.arange(0, BLOCK)
    places = rows
    if HAS_WINDOW:
        places = window_keys(positions_ptr, index_ptr, first, last, BLOCK, HAS_POSITIONS, HAS_HOLES)
    q = load_places(q_ptr, stride_qt, index_ptr, first, last, BLOCK, HEAD_DIM, BLOCK_D, HAS_HOLES)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    low, high = walk_blocks(begin, end, first, window_left, window_right, BLOCK, HAS_WINDOW, HAS_HOLES)
    inner_low, inner_high, before, behind = unclamped_steps(low, high, first, ends_ptr, BLOCK, False)
    bound = tl.maximum(1, tl.minimum(end - begin, reach))
    if low < inner_low:
        acc, row_max, row_sum = _fwd_clamped(
            acc, row_max, row_sum, q, k_ptr, v_ptr, key_ptr, query_ptr, bias_ptr, stride_kt, stride_vt, rows, places,
            low, inner_low, first, begin, end, before, index_ptr, philox_ptr, positions_ptr, head, scale_log2e,
            threshold, keep_scale, window_left, window_right,
            HEAD_DIM, BLOCK_D, BLOCK, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS, HAS_DROPOUT,
        )  # fmt: skip
    if inner_high < high:
        acc, row_max, row_sum = _fwd_clamped(
            acc, row_max, row_sum, q, k_ptr, v_ptr, key_ptr, query_ptr, bias_ptr, stride_kt, stride_vt, rows, places,
            inner_high, high, first, begin, end, behind, index_ptr, philox_ptr, positions_ptr, head, scale_log2e,
            threshold, keep_scale, window_left, window_right,
            HEAD_DIM, BLOCK_D, BLOCK, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS, HAS_DROPOUT,
        )  # fmt: skip
    hi_product = 0.0
    if HAS_KEY:
        hi = load_slab(key_ptr, first - inner_low, bound, BLOCK, BLOCK_D)
        hi_product = tl.dot(q, tl.trans(hi), input_precision="ieee")
    for start in range(inner_low, inner_high, BLOCK):
        acc, row_max, row_sum, hi_product = _fwd_step(
            acc, row_max, row_sum, hi_product, q, row_sum, k_ptr, v_ptr, key_ptr, query_ptr, bias_ptr, stride_kt,
            stride_vt, rows, places, start, first, begin, end, bound, 0, index_ptr, philox_ptr, positions_ptr, head,
            scale_log2e, threshold, keep_scale, window_left, window_right,
            HEAD_DIM, BLOCK_D, BLOCK, True, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS,
            HAS_DROPOUT,
        )  # fmt: skip
    inverse = tl.div_rn(1.0, tl.where(row_sum == 0.0, 1.0, row_sum))
    store_places(out_ptr, stride_ot, index_ptr, first, last, acc * inverse[:, None], HEAD_DIM, HAS_HOLES)
    if RETURN_STATS:
        tokens, inside = rows, rows < last
        if HAS_HOLES:
            tokens = tokens_at(index_ptr, first, last, BLOCK)
            inside = tokens >= 0
        tl.store(row_max_ptr + tokens, tl.where(row_sum == 0.0, 0.0, row_max), mask=inside)
        tl.store(row_sum_ptr + tokens, row_sum, mask=inside)


@triton.jit(do_not_specialize=["threshold", "total_tokens", "reach", "window_left", "window_right"])
def _attention_relative_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, row_max_ptr, row_sum_ptr, key_slab_ptr, query_slab_ptr, bias_slab_ptr, ends_ptr,
    tiles_ptr, index_ptr, philox_ptr, positions_ptr, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    total_tokens, num_heads, reach, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_TILE: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_HOLES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr, RETURN_STATS: tl.constexpr,
):  # fmt: skip
    first, last, begin, end = load_tile(tiles_ptr, BLOCK, BLOCK_TILE)
    if first >= last:
        return
    head = tl.program_id(1)
    h = head.to(tl.int64)
    _fwd_head(
        q_ptr + h * stride_qh, k_ptr + h * stride_kh, v_ptr + h * stride_vh, out_ptr + h * HEAD_DIM,
        row_max_ptr + h * total_tokens, row_sum_ptr + h * total_tokens, slab_of(key_slab_ptr, h, reach, BLOCK_D),
        slab_of(query_slab_ptr, h, reach, BLOCK_D), slab_of(bias_slab_ptr, h, reach, 1), ends_ptr, index_ptr,
        philox_ptr, positions_ptr, stride_qt, stride_kt, stride_vt, num_heads * HEAD_DIM, head, first, last, begin,
        end, reach, scale_log2e, threshold, keep_scale, window_left, window_right,
        HEAD_DIM, BLOCK_D, BLOCK, HAS_KEY, HAS_QUERY, HAS_BIAS, HAS_HOLES, HAS_WINDOW, HAS_POSITIONS, HAS_DROPOUT,
        RETURN_STATS,
    )  # fmt: skip


def attention_relative_fwd(
    q, k, v, rows, key, query, bias, tiles, offsets, index, philox, window_positions, tile, softmax_scale, dropout_p,
    window_size, return_stats,
):  # fmt: skip
    """q, k, v (total_tokens, num_heads, head_dim) -> out, softmax_stats; schema: ops/attention/relative_triton.py."""
    q, k, v = (rows_whole(t) for t in (q, k, v))
    new = q.new_empty if index is None else q.new_zeros  # padding has no place in a sequence
    out = new(q.shape)
    stats = new(2 if return_stats else 0, q.shape[1], q.shape[0], dtype=torch.float32)
    if q.numel() == 0:
        return out, stats
    row_max, row_sum = stats if return_stats else (out, out)
    rows = rows.contiguous()
    slabs = expand(rows, key, query, bias, q.shape[2])
    blocks = relative_blocks("fwd", q, tile, variant_of(slabs, index, window_size))
    grid, shared = relative_arguments(
        q, tiles, tile, philox, window_positions, softmax_scale, dropout_p, window_size, blocks, slabs, index
    )  # fmt: skip
    with torch.cuda.device_of(q):
        _attention_relative_fwd_kernel[grid](
            q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=out, row_max_ptr=row_max, row_sum_ptr=row_sum, **strides(q=q, k=k, v=v),
            **shared,
            RETURN_STATS=return_stats,
        )  # fmt: skip
    return out, stats
