"""The first product of a feed-forward with its activation, and that product's part of backward.

    forward:  pre = x up^T + bias,  inner = activation(pre)             (Vaswani et al. 2017, section 3.3, eq. 2)
    backward: dpre = (dout down) * activation'(pre), and inner again, which forward does not keep

Either as the epilogue of a GEMM, which saves two trips of the wide matrix through memory, or as one elementwise kernel
after cuBLAS, whose products are faster than Triton's: `feed_forward_plan` says which is used where. The second
product, and the products that make dx and the weights' gradients, have nothing to be fused with and are torch's.
dbias is added up in fp32, over a tile's rows in the kernel, over tiles afterwards: no atomics.

Legend: M tokens, N intermediate_size, K hidden_size. Sums, bias and activation are fp32; pre is rounded before it is
activated, so that backward differentiates what forward computed.
"""

import torch
import triton
import triton.language as tl

from .activation import activate, activation_slope
from .blocks import feed_forward_plan


@triton.jit
def _up_kernel(
    x_ptr, weight_ptr, bias_ptr, inner_ptr, pre_ptr, M, N, K, stride_xm, stride_wn,
    HAS_BIAS: tl.constexpr, RETURN_PRE: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """inner (M, N) = activation(x (M, K) weight (N, K)^T + bias)."""
    rows, columns, row_inside, column_inside = _tile_of(M, N, BLOCK_M, BLOCK_N, GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_at = rows.to(tl.int64)[:, None] * stride_xm + k[None, :]
        x = tl.load(x_ptr + x_at, mask=row_inside[:, None] & (k < K)[None, :], other=0.0)
        w_at = columns.to(tl.int64)[:, None] * stride_wn + k[None, :]
        weight = tl.load(weight_ptr + w_at, mask=column_inside[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    pre = acc.to(inner_ptr.dtype.element_ty)
    if RETURN_PRE:
        tl.store(pre_ptr + at, pre, mask=inside)
    tl.store(inner_ptr + at, activate(pre.to(tl.float32), ACTIVATION).to(inner_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _down_bwd_kernel(
    dout_ptr, weight_ptr, pre_ptr, dpre_ptr, inner_ptr, shares_ptr, M, N, K, stride_dm, stride_wk,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dpre (M, N) = dout (M, K) weight (K, N) * activation'(pre); inner = activation(pre); shares (M tiles, N)."""
    rows, columns, row_inside, column_inside = _tile_of(M, N, BLOCK_M, BLOCK_N, GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        dout_at = rows.to(tl.int64)[:, None] * stride_dm + k[None, :]
        dout = tl.load(dout_ptr + dout_at, mask=row_inside[:, None] & (k < K)[None, :], other=0.0)
        w_at = k.to(tl.int64)[:, None] * stride_wk + columns[None, :]
        weight = tl.load(weight_ptr + w_at, mask=(k < K)[:, None] & column_inside[None, :], other=0.0)
        acc = tl.dot(dout, weight, acc, input_precision="ieee")
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dpre = acc * activation_slope(pre, ACTIVATION)
    tl.store(dpre_ptr + at, dpre.to(dpre_ptr.dtype.element_ty), mask=inside)
    tl.store(inner_ptr + at, activate(pre, ACTIVATION).to(inner_ptr.dtype.element_ty), mask=inside)
    share = tl.sum(tl.where(inside, dpre, 0.0), axis=0)
    row_tile = tl.min(rows, axis=0) // BLOCK_M
    tl.store(shares_ptr + row_tile.to(tl.int64) * N + columns, share, mask=column_inside)


@triton.jit
def _tile_of(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """A program's rows and columns; GROUP row tiles go through all columns together, so that the second-level cache
    holds what neighbours read."""
    row_tiles, column_tiles = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    group = program // (GROUP * column_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUP, GROUP)
    inside_group = program % (GROUP * column_tiles)
    rows = (group * GROUP + inside_group % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (inside_group // group_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows, columns, rows < M, columns < N


@triton.jit
def _bias_activation_fwd_kernel(
    pre_ptr, bias_ptr, inner_ptr, M, N,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """pre (M, N) += bias, in place; inner = activation(pre)."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    pre = tl.load(pre_ptr + at, mask=inside, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        pre = (pre.to(tl.float32) + bias[None, :]).to(pre_ptr.dtype.element_ty)
        tl.store(pre_ptr + at, pre, mask=inside)
    tl.store(inner_ptr + at, activate(pre.to(tl.float32), ACTIVATION).to(inner_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_bwd_kernel(
    dinner_ptr, pre_ptr, inner_ptr, shares_ptr, M, N,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dinner (M, N) becomes dpre, in place; inner = activation(pre); shares (M tiles, N) of dbias."""
    row_tile = tl.program_id(0)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    pre = tl.load(pre_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dpre = tl.load(dinner_ptr + at, mask=inside, other=0.0).to(tl.float32) * activation_slope(pre, ACTIVATION)
    tl.store(dinner_ptr + at, dpre.to(dinner_ptr.dtype.element_ty), mask=inside)
    tl.store(inner_ptr + at, activate(pre, ACTIVATION).to(inner_ptr.dtype.element_ty), mask=inside)
    share = tl.sum(tl.where(inside, dpre, 0.0), axis=0)
    tl.store(shares_ptr + row_tile.to(tl.int64) * N + columns, share, mask=columns < N)


def feed_forward(x, up_weight, up_bias, down_weight, activation, return_pre):
    """x (total_tokens, hidden_size) -> out, pre; the schema in fastbert/ops/_library.py."""
    x, up_weight, down_weight = x.contiguous(), up_weight.contiguous(), down_weight.contiguous()
    M, K, N = x.shape[0], x.shape[1], up_weight.shape[0]
    if M == 0 or N == 0:
        return x.new_zeros(M, down_weight.shape[0]), x.new_zeros(M if return_pre else 0, N)
    plan = feed_forward_plan(x, N)
    inner = x.new_empty(M, N)
    with torch.cuda.device_of(x):
        if plan.up is not None:
            pre = x.new_empty(M if return_pre else 0, N)
            grid = (triton.cdiv(M, plan.up["BLOCK_M"]) * triton.cdiv(N, plan.up["BLOCK_N"]),)
            _up_kernel[grid](
                x, up_weight, up_bias, inner, pre, M, N, K, K, K, HAS_BIAS=up_bias is not None, RETURN_PRE=return_pre,
                ACTIVATION=activation, **plan.up,
            )  # fmt: skip
        else:
            pre = torch.mm(x, up_weight.t())
            _bias_activation_fwd_kernel[(triton.cdiv(M, 16), triton.cdiv(N, 256))](
                pre, up_bias, inner, M, N, HAS_BIAS=up_bias is not None, ACTIVATION=activation, BLOCK_M=16, BLOCK_N=256
            )
            pre = pre if return_pre else pre[:0]
    return torch.mm(inner, down_weight.t()), pre


def feed_forward_bwd(dout, x, pre, up_weight, down_weight, activation, needs_dx, needs_dweight, needs_dbias):
    """dout as out -> dx, dup_weight, dup_bias, ddown_weight; the schema in fastbert/ops/_library.py."""
    dout, x, up_weight, down_weight = (t.contiguous() for t in (dout, x, up_weight, down_weight))
    M, N, K = pre.shape[0], pre.shape[1], dout.shape[1]
    if M == 0 or N == 0:
        shapes = ((M if needs_dx else 0, x.shape[1]), up_weight.shape, (N,), down_weight.shape)
        return tuple(x.new_zeros(shape) for shape in shapes)
    plan = feed_forward_plan(x, N)
    inner = torch.empty_like(pre)
    with torch.cuda.device_of(x):
        if plan.down is not None:
            dpre = torch.empty_like(pre)
            row_tiles = triton.cdiv(M, plan.down["BLOCK_M"])
            shares = pre.new_empty(row_tiles, N, dtype=torch.float32)
            _down_bwd_kernel[(row_tiles * triton.cdiv(N, plan.down["BLOCK_N"]),)](
                dout, down_weight, pre, dpre, inner, shares, M, N, K, K, N, ACTIVATION=activation, **plan.down
            )
        else:
            dpre = torch.mm(dout, down_weight)
            shares = pre.new_empty(triton.cdiv(M, 16), N, dtype=torch.float32)
            _activation_bwd_kernel[(triton.cdiv(M, 16), triton.cdiv(N, 256))](
                dpre, pre, inner, shares, M, N, ACTIVATION=activation, BLOCK_M=16, BLOCK_N=256
            )
    dx = torch.mm(dpre, up_weight) if needs_dx else x.new_empty(0, x.shape[1])
    dup = torch.mm(dpre.t(), x) if needs_dweight else up_weight.new_empty(0, up_weight.shape[1])
    ddown = torch.mm(dout.t(), inner) if needs_dweight else down_weight.new_empty(0, down_weight.shape[1])
    return dx, dup, shares.sum(0).to(x.dtype) if needs_dbias else x.new_empty(0), ddown
