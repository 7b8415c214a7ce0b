"""pooling: mean, first token or maximum of each sequence of packed tokens, and their gradients.

    mean: out[s] = 1/n sum x[t],  dx[t] = dout[s] / n            t in the n tokens of sequence s
    cls:  out[s] = x[first],      dx[first] = dout[s]
    max:  out[s] = max x[t],      dx[t] = dout[s] / ties where x[t] = out[s]

A maximum's gradient is shared evenly by the `ties` tokens that have it, as torch's amax does; sums are fp32. A sequence
without tokens gives zeros, and so do the gradients of padding rows, which are never read. A sequence whose offsets
fall, or lie beyond the tokens, gives NaN, and nothing beyond x is read.

Forward: a program takes BLOCK_N columns of a sequence. Where sequences are long, several programs share one, by blocks
of BLOCK_M tokens in turn, and a second kernel joins what they have in a fixed order. Backward: a program takes BLOCK_M
tokens, whatever their sequences, and writes each gradient once. Bound by memory: x is read once, dx is written once.

Legend: B sequences, M tokens, N columns (hidden_size), S programs that share a sequence.
"""

import torch
import triton
import triton.language as tl

from .sizes import cdiv

# Several programs share a sequence where its columns alone would not fill the largest GPUs: as many as do, with a share
# of some tokens each. Constants, so that a sum's last bits do not depend on the GPU.
_PROGRAMS = 1024
_MIN_SHARE = 64
_MAX_SPLITS = 64


@triton.jit
def _join_max(top, ties):
    """top, ties [M, N] -> [N]: the maximum, NaN where there is one, and how many have it."""
    is_nan = tl.max((top != top).to(tl.int32), axis=0) > 0  # tl.max passes over NaN
    joined = tl.where(is_nan, float("nan"), tl.max(top, axis=0))
    return joined, tl.sum(tl.where(top == joined[None, :], ties, 0), axis=0)


@triton.jit
def _store_pooled(
    out_ptr, ties_ptr, at, inside, pooled, ties, length, is_span, MODE: tl.constexpr, RETURN_TIES: tl.constexpr
):  # fmt: skip
    if MODE == "max":
        pooled = tl.where(length > 0, pooled, 0.0)
        if RETURN_TIES:
            tl.store(ties_ptr + at, ties, mask=inside)
    else:
        pooled = pooled / tl.maximum(length, 1).to(tl.float32)
    pooled = tl.where(is_span, pooled, float("nan"))
    tl.store(out_ptr + at, pooled.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_span(cu_seqlens_ptr, sequence, total_tokens, MODE: tl.constexpr):
    """First token, the end of those that count, and whether they are tokens at all; if not, none counts."""
    begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64)
    is_span = (begin >= 0) & (end >= begin) & (end <= total_tokens)
    if MODE == "cls":
        end = tl.minimum(end, begin + 1)
    return begin, tl.where(is_span, end, begin), is_span


@triton.jit(do_not_specialize=["total_tokens"])
def _pooling_fwd_kernel(
    x_ptr, cu_seqlens_ptr, out_ptr, ties_ptr, parts_ptr, part_ties_ptr, total_tokens, hidden_size,
    MODE: tl.constexpr, RETURN_TIES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """parts, part_ties (B, S, N), fp32 and int32: sums or maxima of the tokens of one program, if SPLITS > 1."""
    sequence = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < hidden_size
    begin, end, is_span = _load_span(cu_seqlens_ptr, sequence, total_tokens, MODE)

    ties = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    if MODE == "max":
        total = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin + tl.program_id(2) * BLOCK_M, end, SPLITS * BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        here = (rows < end)[:, None] & inside[None, :]
        other = float("-inf") if MODE == "max" else 0.0
        x = tl.load(x_ptr + rows[:, None] * hidden_size + columns[None, :], mask=here, other=other).to(tl.float32)
        if MODE == "max":
            ties = tl.where(x > total, 1, ties + (here & (x == total)).to(tl.int32))
            total = tl.where((x > total) | (x != x), x, total)
        else:
            total += x
    if MODE == "max":
        pooled, ties_of_all = _join_max(total, ties)
    else:
        pooled, ties_of_all = tl.sum(total, axis=0), tl.sum(ties, axis=0)

    if SPLITS == 1:
        at = sequence * hidden_size + columns
        _store_pooled(out_ptr, ties_ptr, at, inside, pooled, ties_of_all, end - begin, is_span, MODE, RETURN_TIES)
    else:
        at = (sequence * SPLITS + tl.program_id(2)) * hidden_size + columns
        tl.store(parts_ptr + at, pooled, mask=inside)
        if RETURN_TIES:
            tl.store(part_ties_ptr + at, ties_of_all, mask=inside)


@triton.jit(do_not_specialize=["total_tokens"])
def _pooling_join_kernel(
    cu_seqlens_ptr, out_ptr, ties_ptr, parts_ptr, part_ties_ptr, total_tokens, hidden_size,
    MODE: tl.constexpr, RETURN_TIES: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < hidden_size
    begin, end, is_span = _load_span(cu_seqlens_ptr, sequence, total_tokens, MODE)
    at = (sequence * SPLITS + tl.arange(0, SPLITS))[:, None] * hidden_size + columns[None, :]  # [S, N]
    parts = tl.load(parts_ptr + at, mask=inside[None, :], other=0.0)
    ties = tl.zeros([SPLITS, BLOCK_N], tl.int32)
    if RETURN_TIES:
        ties = tl.load(part_ties_ptr + at, mask=inside[None, :], other=0)
    if MODE == "max":
        pooled, ties_of_all = _join_max(parts, ties)
    else:
        pooled, ties_of_all = tl.sum(parts, axis=0), tl.sum(ties, axis=0)
    at = sequence * hidden_size + columns
    _store_pooled(out_ptr, ties_ptr, at, inside, pooled, ties_of_all, end - begin, is_span, MODE, RETURN_TIES)


def _splits(total_tokens: int, batch_size: int, blocks: int, mode: str) -> int:
    """Programs that share a sequence, a power of two; from the average length, which needs no host sync."""
    if mode == "cls":
        return 1
    splits = min(_MAX_SPLITS, _PROGRAMS // (batch_size * blocks), total_tokens // batch_size // _MIN_SHARE)
    return 1 << max(0, splits.bit_length() - 1)


def pooling_fwd(x, cu_seqlens, mode, return_ties):
    """x (total_tokens, hidden_size) -> out, ties (batch, hidden_size); the schema in fastbert/ops/pooling.py."""
    x, cu_seqlens = x.contiguous(), cu_seqlens.contiguous()
    total_tokens, hidden_size = x.shape
    batch_size = cu_seqlens.shape[0] - 1
    out = x.new_empty(batch_size, hidden_size)
    ties = x.new_empty(batch_size if return_ties else 0, hidden_size, dtype=torch.int32)
    if out.numel() == 0:
        return out, ties
    blocks = cdiv(hidden_size, 64)
    splits = _splits(total_tokens, batch_size, blocks, mode)
    shared = (batch_size, splits, hidden_size) if splits > 1 else (0,)
    parts, part_ties = (x.new_empty(shared, dtype=dtype) for dtype in (torch.float32, torch.int32))
    options = {"MODE": mode, "RETURN_TIES": return_ties, "SPLITS": splits, "BLOCK_N": 64, "num_warps": 4}
    with torch.cuda.device_of(x):
        _pooling_fwd_kernel[(batch_size, blocks, splits)](
            x, cu_seqlens, out, ties, parts, part_ties, total_tokens, hidden_size, BLOCK_M=32, **options
        )
        if splits > 1:
            _pooling_join_kernel[(batch_size, blocks)](
                cu_seqlens, out, ties, parts, part_ties, total_tokens, hidden_size, **options
            )
    return out, ties


@triton.jit(do_not_specialize=["total_tokens", "batch_size", "search_steps"])
def _pooling_bwd_kernel(
    dout_ptr, x_ptr, out_ptr, ties_ptr, cu_seqlens_ptr, dx_ptr, total_tokens, batch_size, hidden_size, search_steps,
    MODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)

    # The sequence of each row: how many end at or before it, by bisection. Padding rows have batch_size.
    sequence = tl.zeros([BLOCK_M], tl.int64)
    high = sequence + batch_size
    for _ in range(search_steps):
        middle = (sequence + high) // 2
        end = tl.load(cu_seqlens_ptr + middle + 1, mask=sequence < high, other=0).to(tl.int64)
        is_before = (sequence < high) & (end <= rows)
        sequence = tl.where(is_before, middle + 1, sequence)
        high = tl.where(is_before, high, middle)
    is_real = (sequence < batch_size) & (rows < total_tokens)
    begin = tl.load(cu_seqlens_ptr + sequence, mask=is_real, other=0).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1, mask=is_real, other=1).to(tl.int64)

    inside = columns[None, :] < hidden_size
    takes = is_real
    if MODE == "cls":
        takes = is_real & (rows == begin)
    takes = takes[:, None] & inside  # [BLOCK_M, BLOCK_N]
    pooled_at = sequence[:, None] * hidden_size + columns[None, :]
    at = rows[:, None] * hidden_size + columns[None, :]
    dx = tl.load(dout_ptr + pooled_at, mask=takes, other=0.0).to(tl.float32)
    if MODE == "mean":
        dx = dx / (end - begin).to(tl.float32)[:, None]
    if MODE == "max":
        # In fp32, as in forward: the interpreter compares 16 bits as integers, to which the two zeros differ.
        x = tl.load(x_ptr + at, mask=takes, other=0.0).to(tl.float32)
        out = tl.load(out_ptr + pooled_at, mask=takes, other=0.0).to(tl.float32)
        ties = tl.load(ties_ptr + pooled_at, mask=takes, other=1)
        dx = tl.where(takes & (x == out), dx / ties.to(tl.float32), 0.0)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=(rows < total_tokens)[:, None] & inside)


def pooling_bwd(dout, x, out, ties, cu_seqlens, mode, total_tokens):
    """dout (batch, hidden_size) -> dx (total_tokens, hidden_size); x, out and ties are those of a maximum."""
    dout, cu_seqlens = dout.contiguous(), cu_seqlens.contiguous()
    x, out = (None if t is None else t.contiguous() for t in (x, out))
    batch_size, hidden_size = dout.shape
    dx = dout.new_empty(total_tokens, hidden_size)
    if dx.numel() == 0:
        return dx
    with torch.cuda.device_of(dx):
        _pooling_bwd_kernel[(cdiv(total_tokens, 8), cdiv(hidden_size, 256))](
            dout, x, out, ties, cu_seqlens, dx, total_tokens, batch_size, hidden_size, batch_size.bit_length(),
            MODE=mode, BLOCK_M=8, BLOCK_N=256, num_warps=4,
        )  # fmt: skip
    return dx
