"""Rotary position embedding of q and k, in front of attention (Su et al. 2021, section 3.4.2).

    x = [x1, x2], in halves of a head:   out = [x1 cos - x2 sin, x2 cos + x1 sin]     cos, sin of the token's position

INTERLEAVED: x1 are a head's even dimensions and x2 its odd ones. BY_TOKEN: cos and sin have a row for each token.

The backward pass is the rotation the other way: INVERSE, with sin negated, in place. Arithmetic in fp32, rounded once.

A kernel of its own, not a part of attention's loops. There a key would be rotated again for every tile of queries, 64
times at 8192 tokens, and every key would go through registers on its way to shared memory, which asynchronous copies
feed the tensor cores from. Here q and k are read once and written once: four matrices, 6 KB a token at hidden size 768
in 16 bits, 1.4 ns of a memory of 4.3 TB/s. In one launch for both.

Attention's list of tiles (attention.py) gives each token its position without a search: row - the sequence's first row.
A program takes BLOCK_M tokens of a tile. The halves of a head are loaded as blocks of their own, so that a thread has
both partners of a pair and nothing is shuffled, 8 neighbours of each: one load of 16 bytes in 16 bits, two in fp32; of
interleaved pairs a thread has whole ones. Where k has fewer heads than q, heads that k has not are masked. cos
and sin stay in registers while HEADS heads are rotated in turn; a token's 256 bytes of them at head size 64 lie in the
second-level cache for all sequences. Padding tokens, which have no position, come out as zeros. A position beyond the
tables, from a max_seqlen that was no bound, gives NaN and reads nothing.

Legend: T tokens of a block (BLOCK_M), C columns of half a head (HALF, padded to BLOCK_HALF).
"""

import torch
import triton
import triton.language as tl

from .attention import rows_whole, strides, tile_at
from .sizes import cdiv, next_power_of_2

HEADS = 4


@triton.jit
def _pairs(rows, columns, num_rows, HALF: tl.constexpr):
    """Offsets of neighbours in a head [T, 2 C], and which of them are inside."""
    columns = tl.arange(0, 2 * columns.shape[1])[None, :]
    return columns, (rows < num_rows) & (columns < 2 * HALF)


@triton.jit
def _load_halves(ptr, stride, rows, columns, num_rows, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:
        ROWS: tl.constexpr = rows.shape[0]
        BLOCK_HALF: tl.constexpr = columns.shape[1]
        pairs, inside = _pairs(rows, columns, num_rows, HALF)
        x = tl.load(ptr + rows * stride + pairs, mask=inside, other=0.0).to(tl.float32)  # [T, 2 C]
        x1, x2 = tl.split(tl.reshape(x, [ROWS, BLOCK_HALF, 2]))
    else:
        inside = (rows < num_rows) & (columns < HALF)
        at = rows * stride + columns
        x1 = tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)  # [T, C]
        x2 = tl.load(ptr + HALF + at, mask=inside, other=0.0).to(tl.float32)
    return x1, x2


@triton.jit
def _store_rotated(
    ptr, stride, rows, columns, num_rows, x1, x2, cos, sin, is_real, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    out1 = tl.where(is_real, x1 * cos - x2 * sin, 0.0).to(ptr.dtype.element_ty)
    out2 = tl.where(is_real, x2 * cos + x1 * sin, 0.0).to(ptr.dtype.element_ty)
    if INTERLEAVED:
        ROWS: tl.constexpr = rows.shape[0]
        BLOCK_HALF: tl.constexpr = columns.shape[1]
        pairs, inside = _pairs(rows, columns, num_rows, HALF)
        out = tl.reshape(tl.join(out1, out2), [ROWS, 2 * BLOCK_HALF])
        tl.store(ptr + rows * stride + pairs, out, mask=inside)
    else:
        inside = (rows < num_rows) & (columns < HALF)
        at = rows * stride + columns
        tl.store(ptr + at, out1, mask=inside)
        tl.store(ptr + HALF + at, out2, mask=inside)


@triton.jit(do_not_specialize=["max_positions"])
def _rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, tiles_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_qo, stride_ko, stride_ct, stride_st, num_heads, num_kv_heads,
    max_positions,
    HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    HEADS: tl.constexpr, IS_GROUPED: tl.constexpr, INTERLEAVED: tl.constexpr, BY_TOKEN: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = BLOCK_TILE // BLOCK_M
    first, last, begin, end = tile_at(tiles_ptr, tl.program_id(0) // BLOCKS)
    first += tl.program_id(0) % BLOCKS * BLOCK_M
    if first >= last:
        return
    is_real = end > begin  # no padding
    rows, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_HALF)[None, :]
    known = (rows < last - first) & (columns < HALF)  # [T, C]
    if BY_TOKEN:
        position = rows
        cos_ptr += tl.cast(first, tl.int64) * stride_ct
        sin_ptr += tl.cast(first, tl.int64) * stride_st
    else:
        position = first - begin + rows
        known &= position < max_positions
    cos = tl.load(cos_ptr + position * stride_ct + columns, mask=known, other=float("nan"))
    sin = tl.load(sin_ptr + position * stride_st + columns, mask=known, other=float("nan"))
    if INVERSE:
        sin = -sin

    # 64-bit for the first row alone.
    q_ptr += tl.cast(first, tl.int64) * stride_qt
    k_ptr += tl.cast(first, tl.int64) * stride_kt
    q_out_ptr += tl.cast(first, tl.int64) * stride_qo
    k_out_ptr += tl.cast(first, tl.int64) * stride_ko
    first_head = tl.program_id(1) * HEADS
    for i in range(0, tl.minimum(HEADS, num_heads - first_head)):
        head = (first_head + i).to(tl.int64)
        num_rows = last - first
        num_keys = num_rows
        if IS_GROUPED:
            num_keys = tl.where(first_head + i < num_kv_heads, num_rows, 0)
        # All loads before the first store, which they would otherwise wait for: it might be to the same memory.
        num_real = tl.where(is_real, num_rows, 0)
        q1, q2 = _load_halves(q_ptr + head * stride_qh, stride_qt, rows, columns, num_real, HALF, INTERLEAVED)
        num_real = tl.where(is_real, num_keys, 0)
        k1, k2 = _load_halves(k_ptr + head * stride_kh, stride_kt, rows, columns, num_real, HALF, INTERLEAVED)
        q_out, k_out = q_out_ptr + head * HALF * 2, k_out_ptr + head * HALF * 2
        _store_rotated(q_out, stride_qo, rows, columns, num_rows, q1, q2, cos, sin, is_real, HALF, INTERLEAVED)
        _store_rotated(k_out, stride_ko, rows, columns, num_keys, k1, k2, cos, sin, is_real, HALF, INTERLEAVED)


def blocks(half: int, tile: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_HALF, num_warps): up to 1024 elements, 8 a thread."""
    block_half = max(8, next_power_of_2(half))
    block_m = min(tile, 1024 // block_half)
    return block_m, block_half, max(1, block_m * block_half // 256)


def rotary(q, k, cos, sin, tiles, tile, interleaved=False, by_token=False):
    """q, k (total_tokens, their heads, head_dim) -> both rotated, contiguous; schema: ops/attention/rotary.py."""
    q, k = rows_whole(q), rows_whole(k)
    q_out, k_out = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    _launch(q, k, q_out, k_out, cos, sin, tiles, tile, interleaved, by_token, inverse=False)
    return q_out, k_out


def rotate_back(dq, dk, cos, sin, tiles, tile, interleaved=False, by_token=False) -> None:
    """In place, the gradients of what was rotated become those of what was given; heads in one piece each."""
    _launch(dq, dk, dq, dk, cos, sin, tiles, tile, interleaved, by_token, inverse=True)


def _launch(q, k, q_out, k_out, cos, sin, tiles, tile, interleaved, by_token, inverse):
    if q.numel() == 0:
        return
    num_heads, num_kv_heads, half = q.shape[1], k.shape[1], q.shape[2] // 2
    block_m, block_half, num_warps = blocks(half, tile)
    with torch.cuda.device_of(q):
        _rotary_kernel[(tiles.shape[0] * (tile // block_m), cdiv(num_heads, HEADS))](
            q, k, q_out, k_out, cos, sin, tiles, **strides(q=q, k=k), stride_qo=q_out.stride(0),
            stride_ko=k_out.stride(0), stride_ct=cos.stride(0), stride_st=sin.stride(0), num_heads=num_heads,
            num_kv_heads=num_kv_heads, max_positions=cos.shape[0], HALF=half, BLOCK_HALF=block_half, BLOCK_TILE=tile,
            BLOCK_M=block_m, HEADS=HEADS, IS_GROUPED=num_kv_heads != num_heads, INTERLEAVED=interleaved,
            BY_TOKEN=by_token, INVERSE=inverse, num_warps=num_warps,
        )  # fmt: skip
