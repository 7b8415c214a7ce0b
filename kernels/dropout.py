"""Dropout on its own: x (..., hidden_size) by the mask of philox.py; backward is the same over dout.

One pass, bound by memory: a program takes BLOCK_M rows by BLOCK_N columns, 16 elements a thread, in loads of 16 bytes.
What is dropped is 0 whatever it was, not 0 times it.
"""

import torch
import triton
import triton.language as tl

from .philox import dropout_multiplier, dropout_numbers
from .sizes import cdiv, next_power_of_2


@triton.jit(do_not_specialize=["num_rows", "threshold"])
def _dropout_kernel(
    x_ptr, philox_ptr, out_ptr, num_rows, hidden_size, threshold, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(hidden_size, BLOCK_N)  # one axis of the grid for both: the others end at 65535
    rows = (tl.program_id(0) // blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_column = tl.program_id(0) % blocks * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    inside = (rows < num_rows)[:, None] & (columns < hidden_size)[None, :]  # [BLOCK_M, BLOCK_N]
    at = rows[:, None] * hidden_size + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    multiplier = dropout_multiplier(philox_ptr, rows, first_column, hidden_size, threshold, scale, BLOCK_N)
    out = tl.where(multiplier == 0.0, 0.0, x * multiplier)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def tile(hidden_size: int) -> tuple[int, int]:
    """(BLOCK_M, BLOCK_N): 2048 elements, for 4 warps."""
    block_n = min(256, max(16, next_power_of_2(hidden_size)))
    return 2048 // block_n, block_n


def dropout(x, philox, dropout_p):
    """x (..., hidden_size) -> out, contiguous; the schema in fastbert/ops/dropout.py."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    hidden_size = x.shape[-1]
    num_rows = x.numel() // hidden_size
    block_m, block_n = tile(hidden_size)
    grid = (cdiv(num_rows, block_m) * cdiv(hidden_size, block_n),)
    with torch.cuda.device_of(x):
        _dropout_kernel[grid](
            x, philox, out, num_rows, hidden_size, *dropout_numbers(dropout_p), BLOCK_M=block_m, BLOCK_N=block_n
        )
    return out
