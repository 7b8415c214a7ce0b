"""Packing: rows of a padded matrix to its real tokens, and back with zeros at padding; each is the other's gradient.

    pack:   packed[t] = padded[indices[t]]
    unpack: padded[r] = packed[t] where r = indices[t], else 0      every row is written once

indices are ascending, as what lists the ones of a mask is. That is what unpack lives on: a program takes BLOCK_M rows,
finds by bisection how many tokens lie before its first one, and has all of its rows' tokens among the BLOCK_M after
that. A table of each row's token would make the search needless, but takes three launches to make, where zeros and the
rows over them, which write padded twice, take two in all. A search reads up to log2 of the tokens, or of the padding,
in words that lie in the cache, one after the other; BLOCK_M rows share one, and the programs beside it copy meanwhile.

An index that is no row of padded reads nothing: pack gives words of ones there, which are NaN in every floating dtype.

Rows are copied as words of 4 bytes where they are whole words, whatever the dtype: logits over BERT's vocabulary, 30522
wide, then move in loads of 4 bytes instead of 2, and rows of a multiple of 16 words in loads of 16 bytes.

Legend: M rows, N columns.
"""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_rows", "total_tokens"])
def _pack_kernel(
    padded_ptr, indices_ptr, packed_ptr, num_rows, total_tokens, hidden_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(hidden_size, BLOCK_N)  # one axis of the grid for both: the others end at 65535
    tokens = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(indices_ptr + tokens, mask=tokens < total_tokens, other=0)  # [BLOCK_M], int64
    inside = (tokens < total_tokens)[:, None] & (columns < hidden_size)[None, :]  # [BLOCK_M, BLOCK_N]
    is_row = (rows >= 0) & (rows < num_rows)
    at = rows[:, None] * hidden_size + columns[None, :]
    words = tl.load(padded_ptr + at, mask=inside & is_row[:, None], other=-1)
    tl.store(packed_ptr + tokens[:, None] * hidden_size + columns[None, :], words, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "total_tokens", "search_steps"])
def _unpack_kernel(
    packed_ptr, indices_ptr, padded_ptr, num_rows, total_tokens, hidden_size, search_steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(hidden_size, BLOCK_N)
    first_row = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)

    # How many tokens lie before the first row: at most all, or one a row; at least one a row that cannot be padding.
    low = tl.maximum(first_row - (num_rows - total_tokens), 0)
    high = tl.minimum(first_row, total_tokens)
    for _ in range(search_steps):
        middle = (low + high) // 2
        is_before = (low < high) & (tl.load(indices_ptr + middle, mask=low < high, other=0) < first_row)
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)

    candidates = low + tl.arange(0, BLOCK_M)
    places = tl.load(indices_ptr + candidates, mask=candidates < total_tokens, other=num_rows)
    is_before = (places[None, :] < rows[:, None]).to(tl.int32)  # [BLOCK_M rows, BLOCK_M candidates]
    is_row = (places[None, :] == rows[:, None]).to(tl.int32)
    tokens = low + tl.sum(is_before, axis=1)
    is_real = (tl.sum(is_row, axis=1) > 0) & (rows < num_rows)

    inside = columns[None, :] < hidden_size
    words = tl.load(
        packed_ptr + tokens[:, None] * hidden_size + columns[None, :], mask=is_real[:, None] & inside, other=0
    )
    tl.store(
        padded_ptr + rows[:, None] * hidden_size + columns[None, :], words, mask=(rows < num_rows)[:, None] & inside
    )


def as_words(matrix: torch.Tensor) -> torch.Tensor:
    """A contiguous matrix as integers: of 4 bytes where that divides its rows and where it begins, else of 2."""
    size = matrix.element_size()
    is_whole = matrix.shape[1] * size % 4 == 0 and matrix.storage_offset() * size % 4 == 0
    return matrix.view(torch.int32 if is_whole else torch.int16)


def tile(width: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): 16 rows and 4096 words, for 4 warps, or fewer words where rows are short."""
    return 16, min(256, max(16, next_power_of_2(width)))


def pack(padded, indices):
    """padded (num_rows, hidden_size), indices (total_tokens,) -> packed; the schema in fastbert/ops/packing.py."""
    padded, indices = padded.contiguous(), indices.contiguous()
    packed = padded.new_empty(indices.shape[0], padded.shape[1])
    if packed.numel() == 0:
        return packed
    source = as_words(padded)
    target = packed.view(source.dtype)
    total_tokens, width = target.shape
    block_m, block_n = tile(width)
    with torch.cuda.device_of(padded):
        _pack_kernel[(cdiv(total_tokens, block_m) * cdiv(width, block_n),)](
            source, indices, target, source.shape[0], total_tokens, width,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return packed


def unpack(packed, indices, num_rows):
    """packed (total_tokens, hidden_size), indices (total_tokens,) -> padded (num_rows, hidden_size), else zeros."""
    packed, indices = packed.contiguous(), indices.contiguous()
    padded = packed.new_empty(num_rows, packed.shape[1])
    if padded.numel() == 0:
        return padded
    source = as_words(packed)
    target = padded.view(source.dtype)
    total_tokens, width = source.shape
    search_steps = min(total_tokens, num_rows - total_tokens).bit_length()
    block_m, block_n = tile(width)
    with torch.cuda.device_of(packed):
        _unpack_kernel[(cdiv(num_rows, block_m) * cdiv(width, block_n),)](
            source, indices, target, num_rows, total_tokens, width, search_steps,
            BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return padded
