"""Bidirectional varlen attention: what its forward (attention_fwd.py) and backward (attention_bwd.py) share.

    s   = q k^T, within each sequence and window              (Vaswani et al. 2017, section 3.2.1, eq. 1)
    out = dropout(softmax(softmax_scale s)) v                 online softmax (Dao et al. 2022, algorithm 1)

A program takes one tile: up to BLOCK_TILE neighbouring tokens of one sequence, and HEADS heads of them in turn, more
than one where sequences are so short that a program would hardly begin. `attention_tiles` lists the tiles on the
device, the longest sequences' first, so that a long sequence in a batch of short ones is not what all wait for; tokens
beyond cu_seqlens[-1] are tiles without keys, whose results are zeros. Keys beyond a sequence's end are loaded as zeros,
not masked afterwards: nothing of one sequence, not even a NaN, reaches another. Where only the first num_keys tokens of
a sequence are keys, the others have tiles of their own, which see the keys, and which nothing sees.

GROUP query heads in a row read one head of k and v (Ainslie et al. 2023, "GQA", section 2.2). Windows go by the tokens'
places, or by positions_ptr (T,), which ascend in a sequence: two tokens' places never differ by more than their
positions, so that the blocks that a window leaves out go by the places alone.

Legend: T tokens of a batch, M queries, N keys, D head_dim padded to a power of two. Products are in the operands' dtype
with fp32 sums (fp32 operands: IEEE products, no TF32), softmax and statistics in fp32.
"""

import torch
import triton
import triton.language as tl

from .blocks import Blocks
from .sizes import cdiv, next_power_of_2

_LOG2E = 1.4426950408889634
_SMALLEST = 2.0**-149  # of the fp32 numbers: what is below would be 0 for a kernel


# --------------------------------------------------------------------------------------------------------------------
# Tiles: (num_tiles, 8) int32, [first token, end, first key, end of the keys, end of the queries that see these tokens];
# empty ones, which end at their start, fill the list up to the length that is known on the host.


@triton.jit
def tile_at(tiles_ptr, tile):
    """A tile's first token and end, and its first key and their end."""
    tiles_ptr += tile * 8
    return tl.load(tiles_ptr), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2), tl.load(tiles_ptr + 3)


@triton.jit
def queries_end_at(tiles_ptr, tile):
    """The end of the queries that see a tile's tokens; they begin where the tile's keys do."""
    return tl.load(tiles_ptr + tile * 8 + 4)


@triton.jit
def _load_spans(cu_seqlens_ptr, num_keys_ptr, span, batch_size, total_tokens, HAS_NUM_KEYS: tl.constexpr):
    """What tiles are cut from: first token and length of each span, the first key and the end of the keys that it sees,
    and the end of the queries that see it. A span is a sequence, or with num_keys each has two, its keys and the other
    tokens. The last one is what lies behind the last sequence, none is beyond it.

    Whatever the offsets, all of it within the batch: no tile leads beyond the tensors.
    """
    sequence, is_padding = span, span == batch_size
    if HAS_NUM_KEYS:
        sequence, is_padding = span // 2, span == 2 * batch_size
    begin = tl.load(cu_seqlens_ptr + sequence, mask=sequence <= batch_size, other=0)
    end = tl.load(cu_seqlens_ptr + sequence + 1, mask=sequence < batch_size, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), total_tokens)
    end = tl.where(is_padding, total_tokens, tl.minimum(end, total_tokens))
    first, last = begin, tl.maximum(end, begin)
    keys_end = tl.where(is_padding, begin, last)  # padding sees no key
    queries_end = keys_end
    if HAS_NUM_KEYS:
        num_keys = tl.load(num_keys_ptr + sequence, mask=sequence < batch_size, other=0)
        keys_end = tl.minimum(begin + tl.maximum(num_keys, 0), keys_end)
        are_keys = span % 2 == 0
        first = tl.where(are_keys, begin, keys_end)
        last = tl.where(are_keys & (is_padding == 0), keys_end, last)
        queries_end = tl.where(are_keys, queries_end, begin)
        last = tl.where(span > 2 * batch_size, first, last)
    return first, last - first, begin, keys_end, queries_end


@triton.jit(do_not_specialize=["batch_size", "total_tokens", "num_tiles"])
def _attention_tiles_kernel(
    cu_seqlens_ptr, num_keys_ptr, tiles_ptr, batch_size, total_tokens, num_tiles,
    BLOCK_TILE: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_R: tl.constexpr, HAS_NUM_KEYS: tl.constexpr,
):  # fmt: skip
    """A program places the tiles of BLOCK_B spans: behind those of all longer ones, which it counts by comparing itself
    with everyone, BLOCK_R at a time."""
    padding = batch_size
    if HAS_NUM_KEYS:
        padding = 2 * batch_size
    span = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)  # [B]
    first, length, first_key, keys_end, queries_end = _load_spans(
        cu_seqlens_ptr, num_keys_ptr, span, batch_size, total_tokens, HAS_NUM_KEYS
    )  # fmt: skip
    key = tl.where(span == padding, -1, length)  # padding is last
    offset = tl.zeros([BLOCK_B], tl.int32)
    occupied = tl.zeros([BLOCK_R], tl.int32)
    for start in range(0, padding + 1, BLOCK_R):
        other = start + tl.arange(0, BLOCK_R)  # [R]
        _, other_length, _, _, _ = _load_spans(
            cu_seqlens_ptr, num_keys_ptr, other, batch_size, total_tokens, HAS_NUM_KEYS
        )  # fmt: skip
        other_key = tl.where(other == padding, -1, other_length)[None, :]
        other_count = tl.cdiv(other_length, BLOCK_TILE)
        is_before = (other_key > key[:, None]) | ((other_key == key[:, None]) & (other[None, :] < span[:, None]))
        offset += tl.sum(tl.where(is_before, other_count[None, :], 0), axis=1)
        occupied += other_count

    column = tl.arange(0, 8)[None, :]
    count = tl.cdiv(length, BLOCK_TILE)
    seen = tl.where(column == 3, keys_end[:, None], tl.where(column == 4, queries_end[:, None], 0))
    seen = tl.where(column == 2, first_key[:, None], seen)
    for i in range(0, tl.max(count, axis=0)):
        row = first + i * BLOCK_TILE
        row_end = tl.minimum(row + BLOCK_TILE, first + length)
        rows = tl.where(column == 0, row[:, None], row_end[:, None])
        entry = offset + i  # within the list, but for sequences that overlap
        at = entry[:, None] * 8 + column
        fits = (i < count) & (entry < num_tiles)
        tl.store(tiles_ptr + at, tl.where(column < 2, rows, seen), mask=fits[:, None] & (column < 8))
    empty_first = tl.sum(occupied, axis=0) + tl.program_id(0) * BLOCK_R
    for empty in range(empty_first, num_tiles, tl.num_programs(0) * BLOCK_R):
        entry = empty + tl.arange(0, BLOCK_R)[:, None]
        tl.store(tiles_ptr + entry * 8 + column, column * 0, mask=(entry < num_tiles) & (column < 8))


def attention_tiles(
    cu_seqlens: torch.Tensor, total_tokens: int, block: int, num_keys: torch.Tensor | None = None
) -> torch.Tensor:
    """The tiles of `block` tokens of a batch, in the order in which programs take them; no host sync."""
    cu_seqlens = cu_seqlens.contiguous()
    batch_size = cu_seqlens.shape[0] - 1
    num_spans = batch_size if num_keys is None else 2 * batch_size
    tiles = cu_seqlens.new_empty(total_tokens // block + num_spans + 1, 8)
    num_keys = None if num_keys is None else num_keys.contiguous()
    with torch.cuda.device_of(cu_seqlens):
        _attention_tiles_kernel[(cdiv(num_spans + 1, 16),)](
            cu_seqlens, num_keys, tiles, batch_size, total_tokens, tiles.shape[0],
            BLOCK_TILE=block, BLOCK_B=16, BLOCK_R=128, HAS_NUM_KEYS=num_keys is not None,
        )  # fmt: skip
    return tiles


@triton.jit
def load_rows(
    ptr, stride, first, end, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_WHOLE: tl.constexpr
):  # fmt: skip
    """ROWS rows of one head from `first` on, [ROWS, BLOCK_D]; zeros from `end` on, which with IS_WHOLE none reaches.

    64-bit arithmetic is for the first row alone: offsets from there are the same in every step of a loop.
    """
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    ptr += tl.cast(first, tl.int64) * stride
    at = rows[:, None] * stride + columns[None, :]
    if IS_WHOLE and HEAD_DIM == BLOCK_D:
        return tl.load(ptr + at)
    return tl.load(ptr + at, mask=(rows < end - first)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, stride, first, end, values, HEAD_DIM: tl.constexpr):
    ROWS: tl.constexpr = values.shape[0]
    BLOCK_D: tl.constexpr = values.shape[1]
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    ptr += tl.cast(first, tl.int64) * stride
    inside = (rows < end - first)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(ptr + rows[:, None] * stride + columns[None, :], values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def kept_probs(philox_ptr, rows, first_column, head, threshold, scale, BLOCK_N: tl.constexpr):
    """[len(rows), BLOCK_N]: 0 where a query's (row's) probability for a key (column) is dropped, else `scale`.

    By tokens, so that the mask does not depend on the tile that asks: half word j of Philox counter (i, row, head)
    decides key 8 i + j of the row's sequence. first_column counts from there, and is a multiple of 8. Seven rounds pass
    every test of randomness that ten do (Salmon et al. 2011); 16 bits resolve dropout_p to 1 in 65536.
    """
    seed, offset = tl.load(philox_ptr), tl.load(philox_ptr + 1)
    columns = (first_column // 8 + tl.arange(0, BLOCK_N // 8)).to(tl.uint32)[None, :]
    zero = rows.to(tl.uint32)[:, None] * 0 + columns * 0
    w0, w1, w2, w3 = tl.philox(
        seed, zero + columns, zero + rows.to(tl.uint32)[:, None], zero + head.to(tl.uint32),
        zero + (offset & 0xFFFFFFFF).to(tl.uint32), n_rounds=7,
    )  # fmt: skip
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [M, N / 8, 2, 2]
    halves = tl.reshape(tl.join(words & 0xFFFF, words >> 16), [rows.shape[0], BLOCK_N])
    return tl.where(halves < threshold.to(tl.uint32), 0.0, scale)


@triton.jit
def signed(scores, SIGN: tl.constexpr):
    """Times the sign of softmax_scale, whose size comes later: the maximum is then that of the softmax. Where the
    scale is 0 all finite scores are 0, and the size that comes later is not, since 0 times the -inf of a masked score
    would be NaN."""
    if SIGN != 1:
        scores = scores * SIGN
    return scores


@triton.jit
def window_places(positions_ptr, tokens, end, HAS_POSITIONS: tl.constexpr):
    """What a window goes by: the tokens' positions, or the tokens themselves.

    Loaded in a block of its own: of a plain vector every thread would load again what it wants (load_records).
    """
    if HAS_POSITIONS:
        column = tl.arange(0, 4)[None, :]
        inside = (tokens < end)[:, None] & (column == 0)
        return tl.sum(tl.load(positions_ptr + tokens[:, None] + column * 0, mask=inside, other=0), axis=1)
    return tokens


@triton.jit
def in_window(queries, keys, window_left, window_right):
    return (keys >= queries - window_left) & (keys <= queries + window_right)


@triton.jit
def walk(begin, end, first, last, before, after, HAS_WINDOW: tl.constexpr):
    """The tokens that a tile [first, last) walks over: its sequence, or of that from `before` it to `after` it."""
    low, high = begin, end
    if HAS_WINDOW:
        low = begin + tl.maximum(0, first - before - begin) // 8 * 8  # where a counter of the dropout mask begins
        high = tl.minimum(end, last + after)
    return low, high


# --------------------------------------------------------------------------------------------------------------------
# What every launch is given


def rows_whole(t: torch.Tensor) -> torch.Tensor:
    """The tensor itself where a head's row is in one piece, as it is in a slice of a fused projection, and offsets
    within a tile of 128 fit into 32 bits."""
    is_row = t.stride(2) == 1 or t.shape[2] == 1
    return t if is_row and t.stride(0) < 2**24 else t.contiguous()


def scale_and_sign(softmax_scale: float) -> tuple[float, int]:
    """softmax_scale for exponentials of 2, without its sign, and that sign: see `signed`."""
    scale, sign = abs(softmax_scale) * _LOG2E, -1 if softmax_scale < 0 else 1
    if scale < _SMALLEST:
        scale, sign = 1.0, 0
    return scale, sign


def launch_arguments(x, group, tiles, philox, positions, softmax_scale, dropout_p, window_size, blocks: Blocks):
    """The grid over the heads of x, which is q or k, and the arguments that all kernels share."""
    total_tokens, num_heads, head_dim = x.shape
    positions = None if positions is None else positions.contiguous()
    # 32-bit sums with tokens' numbers: 2^30 is further than any sequence reaches.
    left, right = (2**30 if side < 0 else min(side, 2**30) for side in window_size)
    scale, sign = scale_and_sign(softmax_scale)
    return (tiles.shape[0], cdiv(num_heads, blocks.heads)), {
        "tiles_ptr": tiles, "philox_ptr": philox, "positions_ptr": positions, "total_tokens": total_tokens,
        "num_heads": num_heads, "scale_log2e": scale, "threshold": round(dropout_p * 2**16),
        "keep_scale": 1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0,
        "window_left": left, "window_right": right,
        "HEAD_DIM": head_dim, "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "SIGN": sign, "HAS_WINDOW": min(window_size) >= 0 or max(window_size) >= 0,
        "HAS_POSITIONS": positions is not None, "HAS_DROPOUT": dropout_p > 0, "BLOCK_TILE": blocks.tile,
        "BLOCK_STEP": blocks.step, "HEADS": blocks.heads, "GROUP": group,
        "num_warps": blocks.num_warps, "num_stages": blocks.num_stages,
    }  # fmt: skip


def strides(**tensors: torch.Tensor) -> dict[str, int]:
    return {f"stride_{name}{axis}": t.stride(i) for name, t in tensors.items() for i, axis in enumerate("th")}
