"""The packed form: pack and unpack (rows of a padded matrix to packed tokens, and back with zeros at padding), and what
cu_seqlens says of the tokens: its checks, and the sequence and place of each."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops._common import (
    Differentiable,
    Rule,
    check_devices,
    define_triton,
    differentiable_once,
    needs_grad,
    triton_unsupported,
)

# Rows of x (num_rows, width) to (total_tokens, width), and back with zeros in the rows that indices leaves out.
# indices: int64 (total_tokens,), ascending. Each op is the other's backward.

_PACK = define_triton(
    "pack",
    "(Tensor x, Tensor indices) -> Tensor",
    "packing",
    lambda x, indices: x.new_empty(indices.shape[0], x.shape[1]),
)
_UNPACK = define_triton(
    "unpack",
    "(Tensor packed, Tensor indices, SymInt num_rows) -> Tensor",
    "packing",
    lambda packed, indices, num_rows: packed.new_empty(num_rows, packed.shape[1]),
)

for _op in ("pack", "unpack"):
    register(_op, Backend.TRITON, triton_unsupported, probe=lambda x, vector: (x,))


class _Pack(torch.autograd.Function):
    """Not `Differentiable`: backward needs a size that no saved tensor has, and torch.compile wants such a one to be
    read from a shape inside of forward."""

    @staticmethod
    def forward(ctx, x, indices):
        ctx.save_for_backward(indices)
        ctx.num_rows = x.shape[0]
        return _PACK(x, indices)

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        (indices,) = ctx.saved_tensors
        return _UNPACK(dout, indices, ctx.num_rows), None


_UNPACK_RULE = Rule(
    lambda backend, num_rows, packed, indices: (_UNPACK(packed, indices, num_rows), (indices,)),
    lambda backend, num_rows, needed, saved, dout: (_PACK(dout, *saved), None),
)


def _check_indices(op: str, indices: torch.Tensor) -> None:
    """What a kernel takes for granted of them, but for their values."""
    if indices.dtype is not torch.int64 or indices.dim() != 1:
        actual = f"{indices.dtype} of shape {tuple(indices.shape)}"
        raise ValueError(f"{op}: indices is {actual}; it must be torch.int64 of shape (total_tokens,)")


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """(rows, ...) -> (rows, width), as the kernels take it."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def pack(x: torch.Tensor, indices: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """x[indices], the rows of real tokens.

    Args:
        x: (rows, ...), a padded batch with its sequences one after the other; of any dtype.
        indices: int64 (total_tokens,), ascending and each once, within [0, rows).
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        (total_tokens, ...), the same bits. An index that is no row never reads or writes memory beyond `x`: torch's
        backend raises IndexError on a CPU, and asserts on a GPU; the kernels give a row of NaN, and no gradient for it.

    Raises:
        ValueError: tensors on two devices, or indices of another dtype or shape. BackendError: the backend that was
        asked for cannot serve the call.
    """
    check_devices("pack", x=x, indices=indices)
    if select("pack", backend, x) is Backend.TORCH:
        return x.index_select(0, indices)
    _check_indices("pack", indices)
    matrix = _matrix(x)
    packed = _Pack.apply(matrix, indices) if needs_grad(x) else _PACK(matrix, indices)
    return packed.view(indices.shape[0], *x.shape[1:])


def unpack(packed: torch.Tensor, indices: torch.Tensor, num_rows: int, *, backend: str | None = None) -> torch.Tensor:
    """The inverse of `pack`: (total_tokens, ...) -> (num_rows, ...) with zeros in the rows that `indices` leaves out.

    `indices`, one for each row of `packed`, and what is raised are those of `pack`; the kernels leave a row out whose
    index is none of the `num_rows`, and its gradient is NaN. Every row is written once, where torch writes zeros and
    then the tokens over them.
    """
    check_devices("unpack", packed=packed, indices=indices)
    if select("unpack", backend, packed) is Backend.TORCH:
        return packed.new_zeros(num_rows, *packed.shape[1:]).index_copy_(0, indices, packed)
    _check_indices("unpack", indices)
    if indices.shape[0] != packed.shape[0]:
        raise ValueError(f"unpack: there are {indices.shape[0]} indices for {packed.shape[0]} tokens")
    matrix = _matrix(packed)
    if needs_grad(packed):
        padded = Differentiable.apply(_UNPACK_RULE, Backend.TRITON, num_rows, matrix, indices)
    else:
        padded = _UNPACK(matrix, indices, num_rows)
    return padded.view(num_rows, *packed.shape[1:])


# --------------------------------------------------------------------------------------------------------------------
# cu_seqlens


def int32_offsets(op: str, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """cu_seqlens as kernels take it; int64 is converted. Raises ValueError for another dtype or shape."""
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: cu_seqlens is {cu_seqlens.dtype}; it must be int32 (or int64)")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{op}: cu_seqlens has shape {tuple(cu_seqlens.shape)}; it must be (batch + 1,)")
    return cu_seqlens.int()


def check_offsets(op: str, offsets: list[int], total_tokens: int) -> None:
    """Raise ValueError unless offsets, which are on the host, begin at 0, never fall, and stay within the tokens."""
    if offsets[0] != 0:
        raise ValueError(f"{op}: cu_seqlens starts at {offsets[0]}, not at 0")
    for i, (start, stop) in enumerate(pairwise(offsets)):
        if stop < start:
            raise ValueError(f"{op}: cu_seqlens falls from {start} to {stop} at sequence {i}; it must never fall")
    if offsets[-1] > total_tokens:
        raise ValueError(f"{op}: cu_seqlens ends at {offsets[-1]}, but there are {total_tokens} tokens")


def _is_on_cpu(t: torch.Tensor) -> bool:
    """tests/gpu/test_host_syncs.py says no for all, as on a GPU."""
    return t.is_cpu


def can_look_at(offsets: torch.Tensor) -> bool:
    """Whether their numbers are to be had without a wait: on a CPU, not in a traced call."""
    return _is_on_cpu(offsets) and not torch.compiler.is_compiling()


def check_offsets_on_cpu(op: str, cu_seqlens: torch.Tensor, total_tokens: int, max_seqlen: int | None = None) -> None:
    """`check_offsets` where `can_look_at` them. max_seqlen must bound the lengths."""
    if not can_look_at(cu_seqlens):
        return
    offsets = cu_seqlens.tolist()
    check_offsets(op, offsets, total_tokens)
    longest = max((stop - start for start, stop in pairwise(offsets)), default=0)
    if max_seqlen is not None and max_seqlen < longest:
        raise ValueError(f"{op}: max_seqlen is {max_seqlen}, but the longest sequence has {longest} tokens")


def token_sequences(cu_seqlens, total_tokens):
    """The sequence each token belongs to (total_tokens,), and False for padding rows beyond cu_seqlens[-1]."""
    token = torch.arange(total_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    batch_size = cu_seqlens.shape[0] - 1
    return sequence.clamp(max=max(batch_size - 1, 0)), sequence < batch_size


def token_positions(cu_seqlens, total_tokens):
    """The place of each token in its sequence (total_tokens,); 0 in padding rows."""
    token, offsets = torch.arange(total_tokens, device=cu_seqlens.device), cu_seqlens.long()
    sequence = torch.searchsorted(offsets[1:], token, right=True)  # of padding rows the one behind the last
    return (token - offsets.index_select(0, sequence)) * (token < offsets[-1])


# Tokens of the longest chain of additions: beyond a few hundred, fp32 loses more than the formula's pairwise sum does.
_CHUNK = 64


def sequence_sums(x, sequence, batch_size):
    """(total_tokens, ...) -> (batch_size, ...): a sequence's rows added up chunk by chunk, then its chunks."""
    total_tokens = x.shape[0]
    # Neither a token's chunk nor its sequence ever falls, so their sum is another one in every part of a sequence.
    part = torch.arange(total_tokens, device=x.device) // _CHUNK + sequence
    num_parts = total_tokens // _CHUNK + batch_size
    parts = x.new_zeros(num_parts, *x.shape[1:]).index_add(0, part, x)
    owner = sequence.new_zeros(num_parts).scatter(0, part, sequence)
    return x.new_zeros(batch_size, *x.shape[1:]).index_add(0, owner, parts)


def attention_slots(indices, cu_seqlens, max_seqlen, seqlen):
    """The index of a sequence's own tokens, (batch, max_seqlen, max_seqlen, heads), in the attention of a padded grid,
    (batch, heads, seqlen + 1, seqlen + 1): slots beyond a sequence's length are in the spare row and column.
    """
    sequence, column = indices // seqlen, indices % seqlen
    slot = torch.arange(indices.numel(), device=indices.device) - cu_seqlens[sequence]
    batch_size = cu_seqlens.shape[0] - 1
    columns = torch.full((batch_size, max_seqlen), seqlen, device=indices.device)
    columns[sequence, slot] = column
    rows = torch.arange(batch_size, device=indices.device)[:, None, None]
    return rows, slice(None), columns[:, :, None], columns[:, None, :]
