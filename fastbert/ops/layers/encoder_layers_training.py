"""Whole layers of any spec in one call, with a backward: a fused op,
`try_fused("encoder_layers_training", x, find_operands)`.

One call for all layers of MiniLM, and not one for each, takes 2 of a fine-tuning step's 55 ms on 32 sentences: Python,
autograd and torch's dispatcher work on one core while the other one waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastbert.backend import Backend, register_fused
from fastbert.layer_spec import NORMS
from fastbert.ops._common import check_devices, compute_dtype, define, differentiable_once
from fastbert.ops.attention.relative import Relative
from fastbert.ops.attention.rotary import Rotary
from fastbert.ops.layers.encoder_layers import LayerOperands, accepts, relative_lists, supports, tables_of
from fastbert.ops.layers.layer_numbers import LayerNumbers
from fastbert.ops.packing import int32_offsets
from fastbert.ops.seeds import draw_seeds

# The lists, layers, ints and floats are LayerOperands'. philox: int64 (layers, 3, 2), of attention's dropout, its
# output's and the feed-forward's, and with dropout inside of the feed-forward (layers, 4, 2), the last two being that
# one's and the output's. relative_rows, relative_positions, relative: as encoder_layers_cpu has them. Products and
# attention run in `dtype`, everything else in x's, which may be wider: under autocast the residual stream stays in x's.
# Forward returns out, and as `kept` what backward wants: layer by layer, before it the output of a pre-norm layer. What
# norms give is not kept.
# Backward returns the gradients of x (zero rows unless needs_dx), weights, norms, biases and relative terms.

_FWD_SCHEMA = (
    "(Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor[] biases, Tensor[] norms, Tensor? philox, str activation,"
    " int[] layers, int[] ints, float[] floats, Tensor[] rotary, int[] rotary_layouts, Tensor? window_positions,"
    " Tensor? num_keys, Tensor? relative_rows, Tensor? relative_positions, Tensor[] relative, ScalarType dtype)"
    " -> Tensor[]"
)
_BWD_SCHEMA = (
    "(Tensor dout, Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor[] norms, Tensor[] kept, Tensor? philox,"
    " str activation, int[] layers, int[] ints, float[] floats, Tensor[] rotary, int[] rotary_layouts,"
    " Tensor? window_positions, Tensor? num_keys, Tensor? relative_rows, Tensor? relative_positions,"
    " Tensor[] relative, bool needs_dx) -> Tensor[]"
)


_QUERY, _KEY, _ATTENTION_OUTPUT, _FEED_FORWARD_OUTPUT = map(
    NORMS.index, ("query_norm", "key_norm", "attention_output_norm", "feed_forward_output_norm")
)


def _fwd_fake(x, cu_seqlens, weights, biases, norms, philox, activation, layers, ints, floats, *others):
    kept, first, dtype, kinds = [], 0, others[-1], LayerNumbers.read(ints, floats)
    for i, at in enumerate(layers):
        layer = kinds[at]
        ups = weights[first + (2 if layer.merged_qkv else 4) : first + layer.num_linears - 1]
        kept += [torch.empty_like(x)] if i and kinds[layers[i - 1]].norm_first else []
        kept += _kept_fake(x, layer, sum([w.shape[0] for w in ups]), dtype)
        first += layer.num_linears
    return [torch.empty_like(x), *kept]


def _kept_fake(x, layer, pre_width, dtype):
    tokens, num_heads, num_kv_heads = x.shape[0], layer.num_heads, layer.num_kv_heads

    def stats(rows=tokens, norm=layer.norm):  # a norm's mean and rstd
        return [x.new_empty(n, dtype=torch.float32) for n in (0 if norm else rows, rows)]

    def output(which):  # of a norm of what a sublayer gives
        return [torch.empty_like(x), *stats()] if layer.norms >> 2 * which & 1 else []

    has_attention_norm = layer.norms & 1
    first = stats() if layer.norm_first and has_attention_norm else []
    heads = [num_heads + 2 * num_kv_heads] if layer.merged_qkv else [num_heads, num_kv_heads, num_kv_heads]
    projected = [x.new_empty(tokens, n, layer.head_dim, dtype=dtype) for n in heads]
    for count, which in ((num_heads, _QUERY), (num_kv_heads, _KEY)):
        projected += stats(tokens * count, layer.head_norm) if layer.norms >> 2 * which & 1 else []
    context = x.new_empty(tokens, num_heads, layer.head_dim, dtype=dtype)
    softmax_stats = x.new_empty(2, num_heads, tokens, dtype=torch.float32)
    middle = [torch.empty_like(x), *(stats() if layer.norm_first or has_attention_norm else [])]
    last = [] if layer.norm_first else [torch.empty_like(x), *stats()]
    pre = x.new_empty(tokens, pre_width, dtype=dtype)
    both = (*output(_ATTENTION_OUTPUT), *middle, pre, *output(_FEED_FORWARD_OUTPUT))
    return [*first, *projected, context, softmax_stats, *both, *last]


def _bwd_fake(dout, x, cu_seqlens, weights, norms, kept, philox, activation, layers, ints, floats, *others):
    dbiases, first, kinds = [], 0, LayerNumbers.read(ints, floats)
    for at in layers:
        of_layer = weights[first : first + kinds[at].num_linears]
        dbiases += [w.new_empty(w.shape[0]) for i, w in enumerate(of_layer) if kinds[at].biases >> i & 1]
        first += len(of_layer)
    *_, relative, needs_dx = others
    dx = x.new_empty(x.shape[0] if needs_dx else 0, x.shape[1])
    return [dx, *map(torch.empty_like, (*weights, *norms)), *dbiases, *[t.new_empty(t.shape) for t in relative]]


_FWD = define("encoder_layers_fwd_cpu", _FWD_SCHEMA, _fwd_fake)
_BWD = define("encoder_layers_bwd_cpu", _BWD_SCHEMA, _bwd_fake)


class _Shared(NamedTuple):
    # The tensors that layers share, beside x.
    cu_seqlens: torch.Tensor
    philox: torch.Tensor | None
    window_positions: torch.Tensor | None
    num_keys: torch.Tensor | None
    relative_rows: torch.Tensor | None
    relative_positions: torch.Tensor | None


class _Call(NamedTuple):
    # What layers have beside their tensors, and how many there are of each kind of these.
    counts: tuple[int, int, int, int]  # of weights, norms, biases, relative terms; the others are rotary tables
    rotary_layouts: list[int]
    numbers: tuple  # activation, layers, ints and floats
    dtype: torch.dtype

    def parts(self, tensors):
        """Weights, norms, biases, relative terms, rotary tables."""
        parts, first = [], 0
        for count in self.counts:
            parts.append(tensors[first : first + count])
            first += count
        return [*parts, tensors[first:]]


class _EncoderLayers(torch.autograd.Function):
    """Autograd around the registered forward and backward; `tensors` in the order of `_Call.parts`."""

    @staticmethod
    def forward(ctx, call, x, *tensors):
        count = len(_Shared._fields)
        shared = _Shared(*tensors[:count])
        weights, norms, biases, relative, rotary = call.parts(tensors[count:])
        tables = (rotary, call.rotary_layouts, *shared[2:], relative)
        out, *kept = _FWD(
            x, shared.cu_seqlens, weights, biases, norms, shared.philox, *call.numbers, *tables, call.dtype
        )
        ctx.save_for_backward(x, *shared, *weights, *norms, *relative, *rotary, *kept)
        ctx.call = call
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        call, needs_dx, count = ctx.call, ctx.needs_input_grad[1], len(_Shared._fields)
        num_tables = 2 * len(call.rotary_layouts)
        x, *saved = ctx.saved_tensors
        shared = _Shared(*saved[:count])
        num_weights, num_norms, _, num_terms = call.counts
        weights, norms, _, relative, rest = call._replace(counts=(num_weights, num_norms, 0, num_terms)).parts(
            saved[count:]
        )
        rotary, kept = rest[:num_tables], rest[num_tables:]
        tables = (rotary, call.rotary_layouts, *shared[2:], relative)
        dx, *gradients = _BWD(
            dout, x, shared.cu_seqlens, weights, norms, kept, shared.philox, *call.numbers, *tables, needs_dx
        )
        return None, dx if needs_dx else None, *[None] * count, *gradients, *[None] * num_tables


def _supports_training(x: torch.Tensor) -> str | None:
    if not torch.is_grad_enabled():
        return "it is for training: gradients are off"
    if compute_dtype(x) not in (torch.float32, torch.bfloat16):
        return f"autocast to {compute_dtype(x)}"
    return supports(x)


def _accepts_training(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if not all([p.requires_grad for p in (*operands.weights, *operands.biases, *operands.norms)]):
        return "it is for training all of a layer: a weight takes no gradient"
    if compute_dtype(x) is not x.dtype and any([layer.norms >> 2 * _QUERY & 15 for layer in operands.kinds]):
        return "queries and keys have norms, which autocast runs in another dtype than their products"
    return accepts(x, operands)


def _run_training(
    x: torch.Tensor,
    operands: LayerOperands,
    cu_seqlens: torch.Tensor,
    rotary: tuple[Rotary, ...] = (),
    window_positions: torch.Tensor | None = None,
    relative: Sequence[Relative] = (),
    num_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    tensors = {"x": x, "cu_seqlens": cu_seqlens, "window_positions": window_positions, "num_keys": num_keys}
    check_devices("encoder_layers_training", **tensors)
    cu_seqlens = int32_offsets("encoder_layers_training", cu_seqlens)
    weights, biases, _, _, norms, activation, layers, ints, floats, _, kinds, _ = operands
    philox = None
    if any([any(layer.dropouts) for layer in kinds]):
        seeds = 4 if any([layer.inner_dropout for layer in kinds]) else 3
        philox = draw_seeds(x.device, len(layers), seeds)
    tables, layouts = tables_of(rotary)
    rows, positions, terms = relative_lists(relative)
    counts = (len(weights), len(norms), len(biases), len(terms))
    call = _Call(counts, layouts, (activation, layers, ints, floats), compute_dtype(x))
    shared = _Shared(cu_seqlens, philox, window_positions, num_keys, rows, positions)
    return _EncoderLayers.apply(call, x, *shared, *weights, *norms, *biases, *terms, *tables)


register_fused("encoder_layers_training", Backend.CPU, _supports_training, _accepts_training, _run_training)
