"""One transformer layer on packed tokens: attention and feed-forward, each with its residual and LayerNorm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert import ops
from fastbert.layers.fused import offer_layer
from fastbert.layers.leaves import (
    get_leaf,
    is_called,
    is_linear,
    is_norm,
    linear,
    linears,
    parent_of,
    place,
    projection,
    weights_of,
    within,
)

if TYPE_CHECKING:
    from fastbert.packing import PackedBatch


@dataclass(frozen=True)
class LayerNames:
    """Where the leaves of one layer are, below the layer: the family's own names.

    `order` is the order in which transformers registers them: an optimizer's saved state goes by it.
    """

    query: str
    key: str
    value: str
    attention_output: str
    attention_norm: str
    up: str
    down: str
    feed_forward_norm: str
    order: tuple[str, ...] = (
        "query", "key", "value", "attention_output", "attention_norm", "up", "down", "feed_forward_norm",
    )  # fmt: skip

    @property
    def linears(self) -> list[str]:
        """The paths of those that are a Linear."""
        return [self.query, self.key, self.value, self.attention_output, self.up, self.down]

    @property
    def norms(self) -> list[str]:
        return [self.attention_norm, self.feed_forward_norm]

    # The paths of what holds leaves: all that stands before a dot, the outer ones first.
    containers: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        leaves = [path.split(".") for path in (*self.linears, *self.norms)]
        paths = dict.fromkeys(".".join(names[:n]) for names in leaves for n in range(1, len(names)))
        object.__setattr__(self, "containers", tuple(paths))


@dataclass(frozen=True)
class LayerOptions:
    """What a layer computes. `norm_first`: LayerNorm before each half (pre-norm) instead of after it (post-norm)."""

    num_attention_heads: int
    activation: str
    attention_output_dropout: float
    attention_dropout: float
    feed_forward_dropout: float
    norm_first: bool


def add_norm(norm: nn.Module, x, bias, residual, dropout_p: float, prenorm: bool = False):
    """add_layer_norm with a leaf's weights, or its own call where the leaf is no plain LayerNorm."""
    if is_norm(norm):
        return ops.add_layer_norm(
            x, residual, norm.weight, norm.bias, x_bias=bias, dropout_p=dropout_p, eps=norm.eps, prenorm=prenorm
        )
    summed = add(x, bias, residual, dropout_p)
    return (norm(summed), summed) if prenorm else norm(summed)


def add(x, bias, residual, dropout_p: float):
    """dropout(x + bias) + residual, the end of a pre-norm half."""
    x = x if bias is None else x + bias
    x = ops.dropout(x, dropout_p)
    return x if residual is None else x + residual


def run_attention(
    layer: nn.Module, names: LayerNames, options: LayerOptions, x, batch: PackedBatch, probs: list | None
):
    """Self-attention of x (total_tokens, hidden_size), before its output projection: (total_tokens, hidden_size)."""
    heads = (-1, options.num_attention_heads, x.shape[-1] // options.num_attention_heads)
    leaves = [get_leaf(layer, path) for path in (names.query, names.key, names.value)]
    q, k, v = (t.view(heads) for t in linears(leaves, x))
    dropout_p = options.attention_dropout if layer.training else 0.0
    out = ops.attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, dropout_p=dropout_p, cache=batch.cache)
    if probs is not None:
        probs.append(ops.attention_probs(q, k, batch.cu_seqlens, batch.max_seqlen))
    return out.flatten(1)


def run_feed_forward(layer: nn.Module, names: LayerNames, options: LayerOptions, x):
    """The feed-forward half, up to its second GEMM: (out, the bias it still lacks)."""
    up, down = get_leaf(layer, names.up), get_leaf(layer, names.down)
    if is_linear(up) and is_linear(down):
        up_weight, up_bias, up_scale, up_input = weights_of(up)
        down_weight, down_bias, down_scale, down_input = weights_of(down)
        scales, inputs = (up_scale, down_scale), (up_input, down_input)
        out = ops.feed_forward(
            x,
            up_weight,
            up_bias,
            down_weight,
            activation=options.activation,
            weight_scales=scales,
            input_scales=inputs,
        )
        return out, down_bias
    return projection(down, linear(up, x, options.activation))


def run_layer(
    layer: nn.Module, names: LayerNames, options: LayerOptions, x, batch: PackedBatch, probs: list | None = None
) -> torch.Tensor:
    """One layer over the leaves of `layer`, ours or Hugging Face's: x (total_tokens, hidden_size) -> the same shape.

    `probs`, a list, receives the attention probabilities.
    """
    if probs is None:
        fused = offer_layer(layer, names, options, x)
        if not isinstance(fused, str):
            return fused(batch.cu_seqlens)
    output_dropout = options.attention_output_dropout if layer.training else 0.0
    feed_forward_dropout = options.feed_forward_dropout if layer.training else 0.0
    attention_norm, feed_forward_norm = get_leaf(layer, names.attention_norm), get_leaf(layer, names.feed_forward_norm)
    if options.norm_first:
        normed = add_norm(attention_norm, x, None, None, 0.0)
        context = run_attention(layer, names, options, normed, batch, probs)
        out, bias = projection(get_leaf(layer, names.attention_output), context)
        normed, x = add_norm(feed_forward_norm, out, bias, x, output_dropout, prenorm=True)
        out, bias = run_feed_forward(layer, names, options, normed)
        return add(out, bias, x, feed_forward_dropout)
    context = run_attention(layer, names, options, x, batch, probs)
    out, bias = projection(get_leaf(layer, names.attention_output), context)
    x = add_norm(attention_norm, out, bias, x, output_dropout)
    out, bias = run_feed_forward(layer, names, options, x)
    return add_norm(feed_forward_norm, out, bias, x, feed_forward_dropout)


def run_containers(
    layer: nn.Module, names: LayerNames, options: LayerOptions, x, batch: PackedBatch, probs: list | None = None
) -> torch.Tensor:
    """`run_layer`, with every container of `layer` that has hooks called with what it stands for in transformers.

    Of attention that is x -> the end of its half, of what is inside of it x -> context and (context, x) -> that end; of
    the feed-forward x -> activations and (activations, x) -> its end. A norm takes part where its path says so.
    """
    output_dropout = options.attention_output_dropout if layer.training else 0.0
    feed_forward_dropout = options.feed_forward_dropout if layer.training else 0.0

    def norm(path: str, x, residual=None, dropout_p: float = 0.0):
        return add_norm(get_leaf(layer, path), x, None, residual, dropout_p)

    def half_end(leaf: str, norm_path: str, scope: str | None, dropout_p: float):
        """What ends a half: its last Linear, and the residual and the norm as far as they are inside of `scope`."""
        is_inside = scope is None or options.norm_first or norm_path.startswith(f"{scope}.")

        def run(x, residual):
            out = linear(get_leaf(layer, leaf), x)
            if options.norm_first:
                return add(out, None, residual, dropout_p)
            return norm(norm_path, out, residual, dropout_p) if is_inside else out

        return run, is_inside

    # Attention. A container around all of it is that of its output's container, or of its leaves.
    own, last = parent_of(names.query), parent_of(names.attention_output)
    around = last if own == last else parent_of(own or "")
    own, last = (None if path == around else path for path in (own, last))
    end, is_inside = half_end(names.attention_output, names.attention_norm, around, output_dropout)

    def attention(x):
        normed = norm(names.attention_norm, x) if options.norm_first else x
        context = within(layer, own, lambda x: run_attention(layer, names, options, x, batch, probs), normed)
        return within(layer, last, end, context, x)

    out = within(layer, around, attention, x)
    x = out if is_inside else norm(names.attention_norm, out, x, output_dropout)

    # The feed-forward, whose two halves have a container each, or one around both, or none.
    up, down = parent_of(names.up), parent_of(names.down)
    around = up if up == down else None
    up, down = (None if path == around else path for path in (up, down))
    end, is_inside = half_end(names.down, names.feed_forward_norm, around or down, feed_forward_dropout)

    def feed_forward(x, residual):
        inner = within(layer, up, lambda x: linear(get_leaf(layer, names.up), x, options.activation), x)
        return within(layer, down, end, inner, residual)

    normed = norm(names.feed_forward_norm, x) if options.norm_first else x
    if around is None:
        out = feed_forward(normed, x)
    else:
        out = within(layer, around, lambda normed: feed_forward(normed, x), normed)
    return out if is_inside else norm(names.feed_forward_norm, out, x, feed_forward_dropout)


class EncoderLayer(nn.Module):
    """Holds the leaves of one layer under the family's names; hidden_size H, intermediate_size I."""

    def __init__(self, names: LayerNames, options: LayerOptions, hidden_size: int, intermediate_size: int, eps: float):
        super().__init__()
        self.names, self.options = names, options
        widths = {"up": (hidden_size, intermediate_size), "down": (intermediate_size, hidden_size)}
        for role in names.order:
            if role in ("attention_norm", "feed_forward_norm"):
                leaf: nn.Module = nn.LayerNorm(hidden_size, eps=eps)
            else:
                leaf = nn.Linear(*widths.get(role, (hidden_size, hidden_size)))
            place(self, getattr(names, role), leaf)

    def forward(self, hidden_states: torch.Tensor, batch: PackedBatch, probs: list | None = None) -> torch.Tensor:
        # A list, not any(...): each of them must be asked whether it is still a container.
        has_hooks = any([is_called(self, path) for path in self.names.containers])
        run = run_containers if has_hooks else run_layer
        return run(self, self.names, self.options, hidden_states, batch, probs)
