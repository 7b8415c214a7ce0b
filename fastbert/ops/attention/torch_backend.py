"""The torch backend of attention: plain, traceable, differentiable PyTorch.

Batched products want equal lengths. Sequences are grouped into buckets of nearly equal length, so that a batch needs
a handful of calls and little padding, and a bucket of exactly equal lengths needs no mask. docs/notes/attention.md
has the measurements against the alternatives (a loop, one padded call, nested tensors).
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

from fastbert.backend import Backend, asked_for, transform_unsupported
from fastbert.ops._common import at_least_fp32, needs_grad
from fastbert.ops.attention.relative import Relative, reached, row_of_each_pair
from fastbert.ops.dropout import dropout_torch
from fastbert.ops.packing import can_look_at, check_offsets, check_offsets_on_cpu, token_sequences


class _Bucket:
    """Sequences of nearly one length: where their tokens are, and which slots of the padded rectangle are real."""

    __slots__ = ("mask", "num_sequences", "real_slots", "span", "token_index", "tokens", "width")

    def __init__(self, starts: list[int], lengths: list[int], device: torch.device):
        self.num_sequences, self.width = len(starts), max(lengths)
        starts_t, lengths_t = torch.tensor(starts), torch.tensor(lengths)
        slot = torch.arange(self.width).expand(self.num_sequences, -1)
        real = slot < lengths_t[:, None]
        # A padding slot repeats its own sequence's last token: what is masked never comes from another sequence, so
        # not even a NaN crosses from one to the next.
        index = (starts_t[:, None] + torch.minimum(slot, lengths_t[:, None] - 1)).flatten()
        first, tokens = starts[0], self.num_sequences * self.width
        equal = bool(real.all())
        contiguous = equal and starts == list(range(first, first + tokens, self.width))
        self.span = (first, first + tokens) if contiguous else None  # a plain view serves, no gather
        self.token_index = index.to(device)
        self.mask = None if equal else real[:, None, None, :].to(device)
        self.real_slots = None if equal else real.flatten().nonzero().flatten().to(device)
        self.tokens = self.token_index if self.real_slots is None else self.token_index[self.real_slots]


def make_buckets(lengths: list[int], device: torch.device) -> list[_Bucket]:
    """Groups of sequences within 1/8 (at least 16 tokens) of their longest; zero-length ones are in no group."""
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += length
    if len(set(lengths)) == 1 and total:
        return [_Bucket(starts, lengths, device)]
    groups: list[list[int]] = []
    for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i)):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and lengths[i] > longest - max(16, longest // 8):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_Bucket([starts[i] for i in g], [lengths[i] for i in g], device) for g in groups]


# Scores are written down this many bytes at a time: they stay in the second-level cache, and the allocator hands the
# same memory out again instead of faulting in fresh pages, which cost three times the products.
_SCORE_BYTES = 2 << 20


def _writes_scores(q, width: int) -> bool:
    """Whether writing the scores down beats SDPA: on CPUs, where it also errs less in backward.

    Measured on a 2-core AVX-512-BF16 machine, 12 heads of 64 (docs/notes/attention.md): bf16 is 2x faster forward and
    1.5-4x with backward, up to 1024 tokens; fp32 is up to 1.3x faster, up to 256. Backward keeps width^2 probabilities
    a head, which bounds its width.
    """
    if q.device.type != "cpu":
        return False
    if q.dtype in (torch.bfloat16, torch.float16):
        return width <= (512 if q.requires_grad else 1024)
    return width <= 256


def _scaled_product(a, b, scale: float):
    """a @ b * scale of batches of matrices."""
    if abs(scale) < torch.finfo(torch.float32).tiny:
        # On CPUs baddbmm returns memory that was not written where alpha is 0, or 0 in fp32 (bf16, torch 2.13).
        return torch.bmm(a, b) * scale
    # alpha scales the GEMM's fp32 accumulator; with beta = 0 the first operand is never read.
    return torch.baddbmm(a.new_zeros(()).expand(a.shape[0], a.shape[1], b.shape[2]), a, b, beta=0, alpha=scale)


def _weighted(scores, v, dropout_p: float):
    """dropout(softmax(scores)) v, of batches of matrices."""
    return dropout_torch(scores.softmax(-1), dropout_p) @ v


def _written_attention(q, k, v, mask, options):
    """As _rectangle_attention, by way of the scores; q, k, v (num_sequences, num_heads, width, head_dim)."""
    num_sequences, num_heads, width, head_dim = q.shape
    softmax_scale = options.softmax_scale
    rows = num_sequences * num_heads
    chunk = rows if torch.compiler.is_compiling() else max(1, _SCORE_BYTES // max(1, width * width * q.element_size()))
    splits = [t.reshape(rows, width, head_dim).split(max(1, chunk)) for t in (q, k, v)]
    if mask is None:
        padding = [None] * len(splits[0])
    else:
        padding = (~mask).expand(-1, num_heads, -1, -1).reshape(rows, mask.shape[2], width).split(max(1, chunk))
    pieces = []
    for qs, ks, vs, padded in zip(*splits, padding, strict=True):
        scores = _scaled_product(qs, ks.mT, softmax_scale)
        if padded is not None:
            scores.masked_fill_(padded, -math.inf)
        pieces.append(_weighted(scores, vs, options.dropout_p))
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out.view(num_sequences, num_heads, width, head_dim)


def _relative_scores(q, k, relative: Relative, pairs, softmax_scale):
    """q, k (num_heads, num_sequences, width, head_dim) -> scores (num_heads, num_sequences, width, width).

    pairs (num_sequences or 1, width, width): the row of the tables for each query and key.
    """
    num_heads, num_sequences, width, _ = q.shape
    scores = _scaled_product(q.flatten(0, 1), k.flatten(0, 1).mT, softmax_scale).unflatten(0, (num_heads, -1))
    pairs = pairs.expand(num_heads, num_sequences, width, width)
    if relative.key is not None:
        by_row = _scaled_product(q.flatten(1, 2), relative.key.permute(1, 2, 0), softmax_scale)
        scores = scores + by_row.unflatten(1, (num_sequences, width)).gather(-1, pairs)
    if relative.query is not None:
        by_row = _scaled_product(k.flatten(1, 2), relative.query.permute(1, 2, 0), softmax_scale)
        scores = scores + by_row.unflatten(1, (num_sequences, width)).gather(-1, pairs.mT).mT
    if relative.bias is not None:
        bias = relative.bias.to(scores.dtype).t()[:, :, None].expand(-1, -1, num_sequences * width)
        scores = scores + bias.transpose(1, 2).unflatten(1, (num_sequences, width)).gather(-1, pairs)
    return scores


def _relative_attention(q, k, v, mask, options, relative: Relative, places):
    """_rectangle_attention with relative terms; places (num_sequences or 1, width). Some heads at a time, by the bytes
    of their scores.
    """
    num_sequences, width, num_heads, _ = q.shape
    relative = reached(relative, width)
    pairs = row_of_each_pair(relative, places)
    padded = None if mask is None else ~mask.transpose(0, 1)
    at_once = num_heads
    if not torch.compiler.is_compiling():
        at_once = max(1, _SCORE_BYTES // max(1, num_sequences * width * width * q.element_size()))
    pieces = []
    for first in range(0, num_heads, at_once):
        heads = slice(first, first + at_once)
        qs, ks, vs = (t[:, :, heads].permute(2, 0, 1, 3) for t in (q, k, v))
        tables = (None if t is None else t[:, heads] for t in relative[1:4])
        scores = _relative_scores(qs, ks, Relative(relative.rows, *tables), pairs, options.softmax_scale)
        if padded is not None:
            scores = scores.masked_fill(padded, -math.inf)
        pieces.append(_weighted(scores, vs, options.dropout_p).permute(1, 2, 0, 3))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _every_head(num_heads, *tensors):
    """(..., num_kv_heads, head_dim) with each head as often as there are query heads to a group."""
    groups = (num_heads // max(1, t.shape[-2]) for t in tensors)
    return [t if group <= 1 else t.repeat_interleave(group, -2) for t, group in zip(tensors, groups, strict=True)]


def _rectangle_attention(operands, mask, options, relative: Relative | None, places):
    """operands: q, k, v (num_sequences, width, heads, head_dim) -> q's shape.

    mask (num_sequences, 1, 1 or width, width); places (num_sequences or 1, width), of relative terms.
    """
    q, k, v = operands
    if relative is not None:
        return _relative_attention(q, k, v, mask, options, relative, places)
    q, k, v = (t.transpose(1, 2) for t in (q, *_every_head(q.shape[2], k, v)))
    has_window = mask is not None and mask.shape[2] > 1  # SDPA's gradients err more where a query sees few keys
    # SDPA's kernels are differentiable once, and not in forward mode.
    is_twice = (asked_for(None) is Backend.TORCH and needs_grad(q, k, v)) or transform_unsupported() is not None
    if has_window or is_twice or _writes_scores(q, q.shape[2]):
        out = _written_attention(q, k, v, mask, options)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=options.dropout_p, scale=options.softmax_scale
        )
    return out.transpose(1, 2)


def _zeros_of_nothing(shape, *operands):
    """The result where there is no sequence to see. It keeps the graph: every gradient is defined, and zero."""
    return operands[0].new_zeros(shape) + sum(t[:0].sum() for t in operands)


def _tables_of(relative: Relative | None) -> list[torch.Tensor]:
    return [] if relative is None else [t for t in relative[1:4] if t is not None]


def _attention_bucketed(q, k, v, buckets, options, relative: Relative | None):
    total_tokens, num_heads, head_dim = q.shape
    pieces, order = [], []
    places: torch.Tensor | None = None
    for b in buckets:
        tokens = [t[b.span[0] : b.span[1]] if b.span else t.index_select(0, b.token_index) for t in (q, k, v)]
        operands = [t.view(b.num_sequences, b.width, *t.shape[1:]) for t in tokens]
        if relative is not None and relative.positions is not None:
            places = relative.positions[b.token_index].view(b.num_sequences, b.width)
        elif relative is not None:
            places = torch.arange(b.width, device=q.device)[None]
        out = _rectangle_attention(operands, b.mask, options, relative, places).reshape(-1, num_heads, head_dim)
        pieces.append(out if b.real_slots is None else out.index_select(0, b.real_slots))
        order.append(b.tokens)
    if len(buckets) == 1 and buckets[0].span == (0, total_tokens):
        return pieces[0]
    if not pieces:
        return _zeros_of_nothing(q.shape, q, k, v, *_tables_of(relative))
    # Tokens of no bucket (padding rows beyond cu_seqlens[-1]) stay zero. Autocast may lower the dtype.
    return pieces[0].new_zeros(q.shape).index_copy_(0, torch.cat(order), torch.cat(pieces))


def _padded_slots(total_tokens, cu_seqlens, max_seqlen):
    """(batch, max_seqlen) token index of each slot, and whether the slot is real; no host sync, traceable."""
    starts, lengths = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    slot = torch.arange(max_seqlen, device=cu_seqlens.device)
    real = slot < lengths[:, None]
    last = (lengths - 1).clamp(min=0)
    index = (starts[:, None] + torch.minimum(slot, last[:, None])).clamp(max=max(total_tokens - 1, 0))
    return index, real


def _is_full(cu_seqlens: torch.Tensor, max_seqlen: int) -> bool:
    """Whether every sequence has max_seqlen tokens; no where that could not be seen without a wait."""
    return can_look_at(cu_seqlens) and int(cu_seqlens[-1]) == (cu_seqlens.shape[0] - 1) * max_seqlen


def _rectangle(t: torch.Tensor, index: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """t (total_tokens, ...) at _padded_slots' index: (batch, max_seqlen, ...)."""
    if _is_full(cu_seqlens, index.shape[1]):
        return t[: index.numel()].unflatten(0, index.shape)
    return t.index_select(0, index.flatten()).view(*index.shape, *t.shape[1:])


def _places(index: torch.Tensor, relative: Relative) -> torch.Tensor:
    """Those of the slots of _padded_slots' index (batch, max_seqlen)."""
    if relative.positions is None:
        return torch.arange(index.shape[1], device=index.device)[None]
    return relative.positions[index]


def _attention_padded(q, k, v, cu_seqlens, max_seqlen, window_positions, num_keys, options, relative: Relative | None):
    """One SDPA call on the (batch, max_seqlen) rectangle: what torch.compile traces, with no data-dependent shape."""
    total_tokens, window_size = q.shape[0], options.window_size
    if 0 in (total_tokens, cu_seqlens.shape[0] - 1, max_seqlen):
        return _zeros_of_nothing(q.shape, q, k, v, *_tables_of(relative))
    index, real = _padded_slots(total_tokens, cu_seqlens, max_seqlen)
    operands = [t.index_select(0, index.flatten()).view(*index.shape, *t.shape[1:]) for t in (q, k, v)]
    # A sequence without tokens attends to slot 0, which is then dropped: no row is fully masked.
    is_first = torch.arange(max_seqlen, device=q.device) == 0
    mask = (real | is_first)[:, None, None, :]
    if max(window_size) >= 0:
        mask = mask & _window(index, window_size, window_positions)
    sees_any = None
    if num_keys is not None:
        mask = mask & _are_keys(num_keys, max_seqlen)
        sees_any = mask.any(-1, keepdim=True)
        mask = mask | (is_first & ~sees_any)
    places = None if relative is None else _places(index, relative)
    out = _rectangle_attention(operands, mask, options, relative, places)
    if sees_any is not None:
        out = torch.where(sees_any.transpose(1, 2), out, 0.0)
    return _back_to_tokens(out, cu_seqlens, total_tokens)


def _back_to_tokens(out: torch.Tensor, cu_seqlens: torch.Tensor, total_tokens: int) -> torch.Tensor:
    """(batch, max_seqlen, heads, head_dim) -> (total_tokens, heads, head_dim); zeros for padding rows."""
    max_seqlen = out.shape[1]
    sequence, inside = token_sequences(cu_seqlens, total_tokens)
    # Token t of sequence s sits in slot (s, t - start(s)).
    slot = (torch.arange(total_tokens, device=out.device) - cu_seqlens[sequence].long()).clamp(max=max_seqlen - 1)
    flat = (sequence * max_seqlen + slot).clamp(min=0)
    return torch.where(inside[:, None, None], out.reshape(-1, *out.shape[2:]).index_select(0, flat), 0.0)


def _are_keys(num_keys, max_seqlen):
    """(batch, 1, 1, max_seqlen): the slots that queries may see."""
    return (torch.arange(max_seqlen, device=num_keys.device) < num_keys[:, None])[:, None, None, :]


def _check_num_keys(num_keys, cu_seqlens):
    """Raise ValueError where a sequence has more keys than tokens, and a look costs no wait."""
    if num_keys is None or not num_keys.is_cpu or torch.compiler.is_compiling():
        return
    for i, (keys, length) in enumerate(zip(num_keys.tolist(), cu_seqlens.diff().tolist(), strict=True)):
        if not 0 <= keys <= length:
            raise ValueError(f"num_keys[{i}] is {keys}; the sequence has {length} tokens")


def _window(index, window_size, window_positions):
    """(batch, 1, max_seqlen, max_seqlen): whether a query (row) sees a key (column), for _padded_slots' index.

    A padding slot is where its sequence's last token is, which it sees: no row is fully masked.
    """
    position = (index if window_positions is None else window_positions[index]).long()
    left, right = (torch.iinfo(torch.int64).max if side < 0 else side for side in window_size)
    distance = position[:, None, None, :] - position[:, None, :, None]
    return (distance >= -left) & (distance <= right)


def _check_positions(name: str, positions, cu_seqlens, longest: int | None = None):
    """Raise ValueError unless they ascend in each sequence, less than `longest` in all, where a look costs no wait."""
    if positions is None or not positions.is_cpu or torch.compiler.is_compiling():
        return
    falls = (positions[1:] <= positions[:-1]).nonzero().flatten() + 1
    offsets = cu_seqlens.tolist()
    for token in set(falls.tolist()).difference(offsets):
        if token < offsets[-1]:
            raise ValueError(f"{name} falls or stands still at token {token}; it must ascend within a sequence")
    if longest is None or not offsets[-1]:
        return
    ends = [(start, stop - 1) for start, stop in pairwise(offsets) if stop > start]
    spread = max(int(positions[last]) - int(positions[first]) for first, last in ends)
    if spread >= longest:
        raise ValueError(f"{name} has places {spread} apart in a sequence; relative.rows serves {longest} places")


def _check_relative_positions(relative: Relative | None, cu_seqlens):
    if relative is not None:
        _check_positions("relative.positions", relative.positions, cu_seqlens, relative.longest)


def attention_torch(q, k, v, cu_seqlens, max_seqlen, window_positions, num_keys, options, cache, relative=None):
    if torch.compiler.is_compiling() or max(options.window_size) >= 0 or num_keys is not None:
        check_offsets_on_cpu("attention", cu_seqlens, q.shape[0], max_seqlen)
        _check_positions("window_positions", window_positions, cu_seqlens)
        _check_num_keys(num_keys, cu_seqlens)
        _check_relative_positions(relative, cu_seqlens)
        return _attention_padded(q, k, v, cu_seqlens, max_seqlen, window_positions, num_keys, options, relative)
    buckets = None if cache is None else cache.get("torch_buckets")
    if buckets is None:
        offsets = cu_seqlens.tolist()
        check_offsets("attention", offsets, q.shape[0])
        buckets = make_buckets([stop - start for start, stop in pairwise(offsets)], q.device)
        if cache is not None:
            cache["torch_buckets"] = buckets
    _check_relative_positions(relative, cu_seqlens)
    return _attention_bucketed(q, k, v, buckets, options, relative)


def attention_probs_torch(q, k, cu_seqlens, max_seqlen, window_positions, num_keys, options, relative=None):
    """(batch, num_heads, max_seqlen, max_seqlen); zero where a query or key slot is padding, or beyond the window."""
    check_offsets_on_cpu("attention_probs", cu_seqlens, q.shape[0], max_seqlen)
    if q.shape[0] == 0:
        shape = (cu_seqlens.shape[0] - 1, q.shape[1], max_seqlen, max_seqlen)
        return _zeros_of_nothing(shape, q, k, *_tables_of(relative))
    (k,) = _every_head(q.shape[1], k)
    index, real = _padded_slots(q.shape[0], cu_seqlens, max_seqlen)
    q, k = (_rectangle(t, index, cu_seqlens).transpose(1, 2) for t in (q, k))
    if relative is None:
        scores = _scaled_product(q.flatten(0, 1), k.flatten(0, 1).mT, options.softmax_scale)
        scores = at_least_fp32(scores).unflatten(0, q.shape[:2])
    else:
        _check_relative_positions(relative, cu_seqlens)
        relative = reached(relative, max_seqlen)
        pairs, heads_first = row_of_each_pair(relative, _places(index, relative)), (t.transpose(0, 1) for t in (q, k))
        scores = _relative_scores(*heads_first, relative, pairs, options.softmax_scale).transpose(0, 1)
        scores = at_least_fp32(scores)
    has_window = max(options.window_size) >= 0
    if not has_window and num_keys is None and _is_full(cu_seqlens, max_seqlen):
        return scores.softmax(-1).to(q.dtype)
    seen = real[:, None, None, :]
    if has_window:
        _check_positions("window_positions", window_positions, cu_seqlens)
        seen = seen & _window(index, options.window_size, window_positions)
    if num_keys is not None:
        _check_num_keys(num_keys, cu_seqlens)
        seen = seen & _are_keys(num_keys, max_seqlen)
    # No infinity: a query may see no key.
    probs = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.where(seen & real[:, None, :, None], probs, 0.0).to(q.dtype)


def attention_from_probs_torch(probs, v, cu_seqlens):
    """probs (batch, num_heads, max_seqlen, max_seqlen), of attention_probs -> (total_tokens, num_heads, head_dim)."""
    total_tokens, max_seqlen = v.shape[0], probs.shape[-1]
    check_offsets_on_cpu("attention_from_probs", cu_seqlens, total_tokens, max_seqlen)
    (v,) = _every_head(probs.shape[1], v)
    if 0 in (total_tokens, cu_seqlens.shape[0] - 1, max_seqlen):
        return _zeros_of_nothing(v.shape, v, probs)
    index, _ = _padded_slots(total_tokens, cu_seqlens, max_seqlen)
    out = (probs @ _rectangle(v, index, cu_seqlens).transpose(1, 2)).transpose(1, 2)
    if _is_full(cu_seqlens, max_seqlen) and index.numel() == total_tokens:
        return out.flatten(0, 1)
    return _back_to_tokens(out, cu_seqlens, total_tokens)
