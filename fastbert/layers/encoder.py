"""One transformer layer on packed tokens, as its LayerSpec says: attention and feed-forward, each with its residual."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.layer_spec import RELATIVES, LayerSpec
from fastbert.layers.context import LayerContext
from fastbert.layers.fused import try_fused_layer
from fastbert.layers.leaves import (
    get_leaf,
    is_called,
    is_linear,
    linear,
    linears,
    make_norm,
    norm_kind,
    norm_weights,
    parent_of,
    place,
    projection,
    weights_of,
    within,
)
from fastbert.layers.relative import relative_of


def add_norm(norm: nn.Module, x, bias, residual, dropout_p: float, prenorm: bool = False):
    """add_layer_norm or add_rms_norm with a leaf's weights, or its own call where the leaf is no plain norm."""
    kind = norm_kind(norm)
    if kind is not None:
        weight, norm_bias, eps = norm_weights(norm)
        options: dict[str, Any] = {"x_bias": bias, "dropout_p": dropout_p, "eps": eps, "prenorm": prenorm}
        if kind == "rms":
            return ops.add_rms_norm(x, residual, weight, **options)
        return ops.add_layer_norm(x, residual, weight, norm_bias, **options)
    summed = add(x, bias, residual, dropout_p)
    return (norm(summed), summed) if prenorm else norm(summed)


def add(x, bias, residual, dropout_p: float):
    """dropout(x + bias) + residual, the end of a pre-norm half."""
    x = x if bias is None else x + bias
    x = ops.dropout(x, dropout_p)
    return x if residual is None else x + residual


def run_attention(layer: nn.Module, spec: LayerSpec, x, context: LayerContext, wants_probs: bool):
    """Self-attention of x (total_tokens, hidden_size), before its output projection: (total_tokens, heads' width).

    Also its probabilities (batch, heads, max_seqlen, max_seqlen), or None.
    """
    form, batch = spec.attention, context.batch
    q, k, v = _queries_keys_values(layer, spec, x)
    rotary = None if form.rotary is None else context.rotary[form.rotary]
    if rotary is not None and form.rotary is not None:
        if form.rotary.rotates_values:
            (v,) = ops.rotate((v,), rotary, batch.cu_seqlens, batch.cache)
        if form.rotary.dim < form.head_dim:  # attention turns whole heads
            (q, k), rotary = ops.rotate((q, k), rotary, batch.cu_seqlens, batch.cache), None
    relative = None if form.relative is None else relative_of(layer, spec, context.relative[form.relative], q.dtype)
    options: dict[str, Any] = {
        "softmax_scale": form.softmax_scale,
        "window_size": form.window_size,
        "window_positions": context.window_positions,
        "rotary": rotary,
        "relative": relative,
    }
    probs = ops.attention_probs(q, k, batch.cu_seqlens, batch.max_seqlen, **options) if wants_probs else None
    dropout_p = form.dropout if layer.training else 0.0
    out = ops.attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, dropout_p=dropout_p, cache=batch.cache, **options)
    return out.flatten(1), probs


def _queries_keys_values(layer: nn.Module, spec: LayerSpec, x) -> list[torch.Tensor]:
    """(total_tokens, its heads, head_dim) each."""
    form, names = spec.attention, spec.names
    heads = (form.num_heads, form.num_kv_heads, form.num_kv_heads)
    products = linears([get_leaf(layer, path) for path in names.qkv], x)
    if names.per_head:
        return _with_biases(layer, spec, list(products[0].unflatten(-1, (form.num_heads, 3, form.head_dim)).unbind(2)))
    if len(products) == 1:
        products = list(products[0].split([count * form.head_dim for count in heads], dim=-1))
    made = [t.unflatten(-1, (count, form.head_dim)) for t, count in zip(products, heads, strict=True)]
    return _with_biases(layer, spec, made)


def _with_biases(layer: nn.Module, spec: LayerSpec, made: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of query and value that are parameters by themselves."""
    for i, path in ((0, spec.names.query_bias), (2, spec.names.value_bias)):
        if path is not None:
            parent, _, name = path.rpartition(".")
            bias = get_leaf(layer, parent)._parameters[name]
            assert bias is not None
            made[i] = made[i] + bias.view(made[i].shape[1:]).to(made[i].dtype)
    return made


def run_feed_forward(layer: nn.Module, spec: LayerSpec, x):
    """The feed-forward half, up to its last product: (out, the bias it still lacks)."""
    form, down = spec.feed_forward, get_leaf(layer, spec.names.down)
    ups = [get_leaf(layer, path) for path in spec.names.ups]
    if is_linear(down) and all(map(is_linear, ups)):
        *gates, up, last = operands = [weights_of(leaf) for leaf in (*ups, down)]
        out = ops.feed_forward(
            x,
            up.weight,
            up.bias,
            last.weight,
            activation=form.activation,
            gated=form.gated,
            gate_weight=gates[0].weight if gates else None,
            gate_bias=gates[0].bias if gates else None,
            dropout_p=form.dropout if layer.training else 0.0,
            weight_scales=tuple(each.weight_scale for each in operands),
            input_scales=tuple(each.input_scale for each in operands),
        )
        return out, last.bias
    return projection(down, run_activations(layer, spec, x))


def run_activations(layer: nn.Module, spec: LayerSpec, x):
    """What goes into the feed-forward's last product, by calls of the leaves: (total_tokens, intermediate_size)."""
    form, ups = spec.feed_forward, [get_leaf(layer, path) for path in spec.names.ups]
    if not form.gated:
        inner = linear(ups[0], x, form.activation)
    else:
        made = linears(ups, x)
        gate, up = made if len(made) == 2 else made[0].chunk(2, -1)
        inner = ops.activation(gate, form.activation) * up
    return ops.dropout(inner, form.dropout) if layer.training else inner


def run_layer(
    layer: nn.Module, spec: LayerSpec, x, context: LayerContext, wants_probs: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One layer over the leaves of `layer`, ours or Hugging Face's: x (total_tokens, hidden_size) -> the same shape.

    Also the attention probabilities, where they are wanted.
    """
    if not wants_probs:
        fused = try_fused_layer(layer, spec, x)
        if not isinstance(fused, str):
            return fused(context), None
    names = spec.names
    output_dropout = spec.attention_output_dropout if layer.training else 0.0
    feed_forward_dropout = spec.feed_forward_dropout if layer.training else 0.0
    feed_forward_norm = get_leaf(layer, names.feed_forward_norm)
    normed = x
    if spec.norm_first and spec.has_attention_norm:
        normed = add_norm(get_leaf(layer, names.attention_norm), x, None, None, 0.0)
    heads, probs = run_attention(layer, spec, normed, context, wants_probs)
    out, bias = projection(get_leaf(layer, names.attention_output), heads)
    if spec.norm_first:
        normed, x = add_norm(feed_forward_norm, out, bias, x, output_dropout, prenorm=True)
        out, bias = run_feed_forward(layer, spec, normed)
        return add(out, bias, x, feed_forward_dropout), probs
    x = add_norm(get_leaf(layer, names.attention_norm), out, bias, x, output_dropout)
    out, bias = run_feed_forward(layer, spec, x)
    return add_norm(feed_forward_norm, out, bias, x, feed_forward_dropout), probs


def run_containers(
    layer: nn.Module, spec: LayerSpec, x, context: LayerContext, wants_probs: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`run_layer`, with every container of `layer` that has hooks called with what it stands for in transformers.

    Of attention that is x -> the end of its half, of what is inside of it x -> heads and (heads, x) -> that end; of the
    feed-forward x -> activations and (activations, x) -> its end. A norm takes part where its path says so.
    """
    names, probs = spec.names, None
    output_dropout = spec.attention_output_dropout if layer.training else 0.0
    feed_forward_dropout = spec.feed_forward_dropout if layer.training else 0.0

    def norm(path: str, x, residual=None, dropout_p: float = 0.0):
        return add_norm(get_leaf(layer, path), x, None, residual, dropout_p)

    def half_end(leaf: str, norm_path: str, scope: str | None, dropout_p: float, adds: bool):
        """What ends a half: its last Linear, and the residual and the norm as far as they are inside of `scope`."""
        is_inside = spec.norm_first or scope is None or norm_path.startswith(f"{scope}.")

        def run(x, residual):
            out = linear(get_leaf(layer, leaf), x)
            if spec.norm_first:
                return add(out, None, residual if adds else None, dropout_p)
            return norm(norm_path, out, residual, dropout_p) if is_inside else out

        return run, is_inside

    # Attention. A container around all of it is that of its output's container, or of its leaves. That of a pre-norm
    # half has the norm and the residual either both inside of it (Megatron-BERT) or neither (ModernBERT).
    own, last = parent_of(names.query), parent_of(names.attention_output)
    around = last if own == last else parent_of(own or "")
    own, last = (None if path == around else path for path in (own, last))
    adds = around is None or names.attention_norm.startswith(f"{around}.")
    end, is_inside = half_end(names.attention_output, names.attention_norm, around, output_dropout, adds)

    def heads(x):
        nonlocal probs
        out, probs = run_attention(layer, spec, x, context, wants_probs)
        return out

    def before(x):
        return norm(names.attention_norm, x) if spec.norm_first and spec.has_attention_norm else x

    def attention(x, residual):
        return within(layer, last, end, within(layer, own, heads, x), residual)

    def half(x):
        if spec.norm_first and not adds:
            return x + within(layer, around, lambda normed: attention(normed, None), before(x))
        out = within(layer, around, lambda x: attention(before(x), x), x)
        return out if is_inside else norm(names.attention_norm, out, x, output_dropout)

    x = within(layer, parent_of(around or ""), half, x)  # MPNet's norm is in a container around that one

    # The feed-forward, whose two halves have a container each, or one around both, or none.
    up, down = parent_of(names.up), parent_of(names.down)
    around = up if up == down else None
    up, down = (None if path == around else path for path in (up, down))
    end, is_inside = half_end(names.down, names.feed_forward_norm, around or down, feed_forward_dropout, around is None)
    norms_inside = up is not None and names.feed_forward_norm.startswith(f"{up}.")  # RoBERTa-PreLayerNorm

    def activations(x):
        return run_activations(layer, spec, norm(names.feed_forward_norm, x) if norms_inside else x)

    def feed_forward(x, residual):
        return within(layer, down, end, within(layer, up, activations, x), residual)

    normed = norm(names.feed_forward_norm, x) if spec.norm_first and not norms_inside else x
    if around is None:
        out = feed_forward(normed, x)
    else:
        out = within(layer, around, lambda normed: feed_forward(normed, x), normed)
        out = x + out if spec.norm_first else out
    return out if is_inside else norm(names.feed_forward_norm, out, x, feed_forward_dropout), probs


class EncoderLayer(nn.Module):
    """Holds the leaves of one layer under the family's names."""

    def __init__(self, spec: LayerSpec, hidden_size: int):
        super().__init__()
        self.spec = spec
        names, form = spec.names, spec.attention
        queries, keys = form.num_heads * form.head_dim, form.num_kv_heads * form.head_dim
        inner = spec.feed_forward.intermediate_size
        rows = {"query": queries, "key": keys, "value": keys, "attention_output": hidden_size,
                "gate": inner, "up": inner, "down": hidden_size}  # fmt: skip
        columns = {"attention_output": queries, "down": inner}
        for role in names.order:
            path = getattr(names, role)
            if role == "attention_norm" and not spec.has_attention_norm:
                continue
            if role in ("attention_norm", "feed_forward_norm"):
                place(self, path, make_norm(spec.norm, hidden_size))
            elif role in RELATIVES:
                if path in names.relatives:
                    place(self, path, nn.Linear(hidden_size, queries, bias=role in spec.biases))
            else:
                served = [other for other in rows if getattr(names, other) == path]
                has_bias = role in spec.biases
                leaf = nn.Linear(columns.get(role, hidden_size), sum(rows[other] for other in served), bias=has_bias)
                place(self, path, leaf)
        for path, width in ((names.query_bias, queries), (names.value_bias, keys)):
            if path is not None:
                parent, _, name = path.rpartition(".")
                get_leaf(self, parent).register_parameter(name, nn.Parameter(torch.zeros(width)))

    def forward(self, hidden_states: torch.Tensor, context: LayerContext, wants_probs: bool = False):
        """The layer's result; where they are wanted, (result, attention probabilities)."""
        # A list, not any(...): each of them must be asked whether it is still a container.
        has_hooks = any([is_called(self, path) for path in self.spec.names.containers])
        run = run_containers if has_hooks else run_layer
        out, probs = run(self, self.spec, hidden_states, context, wants_probs)
        return (out, probs) if wants_probs else out
