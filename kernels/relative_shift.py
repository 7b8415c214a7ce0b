"""From products by distance to scores by key, and back, for square tiles.

The product of a tile's rows with a slab has a column a distance, and a score wants the one that its column is away: row
r begins in its own place. Products come in two blocks, LO with the distances -N to -1 (of a row from a column of the
tile, row less column) and HI with 0 to N - 1.

A tile goes through shared memory: 32 banks of 4 bytes. Of the result of a product a warp has 8 rows and 4 pairs of
neighbouring columns, so the innermost 32 elements are 8 rows (or distances) by every second of 8 columns. Whether a
warp's threads put down what they have or fetch what is at r - c, the remainders by 8 that they meet are all different,
and no two meet in a bank (docs/notes/gpu.md, "Relative terms").
"""

import triton
import triton.language as tl


@triton.jit
def _flat(x):
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, [M // 8, 8, N // 8, 4, 2]), (0, 2, 4, 1, 3))
    return tl.reshape(x, [M * N])


@triton.jit
def _eights(M: tl.constexpr, N: tl.constexpr):
    """Rows and columns of [M, N], each as eights and rest, along four axes. A thread has two rests; its
    eights differ by constants, of which offsets in loads are made where they are added last."""
    rows, columns = tl.arange(0, M // 8)[:, None, None, None], tl.arange(0, N // 8)[None, None, :, None]
    return rows, tl.arange(0, 8)[None, :, None, None], columns, tl.arange(0, 8)[None, None, None, :]


@triton.jit
def _at(row_of_8, row, column_of_8, column, N: tl.constexpr):
    """The place in _flat of (., N)."""
    return (row_of_8 * (N // 8) + column_of_8) * 64 + (column % 2 * 32 + row * 4 + column // 2)


@triton.jit
def _fetch(flat, at):
    SIZE: tl.constexpr = at.shape[0] * at.shape[1] * at.shape[2] * at.shape[3]
    values = tl.gather(flat, tl.reshape(at, [SIZE]), 0)
    return tl.reshape(values, [at.shape[0] * at.shape[1], at.shape[2] * at.shape[3]])


@triton.jit
def beside(lo, hi):
    """[M, 2 N]; nothing moves, of two numbers of a thread each column has one."""
    both = tl.permute(tl.join(lo, hi), (0, 2, 1))
    return tl.reshape(both, [lo.shape[0], 2 * lo.shape[1]])


@triton.jit
def above(lo, hi):
    """[2 M, N]."""
    both = tl.permute(tl.join(lo, hi), (2, 0, 1))
    return tl.reshape(both, [2 * lo.shape[0], lo.shape[1]])


# Halves: rows, or columns, with bit 3 clear, and those with it set. Every thread has both. One by one they take
# half of the shared memory, and where they are joined last the compiler makes a product's operand without moving them.


@triton.jit
def _row_halves(x):
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    a, b = tl.split(tl.permute(tl.reshape(x, [M // 16, 2, 8, N]), (0, 2, 3, 1)))
    return tl.reshape(a, [M // 2, N]), tl.reshape(b, [M // 2, N])


@triton.jit
def _column_halves(x):
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    a, b = tl.split(tl.permute(tl.reshape(x, [M, N // 16, 2, 8]), (0, 1, 3, 2)))
    return tl.reshape(a, [M, N // 2]), tl.reshape(b, [M, N // 2])


@triton.jit
def _join_rows(a, b):
    M: tl.constexpr = a.shape[0]
    N: tl.constexpr = a.shape[1]
    both = tl.join(tl.reshape(a, [M // 8, 8, N]), tl.reshape(b, [M // 8, 8, N]))
    return tl.reshape(tl.permute(both, (0, 3, 1, 2)), [2 * M, N])


@triton.jit
def _join_columns(a, b):
    M: tl.constexpr = a.shape[0]
    N: tl.constexpr = a.shape[1]
    both = tl.join(tl.reshape(a, [M, N // 8, 8]), tl.reshape(b, [M, N // 8, 8]))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [M, 2 * N])


@triton.jit
def shift_rows(products):
    """products [N, 2 N] -> [r, c]: of row r, the distance r - c."""
    N: tl.constexpr = products.shape[0]
    a, b = _row_halves(products)
    r_of_16, r, c_of_8, c = _eights(N // 2, N)
    at = _at(r_of_16, r, 2 * r_of_16 + ((r - c) >> 3) + N // 8, (r - c) & 7, 2 * N) - c_of_8 * 64
    return _join_rows(_fetch(_flat(a), at), _fetch(_flat(b), at + 64))  # b's are 8 distances further on


@triton.jit
def shift_columns(products):
    """products [2 N, N] -> [r, c]: of column c, the distance r - c."""
    N: tl.constexpr = products.shape[1]
    a, b = _column_halves(products)
    r_of_8, r, c_of_16, c = _eights(N, N // 2)
    at = _at(((r - c) >> 3) + N // 8, (r - c) & 7, 0, c, N // 2) + r_of_8 * (4 * N) - c_of_16 * (8 * N - 64)
    return _join_columns(_fetch(_flat(a), at), _fetch(_flat(b), at - 4 * N))  # 8 distances less


@triton.jit
def shift_vector(vector, N: tl.constexpr):
    """vector [2 N] -> [r, c]: that of the distance r - c."""
    r_of_8, r, c_of_8, c = _eights(N, N)
    return _fetch(vector, (r - c + N) + r_of_8 * 8 - c_of_8 * 8)


@triton.jit
def settled(x):
    """x, which costs nothing but that a product is waited for whose sum it is.

    The compiler leaves a loop's last product under way until the next step has waited for one of its own. ptxas then
    meets instructions that define another product's sum while this one is not done, and serialises all products of the
    kernel (C7515). What is used in the same step is waited for.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    a, b = tl.split(tl.reshape(x, [M, N // 2, 2]))
    return tl.reshape(tl.join(a, b), [M, N])


# Back: from two copies beside each other (or above), so that what begins anywhere in one ends in the other. Distances
# from 0 to N - 1 and, modulo N, from -N to -1 come from the same places.


@triton.jit
def _parted(x, is_lo):
    """x where a distance is negative and where it is not, and 0 elsewhere."""
    is_lo = tl.reshape(is_lo, x.shape)
    return tl.where(is_lo, x, 0.0), tl.where(is_lo, 0.0, x)


@triton.jit
def unshift_rows(x):
    """x [N, N] -> [r, d] (N, 2 N): of row r, the column at distance d, or 0."""
    N: tl.constexpr = x.shape[0]
    r_of_8, r, d_of_8, d = _eights(N, N)
    at = _at(0, r, ((r - d) >> 3) + N // 8, (r - d) & 7, 2 * N) + r_of_8 * (16 * N + 64) - d_of_8 * 64
    lo, hi = _parted(_fetch(_flat(beside(x, x)), at), d_of_8 * 8 > r_of_8 * 8 + r - d)
    return beside(lo, hi)


@triton.jit
def unshift_columns_across(x):
    """x [N, N] -> [c, d] (N, 2 N): of column c, the row at distance d, or 0."""
    N: tl.constexpr = x.shape[0]
    c_of_8, c, d_of_8, d = _eights(N, N)
    at = _at((d + c) >> 3, (d + c) & 7, 0, c, N) + d_of_8 * (8 * N) + c_of_8 * (8 * N + 64)
    lo, hi = _parted(_fetch(_flat(above(x, x)), at), c_of_8 * 8 + c + d >= N - d_of_8 * 8)
    return beside(lo, hi)


@triton.jit
def unshift_rows_across(x):
    """unshift_rows, transposed: [d, r], of the N negative distances and of the others."""
    N: tl.constexpr = x.shape[0]
    a, b = _row_halves(x)
    d_of_8, d, r_of_16, r = _eights(N, N // 2)
    at = _at(r_of_16, r, 2 * r_of_16 + ((r - d) >> 3) + N // 8, (r - d) & 7, 2 * N) - d_of_8 * 64
    a_lo, a_hi = _parted(_fetch(_flat(beside(a, a)), at), d_of_8 * 8 + d - r > r_of_16 * 16)
    b_lo, b_hi = _parted(_fetch(_flat(beside(b, b)), at + 64), d_of_8 * 8 + d - r > r_of_16 * 16 + 8)
    return _join_columns(a_lo, b_lo), _join_columns(a_hi, b_hi)


@triton.jit
def unshift_columns(x):
    """unshift_columns_across, transposed: [d, c], of the N negative distances and of the others."""
    N: tl.constexpr = x.shape[0]
    a, b = _column_halves(x)
    d_of_8, d, c_of_16, c = _eights(N, N // 2)
    at = _at((d + c) >> 3, (d + c) & 7, 0, c, N // 2) + d_of_8 * (4 * N) + c_of_16 * (8 * N + 64)
    a_lo, a_hi = _parted(_fetch(_flat(above(a, a)), at), d_of_8 * 8 + d + c >= N - c_of_16 * 16)
    b_lo, b_hi = _parted(_fetch(_flat(above(b, b)), at + 4 * N), d_of_8 * 8 + d + c >= N - 8 - c_of_16 * 16)
    return _join_columns(a_lo, b_lo), _join_columns(a_hi, b_hi)
