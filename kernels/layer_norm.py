"""add_layer_norm and add_rms_norm, forward and backward: bias + dropout + residual + norm in one pass over memory.

    summed = dropout(x + x_bias) + residual, rounded to x's dtype
    out    = (summed - mean) * rstd * weight + bias                               (Ba et al. 2016, section 3, eq. 4)

IS_RMS: the mean is 0, and there is no bias (Zhang & Sennrich 2019, eq. 4).

Matrices are row-major (total_tokens, hidden_size) without gaps, in bf16, fp16 or fp32; vectors are (hidden_size,) in
the same dtype. Arithmetic and the saved mean and rstd, (total_tokens,), are fp32. The dropout mask is not saved: Philox
makes it again from the seed and offset, which are read on the device, so that nothing waits for the host.

Forward: one program a row, whole in registers, so a row is read once and written once (twice with summed). Backward:
a program walks over tiles of BLOCK_M rows and keeps its share of the vectors' gradients in registers; the shares go to
an fp32 buffer that a second kernel adds up in a fixed order. No atomics: every run gives the same bits. Both are bound
by memory: forward moves 2 to 4 matrices, backward 3 to 5.

Legend: M rows (tokens), N columns (hidden_size).
"""

import torch
import triton
import triton.language as tl

from .philox import dropout_multiplier, dropout_numbers
from .sizes import cdiv, next_power_of_2

# The shares of the vectors' gradients: enough programs to fill the largest GPUs, few enough that their buffer is small
# beside the matrices. A constant, so that a sum's last bits do not depend on the GPU.
_MAX_SHARES = 512


@triton.jit
def centre(x, inside, hidden_size, eps, IS_RMS: tl.constexpr):
    """x - mean, mean and rstd of a row x [BLOCK_N], in fp32; zeros in the columns that are not inside.

    The rounding error of a large mean is of the size of a small spread: what is left after centring is taken off too.
    """
    if IS_RMS:
        mean, left = 0.0, 0.0
        centred = tl.where(inside, x, 0.0)
    else:
        mean = tl.sum(x, axis=0) / hidden_size
        centred = tl.where(inside, x - mean, 0.0)
        left = tl.sum(centred, axis=0) / hidden_size
        centred = tl.where(inside, centred - left, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, axis=0) / hidden_size + eps)
    return centred, mean + left, rstd


@triton.jit(do_not_specialize=["threshold"])
def _add_layer_norm_fwd_kernel(
    x_ptr, x_bias_ptr, residual_ptr, weight_ptr, bias_ptr, philox_ptr,
    out_ptr, summed_ptr, mean_ptr, rstd_ptr,
    hidden_size, threshold, scale, eps,
    HAS_X_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
    RETURN_SUM: tl.constexpr, RETURN_STATS: tl.constexpr, IS_RMS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_N)
    inside = columns < hidden_size
    start = row * hidden_size

    summed = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_N]
    if HAS_X_BIAS:
        summed += tl.load(x_bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        rows = row + tl.arange(0, 1)
        summed *= tl.reshape(dropout_multiplier(philox_ptr, rows, 0, hidden_size, threshold, scale, BLOCK_N), [BLOCK_N])
    if HAS_RESIDUAL:
        summed += tl.load(residual_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded as backward will read it: with the statistics of the unrounded sum, the difference times rstd, which is
    # 1e6 for a constant row under eps 1e-12, would swamp the gradient.
    rounded = summed.to(x_ptr.dtype.element_ty)
    summed = rounded.to(tl.float32)
    if RETURN_SUM:
        tl.store(summed_ptr + start + columns, rounded, mask=inside)

    centred, mean, rstd = centre(summed, inside, hidden_size, eps, IS_RMS)
    if RETURN_STATS:
        if not IS_RMS:
            tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)

    out = centred * rstd * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + start + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


def row_tile(hidden_size: int) -> tuple[int, int]:
    """(BLOCK_N, num_warps): 8 columns a thread, which is one 16-byte load of bf16, up to 16 warps."""
    block_n = max(16, next_power_of_2(hidden_size))
    return block_n, min(max(block_n // 256, 1), 16)


def add_layer_norm_fwd(
    x, x_bias, residual, weight, bias, philox, dropout_p, eps, return_sum, return_stats, rms=False
):  # fmt: skip
    """x, residual (total_tokens, hidden_size) -> out, summed, mean, rstd; the schema in fastbert/ops/layer_norm.py."""
    x = x.contiguous()
    x_bias, residual, bias = (None if t is None else t.contiguous() for t in (x_bias, residual, bias))
    weight = weight.contiguous()
    total_tokens, hidden_size = x.shape
    out = torch.empty_like(x)
    summed = x.new_empty(total_tokens if return_sum else 0, hidden_size)
    stats = total_tokens if return_stats else 0
    mean, rstd = (x.new_empty(rows, dtype=torch.float32) for rows in (0 if rms else stats, stats))
    if total_tokens == 0:
        return out, summed, mean, rstd
    block_n, num_warps = row_tile(hidden_size)
    with torch.cuda.device_of(x):
        _add_layer_norm_fwd_kernel[(total_tokens,)](
            x, x_bias, residual, weight, bias, philox, out, summed, mean, rstd,
            hidden_size, *dropout_numbers(dropout_p), eps,
            HAS_X_BIAS=x_bias is not None, HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None,
            HAS_DROPOUT=dropout_p > 0, RETURN_SUM=return_sum, RETURN_STATS=return_stats, IS_RMS=rms, BLOCK_N=block_n,
            num_warps=num_warps,
        )  # fmt: skip
    return out, summed, mean, rstd


@triton.jit(do_not_specialize=["threshold", "total_tokens"])
def _add_layer_norm_bwd_kernel(
    dout_ptr, dsum_ptr, summed_ptr, mean_ptr, rstd_ptr, weight_ptr, philox_ptr,
    dx_ptr, dsummed_ptr, shares_ptr,
    total_tokens, hidden_size, threshold, scale,
    HAS_DSUM: tl.constexpr, HAS_X_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, IS_RMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    columns = tl.arange(0, BLOCK_N)
    weight = tl.load(weight_ptr + columns, mask=columns < hidden_size, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([BLOCK_N], tl.float32)
    dbias = tl.zeros([BLOCK_N], tl.float32)
    dx_bias = tl.zeros([BLOCK_N], tl.float32)

    for tile in range(share, tl.cdiv(total_tokens, BLOCK_M), tl.num_programs(0)):
        rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # [BLOCK_M]
        inside = (rows < total_tokens)[:, None] & (columns < hidden_size)[None, :]  # [BLOCK_M, BLOCK_N]
        at = rows[:, None] * hidden_size + columns[None, :]
        mean = 0.0
        if not IS_RMS:
            mean = tl.load(mean_ptr + rows, mask=rows < total_tokens, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < total_tokens, other=0.0)[:, None]
        dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
        summed = tl.load(summed_ptr + at, mask=inside, other=0.0).to(tl.float32)

        xhat = tl.where(inside, (summed - mean) * rstd, 0.0)
        dxhat = dout * weight
        along_xhat = (tl.sum(dxhat * xhat, axis=1) / hidden_size)[:, None]
        along_ones = 0.0
        if not IS_RMS:
            along_ones = (tl.sum(dxhat, axis=1) / hidden_size)[:, None]
            dbias += tl.sum(dout, axis=0)
        gradient = (dxhat - along_ones - xhat * along_xhat) * rstd
        dweight += tl.sum(dout * xhat, axis=0)
        if HAS_DSUM:
            gradient += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dsummed_ptr + at, gradient.to(dsummed_ptr.dtype.element_ty), mask=inside)
        if HAS_DROPOUT:
            gradient *= dropout_multiplier(philox_ptr, rows, 0, hidden_size, threshold, scale, BLOCK_N)
            tl.store(dx_ptr + at, gradient.to(dx_ptr.dtype.element_ty), mask=inside)
        if HAS_X_BIAS:
            dx_bias += tl.sum(tl.where(inside, gradient, 0.0), axis=0)

    shares_ptr += share.to(tl.int64) * 3 * hidden_size
    tl.store(shares_ptr + columns, dweight, mask=columns < hidden_size)
    if not IS_RMS:
        tl.store(shares_ptr + hidden_size + columns, dbias, mask=columns < hidden_size)
    if HAS_X_BIAS:
        tl.store(shares_ptr + 2 * hidden_size + columns, dx_bias, mask=columns < hidden_size)


@triton.jit(do_not_specialize=["num_shares"])
def _add_shares_kernel(
    shares_ptr, dweight_ptr, dbias_ptr, dx_bias_ptr, num_shares, hidden_size,
    IS_RMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """shares (num_shares, 3, hidden_size) fp32 -> the three vectors, in their dtype; axis 1 of the grid says which.

    IS_RMS: there is no dbias, and its share was not written.
    """
    which = tl.program_id(1)
    if IS_RMS:
        which *= 2
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(tl.cdiv(num_shares, BLOCK_M)):
        rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < num_shares)[:, None] & (columns < hidden_size)[None, :]
        at = (rows[:, None] * 3 + which) * hidden_size + columns[None, :]
        total += tl.load(shares_ptr + at, mask=inside, other=0.0)
    vector = tl.sum(total, axis=0)  # [BLOCK_N]
    if which == 0:
        tl.store(dweight_ptr + columns, vector.to(dweight_ptr.dtype.element_ty), mask=columns < hidden_size)
    elif which == 1:
        tl.store(dbias_ptr + columns, vector.to(dbias_ptr.dtype.element_ty), mask=columns < hidden_size)
    else:
        tl.store(dx_bias_ptr + columns, vector.to(dx_bias_ptr.dtype.element_ty), mask=columns < hidden_size)


def _bwd_tile(hidden_size: int) -> tuple[int, int, int]:
    """(BLOCK_M, BLOCK_N, num_warps): 16 elements a thread. 32 take so many registers that few programs fit at once."""
    block_n, num_warps = row_tile(hidden_size)
    return max(1, min(16, num_warps * 512 // block_n)), block_n, num_warps


def add_layer_norm_bwd(dout, dsum, summed, mean, rstd, weight, philox, dropout_p, has_x_bias, rms=False):
    """dout, dsum (total_tokens, hidden_size) -> dx, dsummed, dx_bias, dweight, dbias (ops/layer_norm.py)."""
    dout, summed, weight = dout.contiguous(), summed.contiguous(), weight.contiguous()
    dsum = None if dsum is None else dsum.contiguous()
    total_tokens, hidden_size = dout.shape
    dx = dout.new_empty(total_tokens if dropout_p > 0 else 0, hidden_size)
    dsummed = torch.empty_like(dout)
    dx_bias = weight.new_empty(hidden_size if has_x_bias else 0)
    dweight, dbias = torch.empty_like(weight), weight.new_empty(0 if rms else hidden_size)
    block_m, block_n, num_warps = _bwd_tile(hidden_size)
    num_shares = min(_MAX_SHARES, cdiv(total_tokens, block_m))
    shares = dout.new_empty(num_shares, 3, hidden_size, dtype=torch.float32)
    with torch.cuda.device_of(dout):
        if total_tokens > 0:
            _add_layer_norm_bwd_kernel[(num_shares,)](
                dout, dsum, summed, mean, rstd, weight, philox, dx, dsummed, shares,
                total_tokens, hidden_size, *dropout_numbers(dropout_p),
                HAS_DSUM=dsum is not None, HAS_X_BIAS=has_x_bias, HAS_DROPOUT=dropout_p > 0, IS_RMS=rms,
                BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps,
            )  # fmt: skip
        _add_shares_kernel[(cdiv(hidden_size, 32), 1 + has_x_bias + (not rms))](
            shares, dweight, dbias, dx_bias, num_shares, hidden_size, IS_RMS=rms, BLOCK_M=32, BLOCK_N=32
        )
    return dx, dsummed, dx_bias, dweight, dbias
