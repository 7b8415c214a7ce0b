"""Which elements dropout zeroes, from Philox4x32-10 (Salmon et al. 2011): every backend agrees on the mask of a row.

Word j of counter row * ceil(hidden_size / 4) + i decides column 4 i + j of the row, the offset is the counter's high
half, and a word below dropout_p 2^32 drops; csrc/include/dropout.h is the same in C++. philox is int64 (2,) = [seed,
offset], read on the device, so that nothing waits for the host.
"""

import triton
import triton.language as tl


@triton.jit
def dropout_multiplier(philox_ptr, rows, first_column, hidden_size, threshold, scale, BLOCK_N: tl.constexpr):
    """rows [BLOCK_M] -> [BLOCK_M, BLOCK_N], 0 where dropped and `scale` where kept; first_column is a multiple of 4.

    One Philox call serves four neighbouring columns: a call for each column would cost more than the memory traffic.
    """
    BLOCK_M: tl.constexpr = rows.shape[0]
    BLOCK_C: tl.constexpr = BLOCK_N // 4
    seed = tl.load(philox_ptr)
    offset = tl.load(philox_ptr + 1)
    of_four = first_column // 4 + tl.arange(0, BLOCK_C)
    counter = rows[:, None] * tl.cdiv(hidden_size, 4) + of_four[None, :]  # [BLOCK_M, BLOCK_C] int64
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = low * 0
    offset_low = zero + (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = zero + (offset >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, offset_low, offset_high)
    # join appends an axis of 2: (w0, w2) and (w1, w3) come out as w0, w1, w2, w3.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [BLOCK_M, BLOCK_C, 2, 2]
    words = tl.reshape(words, [BLOCK_M, BLOCK_N])
    return tl.where(words < threshold.to(tl.uint32), 0.0, scale)


def dropout_numbers(dropout_p: float) -> tuple[int, float]:
    """(threshold, scale): a random word below the threshold drops, what is kept is multiplied by the scale."""
    return min(int(dropout_p * 2**32), 2**32 - 1), 1.0 / (1.0 - dropout_p) if dropout_p < 1 else 0.0
