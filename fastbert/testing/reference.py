"""The oracle: the literal formula of every op, in whatever dtype it is given, with no fused function.

Run it in float64 for the truth, and in a kernel's dtype for the baseline that the kernel's error is compared with.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch


def activation(x, name):
    if name == "gelu":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    if name == "relu":
        return torch.where(x > 0, x, torch.zeros_like(x))
    if name == "tanh":
        return torch.tanh(x)
    if name == "silu":
        return x / (1.0 + torch.exp(-x))
    raise ValueError(f"unknown activation {name!r}")


def layer_norm(x, weight, bias, eps):
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    variance = (centred * centred).mean(-1, keepdim=True)
    out = centred / torch.sqrt(variance + eps) * weight
    return out if bias is None else out + bias


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _add(x, residual, x_bias, keep, dropout_p):
    if x_bias is not None:
        x = x + x_bias
    if keep is not None:
        x = torch.where(keep, x / (1.0 - dropout_p), torch.zeros_like(x))
    return x if residual is None else x + residual


def add_layer_norm(x, residual, weight, bias, x_bias=None, eps=1e-12, keep=None, dropout_p=0.0):
    """`keep` (bool, x's shape) is the dropout mask that was used; returns (out, summed)."""
    summed = _add(x, residual, x_bias, keep, dropout_p)
    return layer_norm(summed, weight, bias, eps), summed


def add_rms_norm(x, residual, weight, x_bias=None, eps=1e-6, keep=None, dropout_p=0.0):
    summed = _add(x, residual, x_bias, keep, dropout_p)
    return rms_norm(summed, weight, eps), summed


def softmax(scores):
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def rotary(x, cos, sin, cu_seqlens, interleaved=False, by_token=False):
    """x (total_tokens, num_heads, head_dim), cos and sin (rows, head_dim // 2); padding rows stay as they are.

    Rows are those of positions in the sequences or, if `by_token`, of the tokens. Dimension i is paired with
    head_dim // 2 + i or, if `interleaved`, 2 i with 2 i + 1.
    """
    offsets = cu_seqlens.tolist()
    half = x.shape[-1] // 2
    first = range(0, 2 * half, 2) if interleaved else range(half)
    second = [i + (1 if interleaved else half) for i in first]
    pieces = []
    for start, stop in pairwise(offsets):
        rows = slice(start, stop) if by_token else slice(stop - start)
        x1, x2 = x[start:stop, :, list(first)], x[start:stop, :, second]
        c, s = cos[rows, None], sin[rows, None]
        order = torch.tensor([*first, *second]).argsort()  # from the first of all pairs, then the second of all
        pieces.append(torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1)[..., order].to(x.dtype))
    return torch.cat([*pieces, x[offsets[-1] :]])


_rotary = rotary  # attention's argument has the same name


def attention(
    q,
    k,
    v,
    cu_seqlens,
    softmax_scale=None,
    keep=None,
    dropout_p=0.0,
    window_size=(-1, -1),
    window_positions=None,
    num_keys=None,
    rotary=None,
    relative=None,
):
    """q (total_tokens, num_heads, head_dim), k and v (total_tokens, num_kv_heads, head_dim), one sequence after the
    other; query head h sees key head h // (num_heads // num_kv_heads).

    `keep`, bool (total_tokens, num_heads, at least the longest length), is the dropout mask that was used: for each
    query, by the key's index in the sequence. window_size (left, right), -1: no end; a query at position p sees the
    keys at p - left to p + right, positions being 0, 1, 2... in each sequence, or those of window_positions
    (total_tokens,). Of each sequence the first num_keys (batch,) tokens are keys, all if None. `rotary` is (cos, sin,
    interleaved, by_token). `relative` is (rows, key, query, bias, positions), as fastbert.ops.Relative has them.
    """
    if rotary is not None:
        cos, sin, *layout = rotary
        q, k = (_rotary(t, cos, sin, cu_seqlens, *layout) for t in (q, k))
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    offsets = cu_seqlens.tolist()
    left, right = (math.inf if side < 0 else side for side in window_size)
    pieces = []
    for i, (start, stop) in enumerate(pairwise(offsets)):
        qs, ks, vs = (t[start:stop].transpose(0, 1) for t in (q, k, v))
        if stop > start:
            scores = qs @ ks.transpose(1, 2)
            if relative is None:
                scores = scores * softmax_scale
            else:
                scores = _with_relative(scores, qs, ks, relative, start, stop, softmax_scale)
            if window_positions is None:
                position = torch.arange(stop - start, device=q.device)
            else:
                position = window_positions[start:stop].long()
            distance = position[None, :] - position[:, None]  # of a key (column) from a query (row)
            seen = (distance >= -left) & (distance <= right)
            if num_keys is not None:
                seen = seen & (torch.arange(stop - start, device=q.device) < num_keys[i])
            sees_any = seen.any(-1, keepdim=True)
            probs = softmax(torch.where(sees_any, torch.where(seen, scores, -math.inf), 0.0))
            probs = torch.where(sees_any, probs, 0.0)
            if keep is not None:
                kept = keep[start:stop, :, : stop - start].transpose(0, 1)
                probs = torch.where(kept, probs / (1.0 - dropout_p), torch.zeros_like(probs))
            pieces.append((probs @ vs).transpose(0, 1))
    return torch.cat([*pieces, v.new_zeros(q.shape[0] - offsets[-1], *v.shape[1:])])  # padding rows are zeros


def _with_relative(scores, q, k, relative, start, stop, softmax_scale):
    """scores (num_heads, n, n), q and k (num_heads, n, head_dim) of one sequence, from token `start` to `stop`."""
    rows, key, query, bias, positions = relative
    pos = torch.arange(stop - start, device=q.device) if positions is None else positions[start:stop].long()
    row = rows.long()[pos[:, None] - pos[None, :] + (rows.shape[0] - 1) // 2]  # (n, n), of a query and a key
    # As transformers: with all rows of a table, of which each pair then takes its own. A product of each pair's vectors
    # by themselves adds them up in another order than products of matrices do, which errs less where all are equal.
    pairs = row.expand(scores.shape)
    if key is not None:
        scores = scores + (q @ key.permute(1, 2, 0)).gather(2, pairs)
    if query is not None:
        scores = scores + (k @ query.permute(1, 2, 0)).gather(2, pairs.mT).mT
    scores = scores * softmax_scale
    return scores if bias is None else scores + bias[row].permute(2, 0, 1)


def embed_layer_norm(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, eps=1e-12):
    x = word[input_ids]
    if position is not None:
        x = x + position[position_ids]
    if token_type is not None:
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = x + token_type[types]
    return x if weight is None else layer_norm(x, weight, bias, eps)


def linear(x, weight, bias, name="none"):
    y = x @ weight.T if bias is None else x @ weight.T + bias
    return y if name == "none" else activation(y, name)


def feed_forward(
    x, up_weight, up_bias, down_weight, name, gated=False, gate_weight=None, gate_bias=None, keep=None, dropout_p=0.0
):
    """keep: which elements dropout leaves, bool (total_tokens, intermediate_size)."""
    if not gated:
        inner = linear(x, up_weight, up_bias, name)
    elif gate_weight is None:
        gate, up = linear(x, up_weight, up_bias).chunk(2, -1)
        inner = activation(gate, name) * up
    else:
        inner = linear(x, gate_weight, gate_bias, name) * linear(x, up_weight, up_bias)
    if keep is not None:
        inner = torch.where(keep, inner / (1.0 - dropout_p), torch.zeros_like(inner))
    return inner @ down_weight.T


def quantize_rows(x, input_scale=0.0):
    """Whole numbers within +-127, and what one of them stands for, (rows, 1); input_scale 0: a row's largest / 127."""
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest / 127 if input_scale == 0 else torch.full_like(largest, input_scale)
    return torch.round(x / torch.where(scale > 0, scale, torch.ones_like(scale))).clamp(-127, 127), scale


def linear_int8(x, weight, bias, weight_scale, input_scale=0.0, name="none"):
    integers, scale = quantize_rows(x, input_scale)
    y = (integers @ weight.T.to(x.dtype)) * scale * weight_scale.to(x.dtype)
    y = y if bias is None else y + bias.to(x.dtype)
    return y if name == "none" else activation(y, name)


def zero_centered_rms_norm(x, weight, eps=1e-6):
    return rms_norm(x, 1 + weight, eps)


def encoder_layer(
    x,
    spec,
    linears,
    norms,
    cu_seqlens,
    table=None,
    window_positions=None,
    num_keys=None,
    keeps=(None,) * 4,
    relative=None,
):
    """A layer of a LayerSpec; `keeps` are the masks of its dropouts that were used, in the order of `spec.dropouts`.

    linears: weight, bias, weight_scale and input_scale of every Linear, in the order of ops.LayerWeights; norms:
    weight, bias and eps of each, by the order of layer_spec.NORMS, None where there is none, and they may end early;
    `table`: by which queries and keys are rotated, if they are; `relative`: as in attention.
    """
    attention_spec, feed_forward_spec, dropouts = spec.attention, spec.feed_forward, [*spec.dropouts.values()]

    def product(x, leaf):
        weight, bias, scale, input_scale = leaf
        return linear(x, weight, bias) if scale is None else linear_int8(x, weight, bias, scale, input_scale)

    def normed(x, which):
        if which >= len(norms) or norms[which] is None:
            return x
        weight, bias, eps = norms[which]
        norm_type = spec.norm_of(which).type
        if norm_type == "layer":
            return layer_norm(x, weight, bias, eps)
        return rms_norm(x, weight, eps) if norm_type == "rms" else zero_centered_rms_norm(x, weight, eps)

    def dropped(x, which):
        if keeps[which] is None:
            return x
        return torch.where(keeps[which], x / (1.0 - dropouts[which]), torch.zeros_like(x))

    num_projections, heads = len(spec.names.qkv), (attention_spec.num_heads, *[attention_spec.num_kv_heads] * 2)
    projections, (output, *ups, down) = linears[:num_projections], linears[num_projections:]
    inputs = normed(x, 0) if spec.norm_first else x
    projected = torch.cat([product(inputs, leaf) for leaf in projections], -1)
    q, k, v = projected.unflatten(-1, (-1, attention_spec.head_dim)).split(heads, 1)
    context = attention(
        normed(q, 2),
        normed(k, 3),
        v,
        cu_seqlens,
        attention_spec.softmax_scale,
        keeps[0],
        dropouts[0],
        attention_spec.window_size,
        window_positions,
        num_keys,
        table,
        relative,
    )
    x = x + dropped(normed(product(context.flatten(1), output), 4), 1)
    x = x if spec.norm_first else normed(x, 0)
    inner = torch.cat([product(normed(x, 1) if spec.norm_first else x, leaf) for leaf in ups], -1)
    if feed_forward_spec.gated:
        gate, up = inner.chunk(2, -1)
        inner = activation(gate, feed_forward_spec.activation) * up
    else:
        inner = activation(inner, feed_forward_spec.activation)
    x = x + dropped(normed(product(dropped(inner, 2), down), 5), 3)
    return x if spec.norm_first else normed(x, 1)


def cross_entropy(hidden_states, weight, bias, labels, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    losses = []
    for h, label in zip(hidden_states, labels.tolist(), strict=True):
        if label != ignore_index:
            logits = weight @ h if bias is None else weight @ h + bias
            row_max = logits.max()
            log_sum_exp = row_max + torch.log(torch.exp(logits - row_max).sum())
            plain, smooth = log_sum_exp - logits[label], log_sum_exp - logits.mean()
            losses.append((1 - label_smoothing) * plain + label_smoothing * smooth + z_loss * log_sum_exp**2)
    return torch.stack(losses).mean() if losses else hidden_states[:0].sum()


def sequence_cross_entropy(logits, cu_seqlens, targets):
    offsets = cu_seqlens.tolist()
    losses = []
    for start, stop, target in zip(offsets, offsets[1:], targets.tolist(), strict=False):
        if 0 <= target < stop - start:
            losses.append(-torch.log(softmax(logits[start:stop])[target]))
    return torch.stack(losses).mean() if losses else logits[:0].sum()


def normalize(x, eps=1e-12):
    return x / (x * x).sum(-1, keepdim=True).sqrt().clamp(min=eps)


def pooling(hidden_states, cu_seqlens, mode):
    offsets = cu_seqlens.tolist()
    rows = []
    for start, stop in pairwise(offsets):
        tokens = hidden_states[start:stop]
        if stop == start:
            rows.append(hidden_states.new_zeros(hidden_states.shape[-1]))
        elif mode == "mean":
            rows.append(tokens.mean(0))
        elif mode == "cls":
            rows.append(tokens[0])
        else:
            rows.append(tokens.amax(0))
    return torch.stack(rows)


def maxsim(queries, cu_seqlens_q, documents, cu_seqlens_d):
    """(queries, documents); -1e9 where a document has no token."""
    rows = []
    for start, stop in pairwise(cu_seqlens_q.tolist()):
        q, row = queries[start:stop], []
        for first, last in pairwise(cu_seqlens_d.tolist()):
            products = q @ documents[first:last].T
            row.append(products.max(1).values.sum() if last > first else q.new_tensor(-1e9))
        rows.append(torch.stack(row))
    return torch.stack(rows)
