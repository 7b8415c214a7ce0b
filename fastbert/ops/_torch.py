"""The torch backend of every op: plain, traceable, differentiable PyTorch; correct everywhere, in train and in eval."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

from fastbert.backend import Backend, asked_for
from fastbert.ops._checks import check_offsets, check_offsets_on_cpu
from fastbert.ops._library import needs_grad
from fastbert.ops._product import compute_dtype, product

_ACTIVATIONS = {
    "gelu": F.gelu,  # exact, by erf (Hendrycks & Gimpel 2016)
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
    "silu": F.silu,
}


_ACTIVATIONS_IN_PLACE = {
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "relu": torch.relu_,
    "tanh": torch.tanh_,
    "silu": lambda x: F.silu(x, inplace=True),
}


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    return _ACTIVATIONS[name](x)


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """Sums and losses run in fp32, or in fp64 where that is what came in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    return F.dropout(x, p) if p > 0 else x


def add_layer_norm(x, residual, weight, bias, x_bias, dropout_p, eps):
    if x_bias is not None:
        x = x + x_bias
    x = dropout(x, dropout_p)
    summed = x if residual is None else x + residual
    return F.layer_norm(summed, summed.shape[-1:], weight, bias, eps), summed


# --------------------------------------------------------------------------------------------------------------------
# attention
#
# Batched products want equal lengths. Sequences are grouped into buckets of nearly equal length, so that a batch needs
# a handful of calls and little padding, and a bucket of exactly equal lengths needs no mask. docs/attention.md has the
# measurements against the alternatives (a loop, one padded call, nested tensors).


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

    Measured on a 2-core AVX-512-BF16 machine, 12 heads of 64 (docs/attention.md): bf16 is 2x faster forward and 1.5-4x
    with backward, up to 1024 tokens; fp32 is up to 1.3x faster, up to 256. Backward keeps width^2 probabilities a head,
    which bounds its width.
    """
    if q.device.type != "cpu":
        return False
    if q.dtype in (torch.bfloat16, torch.float16):
        return width <= (512 if q.requires_grad else 1024)
    return width <= 256


def _written_attention(q, k, v, mask, softmax_scale, dropout_p):
    """As _rectangle_attention, by way of the scores; q, k, v (num_sequences, num_heads, width, head_dim)."""
    num_sequences, num_heads, width, head_dim = q.shape
    rows = num_sequences * num_heads
    chunk = rows if torch.compiler.is_compiling() else max(1, _SCORE_BYTES // max(1, width * width * q.element_size()))
    splits = [t.reshape(rows, width, head_dim).split(max(1, chunk)) for t in (q, k, v)]
    if mask is None:
        padding = [None] * len(splits[0])
    else:
        padding = (~mask).expand(-1, num_heads, -1, -1).reshape(rows, mask.shape[2], width).split(max(1, chunk))
    pieces = []
    for qs, ks, vs, padded in zip(*splits, padding, strict=True):
        if abs(softmax_scale) < torch.finfo(torch.float32).tiny:
            # On CPUs baddbmm returns memory that nobody has written where alpha is 0, or 0 in fp32 (bf16, torch 2.13).
            scores = torch.bmm(qs, ks.mT) * softmax_scale
        else:
            # alpha scales the GEMM's fp32 accumulator; with beta = 0 the first operand is never read.
            scores = torch.baddbmm(
                q.new_zeros(()).expand(qs.shape[0], width, width), qs, ks.mT, beta=0, alpha=softmax_scale
            )
        if padded is not None:
            scores.masked_fill_(padded, -math.inf)
        pieces.append(torch.bmm(dropout(scores.softmax(-1), dropout_p), vs))
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return out.view(num_sequences, num_heads, width, head_dim)


def _rectangle_attention(q, k, v, mask, softmax_scale, dropout_p):
    """q, k, v (num_sequences, width, num_heads, head_dim) -> q's shape; mask (num_sequences, 1, 1 or width, width)."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    has_window = mask is not None and mask.shape[2] > 1  # SDPA's gradients err more where a query sees few keys
    is_twice = asked_for(None) is Backend.TORCH and needs_grad(q, k, v)  # SDPA's kernels are differentiable once
    if has_window or is_twice or _writes_scores(q, q.shape[2]):
        out = _written_attention(q, k, v, mask, softmax_scale, dropout_p)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=softmax_scale)
    return out.transpose(1, 2)


def _zeros_of_nothing(shape, *operands):
    """The result where there is no sequence to see. It keeps the graph: every gradient is defined, and zero."""
    return operands[0].new_zeros(shape) + sum(t[:0].sum() for t in operands)


def _attention_bucketed(q, k, v, buckets, softmax_scale, dropout_p):
    total_tokens, num_heads, head_dim = q.shape
    pieces, order = [], []
    for b in buckets:
        shape = (b.num_sequences, b.width, num_heads, head_dim)
        if b.span is not None:
            operands = [t[b.span[0] : b.span[1]].view(shape) for t in (q, k, v)]
        else:
            operands = [t.index_select(0, b.token_index).view(shape) for t in (q, k, v)]
        out = _rectangle_attention(*operands, b.mask, softmax_scale, dropout_p).reshape(-1, num_heads, head_dim)
        pieces.append(out if b.real_slots is None else out.index_select(0, b.real_slots))
        order.append(b.tokens)
    if len(buckets) == 1 and buckets[0].span == (0, total_tokens):
        return pieces[0]
    if not pieces:
        return _zeros_of_nothing(q.shape, q, k, v)
    # Tokens of no bucket (slack rows beyond cu_seqlens[-1]) stay zero. Autocast may lower the dtype.
    return pieces[0].new_zeros(q.shape).index_copy(0, torch.cat(order), torch.cat(pieces))


def _padded_slots(total_tokens, cu_seqlens, max_seqlen):
    """(batch, max_seqlen) token index of each slot, and whether the slot is real; no host sync, traceable."""
    starts, lengths = cu_seqlens[:-1].long(), (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    slot = torch.arange(max_seqlen, device=cu_seqlens.device)
    real = slot < lengths[:, None]
    last = (lengths - 1).clamp(min=0)
    index = (starts[:, None] + torch.minimum(slot, last[:, None])).clamp(max=max(total_tokens - 1, 0))
    return index, real


def _attention_padded(q, k, v, cu_seqlens, max_seqlen, softmax_scale, dropout_p, window_size):
    """One SDPA call on the (batch, max_seqlen) rectangle: what torch.compile traces, with no data-dependent shape."""
    total_tokens = q.shape[0]
    if 0 in (total_tokens, cu_seqlens.shape[0] - 1, max_seqlen):
        return _zeros_of_nothing(q.shape, q, k, v)
    index, real = _padded_slots(total_tokens, cu_seqlens, max_seqlen)
    operands = [t.index_select(0, index.flatten()).view(*index.shape, *t.shape[1:]) for t in (q, k, v)]
    # A sequence without tokens attends to slot 0, which is then dropped: no row is fully masked.
    mask = (real | (torch.arange(max_seqlen, device=q.device) == 0))[:, None, None, :]
    if max(window_size) >= 0:
        # A query sees itself whatever the window, in padding too: no row is fully masked.
        mask = mask & _window(max_seqlen, window_size, q.device) | torch.eye(
            max_seqlen, dtype=torch.bool, device=q.device
        )
    out = _rectangle_attention(*operands, mask, softmax_scale, dropout_p)
    # Back to tokens: token t of sequence s sits in slot (s, t - start(s)).
    sequence, inside = token_sequences(cu_seqlens, total_tokens)
    slot = (torch.arange(total_tokens, device=q.device) - cu_seqlens[sequence].long()).clamp(max=max_seqlen - 1)
    flat = (sequence * max_seqlen + slot).clamp(min=0)
    out = out.reshape(-1, *q.shape[1:]).index_select(0, flat)
    return torch.where(inside[:, None, None], out, 0.0)


def _window(width, window_size, device):
    """(width, width): whether a query (row) sees a key (column)."""
    left, right = (width if side < 0 else side for side in window_size)
    distance = torch.arange(width, device=device)[None, :] - torch.arange(width, device=device)[:, None]
    return (distance >= -left) & (distance <= right)


def attention(q, k, v, cu_seqlens, max_seqlen, softmax_scale, dropout_p, window_size, cache):
    if torch.compiler.is_compiling() or max(window_size) >= 0:
        check_offsets_on_cpu("attention", cu_seqlens, q.shape[0], max_seqlen)
        return _attention_padded(q, k, v, cu_seqlens, max_seqlen, softmax_scale, dropout_p, window_size)
    buckets = None if cache is None else cache.get("torch_buckets")
    if buckets is None:
        offsets = cu_seqlens.tolist()
        check_offsets("attention", offsets, q.shape[0])
        buckets = make_buckets([stop - start for start, stop in pairwise(offsets)], q.device)
        if cache is not None:
            cache["torch_buckets"] = buckets
    return _attention_bucketed(q, k, v, buckets, softmax_scale, dropout_p)


def attention_probs(q, k, cu_seqlens, max_seqlen, softmax_scale):
    """(batch, num_heads, max_seqlen, max_seqlen); zero where a query or key slot is padding."""
    check_offsets_on_cpu("attention_probs", cu_seqlens, q.shape[0], max_seqlen)
    if q.shape[0] == 0:
        return _zeros_of_nothing((cu_seqlens.shape[0] - 1, q.shape[1], max_seqlen, max_seqlen), q, k)
    index, real = _padded_slots(q.shape[0], cu_seqlens, max_seqlen)
    q, k = (t.index_select(0, index.flatten()).view(*index.shape, *t.shape[1:]).transpose(1, 2) for t in (q, k))
    scores = at_least_fp32(q @ k.transpose(-1, -2)) * softmax_scale
    scores = scores.masked_fill(~real[:, None, None, :], -math.inf)
    both = real[:, None, None, :] & real[:, None, :, None]
    return torch.where(both, scores.softmax(-1), 0.0).to(q.dtype)


def rotary(x, cos, sin):
    """x (total_tokens, num_heads, head_dim), cos and sin (total_tokens, head_dim // 2), of each token's position."""
    x1, x2 = at_least_fp32(x).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


# --------------------------------------------------------------------------------------------------------------------


def embed_layer_norm(
    input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, inputs_embeds,
    padding_idx, position_padding_idx, dropout_p, eps,
):  # fmt: skip
    x = F.embedding(input_ids, word, padding_idx) if inputs_embeds is None else inputs_embeds
    if token_type is not None:
        # Types are few and mostly 0: one row when none were given, as transformers does with its zero buffer.
        x = x + (token_type[0] if token_type_ids is None else F.embedding(token_type_ids, token_type))
    x = x + F.embedding(position_ids, position, position_padding_idx)
    if weight is not None:
        x = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return dropout(x, dropout_p)


def linear(x, weight, bias, weight_scale, input_scale, activation_name):
    if weight_scale is None:
        y = product(x, weight, bias)
    else:
        y = linear_int8(x, weight, bias, weight_scale, input_scale)
    if activation_name == "none":
        return y
    # Where backward does not need what went in, no second buffer of the largest size is made (1 % of an fp32 forward).
    return activation(y, activation_name) if y.requires_grad else _ACTIVATIONS_IN_PLACE[activation_name](y)


def feed_forward(x, up_weight, up_bias, down_weight, weight_scales, input_scales, activation_name, gated):
    (up_scale, down_scale), (up_input, down_input) = weight_scales, input_scales
    inner = linear(x, up_weight, up_bias, up_scale, up_input, "none" if gated else activation_name)
    if gated:
        first, second = inner.chunk(2, -1)
        if inner.requires_grad:
            inner = activation(first, activation_name) * second
        else:
            inner = _ACTIVATIONS_IN_PLACE[activation_name](first).mul_(second)
    return linear(inner, down_weight, None, down_scale, down_input, "none")


def linear_int8(x, weight, bias, weight_scale, input_scale):
    rows = at_least_fp32(x)
    largest = rows.abs().amax(-1, keepdim=True)
    # A static scale must not hide what is not finite behind the clamp: 0 times it is NaN.
    scale = largest / 127 if input_scale == 0 else input_scale + 0 * largest
    quantized = torch.round(rows / torch.where(scale > 0, scale, 1.0)).clamp(-127, 127)
    with torch.autocast(x.device.type, enabled=False):  # which would round the sums
        y = F.linear(quantized, weight.to(rows.dtype)) * (scale * weight_scale)
    return (y if bias is None else y + bias.to(rows.dtype)).to(compute_dtype(x))


def cross_entropy(hidden_states, weight, bias, labels, ignore_index, label_smoothing, z_loss):
    kept = (labels != ignore_index).nonzero().flatten()
    logits = product(hidden_states.index_select(0, kept), weight, bias)
    return logits_cross_entropy(logits, labels.index_select(0, kept), ignore_index, label_smoothing, z_loss)


def logits_cross_entropy(logits, labels, ignore_index, label_smoothing, z_loss=0.0):
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    logits = at_least_fp32(logits)
    total = F.cross_entropy(logits, labels, reduction="sum", **options)
    if z_loss > 0:
        total = total + z_loss * (logits.logsumexp(-1).square() * (labels != ignore_index)).sum()
    return total / (labels != ignore_index).sum().clamp(min=1)


def token_sequences(cu_seqlens, total_tokens):
    """The sequence each token belongs to (total_tokens,), and False for slack rows beyond cu_seqlens[-1]."""
    token = torch.arange(total_tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), token, right=True)
    batch_size = cu_seqlens.shape[0] - 1
    return sequence.clamp(max=max(batch_size - 1, 0)), sequence < batch_size


def token_positions(cu_seqlens, total_tokens):
    """The place of each token in its sequence (total_tokens,); 0 in slack rows."""
    sequence, inside = token_sequences(cu_seqlens, total_tokens)
    place = torch.arange(total_tokens, device=cu_seqlens.device) - cu_seqlens[sequence].long()
    return torch.where(inside, place, 0)


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


def pooling(hidden_states, cu_seqlens, mode):
    total_tokens, hidden_size = hidden_states.shape
    check_offsets_on_cpu("pooling", cu_seqlens, total_tokens)
    batch_size = cu_seqlens.shape[0] - 1
    pooled = hidden_states.new_zeros(batch_size, hidden_size)
    if total_tokens == 0:
        return pooled + hidden_states.sum()  # keeps the graph: gradients are defined, and zero
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]
    if mode == "cls":
        first = cu_seqlens[:-1].long().clamp(max=total_tokens - 1)
        return torch.where(lengths > 0, hidden_states.index_select(0, first), 0.0)
    sequence, inside = token_sequences(cu_seqlens, total_tokens)
    if mode == "mean":
        real = torch.where(inside[:, None], at_least_fp32(hidden_states), 0.0)
        return (sequence_sums(real, sequence, batch_size) / lengths.clamp(min=1)).to(hidden_states.dtype)
    real = torch.where(inside[:, None], hidden_states, -math.inf)
    index = sequence[:, None].expand_as(hidden_states)
    # Not from zeros: scatter_reduce's backward shares the gradient with what it starts from, where that is the maximum.
    pooled = torch.full_like(pooled, -math.inf).scatter_reduce(0, index, real, "amax", include_self=False)
    return torch.where(lengths > 0, pooled, 0.0)


def pack(x, indices):
    return x.index_select(0, indices)


def unpack(packed, indices, num_rows):
    return packed.new_zeros(num_rows, *packed.shape[1:]).index_copy(0, indices, packed)


def sequence_cross_entropy(logits, cu_seqlens, targets):
    total_tokens, batch_size = logits.shape[0], cu_seqlens.shape[0] - 1
    check_offsets_on_cpu("sequence_cross_entropy", cu_seqlens, total_tokens)
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    kept = (targets >= 0) & (targets < lengths)
    if total_tokens == 0:
        return at_least_fp32(logits).sum()
    logits = at_least_fp32(logits)
    sequence, inside = token_sequences(cu_seqlens, total_tokens)
    logits = torch.where(inside, logits, -math.inf)
    largest = logits.new_zeros(batch_size).scatter_reduce(0, sequence, logits.detach(), "amax", include_self=False)
    total = logits.new_zeros(batch_size).index_add(0, sequence, (logits - largest[sequence]).exp())
    chosen = (cu_seqlens[:-1].long() + targets).clamp(0, total_tokens - 1)
    # The log of an empty sequence's zero total is never used: it is replaced before, so no gradient is NaN.
    # The difference of the logits first: what they have in common would take the digits of the small logarithm.
    losses = torch.where(kept, total, 1.0).log() + (largest - logits.index_select(0, chosen))
    return torch.where(kept, losses, 0.0).sum() / kept.sum().clamp(min=1)
