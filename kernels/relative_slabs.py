"""The tables of relative terms by distance, a slab a head: what attention's kernels read of them lies in a row.

Slabs are (num_heads, 2 reach - 1, BLOCK_D), of the distances (query less key) from 1 - reach on; a bias is fp32 and
times log2(e). `ends` are the distances up to which, and from which on, all have one row.
"""

import torch
import triton
import triton.language as tl

from .sizes import cdiv, next_power_of_2


@triton.jit
def _find_ends(rows_ptr, ends_ptr, count, BLOCK: tl.constexpr):
    low, high = count, -1
    lowest, highest = tl.load(rows_ptr), tl.load(rows_ptr + count - 1)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + at, mask=at < count, other=0)
        low = tl.minimum(low, tl.min(tl.where((at < count) & (row != lowest), at, count), axis=0))
        high = tl.maximum(high, tl.max(tl.where((at < count) & (row != highest), at, -1), axis=0))
    tl.store(ends_ptr, low - 1 - count // 2)
    tl.store(ends_ptr + 1, high + 1 - count // 2)


@triton.jit
def _expand(
    table_ptr, slab_ptr, stride_row, stride_head, row, at, count, num_rows, head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_D)[None, :]
    known = ((row >= 0) & (row < num_rows))[:, None]
    values = tl.load(
        table_ptr + row.to(tl.int64)[:, None] * stride_row + head * stride_head + columns,
        mask=known & (columns < HEAD_DIM), other=0.0,
    )  # fmt: skip
    values = tl.where(known, values.to(tl.float32), float("nan")).to(slab_ptr.dtype.element_ty)
    tl.store(slab_ptr + (head * count + at)[:, None] * BLOCK_D + columns, values, mask=(at < count)[:, None])


@triton.jit(do_not_specialize=["count", "num_rows"])
def _expand_kernel(
    rows_ptr, key_ptr, query_ptr, bias_ptr, key_slab_ptr, query_slab_ptr, bias_slab_ptr, ends_ptr,
    stride_kr, stride_kh, stride_qr, stride_qh, stride_br, stride_bh, count, num_rows, num_heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
    HAS_KEY: tl.constexpr, HAS_QUERY: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A program makes BLOCK distances of one head; one more finds the ends. A row beyond the tables is NaN."""
    if tl.program_id(1) == num_heads:
        if tl.program_id(0) == 0:
            _find_ends(rows_ptr, ends_ptr, count, 1024)
    else:
        head = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(rows_ptr + at, mask=at < count, other=0)
        if HAS_KEY:
            _expand(
                key_ptr, key_slab_ptr, stride_kr, stride_kh, row, at, count, num_rows, head, HEAD_DIM, BLOCK_D
            )  # fmt: skip
        if HAS_QUERY:
            _expand(
                query_ptr, query_slab_ptr, stride_qr, stride_qh, row, at, count, num_rows, head, HEAD_DIM, BLOCK_D
            )  # fmt: skip
        if HAS_BIAS:
            known = (row >= 0) & (row < num_rows)
            values = tl.load(bias_ptr + row.to(tl.int64) * stride_br + head * stride_bh, mask=known, other=0.0)
            values = tl.where(known, values.to(tl.float32) * 1.4426950408889634, float("nan"))
            tl.store(bias_slab_ptr + head * count + at, values, mask=at < count)


class Slabs:
    """What _expand_kernel makes; None where there is no such table."""

    def __init__(self, key, query, bias, ends: torch.Tensor, reach: int):
        self.key, self.query, self.bias, self.ends, self.reach = key, query, bias, ends, reach


def expand(rows, key, query, bias, head_dim: int) -> Slabs:
    """rows: of the distances that sequences of up to `reach` places have, (2 reach - 1,)."""
    num_rows, num_heads = next(t for t in (key, query, bias) if t is not None).shape[:2]
    block_d, count = max(16, next_power_of_2(head_dim)), rows.shape[0]
    key, query = (t if t is None or t.stride(2) == 1 else t.contiguous() for t in (key, query))
    slabs = [None if t is None else t.new_empty(num_heads, count, block_d) for t in (key, query)]
    slabs.append(None if bias is None else bias.new_empty(num_heads, count, dtype=torch.float32))
    ends = rows.new_empty(2)
    strides = [s for t in (key, query, bias) for s in ((0, 0) if t is None else t.stride()[:2])]
    with torch.cuda.device_of(rows):
        _expand_kernel[(cdiv(count, 32), num_heads + 1)](
            rows, key, query, bias, *slabs, ends, *strides, count, num_rows, num_heads,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK=32,
            HAS_KEY=key is not None, HAS_QUERY=query is not None, HAS_BIAS=bias is not None,
        )  # fmt: skip
    return Slabs(*slabs, ends, (count + 1) // 2)
