"""Attention, forward: an online softmax over blocks of keys (Dao et al. 2022, algorithm 1); see attention.py."""

import torch
import triton
import triton.language as tl

from .attention import (
    in_window,
    kept_probs,
    launch_arguments,
    load_rows,
    rows_whole,
    signed,
    store_rows,
    strides,
    tile_at,
    walk,
    window_places,
)
from .blocks import attention_blocks


@triton.jit
def _fwd_step(
    acc, row_max, row_sum, q, k_ptr, v_ptr, stride_kt, stride_vt, rows, places, start, begin, end, philox_ptr,
    positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SIGN: tl.constexpr, IS_FP32: tl.constexpr,
    IS_WHOLE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One block of keys into the online softmax; IS_WHOLE: every query sees every key of it."""
    columns = start + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, stride_kt, start, end, BLOCK_N, HEAD_DIM, BLOCK_D, IS_WHOLE)
    scores = signed(tl.dot(q, tl.trans(k), input_precision="ieee"), SIGN)  # [M, N]
    if not IS_WHOLE:
        seen = (columns < end)[None, :]
        if HAS_WINDOW:
            keys = window_places(positions_ptr, columns, end, HAS_POSITIONS)
            seen = seen & in_window(places[:, None], keys[None, :], window_left, window_right)
        scores = tl.where(seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    finite = new_max
    if HAS_WINDOW:  # a query that has seen no key yet
        finite = tl.where(new_max == float("-inf"), 0.0, new_max)
    if IS_FP32:
        probs = tl.exp2((scores - finite[:, None]) * scale_log2e)
    else:  # one FMA, whose rounding drowns in the operands'
        probs = tl.exp2(scores * scale_log2e - (finite * scale_log2e)[:, None])
    shrink = tl.exp2((row_max - finite) * scale_log2e)
    row_sum = row_sum * shrink + tl.sum(probs, axis=1)
    if HAS_DROPOUT:
        probs = probs * kept_probs(philox_ptr, rows, start - begin, head, threshold, keep_scale, BLOCK_N)
    v = load_rows(v_ptr, stride_vt, start, end, BLOCK_N, HEAD_DIM, BLOCK_D, IS_WHOLE)
    acc = tl.dot(probs.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def _fwd_head(
    q_ptr, k_ptr, v_ptr, out_ptr, row_max_ptr, row_sum_ptr, philox_ptr, positions_ptr, stride_qt, stride_kt, stride_vt,
    stride_ot, head, first, last, begin, end, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TILE: tl.constexpr, BLOCK_STEP: tl.constexpr,
    SIGN: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    RETURN_STATS: tl.constexpr,
):  # fmt: skip
    IS_FP32: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    rows = first + tl.arange(0, BLOCK_TILE)
    places = window_places(positions_ptr, rows, last, HAS_POSITIONS)
    q = load_rows(q_ptr, stride_qt, first, last, BLOCK_TILE, HEAD_DIM, BLOCK_D, False)
    acc = tl.zeros([BLOCK_TILE, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_TILE], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_TILE], tl.float32)
    low, high = walk(begin, end, first, last, window_left, window_right, HAS_WINDOW)
    whole = low
    if not HAS_WINDOW:  # what needs no mask
        whole = low + (high - low) // BLOCK_STEP * BLOCK_STEP
        for start in range(low, whole, BLOCK_STEP):
            acc, row_max, row_sum = _fwd_step(
                acc, row_max, row_sum, q, k_ptr, v_ptr, stride_kt, stride_vt, rows, places, start, begin, end,
                philox_ptr, positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
                HEAD_DIM, BLOCK_D, BLOCK_STEP, SIGN, IS_FP32, True, False, False, HAS_DROPOUT,
            )  # fmt: skip
    for start in range(whole, high, BLOCK_STEP):
        acc, row_max, row_sum = _fwd_step(
            acc, row_max, row_sum, q, k_ptr, v_ptr, stride_kt, stride_vt, rows, places, start, begin, end, philox_ptr,
            positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
            HEAD_DIM, BLOCK_D, BLOCK_STEP, SIGN, IS_FP32, False, HAS_WINDOW, HAS_POSITIONS, HAS_DROPOUT,
        )  # fmt: skip
    # 1 for 1, which a GPU's own division does not promise.
    inverse = tl.div_rn(1.0, tl.where(row_sum == 0.0, 1.0, row_sum))
    store_rows(out_ptr, stride_ot, first, last, acc * inverse[:, None], HEAD_DIM)
    if RETURN_STATS:
        tl.store(row_max_ptr + rows, tl.where(row_sum == 0.0, 0.0, row_max), mask=rows < last)
        tl.store(row_sum_ptr + rows, row_sum, mask=rows < last)


@triton.jit(do_not_specialize=["threshold", "total_tokens", "window_left", "window_right"])
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, row_max_ptr, row_sum_ptr, tiles_ptr, philox_ptr, positions_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
    total_tokens, num_heads, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TILE: tl.constexpr, BLOCK_STEP: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIGN: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr, RETURN_STATS: tl.constexpr,
):  # fmt: skip
    first, last, begin, end = tile_at(tiles_ptr, tl.program_id(0))
    if first == last:
        return
    first_head = tl.program_id(1) * HEADS
    for i in range(0, tl.minimum(HEADS, num_heads - first_head)):
        head = first_head + i
        h = head.to(tl.int64)
        kh = h // GROUP
        _fwd_head(
            q_ptr + h * stride_qh, k_ptr + kh * stride_kh, v_ptr + kh * stride_vh, out_ptr + h * HEAD_DIM,
            row_max_ptr + h * total_tokens, row_sum_ptr + h * total_tokens, philox_ptr, positions_ptr,
            stride_qt, stride_kt, stride_vt, num_heads * HEAD_DIM,
            head, first, last, begin, end, scale_log2e, threshold, keep_scale, window_left, window_right,
            HEAD_DIM, BLOCK_D, BLOCK_TILE, BLOCK_STEP, SIGN, HAS_WINDOW, HAS_POSITIONS, HAS_DROPOUT, RETURN_STATS,
        )  # fmt: skip


def attention_fwd(
    q, k, v, tiles, philox, window_positions, tile, softmax_scale, dropout_p, window_size, return_stats
):  # fmt: skip
    """q, k, v (total_tokens, their heads, head_dim) -> out, softmax_stats; the schema in ops/attention/attention.py."""
    q, k, v = rows_whole(q), rows_whole(k), rows_whole(v)
    total_tokens, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    stats = q.new_empty(2 if return_stats else 0, num_heads, total_tokens, dtype=torch.float32)
    if q.numel() == 0:
        return out, stats
    row_max, row_sum = stats.unbind() if return_stats else (out, out)
    group = num_heads // k.shape[1]
    blocks = attention_blocks("fwd", q, tile, dropout_p > 0, group, window_positions is not None)
    grid, shared = launch_arguments(
        q, group, tiles, philox, window_positions, softmax_scale, dropout_p, window_size, blocks
    )
    with torch.cuda.device_of(q):
        _attention_fwd_kernel[grid](
            q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=out, row_max_ptr=row_max, row_sum_ptr=row_sum, RETURN_STATS=return_stats,
            **strides(q=q, k=k, v=v), **shared,
        )  # fmt: skip
    return out, stats
