"""Attention with relative terms on the Triton kernels: their schemas, the places of tokens, autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastbert.backend import Backend
from fastbert.ops._common import Differentiable, Rule, define_triton, needs_grad
from fastbert.ops.attention.relative import Relative
from fastbert.ops.attention.tiles import tiles_of
from fastbert.ops.packing import token_sequences

# As attention's, with the tables; rows are those of the distances that sequences of this batch may have. offsets, int32
# (batch + 1,), and tiles are those of places: of tokens, or where tokens have positions with holes (index), of the
# padded sequences from their first token to their last. index: int32, the token of each place, -1 in a hole.

_TERMS = "Tensor rows, Tensor? key, Tensor? query, Tensor? bias, Tensor tiles, Tensor offsets, Tensor? index"
_FORM = "Tensor? philox, Tensor? window_positions, int tile, float softmax_scale, float dropout_p, SymInt[] window_size"


def _fwd_fake(q, *others):
    tokens, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(2 if others[-1] else 0, num_heads, tokens, dtype=torch.float32)


def _bwd_fake(dout, q, k, v, out, softmax_stats, rows, key, query, bias, *others):
    total_tokens, num_heads, head_dim = q.shape
    wanted = zip((key, query, bias), others[-1], strict=True)
    tables = (q.new_empty(0) if t is None or not is_wanted else t.new_empty(t.shape) for t, is_wanted in wanted)
    return q.new_empty(total_tokens, 3 * num_heads, head_dim), *tables


_FWD = define_triton(
    "attention_relative_fwd",
    f"(Tensor q, Tensor k, Tensor v, {_TERMS}, {_FORM}, bool return_stats) -> (Tensor out, Tensor softmax_stats)",
    "attention_relative_fwd",
    _fwd_fake,
)
_BWD = define_triton(
    "attention_relative_bwd",
    f"(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_stats, {_TERMS}, {_FORM},"
    " bool[] needs_tables) -> (Tensor dqkv, Tensor dkey, Tensor dquery, Tensor dbias)",
    "attention_relative_bwd",
    _bwd_fake,
)


class RelativeOptions(NamedTuple):
    tile: int
    softmax_scale: float
    dropout_p: float
    window_size: tuple[int, int]


def _tile(head_dim: int, longest: int, is_fp32: bool) -> int:
    """Places of a tile of the list, of which programs take a part or all (kernels/blocks.py). Comparisons only, so that
    a traced length is guarded by them alone."""
    largest = 16 if is_fp32 else 64 if head_dim <= 64 else 32
    tile = 16
    while tile < largest and tile < longest:
        tile *= 2
    return tile


def _places(positions, cu_seqlens, total_tokens, longest) -> tuple[torch.Tensor, torch.Tensor]:
    """offsets and index of tokens at `positions`; whatever these are, nothing leads beyond the tensors."""
    batch_size = cu_seqlens.shape[0] - 1
    sequence, inside = token_sequences(cu_seqlens, total_tokens)
    start, stop = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    first, last = (positions[t.clamp(0, total_tokens - 1)].long() for t in (start, stop - 1))
    lengths = torch.where(stop > start, (last - first + 1).clamp(0, longest), 0)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    slot = positions - first[sequence]
    known = inside & (slot >= 0) & (slot < lengths[sequence])
    size, token = batch_size * longest, torch.arange(total_tokens, device=cu_seqlens.device)
    at = torch.where(known, offsets[sequence] + slot, size + token)
    index = cu_seqlens.new_full((size + total_tokens,), -1).index_copy(0, at, token.int())
    return offsets.int(), index[:size]


def _where(relative: Relative, cu_seqlens, total_tokens: int, tile: int, cache: dict | None):
    """(tiles, offsets, index), made once for all layers."""
    if relative.positions is None or not total_tokens or cu_seqlens.shape[0] == 1:
        return tiles_of(cu_seqlens, total_tokens, tile, cache), cu_seqlens, None
    kept = None if cache is None else cache.get(("triton_places", tile))
    if kept is None or kept[0] is not relative.positions:
        offsets, index = _places(relative.positions, cu_seqlens, total_tokens, relative.longest)
        kept = relative.positions, tiles_of(offsets, index.shape[0], tile, None), offsets, index
        if cache is not None:
            cache["triton_places", tile] = kept
    return kept[1:]


def _forward(backend, options: RelativeOptions, *tensors):
    out, softmax_stats = _FWD(*tensors, *options, True)
    return out, (*tensors[:3], out, softmax_stats, *tensors[3:])


def _backward(backend, options: RelativeOptions, needed, saved, dout):
    dqkv, *tables = _BWD(dout, *saved, *options, needed[4:7])
    return *dqkv.split(saved[0].shape[1], 1), None, *tables, None, None, None, None, None


_RULE = Rule(_forward, _backward)


def attention_relative_triton(
    options, q, k, v, cu_seqlens, philox, window_positions, relative: Relative, max_seqlen, cache
) -> torch.Tensor:
    """fastbert.ops.attention of checked operands; options: AttentionOptions."""
    rows, *tables, positions = relative
    longest = relative.longest
    if positions is None and 0 < max_seqlen < longest:
        rows, longest = rows[longest - max_seqlen : longest + max_seqlen - 1], max_seqlen
    tile = _tile(q.shape[-1], longest, q.dtype is torch.float32)
    where = _where(relative, cu_seqlens, q.shape[0], tile, cache)
    tensors = (q, k, v, rows, *tables, *where, philox, window_positions)
    relative_options = RelativeOptions(tile, options.softmax_scale, options.dropout_p, options.window_size)
    if needs_grad(q, k, v, *tables):
        return Differentiable.apply(_RULE, Backend.TRITON, relative_options, *tensors)
    return _FWD(*tensors, *relative_options, False)[0]
