"""The first product of a feed-forward with its activation, and that product's part of backward.

    forward:  pre = x up^T + bias,  inner = activation(pre)             (Vaswani et al. 2017, section 3.3, eq. 2)
    backward: dpre = (dout down) * activation'(pre), and inner again, which forward does not keep
    gated:    inner = activation(gate) * up, the halves of pre                     (Shazeer 2020, section 2, eq. 6)

Either as the epilogue of a GEMM, which saves two trips of the wide matrix through memory, or as one elementwise kernel
after cuBLAS, whose products end in the bias: PLAN says which. The second product, and the products that make dx and the
weights' gradients, have nothing to be fused with and are torch's. dbias is added up in fp32, over a tile's rows in the
kernel, over tiles afterwards: no atomics.

Legend: M tokens, N intermediate_size, K hidden_size; gated, pre and dpre are (M, 2 N), of one weight or of two. Sums,
bias and activation are fp32; pre is rounded before it is activated, so that backward differentiates what forward
computed.
"""

import torch
import triton
import triton.language as tl

from .activation import activate, activation_slope
from .blocks import FeedForwardPlan
from .launching import Launches
from .sizes import cdiv

# A tile of the elementwise kernels, which have four warps: 16 bytes of a row or two a thread and load.
_BLOCK_M, _BLOCK_N = 16, 256

# For every GPU, dtype and size: cuBLAS and a kernel after it, as the CUDA backend has it. An epilogue is for where one
# has been timed and has won; none has been timed yet, so there is no such place, and no table to fall back to.
PLAN = FeedForwardPlan()


@triton.jit(do_not_specialize=["M"])
def _up_kernel(
    x_ptr, weight_ptr, bias_ptr, inner_ptr, pre_ptr, M, N, K, stride_xm, stride_wn,
    HAS_BIAS: tl.constexpr, RETURN_PRE: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """inner (M, N) = activation(x (M, K) weight (N, K)^T + bias); gated, weight and bias have 2 N rows."""
    rows, columns, row_inside, column_inside = _tile_of(M, N, BLOCK_M, BLOCK_N, GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if GATED:
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_at = rows.to(tl.int64)[:, None] * stride_xm + k[None, :]
        x = tl.load(x_ptr + x_at, mask=row_inside[:, None] & (k < K)[None, :], other=0.0)
        w_at = columns.to(tl.int64)[:, None] * stride_wn + k[None, :]
        w_inside = column_inside[:, None] & (k < K)[None, :]
        weight = tl.load(weight_ptr + w_at, mask=w_inside, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if GATED:
            up_at = (columns + N).to(tl.int64)[:, None] * stride_wn + k[None, :]
            up_weight = tl.load(weight_ptr + up_at, mask=w_inside, other=0.0)
            up_acc = tl.dot(x, tl.trans(up_weight), up_acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    pre_at = _pre_at(rows, columns, N, GATED)
    pre = acc.to(inner_ptr.dtype.element_ty)
    inner = activate(pre.to(tl.float32), ACTIVATION, inner_ptr.dtype.element_ty == tl.float32)
    if RETURN_PRE:
        tl.store(pre_ptr + pre_at, pre, mask=inside)
    if GATED:
        if HAS_BIAS:
            up_acc += tl.load(bias_ptr + N + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        up = up_acc.to(inner_ptr.dtype.element_ty)
        inner *= up.to(tl.float32)
        if RETURN_PRE:
            tl.store(pre_ptr + pre_at + N, up, mask=inside)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(inner_ptr + at, inner.to(inner_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])
def _down_bwd_kernel(
    dout_ptr, weight_ptr, pre_ptr, dpre_ptr, inner_ptr, shares_ptr, M, N, K, stride_dm, stride_wk,
    NEEDS_DBIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dinner (M, N) = dout (M, K) weight (K, N), which goes on to _through_activation and is not written."""
    rows, columns, row_inside, column_inside = _tile_of(M, N, BLOCK_M, BLOCK_N, GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        dout_at = rows.to(tl.int64)[:, None] * stride_dm + k[None, :]
        dout = tl.load(dout_ptr + dout_at, mask=row_inside[:, None] & (k < K)[None, :], other=0.0)
        w_at = k.to(tl.int64)[:, None] * stride_wk + columns[None, :]
        weight = tl.load(weight_ptr + w_at, mask=(k < K)[:, None] & column_inside[None, :], other=0.0)
        acc = tl.dot(dout, weight, acc, input_precision="ieee")
    row_tile = tl.min(rows, axis=0) // BLOCK_M
    _through_activation(
        acc, pre_ptr, dpre_ptr, inner_ptr, shares_ptr, row_tile, rows, columns, row_inside, column_inside, N,
        NEEDS_DBIAS, GATED, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _through_activation(
    dinner, pre_ptr, dpre_ptr, inner_ptr, shares_ptr, row_tile, rows, columns, row_inside, column_inside, N,
    NEEDS_DBIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """From dinner [BLOCK_M, BLOCK_N], in fp32, to dpre, inner and, a share a row tile, dbias."""
    inside = row_inside[:, None] & column_inside[None, :]
    pre_at = _pre_at(rows, columns, N, GATED)
    pre = tl.load(pre_ptr + pre_at, mask=inside, other=0.0).to(tl.float32)
    share_at = row_tile.to(tl.int64) * (2 * N if GATED else N) + columns
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
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(inner_ptr + at, inner.to(inner_ptr.dtype.element_ty), mask=inside)
    if NEEDS_DBIAS:
        tl.store(shares_ptr + share_at, tl.sum(tl.where(inside, dpre, 0.0), axis=0), mask=column_inside)


@triton.jit
def _pre_at(rows, columns, N, GATED: tl.constexpr):
    """Offsets [BLOCK_M, BLOCK_N] into pre, whose rows are twice as long where they are gated; up is N further."""
    return rows.to(tl.int64)[:, None] * (2 * N if GATED else N) + columns[None, :]


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
    """What _through_activation makes of dinner (M, N), in whose memory one of dpre and inner may be written."""
    row_tile = tl.program_id(0)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = rows < M, columns < N
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    dinner = tl.load(dinner_ptr + at, mask=row_inside[:, None] & column_inside[None, :], other=0.0).to(tl.float32)
    _through_activation(
        dinner, pre_ptr, dpre_ptr, inner_ptr, shares_ptr, row_tile, rows, columns, row_inside, column_inside, N,
        NEEDS_DBIAS, GATED, ACTIVATION,
    )  # fmt: skip


def _fwd_constants(width, activation, gated):
    return {"N": width, "GATED": gated, "ACTIVATION": activation, "BLOCK_M": _BLOCK_M, "BLOCK_N": _BLOCK_N}


def _bwd_constants(width, activation, gated, needs_dbias):
    return {**_fwd_constants(width, activation, gated), "NEEDS_DBIAS": needs_dbias}


_ACTIVATION_FWD = Launches("pre_ptr inner_ptr", _fwd_constants, "M")
_ACTIVATION_BWD = Launches("dinner_ptr pre_ptr dpre_ptr inner_ptr shares_ptr", _bwd_constants, "M")


def activation_fwd_launch(M, N, activation, gated):
    """What launches on pre and inner (M, N): see the kernel."""
    grid = (cdiv(M, _BLOCK_M), cdiv(N, _BLOCK_N))
    return _ACTIVATION_FWD.bind(_activation_fwd_kernel, (N, activation, gated), grid, M)


def activation_bwd_launch(M, N, activation, gated, needs_dbias):
    """What launches on dinner (M, N), pre, dpre, inner and shares: see the kernel. shares is not written unless
    needs_dbias."""
    grid = (cdiv(M, _BLOCK_M), cdiv(N, _BLOCK_N))
    return _ACTIVATION_BWD.bind(_activation_bwd_kernel, (N, activation, gated, needs_dbias), grid, M)


def activation_fwd(pre, inner, activation, gated):
    with torch.cuda.device_of(pre):
        activation_fwd_launch(*inner.shape, activation, gated)(pre, inner)


def dbias_shares(like, width):
    """Memory for activation_bwd's shares of dbias (width,), of the rows of `like`: their sum, in fp32, is dbias."""
    return like.new_empty(cdiv(like.shape[0], _BLOCK_M), width, dtype=torch.float32)


def activation_bwd(dinner, pre, dpre, inner, shares, activation, gated, needs_dbias):
    with torch.cuda.device_of(pre):
        activation_bwd_launch(*dinner.shape, activation, gated, needs_dbias)(dinner, pre, dpre, inner, shares)


def feed_forward(x, up_weight, up_bias, down_weight, gate_weight, gate_bias, activation, gated, return_pre):
    """x (total_tokens, hidden_size) -> out, pre; the schema in fastbert/ops/linear/feed_forward.py."""
    M, K, N = x.shape[0], x.shape[1], down_weight.shape[1]
    width = 2 * N if gated else N
    if M == 0 or N == 0:
        return x.new_zeros(M, down_weight.shape[0]), x.new_empty(M if return_pre else 0, width)
    with torch.cuda.device_of(x):
        if PLAN.up is not None and gate_weight is None:  # the epilogue takes one weight
            x, up_weight = x.contiguous(), up_weight.contiguous()
            bias = None if up_bias is None else up_bias.contiguous()
            inner, pre = x.new_empty(M, N), x.new_empty(M if return_pre else 0, width)
            grid = (cdiv(M, PLAN.up["BLOCK_M"]) * cdiv(N, PLAN.up["BLOCK_N"]),)
            _up_kernel[grid](
                x, up_weight, bias, inner, pre, M, N, K, K, K, HAS_BIAS=up_bias is not None, RETURN_PRE=return_pre,
                GATED=gated, ACTIVATION=activation, **PLAN.up,
            )  # fmt: skip
        else:
            pre = x.new_empty(M, width)
            if gate_weight is None:
                _product(x, up_weight, up_bias, pre)
            else:
                _product(x, gate_weight, gate_bias, pre[:, :N])
                _product(x, up_weight, up_bias, pre[:, N:])
            # Inference has no second matrix of this size. A gated one's halves would leave gaps in the next product's
            # operand, for which cuBLAS may take another kernel than in training, and so give other bits.
            inner = x.new_empty(M, N) if return_pre or gated else pre
            activation_fwd(pre, inner, activation, gated)
            pre = pre if return_pre else x.new_empty(0, width)
    return torch.mm(inner, down_weight.t()), pre


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
    tile = _BLOCK_M if PLAN.down is None else PLAN.down["BLOCK_M"]
    row_tiles = cdiv(M, tile)
    shares = pre.new_empty(row_tiles if needs_dbias else 0, width, dtype=torch.float32)
    options = {"NEEDS_DBIAS": needs_dbias, "GATED": gated, "ACTIVATION": activation}
    with torch.cuda.device_of(x):
        if PLAN.down is not None:
            dout, down_weight = dout.contiguous(), down_weight.contiguous()
            dpre, inner = torch.empty_like(pre), pre.new_empty(M, N)
            _down_bwd_kernel[(row_tiles * cdiv(N, PLAN.down["BLOCK_N"]),)](
                dout, down_weight, pre, dpre, inner, shares, M, N, K, K, N, **options, **PLAN.down
            )
        else:
            dinner = torch.mm(dout, down_weight)
            dpre, inner = (torch.empty_like(pre), dinner) if gated else (dinner, torch.empty_like(pre))
            activation_bwd(dinner, pre, dpre, inner, shares, activation, gated, needs_dbias)
    parts = [dpre] if gate_weight is None else [dpre[:, :N], dpre[:, N:]]
    dx = torch.mm(parts[0], ups[0]) if needs_dx else x.new_empty(0, x.shape[1])
    if needs_dx and gate_weight is not None:
        dx.addmm_(parts[1], up_weight)
    dups = [torch.mm(part.t(), x) for part in parts] if needs_dweight else []
    ddown = torch.mm(dout.t(), inner) if needs_dweight else down_weight.new_empty(0, N)
    # One sum for each: no result may be part of another one.
    dbiases = [share.sum(0).to(x.dtype) for share in shares.split(width // len(ups), 1)] if needs_dbias else []
    return dx, dups, dbiases, ddown
