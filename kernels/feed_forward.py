"""The first product of a feed-forward with its activation, and that product's part of backward.

    forward:  pre = x up^T + bias,  inner = activation(pre)             (Vaswani et al. 2017, section 3.3, eq. 2)
    backward: dpre = (dout down) * activation'(pre), and inner again, which forward does not keep
    gated:    inner = activation(gate) * up, the halves of pre                     (Shazeer 2020, section 2, eq. 6)

One elementwise kernel after cuBLAS, whose products end in the bias. dbias is added up in fp32, over a tile's rows in
the kernel, over tiles afterwards: no atomics.

Legend: M tokens, N intermediate_size; gated, pre and dpre are (M, 2 N), of one weight or of two. Sums and activation
are fp32; pre is rounded before it is activated, so that backward differentiates what forward computed.
"""

import torch
import triton
import triton.language as tl

from .activation import activate, activation_slope
from .sizes import cdiv

# A tile of the elementwise kernels, which have four warps: 16 bytes of a row or two a thread and load.
_BLOCK_M, _BLOCK_N = 16, 256


@triton.jit
def _pre_at(rows, columns, N, GATED: tl.constexpr):
    """Offsets [BLOCK_M, BLOCK_N] into pre, whose rows are twice as long where they are gated; up is N further."""
    return rows.to(tl.int64)[:, None] * (2 * N if GATED else N) + columns[None, :]


@triton.jit(do_not_specialize=["M"])
def _activation_fwd_kernel(
    pre_ptr, inner_ptr, M, N,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """inner (M, N) = activation(pre), in pre's own memory where the caller says so; gated, times pre's second half."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    pre_at = _pre_at(rows, columns, N, GATED)
    pre = tl.load(pre_ptr + pre_at, mask=inside, other=0.0).to(tl.float32)
    inner = activate(pre, ACTIVATION, pre_ptr.dtype.element_ty == tl.float32)
    if GATED:
        inner *= tl.load(pre_ptr + pre_at + N, mask=inside, other=0.0).to(tl.float32)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(inner_ptr + at, inner.to(inner_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _activation_bwd_kernel(
    dinner_ptr, pre_ptr, dpre_ptr, inner_ptr, shares_ptr, M, N,
    NEEDS_DBIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dinner (M, N), in whose memory one of dpre and inner may be written, to dpre, inner and, a share a row tile,
    dbias."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_inside = columns < N
    inside = (rows < M)[:, None] & column_inside[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    dinner = tl.load(dinner_ptr + at, mask=inside, other=0.0).to(tl.float32)
    pre_at = _pre_at(rows, columns, N, GATED)
    pre = tl.load(pre_ptr + pre_at, mask=inside, other=0.0).to(tl.float32)
    share_at = tl.program_id(0).to(tl.int64) * (2 * N if GATED else N) + columns
    IS_FP32: tl.constexpr = pre_ptr.dtype.element_ty == tl.float32
    inner = activate(pre, ACTIVATION, IS_FP32)
    dpre = dinner * activation_slope(pre, ACTIVATION, IS_FP32)
    if GATED:
        up = tl.load(pre_ptr + pre_at + N, mask=inside, other=0.0).to(tl.float32)
        dup = dinner * inner
        inner *= up
        dpre *= up
        tl.store(dpre_ptr + pre_at + N, dup.to(dpre_ptr.dtype.element_ty), mask=inside)
        if NEEDS_DBIAS:
            tl.store(shares_ptr + share_at + N, tl.sum(tl.where(inside, dup, 0.0), axis=0), mask=column_inside)
    tl.store(dpre_ptr + pre_at, dpre.to(dpre_ptr.dtype.element_ty), mask=inside)
    tl.store(inner_ptr + at, inner.to(inner_ptr.dtype.element_ty), mask=inside)
    if NEEDS_DBIAS:
        tl.store(shares_ptr + share_at, tl.sum(tl.where(inside, dpre, 0.0), axis=0), mask=column_inside)


def feed_forward(x, up_weight, up_bias, down_weight, gate_weight, gate_bias, activation, gated, return_pre):
    """x (total_tokens, hidden_size) -> out, pre; the schema in fastbert/ops/linear/feed_forward.py."""
    M, N = x.shape[0], down_weight.shape[1]
    width = 2 * N if gated else N
    if M == 0 or N == 0:
        return x.new_zeros(M, down_weight.shape[0]), x.new_empty(M if return_pre else 0, width)
    with torch.cuda.device_of(x):
        pre = x.new_empty(M, width)
        if gate_weight is None:
            _product(x, up_weight, up_bias, pre)
        else:
            _product(x, gate_weight, gate_bias, pre[:, :N])
            _product(x, up_weight, up_bias, pre[:, N:])
        # Inference has no second matrix of this size. A gated one's halves would leave gaps in the next product's
        # operand, for which cuBLAS may take another kernel than in training, and so give other bits.
        inner = x.new_empty(M, N) if return_pre or gated else pre
        _activation_fwd_kernel[cdiv(M, _BLOCK_M), cdiv(N, _BLOCK_N)](
            pre, inner, M, N, GATED=gated, ACTIVATION=activation, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N
        )
    return torch.mm(inner, down_weight.t()), pre if return_pre else x.new_empty(0, width)


def _product(x, weight, bias, out):
    """out = x weight^T + bias, where out's rows may be part of wider ones."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def feed_forward_bwd(
    dout, x, pre, up_weight, down_weight, gate_weight, activation, gated, needs_dx, needs_dweight, needs_dbias
):
    """dout as out -> dx, dups, dup_biases, ddown_weight; the schema in fastbert/ops/linear/feed_forward.py."""
    M, N, K, width = pre.shape[0], down_weight.shape[1], dout.shape[1], pre.shape[1]
    ups = (up_weight,) if gate_weight is None else (gate_weight, up_weight)
    if M == 0 or N == 0:
        dx, ddown = x.new_zeros(M if needs_dx else 0, x.shape[1]), down_weight.new_zeros(K if needs_dweight else 0, N)
        dups = [torch.zeros_like(up) for up in ups] if needs_dweight else []
        return dx, dups, [up.new_zeros(up.shape[0]) for up in ups] if needs_dbias else [], ddown
    grid = (cdiv(M, _BLOCK_M), cdiv(N, _BLOCK_N))
    shares = pre.new_empty(grid[0] if needs_dbias else 0, width, dtype=torch.float32)
    with torch.cuda.device_of(x):
        dinner = torch.mm(dout, down_weight)
        dpre, inner = (torch.empty_like(pre), dinner) if gated else (dinner, torch.empty_like(pre))
        _activation_bwd_kernel[grid](
            dinner, pre, dpre, inner, shares, M, N,
            NEEDS_DBIAS=needs_dbias, GATED=gated, ACTIVATION=activation, BLOCK_M=_BLOCK_M, BLOCK_N=_BLOCK_N,
        )  # fmt: skip
    parts = [dpre] if gate_weight is None else [dpre[:, :N], dpre[:, N:]]
    dx = torch.mm(parts[0], ups[0]) if needs_dx else x.new_empty(0, x.shape[1])
    if needs_dx and gate_weight is not None:
        dx.addmm_(parts[1], up_weight)
    dups = [torch.mm(part.t(), x) for part in parts] if needs_dweight else []
    ddown = torch.mm(dout.t(), inner) if needs_dweight else down_weight.new_empty(0, N)
    # One sum for each: no result may be part of another one.
    dbiases = [share.sum(0).to(x.dtype) for share in shares.split(width // len(ups), 1)] if needs_dbias else []
    return dx, dups, dbiases, ddown
