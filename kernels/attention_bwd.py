"""Attention, backward: the probabilities are made again from two numbers a query (Dao 2023, section 3.1.2).

With p the probabilities, kept 0 or 1 / (1 - dropout_p), delta = sum_d dout out (Dao et al. 2022, appendix B.4):

    dv = (p kept)^T dout,   ds = p (dout v^T kept - delta),   dq = softmax_scale ds k,   dk = softmax_scale ds^T q

One kernel makes dk and dv and walks over queries, one makes dq and walks over keys. Neither adds to memory that another
program writes: every run gives the same bits, for two products in seven. See attention.py.
"""

import torch
import triton
import triton.language as tl

from .attention import (
    in_window,
    kept_probs,
    launch_arguments,
    load_rows,
    queries_end_at,
    rows_whole,
    scale_and_sign,
    signed,
    store_rows,
    strides,
    tile_at,
    walk,
    window_places,
)
from .blocks import attention_blocks
from .rotary import rotate_back
from .sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["total_tokens"])
def _attention_records_kernel(
    dout_ptr, out_ptr, row_max_ptr, row_sum_ptr, records_ptr, stride_dt, stride_dh, stride_ot, stride_oh, total_tokens,
    scale_log2e, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TILE: tl.constexpr,
):  # fmt: skip
    """What the other kernels want of a query: records, fp32 (num_heads, total_tokens, 4), of 16 bytes each.

    Two numbers that make probabilities of scores, delta, and nothing. delta is the diagonal of a product, because of
    dout v^T: where one key has all of the probability out is its v, and dout v^T - delta is 0, where k and q may be
    large. In fp32 it is 0 exactly: products are one chain of multiply-adds an element over ascending d, whatever the
    block (no tensor core has them: test_aot.py), the probability is 2^0 times an inverse of exactly 1, and out is
    v times that. In 16 bits the two may be products of different instructions, which add in other orders and cut off
    other bits; what is left is some 2^-20 of dout v^T, where rounding ds to 16 bits takes 2^-12 of its terms and more.
    Nobody relies on a 0 there: tests/ops/test_attention_triton.py makes products that differ.
    """
    first = tl.program_id(0) * BLOCK_TILE
    rows = first + tl.arange(0, BLOCK_TILE)
    head = tl.program_id(1).to(tl.int64)
    dout = load_rows(dout_ptr + head * stride_dh, stride_dt, first, total_tokens, BLOCK_TILE, HEAD_DIM, BLOCK_D, False)
    out = load_rows(out_ptr + head * stride_oh, stride_ot, first, total_tokens, BLOCK_TILE, HEAD_DIM, BLOCK_D, False)
    product = tl.dot(dout, tl.trans(out), input_precision="ieee")  # [BLOCK_TILE, BLOCK_TILE]
    delta = tl.sum(tl.where(rows[:, None] == rows[None, :], product, 0.0), axis=1)
    at = head * total_tokens + rows
    row_max = tl.load(row_max_ptr + at, mask=rows < total_tokens, other=0.0)
    row_sum = tl.load(row_sum_ptr + at, mask=rows < total_tokens, other=1.0)
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # of a query without keys
    if dout_ptr.dtype.element_ty == tl.float32:
        shift, inverse = row_max, tl.div_rn(1.0, row_sum)
    else:  # one FMA makes an exponent of a score
        shift, inverse = row_max * scale_log2e + tl.log2(row_sum), row_max * 0.0
    column = tl.arange(0, 4)[None, :]
    records = tl.where(column == 0, shift[:, None], tl.where(column == 1, inverse[:, None], delta[:, None]))
    tl.store(records_ptr + at[:, None] * 4 + column, records, mask=(rows < total_tokens)[:, None] & (column < 4))


@triton.jit
def load_records(ptr, first, end, ROWS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """shift, inverse and delta of ROWS queries from `first` on; zeros from `end` on.

    One record is one load, which one thread does and puts where all find it. Loads of single numbers are done again by
    every thread that wants one: in a loop over queries, whose scores lie across all threads, that was half of it.

    In that loop the compiler makes an asynchronous copy of the load, one step ahead, into shared memory for ONE block
    of records. The next block's copy begins behind this one's reads all the same: the pipeliner puts a step's copies
    behind the last use of what they overwrite, and a barrier of all threads stands between reads of shared memory and
    a copy to the same place; all copies are waited for, and a barrier passed, before a read. test_aot.py checks that
    order in the code of every kernel.
    """
    rows, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 4)[None, :]
    at = ptr + tl.cast(first, tl.int64) * 4 + rows * 4 + column
    if IS_WHOLE:
        records = tl.load(at)
    else:
        records = tl.load(at, mask=(rows < end - first) & (column < 4), other=0.0)
    shift = tl.sum(tl.where(column == 0, records, 0.0), axis=1)
    inverse = tl.sum(tl.where(column == 1, records, 0.0), axis=1)
    delta = tl.sum(tl.where(column == 2, records, 0.0), axis=1)
    return shift, inverse, delta


@triton.jit
def probs_and_dscores(
    scores, dprobs, shift, inverse, delta, kept, seen, scale_log2e, IS_FP32: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """(p, ds / softmax_scale); operands broadcast to the scores' shape, `kept` is 1 without dropout."""
    if IS_FP32:
        probs = tl.exp2((scores - shift) * scale_log2e) * inverse
    else:
        probs = tl.exp2(scores * scale_log2e - shift)
    if not IS_WHOLE:
        probs = tl.where(seen, probs, 0.0)
    return probs, probs * (dprobs * kept - delta)


@triton.jit
def _dkdv_step(
    dk, dv, k, v, q_ptr, dout_ptr, records_ptr, stride_qt, stride_dt, places, start, first, begin, end, philox_ptr,
    positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SIGN: tl.constexpr, IS_FP32: tl.constexpr,
    IS_WHOLE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One block of queries into dk and dv of the keys at `places`; all of it transposed: keys down, queries across.

    Rows that are no keys any more make numbers that are not stored, and reach no other row.
    """
    queries = start + tl.arange(0, BLOCK_M)
    inside = queries < end
    q = load_rows(q_ptr, stride_qt, start, end, BLOCK_M, HEAD_DIM, BLOCK_D, IS_WHOLE)
    scores = signed(tl.dot(k, tl.trans(q), input_precision="ieee"), SIGN)  # [N, M]
    dout = load_rows(dout_ptr, stride_dt, start, end, BLOCK_M, HEAD_DIM, BLOCK_D, IS_WHOLE)
    dprobs = tl.dot(v, tl.trans(dout), input_precision="ieee")  # [N, M]
    shift, inverse, delta = load_records(records_ptr, start, end, BLOCK_M, IS_WHOLE)
    seen = inside[None, :]
    if HAS_WINDOW:
        at = window_places(positions_ptr, queries, end, HAS_POSITIONS)
        seen = seen & in_window(at[None, :], places[:, None], window_left, window_right)
    kept = 1.0
    if HAS_DROPOUT:
        kept = tl.trans(kept_probs(philox_ptr, queries, first - begin, head, threshold, keep_scale, k.shape[0]))
    probs, dscores = probs_and_dscores(
        scores, dprobs, shift[None, :], inverse[None, :], delta[None, :], kept, seen, scale_log2e, IS_FP32, IS_WHOLE
    )  # fmt: skip
    dv = tl.dot((probs * kept).to(dout.dtype), dout, dv, input_precision="ieee")
    dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["threshold", "total_tokens", "window_left", "window_right"])
def _attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, records_ptr, dk_ptr, dv_ptr, tiles_ptr, philox_ptr, positions_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dt, stride_dh, stride_gt,
    total_tokens, num_heads, softmax_scale, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TILE: tl.constexpr, BLOCK_STEP: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIGN: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys: sums over the GROUP query heads that read them. num_heads is that of k; a token's
    heads lie beside each other, tokens stride_gt apart."""
    IS_FP32: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    first, last, begin, _ = tile_at(tiles_ptr, tl.program_id(0))
    end = queries_end_at(tiles_ptr, tl.program_id(0))
    if first == last:
        return
    places = window_places(positions_ptr, first + tl.arange(0, BLOCK_TILE), last, HAS_POSITIONS)
    # A key at j is seen by the queries from j - right to j + left.
    low, high = walk(begin, end, first, last, window_right, window_left, HAS_WINDOW)
    whole = low
    if not HAS_WINDOW:
        whole = low + (high - low) // BLOCK_STEP * BLOCK_STEP
    first_head = tl.program_id(1) * HEADS
    for i in range(0, tl.minimum(HEADS, num_heads - first_head)):
        kh = (first_head + i).to(tl.int64)
        k = load_rows(k_ptr + kh * stride_kh, stride_kt, first, last, BLOCK_TILE, HEAD_DIM, BLOCK_D, False)
        v = load_rows(v_ptr + kh * stride_vh, stride_vt, first, last, BLOCK_TILE, HEAD_DIM, BLOCK_D, False)
        dk = tl.zeros([BLOCK_TILE, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_TILE, BLOCK_D], tl.float32)
        for member in range(0, GROUP):
            head = (first_head + i) * GROUP + member
            h = head.to(tl.int64)
            if not HAS_WINDOW:
                for start in range(low, whole, BLOCK_STEP):
                    dk, dv = _dkdv_step(
                        dk, dv, k, v, q_ptr + h * stride_qh, dout_ptr + h * stride_dh,
                        records_ptr + h * total_tokens * 4, stride_qt, stride_dt, places, start, first, begin, end,
                        philox_ptr, positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
                        HEAD_DIM, BLOCK_D, BLOCK_STEP, SIGN, IS_FP32, True, False, False, HAS_DROPOUT,
                    )  # fmt: skip
            for start in range(whole, high, BLOCK_STEP):
                dk, dv = _dkdv_step(
                    dk, dv, k, v, q_ptr + h * stride_qh, dout_ptr + h * stride_dh,
                    records_ptr + h * total_tokens * 4, stride_qt, stride_dt, places, start, first, begin, end,
                    philox_ptr, positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
                    HEAD_DIM, BLOCK_D, BLOCK_STEP, SIGN, IS_FP32, False, HAS_WINDOW, HAS_POSITIONS, HAS_DROPOUT,
                )  # fmt: skip
        store_rows(dk_ptr + kh * HEAD_DIM, stride_gt, first, last, dk * softmax_scale, HEAD_DIM)
        store_rows(dv_ptr + kh * HEAD_DIM, stride_gt, first, last, dv, HEAD_DIM)


@triton.jit
def _dq_step(
    dq, q, dout, shift, inverse, delta, k_ptr, v_ptr, stride_kt, stride_vt, rows, places, start, begin, end, philox_ptr,
    positions_ptr, head, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SIGN: tl.constexpr, IS_FP32: tl.constexpr,
    IS_WHOLE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One block of keys into dq of the queries `rows`."""
    columns = start + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, stride_kt, start, end, BLOCK_N, HEAD_DIM, BLOCK_D, IS_WHOLE)
    v = load_rows(v_ptr, stride_vt, start, end, BLOCK_N, HEAD_DIM, BLOCK_D, IS_WHOLE)
    scores = signed(tl.dot(q, tl.trans(k), input_precision="ieee"), SIGN)  # [M, N]
    dprobs = tl.dot(dout, tl.trans(v), input_precision="ieee")  # [M, N]
    seen = (columns < end)[None, :]
    if HAS_WINDOW:
        keys = window_places(positions_ptr, columns, end, HAS_POSITIONS)
        seen = seen & in_window(places[:, None], keys[None, :], window_left, window_right)
    kept = 1.0
    if HAS_DROPOUT:
        kept = kept_probs(philox_ptr, rows, start - begin, head, threshold, keep_scale, BLOCK_N)
    _, dscores = probs_and_dscores(
        scores, dprobs, shift, inverse, delta, kept, seen, scale_log2e, IS_FP32, IS_WHOLE
    )  # fmt: skip
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["threshold", "total_tokens", "window_left", "window_right"])
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, records_ptr, dq_ptr, tiles_ptr, philox_ptr, positions_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_dt, stride_dh, stride_gt,
    total_tokens, num_heads, softmax_scale, scale_log2e, threshold, keep_scale, window_left, window_right,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_TILE: tl.constexpr, BLOCK_STEP: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIGN: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries, laid out as dk and dv."""
    IS_FP32: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    first, last, begin, end = tile_at(tiles_ptr, tl.program_id(0))
    if first == last:
        return
    rows = first + tl.arange(0, BLOCK_TILE)
    places = window_places(positions_ptr, rows, last, HAS_POSITIONS)
    low, high = walk(begin, end, first, last, window_left, window_right, HAS_WINDOW)
    whole = low
    if not HAS_WINDOW:
        whole = low + (high - low) // BLOCK_STEP * BLOCK_STEP
    first_head = tl.program_id(1) * HEADS
    for i in range(0, tl.minimum(HEADS, num_heads - first_head)):
        head = first_head + i
        h = head.to(tl.int64)
        kh = h // GROUP
        q = load_rows(q_ptr + h * stride_qh, stride_qt, first, last, BLOCK_TILE, HEAD_DIM, BLOCK_D, False)
        dout = load_rows(dout_ptr + h * stride_dh, stride_dt, first, last, BLOCK_TILE, HEAD_DIM, BLOCK_D, False)
        shift, inverse, delta = load_records(records_ptr + h * total_tokens * 4, first, last, BLOCK_TILE, False)
        shift, inverse, delta = shift[:, None], inverse[:, None], delta[:, None]
        dq = tl.zeros([BLOCK_TILE, BLOCK_D], tl.float32)
        if not HAS_WINDOW:
            for start in range(low, whole, BLOCK_STEP):
                dq = _dq_step(
                    dq, q, dout, shift, inverse, delta, k_ptr + kh * stride_kh, v_ptr + kh * stride_vh, stride_kt,
                    stride_vt, rows, places, start, begin, end, philox_ptr, positions_ptr, head, scale_log2e, threshold,
                    keep_scale, window_left, window_right,
                    HEAD_DIM, BLOCK_D, BLOCK_STEP, SIGN, IS_FP32, True, False, False, HAS_DROPOUT,
                )  # fmt: skip
        for start in range(whole, high, BLOCK_STEP):
            dq = _dq_step(
                dq, q, dout, shift, inverse, delta, k_ptr + kh * stride_kh, v_ptr + kh * stride_vh, stride_kt,
                stride_vt, rows, places, start, begin, end, philox_ptr, positions_ptr, head, scale_log2e, threshold,
                keep_scale, window_left, window_right,
                HEAD_DIM, BLOCK_D, BLOCK_STEP, SIGN, IS_FP32, False, HAS_WINDOW, HAS_POSITIONS, HAS_DROPOUT,
            )  # fmt: skip
        store_rows(dq_ptr + h * HEAD_DIM, stride_gt, first, last, dq * softmax_scale, HEAD_DIM)


def make_records(dout, out, softmax_stats, scale_log2e) -> torch.Tensor:
    """fp32 (num_heads, total_tokens, 4): see the kernel."""
    total_tokens, num_heads, head_dim = dout.shape
    row_max, row_sum = softmax_stats.unbind()
    records = row_max.new_empty(num_heads, total_tokens, 4)
    _attention_records_kernel[(cdiv(total_tokens, 32), num_heads)](
        dout, out, row_max, row_sum, records, **strides(d=dout, o=out), total_tokens=total_tokens,
        scale_log2e=scale_log2e, HEAD_DIM=head_dim, BLOCK_D=max(16, next_power_of_2(head_dim)), BLOCK_TILE=32,
    )  # fmt: skip
    return records


def attention_bwd(
    dout, q, k, v, out, softmax_stats, tiles, philox, window_positions, tile, softmax_scale, dropout_p, window_size,
    cos, sin, interleaved, by_token,
):  # fmt: skip
    """dout as out -> dqkv (total_tokens, heads of q, k and v, head_dim); the schema in ops/attention/attention.py."""
    dout, q, k, v = rows_whole(dout), rows_whole(q), rows_whole(k), rows_whole(v)
    total_tokens, num_heads, head_dim = q.shape
    num_kv_heads, group = k.shape[1], num_heads // k.shape[1]
    dqkv = q.new_empty(total_tokens, num_heads + 2 * num_kv_heads, head_dim)
    if q.numel() == 0:
        return dqkv
    dq, dk, dv = torch.split_with_sizes(dqkv, (num_heads, num_kv_heads, num_kv_heads), 1)
    options = (group, tiles, philox, window_positions, softmax_scale, dropout_p, window_size)

    def arguments(which, x):
        blocks = attention_blocks(which, q, tile, dropout_p > 0, group, window_positions is not None)
        return launch_arguments(x, *options, blocks)

    with torch.cuda.device_of(q):
        records = make_records(dout, out, softmax_stats, scale_and_sign(softmax_scale)[0])
        operands = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "dout_ptr": dout, "records_ptr": records}
        operands |= strides(q=q, k=k, v=v, d=dout)
        operands |= {"softmax_scale": softmax_scale, "stride_gt": dqkv.stride(0)}
        grid, shared = arguments("dkdv", k)
        _attention_dkdv_kernel[grid](dk_ptr=dk, dv_ptr=dv, **operands, **shared)
        grid, shared = arguments("dq", q)
        _attention_dq_kernel[grid](dq_ptr=dq, **operands, **shared)
    if cos is not None:
        rotate_back(dq, dk, cos, sin, tiles, tile, interleaved, by_token)
    return dqkv
