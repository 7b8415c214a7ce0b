"""AdamW (Loshchilov & Hutter 2017, algorithm 2) over all weights of a model at once, clipping included.

Gradients, means and squares lie in one buffer each, weights where they are: a block of BLOCK elements is of one weight,
whose place is a number in memory. What changes from step to step is read from memory, too (rates, decays, corrections
of the means), so that a CUDA graph serves any step. Every element is read once and written once, 28 bytes, and 4 for
the gradient's zero, which is where the next step's begins; clipping reads gradients a second time.

The norm is summed in one order on any GPU: PARTS programs, each over every PARTS-th block, and one program over these.
"""

import torch
import triton
import triton.language as tl

PARTS = 1024
_TINY = tl.constexpr(1e-6)  # as torch.nn.utils.clip_grad_norm_ has it


@triton.jit(do_not_specialize=["num_blocks"])
def _square_sums_kernel(gradients_ptr, parts_ptr, num_blocks, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """parts (PARTS,), fp32: each program's sum of squares; those that have no block are 0 before."""
    total = tl.zeros([BLOCK], tl.float32)
    gradients_ptr += tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for _ in range(tl.program_id(0), num_blocks, PARTS):
        gradient = tl.load(gradients_ptr)
        total += gradient * gradient
        gradients_ptr += PARTS * BLOCK
    tl.store(parts_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _norm_kernel(parts_ptr, norm_ptr, max_norm, PARTS: tl.constexpr):
    """norm (2,), fp32: that of all gradients, and what they are multiplied with so that it is max_norm at most."""
    norm = tl.sqrt(tl.sum(tl.load(parts_ptr + tl.arange(0, PARTS)), axis=0))
    tl.store(norm_ptr, norm)
    scale = max_norm / (norm + _TINY)
    tl.store(norm_ptr + 1, tl.where(scale < 1.0, scale, tl.where(scale >= 1.0, 1.0, scale)))  # NaN stays


@triton.jit
def _stepped(weight, mean, square, gradient, rate, decay, correction1, correction2, beta1, beta2, eps):
    mean = beta1 * mean + (1.0 - beta1) * gradient
    square = beta2 * square + (1.0 - beta2) * gradient * gradient
    weight = weight * (1.0 - rate * decay) - rate * correction1 * mean / (tl.sqrt(square) * correction2 + eps)
    return weight, mean, square


@triton.jit(do_not_specialize=["num_groups"])
def _adamw_kernel(
    addresses_ptr, counts_ptr, groups_ptr, gradients_ptr, means_ptr, squares_ptr, numbers_ptr, norm_ptr, num_groups,
    beta1, beta2, eps, CLIPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a weight. Behind the weight's end its gradients, means and squares are 0, and stay so."""
    block = tl.program_id(0).to(tl.int64)
    weights_ptr = tl.load(addresses_ptr + block).to(tl.pointer_type(tl.float32))
    weights_ptr = tl.multiple_of(weights_ptr, 16)
    count, group = tl.load(counts_ptr + block), tl.load(groups_ptr + block)
    correction1, correction2 = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    rate, decay = tl.load(numbers_ptr + 2 + group), tl.load(numbers_ptr + 2 + num_groups + group)
    at = tl.arange(0, BLOCK)
    here = block * BLOCK + at
    gradient, mean, square = tl.load(gradients_ptr + here), tl.load(means_ptr + here), tl.load(squares_ptr + here)
    if CLIPS:
        gradient *= tl.load(norm_ptr + 1)
    numbers = (rate, decay, correction1, correction2, beta1, beta2, eps)
    if count == BLOCK:  # without a mask, which would take loads of 4 bytes
        weight = tl.load(weights_ptr + at)
        weight, mean, square = _stepped(weight, mean, square, gradient, *numbers)
        tl.store(weights_ptr + at, weight)
    else:
        weight = tl.load(weights_ptr + at, mask=at < count, other=0.0)
        weight, mean, square = _stepped(weight, mean, square, gradient, *numbers)
        tl.store(weights_ptr + at, weight, mask=at < count)
    tl.store(means_ptr + here, mean)
    tl.store(squares_ptr + here, square)
    tl.store(gradients_ptr + here, tl.zeros([BLOCK], tl.float32))


def adamw_flat(addresses, counts, groups, gradients, means, squares, numbers, beta1, beta2, eps, max_norm):
    """-> the gradients' norm (), fp32; the schema in fastbert/ops/optim/adamw_flat.py."""
    num_blocks, num_groups = addresses.shape[0], (numbers.shape[0] - 2) // 2
    norm = gradients.new_full((2,), float("nan"))
    if num_blocks == 0:
        return norm[0].zero_() if max_norm > 0 else norm[0]
    block = gradients.shape[0] // num_blocks
    with torch.cuda.device_of(gradients):
        if max_norm > 0:
            parts = gradients.new_zeros(PARTS)
            programs = min(PARTS, num_blocks)
            _square_sums_kernel[(programs,)](gradients, parts, num_blocks, PARTS=PARTS, BLOCK=block, num_warps=4)
            _norm_kernel[(1,)](parts, norm, max_norm, PARTS=PARTS, num_warps=4)
        _adamw_kernel[(num_blocks,)](
            addresses, counts, groups, gradients, means, squares, numbers, norm, num_groups, beta1, beta2, eps,
            CLIPS=max_norm > 0, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return norm[0]
