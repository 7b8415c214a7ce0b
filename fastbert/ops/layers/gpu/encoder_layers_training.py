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
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fastbert.backend import Backend
from fastbert.ops._common import (
    _library,
    check_devices,
    compute_dtype,
    cuda_unsupported,
    define,
    differentiable_once,
    triton_unsupported,
)
from fastbert.ops.attention.attention import _tile
from fastbert.ops.attention.relative import Relative
from fastbert.ops.attention.rotary import Rotary, check_rotary
from fastbert.ops.attention.tiles import tiles_of
from fastbert.ops.layers.encoder_layers import LayerOperands, tables_of
from fastbert.ops.layers.gpu.kernels import layer_kernels, their_vectors
from fastbert.ops.layers.gpu.memory import Memory, weights_memory
from fastbert.ops.layers.gpu.merged_weights import merge_vectors, merge_weights, weight_tables
from fastbert.ops.layers.gpu.plan import Plan, kinds_of, plan_of
from fastbert.ops.layers.gpu.stack import Operands, Stack
from fastbert.ops.layers.gpu.stack_bwd import backward
from fastbert.ops.layers.layer_numbers import LayerNumbers
from fastbert.ops.packing import int32_offsets
from fastbert.ops.seeds import draw_seeds

# flat, kept_weights: of `merged`. vectors: those that junctions take (plan.py). tiles, tile_sizes: of each kind
# of layer. philox, activation, layers, ints, floats, rotary, rotary_layouts, window_positions: as
# encoder_layers_fwd_cpu has them. intermediate_sizes: the layers'. x, flat and what is made of them have one dtype;
# biases and norms, and so the gradients of all parameters, have that of the weights, which is the same or wider.
# Forward returns out and what backward wants. Backward returns the gradients of x (zero rows unless needs_dx), of all
# weights as Layout has them, and of biases and norms as Plan.vectors has them.
_FORM = (
    "Tensor flat, Tensor[] kept_weights, Tensor vectors, Tensor[] tiles, Tensor? philox,"
    " str activation, int[] layers, int[] ints, float[] floats, int[] intermediate_sizes, int[] tile_sizes,"
    " Tensor[] rotary, int[] rotary_layouts, Tensor? window_positions, bool recomputes"
)
_FWD_SCHEMA = f"(Tensor x, {_FORM}) -> Tensor[]"
_BWD_SCHEMA = f"(Tensor dout, Tensor x, Tensor[] kept, {_FORM}, bool needs_dx) -> Tensor[]"
_BACKENDS = (Backend.TRITON, Backend.CUDA)
# Read of some 200 parameters in each step.
_shape = attrgetter("shape")


class _Form(NamedTuple):
    """_FORM's."""

    flat: torch.Tensor
    kept_weights: list[torch.Tensor]
    vectors: torch.Tensor
    tiles: list[torch.Tensor]
    philox: torch.Tensor | None
    activation: str
    layers: list[int]
    ints: list[int]
    floats: list[float]
    intermediate_sizes: list[int]
    tile_sizes: list[int]
    rotary: list[torch.Tensor]
    rotary_layouts: list[int]
    window_positions: torch.Tensor | None
    recomputes: bool


def _stack(backend: Backend, x: torch.Tensor, form: _Form) -> Stack:
    tables = [
        (form.rotary[2 * i], form.rotary[2 * i + 1], bool(bits & 1), bool(bits & 2))
        for i, bits in enumerate(form.rotary_layouts)
    ]
    plan = _plan(x, form)
    operands = Operands(
        form.flat, form.kept_weights, form.vectors, form.tiles, form.tile_sizes, form.philox, form.activation, tables,
        form.window_positions,
    )  # fmt: skip
    return Stack(plan, layer_kernels(backend)(x, form.vectors.dtype, plan), operands, x)


def _plan(x: torch.Tensor, form: _Form) -> Plan:
    sizes = tuple(form.intermediate_sizes)
    return plan_of(tuple(form.layers), tuple(form.ints), tuple(form.floats), x.shape[1], sizes, form.recomputes)


def _forward(backend: Backend, x: torch.Tensor, *form: Any) -> list[torch.Tensor]:
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        out, kept = _stack(backend, x, _Form(*form)).forward()
    return [out, *kept]


def _backward(backend, dout, x, kept, *rest) -> list[torch.Tensor]:
    form, needs_dx = _Form(*rest[:-1]), rest[-1]
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
        stack = _stack(backend, x, form)
        flat = x.new_empty(stack.plan.layout.size)
        dx, vectors = backward(stack, dout, kept, flat, needs_dx)
        flat = flat.to(form.vectors.dtype)
    return [dx if needs_dx else x.new_empty(0, x.shape[1]), flat, *vectors]


_FWD: dict[Backend, Callable[..., list[torch.Tensor]]] = {}
_BWD: dict[Backend, Callable[..., list[torch.Tensor]]] = {}
for _backend in _BACKENDS:
    for _table, _name, _schema, _kernel in (
        (_FWD, "fwd", _FWD_SCHEMA, _forward),
        (_BWD, "bwd", _BWD_SCHEMA, _backward),
    ):
        _op = f"encoder_layers_{_name}_{_backend.value}"
        _table[_backend] = define(_op, _schema, None)
        for _key in ("CUDA", "CPU"):  # CPU: for TRITON_INTERPRET=1
            _library.impl(_op, functools.partial(_kernel, _backend), _key)


class _EncoderLayers(torch.autograd.Function):
    """Autograd around the registered forward and backward, by the operands' weights, biases and norms."""

    @classmethod
    def apply(cls, *arguments):
        """Without torch's look at each of 200 arguments for what a transform of torch.func left, 100 us: whoever asks
        for a fused op has been refused under one."""
        return super(torch.autograd.Function, cls).apply(*arguments)

    @staticmethod
    def forward(ctx, backend: Backend, form: _Form, x, *parameters):
        out, *kept = _FWD[backend](x, *form)
        ctx.save_for_backward(x, form.flat, form.vectors, *form.kept_weights, *kept)
        ctx.count = len(form.kept_weights)
        ctx.backend, ctx.form = backend, form._replace(flat=x, kept_weights=[], vectors=x)  # which are saved
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        backend, form, (x, flat, vectors, *saved) = ctx.backend, ctx.form, ctx.saved_tensors
        form = form._replace(flat=flat, kept_weights=saved[: ctx.count], vectors=vectors)
        needs_dx = ctx.needs_input_grad[2]
        dx, dweights, *dvectors = _BWD[backend](dout, x, saved[ctx.count :], *form, needs_dx)
        plan = _plan(x, form)
        made = Memory(x, vectors.dtype, len(plan.kinds), their_vectors(backend, x.dtype, vectors.dtype))
        given = iter(dvectors)
        for tensors in plan.vectors:
            made.take(tensors, given)
        gradients = (*plan.layout.split(dweights), *_dbiases(plan, made), *_dnorms(plan, made))
        return None, None, dx if needs_dx else None, *gradients


def _dbiases(plan: Plan, made: Memory) -> list[torch.Tensor]:
    """The gradients of biases, one for each of the operands'."""
    (qkv, up), found = plan.layout.bias_runs, []
    for name, run in (("qkv_biases", qkv), ("up_biases", up)):
        rows = [() if part is None else part.rows for part in run.parts]
        found.append(made.vectors_apart(name, rows))
    names = zip(found[0], made["output_biases"], found[1], made["down_biases"], strict=True)
    return [t for qkv, output, ups, down in names for t in (*qkv, output, *ups, down) if t is not None]


def _dnorms(plan: Plan, made: Memory) -> list[torch.Tensor]:
    names = ("attention_norm_weights", "attention_norm_biases", "feed_forward_norm_weights", "feed_forward_norm_biases")
    return [t for t in chain.from_iterable(zip(*[made[name] for name in names], strict=True)) if t is not None]


# --------------------------------------------------------------------------------------------------------------------
# The fused op, which encoder_layers_training.py registers: CPUs need not load this


def supports(backend: Backend, x: torch.Tensor) -> str | None:
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, hidden_size)"
    if x.shape[0] == 0:
        return "there is no token"
    if torch.is_autocast_enabled(x.device.type) and compute_dtype(x) is not torch.bfloat16:
        return f"under autocast to {compute_dtype(x)} sums stay in float32"
    if x.shape[1] > 8192:
        return f"hidden_size {x.shape[1]} is above 8192, where rows no longer fit in registers"
    return (cuda_unsupported(x) if backend is Backend.CUDA else None) or triton_unsupported(x)


def accepts(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if operands.unsupported is not None:
        return operands.unsupported
    if operands.weight_scales:
        return "weights are int8"
    given = operands.weights[0].dtype
    parameters = (*operands.weights, *operands.biases, *operands.norms)
    if not all([p.requires_grad for p in parameters]):
        return "it is for training all of a layer: a weight takes no gradient"
    found = {p.dtype for p in parameters}, set(map(torch.Tensor.get_device, parameters))
    if found != ({given}, {x.get_device()}) or not all(map(torch.Tensor.is_contiguous, parameters)):
        others = sorted({f"{p.dtype} on {p.device}" for p in parameters})
        return f"x is on {x.device}, the weights {' and '.join(others)}, or not in one piece"
    is_autocast = torch.is_autocast_enabled(x.device.type)
    if given is not x.dtype if not is_autocast else given not in (torch.float32, torch.bfloat16):
        return f"x is {x.dtype}, the weights {given}"
    numbers = (tuple(operands.layers), tuple(operands.ints), tuple(operands.floats))
    kinds = kinds_of(*numbers)
    reason = _kinds_unsupported(kinds)
    if reason is not None:
        return reason
    expected = plan_of(*numbers, x.shape[1], _intermediate_sizes(kinds, operands.weights), False).layout.shapes
    shapes = [*map(_shape, operands.weights)]
    if shapes != expected:
        found, shape = next(both for both in zip(shapes, expected, strict=True) if both[0] != both[1])
        return f"a weight is {tuple(found)}, expected {shape}"
    return None


@functools.lru_cache(maxsize=64)
def _kinds_unsupported(kinds: tuple[LayerNumbers, ...]) -> str | None:
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


def _intermediate_sizes(kinds: Sequence[LayerNumbers], weights: Sequence[torch.Tensor]) -> tuple[int, ...]:
    sizes, last = [], -1
    for layer in kinds:
        last += layer.num_linears
        sizes.append(weights[last].shape[1])
    return tuple(sizes)


def run(
    backend: Backend,
    recomputes: bool,
    x: torch.Tensor,
    operands: LayerOperands,
    cu_seqlens: torch.Tensor,
    rotary: tuple[Rotary, ...] = (),
    window_positions: torch.Tensor | None = None,
    relative: Sequence[Relative] = (),
    *,
    max_seqlen: int | None = None,
    cache: dict | None = None,
) -> torch.Tensor:
    """max_seqlen: of all sequences, if somebody knows; cache: as attention has it."""
    check_devices("encoder_layers_training", x=x, cu_seqlens=cu_seqlens, window_positions=window_positions)
    cu_seqlens = int32_offsets("encoder_layers_training", cu_seqlens)
    weights, biases, _, _, norms, activation, layers, ints, floats, _, _ = operands
    numbers = (tuple(layers), tuple(ints), tuple(floats))
    inner = _intermediate_sizes(kinds_of(*numbers), weights)
    plan = plan_of(*numbers, x.shape[1], inner, recomputes)
    dtype, longest = compute_dtype(x), x.shape[0] if max_seqlen is None else max_seqlen
    x = x.to(dtype)
    cache = {} if cache is None else cache
    tile_sizes = [_tile(kind.head_dim, longest, dtype is torch.float32) for kind in plan.distinct_kinds]
    tiles = [tiles_of(cu_seqlens, x.shape[0], tile, cache) for tile in tile_sizes]
    for layer in [kind for kind in plan.distinct_kinds if kind.rotary >= 0]:
        check_rotary(x.as_strided((x.shape[0], 1, layer.head_dim), (0, 0, 0)), rotary[layer.rotary], max_seqlen or 0)
    tables, layouts = tables_of(rotary)
    tables = [t if t.stride(1) == 1 else t.contiguous() for t in tables]
    window_positions = None if window_positions is None else window_positions.contiguous()
    philox = None
    if plan.has_dropout:
        philox = draw_seeds(x.device, len(layers), 4 if plan.has_inner_dropout else 3)
    x, given = x.contiguous(), weights[0].dtype
    kept_weights = [weights[i] for i in plan.layout.copied(given is not dtype).kept]
    with torch.no_grad():
        flat, vectors = weights_memory(plan, x, given)
        known = weight_tables(weights[0])
        merge_weights(known, plan.layout, weights, biases, flat)
        merge_vectors(known, [*[biases[i] for i in plan.junction_biases], *norms], plan.vector_places, vectors)
    form = _Form(
        flat, kept_weights, vectors, tiles, philox, activation, layers, ints, floats, list(inner), tile_sizes, tables,
        layouts, window_positions, recomputes,
    )  # fmt: skip
    return _EncoderLayers.apply(backend, form, x, *weights, *biases, *norms)
