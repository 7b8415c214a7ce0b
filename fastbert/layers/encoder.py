"""One transformer layer on packed tokens: attention and feed-forward, each with its residual and LayerNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert import ops
from fastbert.layers.leaves import get_leaf, is_linear, is_norm, linear, linears, place, projection, weights_of
from fastbert.layers.whole import run_training_layer

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
    """Self-attention of x (total_tokens, hidden_size), up to its output projection: (out, the bias it lacks)."""
    heads = (-1, options.num_attention_heads, x.shape[-1] // options.num_attention_heads)
    leaves = [get_leaf(layer, path) for path in (names.query, names.key, names.value)]
    q, k, v = (t.view(heads) for t in linears(leaves, x))
    dropout_p = options.attention_dropout if layer.training else 0.0
    out = ops.attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, dropout_p=dropout_p, cache=batch.cache)
    if probs is not None:
        probs.append(ops.attention_probs(q, k, batch.cu_seqlens, batch.max_seqlen))
    return projection(get_leaf(layer, names.attention_output), out.flatten(1))


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
    if torch.is_grad_enabled() and probs is None and not options.norm_first:
        out = run_training_layer(layer, names, options, x, batch)
        if out is not None:
            return out
    output_dropout = options.attention_output_dropout if layer.training else 0.0
    feed_forward_dropout = options.feed_forward_dropout if layer.training else 0.0
    attention_norm, feed_forward_norm = get_leaf(layer, names.attention_norm), get_leaf(layer, names.feed_forward_norm)
    if options.norm_first:
        normed = add_norm(attention_norm, x, None, None, 0.0)
        out, bias = run_attention(layer, names, options, normed, batch, probs)
        normed, x = add_norm(feed_forward_norm, out, bias, x, output_dropout, prenorm=True)
        out, bias = run_feed_forward(layer, names, options, normed)
        return add(out, bias, x, feed_forward_dropout)
    out, bias = run_attention(layer, names, options, x, batch, probs)
    x = add_norm(attention_norm, out, bias, x, output_dropout)
    out, bias = run_feed_forward(layer, names, options, x)
    return add_norm(feed_forward_norm, out, bias, x, feed_forward_dropout)


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
        return run_layer(self, self.names, self.options, hidden_states, batch, probs)
