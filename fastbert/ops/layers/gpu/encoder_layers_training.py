"""encoder_layers_training on GPUs: all layers as one op, whose forward and backward launch kernels and products, and
nothing between them.

Op by op a layer of BERT makes 26 launches forward and 36 backward, and most of a step's time on the host is Python and
autograd between them (docs/gpu.md, "All layers as one op"). Here weights are laid beside each other and cast once for
all layers, gradients of a residual are added inside of products, and gradients are cast back in one launch.

`encoder_layers_recomputing` is the same with less kept: of each layer what goes into it. Backward makes the rest again,
with the same dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter

import torch

from fastbert.ops._common import check_devices, compute_dtype, differentiable_once, triton_unsupported
from fastbert.ops.attention.attention import _tile
from fastbert.ops.attention.relative import Relative
from fastbert.ops.attention.rotary import Rotary, check_rotary
from fastbert.ops.attention.tiles import tiles_of
from fastbert.ops.layers.encoder_layers import LayerOperands
from fastbert.ops.layers.gpu.memory import Memory
from fastbert.ops.layers.gpu.merged_weights import merge_vectors, merge_weights, weight_tables
from fastbert.ops.layers.gpu.plan import Plan, plan_of
from fastbert.ops.layers.gpu.stack import Batch, MergedWeights, Stack
from fastbert.ops.layers.gpu.stack_bwd import backward
from fastbert.ops.layers.layer_numbers import LayerNumbers
from fastbert.ops.packing import int32_offsets
from fastbert.ops.seeds import draw_seeds

# Read of some 200 parameters in each step.
_shape = attrgetter("shape")


class _EncoderLayers(torch.autograd.Function):
    """All layers of `plan` over x, by the operands' weights, biases and norms, which are in `merged`.

    x and what products take have one dtype; the gradients of all parameters have theirs, which is the same or wider.
    """

    @classmethod
    def apply(cls, *arguments):
        """Without torch's look at each of 200 arguments for what a transform of torch.func left, 100 us: whoever asks
        for a fused op has been refused under one."""
        return super(torch.autograd.Function, cls).apply(*arguments)

    @staticmethod
    def forward(ctx, plan: Plan, merged: MergedWeights, batch: Batch, x, *parameters):
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            out, kept = Stack(plan, merged, batch, x).forward()
        ctx.save_for_backward(x, merged.flat, merged.vectors, *merged.kept, *kept)
        ctx.plan, ctx.batch, ctx.num_kept_weights = plan, batch, len(merged.kept)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        plan, (x, flat, vectors, *saved) = ctx.plan, ctx.saved_tensors
        weights, kept = saved[: ctx.num_kept_weights], saved[ctx.num_kept_weights :]
        needs_dx = ctx.needs_input_grad[3]
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            stack = Stack(plan, MergedWeights(flat, weights, vectors), ctx.batch, x)
            dweights = x.new_empty(plan.layout.size)
            dx, dvectors = backward(stack, dout, kept, dweights, needs_dx)
            dweights = dweights.to(vectors.dtype)
        gradients = (*plan.layout.split(dweights), *_dbiases(plan, dvectors), *_dnorms(dvectors))
        return None, None, None, dx if needs_dx else None, *gradients


def _dbiases(plan: Plan, dvectors: Memory) -> list[torch.Tensor]:
    """The gradients of biases, one for each of the operands'."""
    (qkv, up), run_dbiases = plan.layout.bias_runs, []
    for name, run in (("qkv_biases", qkv), ("up_biases", up)):
        rows = [() if part is None else part.rows for part in run.parts]
        run_dbiases.append(dvectors.vectors_apart(name, rows))
    names = zip(run_dbiases[0], dvectors["output_biases"], run_dbiases[1], dvectors["down_biases"], strict=True)
    return [t for qkv, output, ups, down in names for t in (*qkv, output, *ups, down) if t is not None]


def _dnorms(dvectors: Memory) -> list[torch.Tensor]:
    names = ("attention_norm_weights", "attention_norm_biases", "feed_forward_norm_weights", "feed_forward_norm_biases")
    return [t for t in chain.from_iterable(zip(*[dvectors[name] for name in names], strict=True)) if t is not None]


# --------------------------------------------------------------------------------------------------------------------
# The fused op, which encoder_layers_training.py registers: CPUs need not load this


def supports(x: torch.Tensor) -> str | None:
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, hidden_size)"
    if x.shape[0] == 0:
        return "there is no token"
    if torch.is_autocast_enabled(x.device.type) and compute_dtype(x) is not torch.bfloat16:
        return f"under autocast to {compute_dtype(x)} sums stay in float32"
    if x.shape[1] > 8192:
        return f"hidden_size {x.shape[1]} is above 8192, where rows no longer fit in registers"
    return triton_unsupported(x)


def accepts(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if operands.unsupported is not None:
        return operands.unsupported
    if operands.weight_scales:
        return "weights are int8"
    weight_dtype = operands.weights[0].dtype
    parameters = (*operands.weights, *operands.biases, *operands.norms)
    if not all([p.requires_grad for p in parameters]):
        return "it is for training all of a layer: a weight takes no gradient"
    actual = {p.dtype for p in parameters}, set(map(torch.Tensor.get_device, parameters))
    if actual != ({weight_dtype}, {x.get_device()}) or not all(map(torch.Tensor.is_contiguous, parameters)):
        others = sorted({f"{p.dtype} on {p.device}" for p in parameters})
        return f"x is on {x.device}, the weights {' and '.join(others)}, or not in one piece"
    is_autocast = torch.is_autocast_enabled(x.device.type)
    if weight_dtype is not x.dtype if not is_autocast else weight_dtype not in (torch.float32, torch.bfloat16):
        return f"x is {x.dtype}, the weights {weight_dtype}"
    reason = _kinds_unsupported(operands.kinds)
    if reason is not None:
        return reason
    expected = _plan(x, operands, False).layout.shapes
    shapes = [*map(_shape, operands.weights)]
    if shapes != expected:
        actual, shape = next(both for both in zip(shapes, expected, strict=True) if both[0] != both[1])
        return f"a weight is {tuple(actual)}, expected {shape}"
    return None


@functools.lru_cache(maxsize=64)
def _kinds_unsupported(kinds: tuple[LayerNumbers, ...]) -> str | None:
    if any(layer.norms >> 4 or layer.norm > 1 for layer in kinds):
        return "queries, keys or what a sublayer gives have norms, or norms a zero-centred weight"
    if len({layer.norm_first for layer in kinds}) > 1 or len({layer.rms for layer in kinds}) > 1:
        return "norms stand before halves of one layer and behind those of another, or are of two kinds"
    for layer in kinds:
        if layer.relative:
            return "attention has relative terms"
        if not layer.norms & 4:
            return "a layer has no norm of its feed-forward"
        count = 1 if layer.merged_qkv else 3
        ups = layer.num_linears - count - 2
        for first, linears in ((0, count), (count + 1, ups)):
            bits = layer.biases >> first & (1 << linears) - 1
            if bits not in (0, (1 << linears) - 1):
                return "of the Linears of one product some have a bias, and others not"
    return None


def _plan(x: torch.Tensor, operands: LayerOperands, recomputes: bool) -> Plan:
    inner, last = [], -1
    for at in operands.layers:
        last += operands.kinds[at].num_linears
        inner.append(operands.weights[last].shape[1])
    layers = tuple(operands.layers)
    return plan_of(operands.kinds, layers, operands.activation, x.shape[1], tuple(inner), recomputes)


def run(
    recomputes: bool,
    x: torch.Tensor,
    operands: LayerOperands,
    cu_seqlens: torch.Tensor,
    rotary: tuple[Rotary, ...] = (),
    window_positions: torch.Tensor | None = None,
    relative: Sequence[Relative] = (),
    num_keys: torch.Tensor | None = None,
    *,
    max_seqlen: int | None = None,
    cache: dict | None = None,
) -> torch.Tensor:
    """max_seqlen: of all sequences, if somebody knows; cache: as attention has it."""
    tensors = {"x": x, "cu_seqlens": cu_seqlens, "window_positions": window_positions, "num_keys": num_keys}
    check_devices("encoder_layers_training", **tensors)
    cu_seqlens = int32_offsets("encoder_layers_training", cu_seqlens)
    plan, weights, biases, norms = _plan(x, operands, recomputes), operands.weights, operands.biases, operands.norms
    dtype, longest = compute_dtype(x), x.shape[0] if max_seqlen is None else max_seqlen
    x = x.to(dtype)
    cache = {} if cache is None else cache
    tile_sizes = [_tile(numbers.head_dim, longest, dtype is torch.float32) for numbers in plan.distinct_kinds]
    tiles = [tiles_of(cu_seqlens, x.shape[0], tile, cache, num_keys) for tile in tile_sizes]
    for layer in [numbers for numbers in plan.distinct_kinds if numbers.rotary >= 0]:
        check_rotary(x.as_strided((x.shape[0], 1, layer.head_dim), (0, 0, 0)), rotary[layer.rotary], max_seqlen or 0)
    rotary = tuple([r._replace(cos=_in_rows(r.cos), sin=_in_rows(r.sin)) for r in rotary])
    window_positions = None if window_positions is None else window_positions.contiguous()
    philox = None
    if plan.has_dropout:
        philox = draw_seeds(x.device, len(plan.kinds), 4 if plan.has_inner_dropout else 3)
    batch, x = Batch(tiles, tile_sizes, philox, rotary, window_positions), x.contiguous()
    with torch.no_grad():
        merged = _merged(plan, x, weights, biases, norms)
    return _EncoderLayers.apply(plan, merged, batch, x, *weights, *biases, *norms)


def _merged(
    plan: Plan,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    norms: Sequence[torch.Tensor],
) -> MergedWeights:
    """The layers' weights as products of x take them, in one launch, and what add_norms take of vectors, in another."""
    dtype, layout, known = weights[0].dtype, plan.layout, weight_tables(weights[0])
    flat = x.new_empty(layout.merged_size(dtype is not x.dtype))
    merge_weights(known, layout, weights, biases, flat)
    vectors = x.new_empty(plan.size_of_vectors, dtype=dtype)
    merge_vectors(known, [*[biases[i] for i in plan.add_norm_biases], *norms], plan.vector_offsets, vectors)
    return MergedWeights(flat, [weights[i] for i in layout.copied(dtype is not x.dtype).kept], vectors)


def _in_rows(table: torch.Tensor) -> torch.Tensor:
    return table if table.stride(1) == 1 else table.contiguous()
