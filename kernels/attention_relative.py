"""Attention with terms by distance (He et al. 2021, "DeBERTa", section 3.1): what forward and backward share.

    s[i, j] = (q_i k_j + q_i key[r] + k_j query[r]) softmax_scale + bias[r],   r = rows[longest - 1 + i - j]

relative_slabs.py expands the tables by distance, once a call. A tile of scores is square: BLOCK queries, its rows, and
BLOCK keys, its columns. Forward and dq keep the queries of a tile and walk over keys, dk and dv the other way round
(OF_KEYS). What a tile wants of a slab are 2 BLOCK distances; relative_shift.py makes scores of the products with them.

Where all distances of a tile lie beyond the last change of `rows`, one row serves: two vectors of scores, no product.
The order of a score's sum is the same in every kernel, so that fp32 makes the same bits of it.

Places are tokens, or with HAS_HOLES the slots of a padded sequence from its first token to its last; index_ptr then has
the token of each place, -1 in a hole. See attention.py for tiles and the rest.
"""

import triton
import triton.language as tl

from .attention import in_window, launch_arguments, load_rows, store_rows, tile_at, window_places
from .attention_bwd import load_records
from .relative_shift import shift_columns, shift_rows, shift_vector
from .relative_slabs import Slabs

LOG2E = 1.4426950408889634

# --------------------------------------------------------------------------------------------------------------------
# Tokens and slabs of a tile


@triton.jit
def load_tile(tiles_ptr, BLOCK: tl.constexpr, BLOCK_TILE: tl.constexpr):
    """A program's block of a tile of the list, which may have several: first place, end, and those of its sequence."""
    PARTS: tl.constexpr = BLOCK_TILE // BLOCK
    first, last, begin, end = tile_at(tiles_ptr, tl.program_id(0) // PARTS)
    first += tl.program_id(0) % PARTS * BLOCK
    return first, tl.minimum(last, first + BLOCK), begin, end


@triton.jit
def tokens_at(index_ptr, first, end, ROWS: tl.constexpr):
    """The tokens of ROWS places from `first` on; -1 in holes and from `end` on. Loaded as in window_places."""
    places, column = tl.arange(0, ROWS)[:, None], tl.arange(0, 4)[None, :]
    inside = (places < end - first) & (column == 0)
    return tl.max(tl.load(index_ptr + first + places + column * 0, mask=inside, other=-1), axis=1)


@triton.jit
def load_places(
    ptr, stride, index_ptr, first, end, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_HOLES: tl.constexpr,
):  # fmt: skip
    """load_rows of places; zeros in holes."""
    if HAS_HOLES:
        columns = tl.arange(0, BLOCK_D)[None, :]
        token = tokens_at(index_ptr, first, end, ROWS)[:, None]
        at = token.to(tl.int64) * stride + columns
        return tl.load(ptr + at, mask=(token >= 0) & (columns < HEAD_DIM), other=0.0)
    else:
        return load_rows(ptr, stride, first, end, ROWS, HEAD_DIM, BLOCK_D, False)


@triton.jit
def store_places(ptr, stride, index_ptr, first, end, values, HEAD_DIM: tl.constexpr, HAS_HOLES: tl.constexpr):
    if HAS_HOLES:
        columns = tl.arange(0, values.shape[1])[None, :]
        token = tokens_at(index_ptr, first, end, values.shape[0])[:, None]
        at = token.to(tl.int64) * stride + columns
        tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=(token >= 0) & (columns < HEAD_DIM))
    else:
        store_rows(ptr, stride, first, end, values, HEAD_DIM)


@triton.jit
def is_token(index_ptr, first, end, ROWS: tl.constexpr, HAS_HOLES: tl.constexpr):
    if HAS_HOLES:
        return tokens_at(index_ptr, first, end, ROWS) >= 0
    else:
        return tl.arange(0, ROWS) < end - first


@triton.jit
def window_keys(
    positions_ptr, index_ptr, first, end, ROWS: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_HOLES: tl.constexpr
):  # fmt: skip
    """What a window goes by, of ROWS places from `first` on: positions, or else tokens, which holes are not."""
    if HAS_HOLES:
        token = tokens_at(index_ptr, first, end, ROWS)
        if HAS_POSITIONS:
            token = tl.load(positions_ptr + token, mask=token >= 0, other=0)
        return token
    else:
        return window_places(positions_ptr, first + tl.arange(0, ROWS), end, HAS_POSITIONS)


@triton.jit
def walk_blocks(
    begin, end, first, before, after, BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_HOLES: tl.constexpr
):  # fmt: skip
    """The places that a tile from `first` on walks over: its sequence, or of that from `before` it to `after` it, in
    whole blocks. Windows go by tokens or positions, of which holes may make any number of places."""
    low, high = begin, end
    if HAS_WINDOW and not HAS_HOLES:
        low = begin + tl.maximum(0, first - before - begin) // BLOCK * BLOCK
        high = tl.minimum(end, first + BLOCK + after)
    return low, high


@triton.jit
def slab_of(ptr, head, reach, BLOCK_D: tl.constexpr):
    """A head's, at the distance 0."""
    return ptr + (head * (2 * reach - 1) + reach - 1) * BLOCK_D


@triton.jit
def is_within(distance, bound):
    """-bound < distance < bound, as one comparison."""
    return (distance + (bound - 1)).to(tl.uint32, bitcast=True) < (2 * bound - 1).to(tl.uint32, bitcast=True)


@triton.jit
def load_slab(ptr, first, bound, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Those of ROWS distances from `first` on; ptr is at distance 0. Zeros from `bound` on, where no pair of the
    sequence is: another's rows may be NaN."""
    distance = first + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(ptr + distance * BLOCK_D + columns, mask=is_within(distance, bound), other=0.0)


@triton.jit
def load_bias(ptr, first, bound, ROWS: tl.constexpr):
    distance = first + tl.arange(0, ROWS)
    return tl.load(ptr + distance, mask=is_within(distance, bound), other=0.0)


@triton.jit
def unclamped_steps(low, high, first, ends_ptr, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr):
    """Of the steps of BLOCK places from `low` on that a block from `first` on walks over: where those begin and end
    whose distances do not all have one row, and at which distances those before and behind them are."""
    lower, upper = tl.load(ends_ptr), tl.load(ends_ptr + 1)
    sign = 1
    if OF_KEYS:  # with the distances the other way round
        lower, upper, sign = -upper, -lower, -1
    # A step's are from first - start - BLOCK + 1 to first - start + BLOCK - 1.
    steps = tl.cdiv(high - low, BLOCK)
    begin = tl.minimum(steps, tl.maximum(0, first - low - upper + 1) // BLOCK)
    stop = tl.minimum(steps, tl.maximum(begin, tl.cdiv(tl.maximum(0, first - low - lower + BLOCK - 1), BLOCK)))
    return low + begin * BLOCK, tl.minimum(low + stop * BLOCK, high), upper * sign, lower * sign


# --------------------------------------------------------------------------------------------------------------------
# Scores of a tile, in units of log(2): a fused multiply-add always, whose bits are the same in every kernel, so that
# the probability of a single key is 1


@triton.jit
def scaled(scores, scale_log2e, shift):
    return tl.fma(scores, tl.cast(scale_log2e, tl.float32), shift)  # fp32 whatever the interpreter takes a tiny one for


@triton.jit
def unclamped_scores(
    q, k, key_slab, query_slab, bias, scale_log2e, HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK], of the slabs' 2 BLOCK distances from BLOCK less than that of the tile's corner on."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_KEY:
        scores += shift_rows(tl.dot(q, tl.trans(key_slab), input_precision="ieee"))
    if HAS_QUERY:
        scores += shift_columns(tl.dot(query_slab, tl.trans(k), input_precision="ieee"))
    shift = 0.0
    if HAS_BIAS:
        shift = shift_vector(bias, q.shape[0])
    return scaled(scores, scale_log2e, shift)


@triton.jit
def clamped_scores(
    q, k, of_q, of_k, bias_ptr, scale_log2e, HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """At one distance: of_q is q key[r], of_k is k query[r], both by `one_row`, and bias_ptr is there."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_KEY:
        scores += of_q[:, None]
    if HAS_QUERY:
        scores += of_k[None, :]
    shift = 0.0
    if HAS_BIAS:
        shift = tl.load(bias_ptr)
    return scaled(scores, scale_log2e, shift)


@triton.jit
def one_row(x, row_ptr, BLOCK_D: tl.constexpr):
    """x [N, D] times the row at row_ptr, [N]: by a product, whose sum goes over D in the order of all others."""
    rows = tl.load(row_ptr + tl.arange(0, 16)[:, None] * 0 + tl.arange(0, BLOCK_D)[None, :])
    products = tl.dot(x, tl.trans(rows), input_precision="ieee")  # [N, 16], all columns alike
    return tl.sum(tl.where(tl.arange(0, 16)[None, :] == 0, products, 0.0), axis=1)


# --------------------------------------------------------------------------------------------------------------------
# Gradients of a tile


@triton.jit
def records_of(ptr, index_ptr, first, end, ROWS: tl.constexpr, HAS_HOLES: tl.constexpr):
    """load_records of places; zeros in holes."""
    if HAS_HOLES:
        token, column = tokens_at(index_ptr, first, end, ROWS)[:, None], tl.arange(0, 4)[None, :]
        records = tl.load(ptr + token.to(tl.int64) * 4 + column, mask=(token >= 0) & (column < 4), other=0.0)
        shift = tl.sum(tl.where(column == 0, records, 0.0), axis=1)
        inverse = tl.sum(tl.where(column == 1, records, 0.0), axis=1)
        return shift, inverse, tl.sum(tl.where(column == 2, records, 0.0), axis=1)
    else:
        return load_records(ptr, first, end, ROWS, False)


@triton.jit
def nothing_at(position, end):
    """A 0 that the compiler does not know, of a place before the end. What it is added to cannot be made before the
    loop: kept there through all steps, it would take registers that are wanted for more."""
    return (end - 1 - position) >> 31


@triton.jit
def dropout_signs(philox_ptr, first_row, first_column, head, nothing, threshold, BLOCK: tl.constexpr):
    """[BLOCK, BLOCK]: -1 where a query's (row's) probability for a key (column) is dropped, else 1.

    By places, so that the mask does not depend on the block that asks. A Philox counter decides the eight elements that
    a thread has of a product's 16 x 16 results: rows r and r + 8, columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9.
    nothing: as from nothing_at, for the rounds' keys, and more that is the same in every step.
    """
    seed, offset = tl.load(philox_ptr) + nothing, (tl.load(philox_ptr + 1) & 0xFFFFFFFF).to(tl.uint32)
    r_of_16, r = tl.arange(0, BLOCK // 16)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    c_of_16, q = tl.arange(0, BLOCK // 16)[None, None, :, None], tl.arange(0, 4)[None, None, None, :]
    columns = ((first_column // 16 + c_of_16) * 4 + q).to(tl.uint32)
    rows = (first_row + r_of_16 * 16 + r).to(tl.uint32)
    zero = rows * 0 + columns * 0
    w0, w1, w2, w3 = tl.philox(
        seed, zero + columns, zero + rows, zero + head.to(tl.uint32), zero + offset,
        n_rounds=7,
    )  # fmt: skip
    words = tl.join(tl.join(w0, w1), tl.join(w2, w3))  # [., 8, ., 4, 8 columns on, 8 rows on]
    halves = tl.join(words & 0xFFFF, words >> 16)  # the last: odd columns
    halves = tl.reshape(tl.permute(halves, (0, 5, 1, 2, 4, 3, 6)), [BLOCK, BLOCK])
    return tl.where(halves < threshold.to(tl.uint32), -1.0, 1.0)


@triton.jit
def tile_probs(
    scores, shift, inverse, query, key, index_ptr, philox_ptr, positions_ptr, begin, end, head, threshold, window_left,
    window_right,
    IS_FP32: tl.constexpr, BLOCK: tl.constexpr, ALL_QUERIES: tl.constexpr, ALL_KEYS: tl.constexpr,
    HAS_HOLES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_POSITIONS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Probabilities of the tile of the queries and the keys from these places on, negative where dropout drops them:
    one number in registers instead of two. ALL_QUERIES, ALL_KEYS: what is none any more makes numbers that reach no
    other row, or column, and are not stored."""
    probs = tl.exp2(scores - shift[:, None])
    if IS_FP32:
        probs *= inverse[:, None]
    if ALL_QUERIES:
        seen = is_token(index_ptr, key, end, BLOCK, HAS_HOLES)[None, :]
    elif ALL_KEYS:
        seen = is_token(index_ptr, query, end, BLOCK, HAS_HOLES)[:, None]
    else:
        seen = is_token(index_ptr, query, end, BLOCK, HAS_HOLES)[:, None]
        seen = seen & is_token(index_ptr, key, end, BLOCK, HAS_HOLES)[None, :]
    if HAS_WINDOW:
        queries = window_keys(positions_ptr, index_ptr, query, end, BLOCK, HAS_POSITIONS, HAS_HOLES)
        keys = window_keys(positions_ptr, index_ptr, key, end, BLOCK, HAS_POSITIONS, HAS_HOLES)
        seen = seen & in_window(queries[:, None], keys[None, :], window_left, window_right)
    probs = tl.where(seen, probs, 0.0)
    if HAS_DROPOUT:
        nothing = nothing_at(tl.maximum(query, key), end)
        probs *= dropout_signs(philox_ptr, query, key - begin, head, nothing, threshold, BLOCK)
    return probs


@triton.jit
def kept_of(probs, keep_scale, HAS_DROPOUT: tl.constexpr):
    """Those of tile_probs, times what dropout makes of them."""
    if HAS_DROPOUT:
        return tl.maximum(probs, 0.0) * keep_scale
    else:
        return probs


@triton.jit
def dscores_of(probs, dprobs, delta, keep_scale, HAS_DROPOUT: tl.constexpr):
    """ds / softmax_scale, of tile_probs and dout v^T."""
    if HAS_DROPOUT:
        return tl.abs(probs) * (tl.where(probs > 0.0, dprobs * keep_scale, 0.0) - delta[:, None])
    else:
        return probs * (dprobs - delta[:, None])


# --------------------------------------------------------------------------------------------------------------------
# What every launch is given


def variant_of(slabs: Slabs, index, window_size) -> str:
    """Of _RELATIVE in blocks.py: by what a kernel has in registers."""
    if index is not None or max(window_size) >= 0:
        return "more"
    if slabs.key is None and slabs.query is None:
        return "bias"
    return "" if slabs.key is None or slabs.query is None or slabs.bias is None else "more"


def relative_arguments(
    x, tiles, tile, philox, positions, softmax_scale, dropout_p, window_size, blocks, slabs: Slabs, index
):  # fmt: skip
    """The grid over the heads of x, and the arguments that all kernels share. blocks.tile divides `tile`."""
    (num_tiles, num_heads), shared = launch_arguments(
        x, 1, tiles, philox, positions, softmax_scale, dropout_p, window_size, blocks
    )  # fmt: skip
    for name in ("SIGN", "GROUP", "HEADS", "BLOCK_STEP"):
        del shared[name]
    absent = slabs.ends  # some pointer
    return (num_tiles * (tile // blocks.tile), num_heads), shared | {
        "key_slab_ptr": absent if slabs.key is None else slabs.key,
        "query_slab_ptr": absent if slabs.query is None else slabs.query,
        "bias_slab_ptr": absent if slabs.bias is None else slabs.bias,
        "ends_ptr": slabs.ends, "index_ptr": index, "reach": slabs.reach,
        "scale_log2e": softmax_scale * LOG2E, "BLOCK": blocks.tile, "BLOCK_TILE": tile,
        "HAS_HOLES": index is not None, "HAS_KEY": slabs.key is not None, "HAS_QUERY": slabs.query is not None,
        "HAS_BIAS": slabs.bias is not None,
    }  # fmt: skip
