"""Many matrices laid one behind the other, in another dtype, in one launch: weights as a step's products want them.

Where each matrix lies is a number in memory, as in adamw.py: a program copies one block of up to BLOCK elements of one
matrix, whose address, count and offset in the result it reads. Bound by memory: every element is read once and written
once. Nothing of the result that belongs to no matrix is written.
"""

import torch
import triton
import triton.language as tl

from .launching import Launches

BLOCK = 2048  # 16 elements a thread


@triton.jit
def _merge_kernel(
    addresses_ptr, counts_ptr, offsets_ptr, like_ptr, merged_ptr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """like_ptr: one of the matrices, for its dtype. IS_ALIGNED: addresses and offsets are multiples of 16."""
    block = tl.program_id(0)
    matrix_ptr = tl.load(addresses_ptr + block).to(like_ptr.dtype)
    offset, count = tl.load(offsets_ptr + block), tl.load(counts_ptr + block)
    if IS_ALIGNED:
        matrix_ptr, offset = tl.multiple_of(matrix_ptr, 16), tl.multiple_of(offset, 16)
    at = tl.arange(0, BLOCK)
    if count == BLOCK:  # without a mask, which would take loads of 4 bytes
        tl.store(merged_ptr + offset + at, tl.load(matrix_ptr + at).to(merged_ptr.dtype.element_ty))
    else:
        matrix = tl.load(matrix_ptr + at, mask=at < count, other=0.0)
        tl.store(merged_ptr + offset + at, matrix.to(merged_ptr.dtype.element_ty), mask=at < count)


_MERGE = Launches(
    "addresses_ptr counts_ptr offsets_ptr like_ptr merged_ptr",
    lambda is_aligned: {"IS_ALIGNED": is_aligned, "BLOCK": BLOCK, "num_warps": 4},
)


def merge_matrices(addresses, counts, offsets, like, is_aligned, merged):
    """The schema in fastbert/ops/layers/gpu/merged_weights.py."""
    if addresses.shape[0]:
        with torch.cuda.device_of(addresses):
            launch = _MERGE.bind(_merge_kernel, (is_aligned,), (addresses.shape[0],))
            launch(addresses, counts, offsets, like, merged)
