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
from typing import Any, NamedTuple

import torch

from fastbert.backend import Backend
from fastbert.ops._attention_tiles import tiles_of
from fastbert.ops._common import (
    _library,
    check_devices,
    compute_dtype,
    cuda_unsupported,
    define,
    differentiable_once,
    triton_unsupported,
)
from fastbert.ops._layer_kernels import layer_kernels
from fastbert.ops._layer_stack import Layer, Seeds, Stack, bias_tensors, norms_of, weights_of
from fastbert.ops._merged_weights import Layout, merged
from fastbert.ops.attention import _tile
from fastbert.ops.encoder_layers import LayerOperands, tables_of
from fastbert.ops.layer_numbers import LayerNumbers
from fastbert.ops.packing import int32_offsets
from fastbert.ops.relative import Relative
from fastbert.ops.rotary import Rotary, check_rotary
from fastbert.ops.seeds import draw_seeds

# flat, kept_weights: of `merged`. biases: all of the operands'; norms: theirs. tiles: of each of `tile_sizes`. philox,
# activation, layers, ints, floats, rotary, rotary_layouts, window_positions: as encoder_layers_fwd_cpu has them.
# intermediate_sizes: the layers'. x, flat and what is made of them have one dtype; biases and norms, and so the
# gradients of all parameters, have that of the weights, which is the same or wider.
# Forward returns out and what backward wants (_layer_stack.py). Backward returns the gradients of x (zero rows unless
# needs_dx), of all weights as Layout has them, and then, layer by layer, those of the biases of qkv, output, up and
# down, as far as there are any, and those of the norms.
_FORM = (
    "Tensor flat, Tensor[] kept_weights, Tensor[] biases, Tensor[] norms, Tensor[] tiles, Tensor? philox,"
    " str activation, int[] layers, int[] ints, float[] floats, int[] intermediate_sizes, int[] tile_sizes,"
    " Tensor[] rotary, int[] rotary_layouts, Tensor? window_positions, ScalarType weights_dtype, bool recomputes"
)
_FWD_SCHEMA = f"(Tensor x, {_FORM}) -> Tensor[]"
_BWD_SCHEMA = f"(Tensor dout, Tensor x, Tensor[] kept, {_FORM}, bool needs_dx) -> Tensor[]"
_BACKENDS = (Backend.TRITON, Backend.CUDA)
_BIASES = ("qkv", "output", "up", "down")


class _Form(NamedTuple):
    """_FORM's."""

    flat: torch.Tensor
    kept_weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    norms: list[torch.Tensor]
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
    weights_dtype: torch.dtype
    recomputes: bool


@functools.lru_cache(maxsize=64)
def _kinds(layers: tuple[int, ...], ints: tuple[int, ...], floats: tuple[float, ...]) -> tuple[LayerNumbers, ...]:
    """Of each layer."""
    numbers = LayerNumbers.read(ints, floats)
    return tuple(numbers[at] for at in layers)


@functools.lru_cache(maxsize=64)
def _layout(kinds: tuple[LayerNumbers, ...], hidden_size: int, intermediate_sizes: tuple[int, ...]) -> Layout:
    return Layout(kinds, hidden_size, intermediate_sizes)


def _stack(backend: Backend, x: torch.Tensor, form: _Form) -> tuple[Stack, Layout]:
    kinds = _kinds(tuple(form.layers), tuple(form.ints), tuple(form.floats))
    layout = _layout(kinds, x.shape[1], tuple(form.intermediate_sizes))
    tiles = dict(zip(form.tile_sizes, form.tiles, strict=True))
    tables = [
        (form.rotary[2 * i], form.rotary[2 * i + 1], bool(bits & 1), bool(bits & 2))
        for i, bits in enumerate(form.rotary_layouts)
    ]
    seeds = [Seeds()] * len(kinds)
    if form.philox is not None:
        rows = [each.unbind() for each in form.philox.unbind()]
        seeds = [Seeds(each[0], each[1], each[2] if len(each) > 3 else None, each[-1]) for each in rows]
    biases, norms = iter(form.biases), iter(form.norms)
    weights = weights_of(layout, form.flat, form.kept_weights, form.weights_dtype)
    made = []
    for i, (numbers, (qkv, output, up, down)) in enumerate(zip(kinds, weights, strict=True)):
        given = bias_tensors(numbers, biases)
        qkv_bias, up_bias = (None if part is None else part.within(form.flat) for part in layout.biases[i])
        tile = form.tile_sizes[0] if len(tiles) == 1 else _tile_of(numbers, form.tile_sizes, x)
        made.append(
            Layer(
                numbers, qkv, output, up, down, qkv_bias, up_bias, given[1 if numbers.merged_qkv else 3], given[-1],
                norms_of(numbers, norms), seeds[i], tiles[tile], tile,
                None if numbers.rotary < 0 else tables[numbers.rotary],
            )
        )  # fmt: skip
    kernels = layer_kernels(backend)
    stack = Stack(kernels, made, form.activation, form.window_positions, form.weights_dtype, form.recomputes)
    return stack, layout


def _tile_of(numbers: LayerNumbers, tile_sizes: Sequence[int], x: torch.Tensor) -> int:
    """Heads of several sizes: the largest tile that a layer's heads allow is the one that was made for them."""
    most = _tile(numbers.head_dim, max(tile_sizes), x.dtype is torch.float32)
    return max(tile for tile in tile_sizes if tile <= most)


def _forward(backend: Backend, x: torch.Tensor, *form: Any) -> list[torch.Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        out, kept = _stack(backend, x, _Form(*form))[0].forward(x)
    return [out, *kept]


def _backward(backend, dout, x, kept, *rest) -> list[torch.Tensor]:
    form, needs_dx = _Form(*rest[:-1]), rest[-1]
    with torch.autocast(x.device.type, enabled=False):
        stack, layout = _stack(backend, x, form)
        flat = x.new_empty(layout.size)
        dweights = ([part.within(flat) for part in parts] for parts in reversed(layout.products))
        dx, found = stack.backward(dout, x, kept, dweights, needs_dx)
        flat = flat.to(form.weights_dtype)
    vectors = []
    for layer in found:
        dbiases = [layer.biases[name] for name in _BIASES]
        vectors += [dbias for dbias in dbiases if dbias is not None] + layer.norms
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


class _Call:
    """counts: of weights, biases and norms."""

    def __init__(
        self,
        backend: Backend,
        form: _Form,
        counts: tuple[int, int, int],
        layout: Layout,
        kinds: tuple[LayerNumbers, ...],
    ):
        self.backend, self.form, self.counts, self.layout, self.kinds = backend, form, counts, layout, kinds


class _EncoderLayers(torch.autograd.Function):
    """Autograd around the registered forward and backward, by the operands' weights, biases and norms."""

    @staticmethod
    def forward(ctx, call: _Call, x, *parameters):
        out, *kept = _FWD[call.backend](x, *call.form)
        form = call.form
        ctx.save_for_backward(x, form.flat, *form.kept_weights, *form.biases, *form.norms, *kept)
        empty = form._replace(flat=x, kept_weights=[], biases=[], norms=[])  # which are among the saved ones
        ctx.call = _Call(call.backend, empty, call.counts, call.layout, call.kinds)
        ctx.kept_weights = len(form.kept_weights)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, dout):
        call, (x, flat, *saved) = ctx.call, ctx.saved_tensors
        parts = []
        for count in (ctx.kept_weights, call.counts[1], call.counts[2]):
            parts.append(saved[:count])
            saved = saved[count:]
        kept_weights, biases, norms = parts
        form = call.form._replace(flat=flat, kept_weights=kept_weights, biases=biases, norms=norms)
        needs_dx = ctx.needs_input_grad[1]
        dx, dweights, *vectors = _BWD[call.backend](dout, x, list(saved), *form, needs_dx)
        dbiases, dnorms = _sorted(call, vectors)
        return None, dx if needs_dx else None, *call.layout.split(dweights), *dbiases, *dnorms


def _sorted(call: _Call, vectors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of biases and of norms, one for each of the operands'."""
    given = iter(vectors)
    dbiases: list[torch.Tensor] = []
    dnorms: list[torch.Tensor] = []
    for numbers, (qkv, _, up, _) in zip(call.kinds, call.layout.products, strict=True):
        places = (0, len(qkv.rows), len(qkv.rows) + 1, numbers.num_linears - 1)
        for part, place in zip((qkv, None, up, None), places, strict=True):
            if numbers.biases >> place & 1:
                dbias = next(given)
                dbiases += [dbias] if part is None or len(part.rows) == 1 else dbias.split(part.rows)
        dnorms += [next(given) for _ in range(numbers.norms.bit_count())]
    return dbiases, dnorms


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
    found = {(p.requires_grad, p.dtype, p.get_device(), p.is_contiguous()) for p in parameters}
    if found != {(True, given, x.get_device(), True)}:
        if not all([p.requires_grad for p in parameters]):
            return "it is for training all of a layer: a weight takes no gradient"
        others = sorted({f"{p.dtype} on {p.device}" for p in parameters})
        return f"x is on {x.device}, the weights {' and '.join(others)}, or not in one piece"
    is_autocast = torch.is_autocast_enabled(x.device.type)
    if given is not x.dtype if not is_autocast else given not in (torch.float32, torch.bfloat16):
        return f"x is {x.dtype}, the weights {given}"
    kinds = _kinds(tuple(operands.layers), tuple(operands.ints), tuple(operands.floats))
    reason = _kinds_unsupported(kinds)
    if reason is not None:
        return reason
    expected = _layout(kinds, x.shape[1], _intermediate_sizes(kinds, operands.weights)).shapes()
    for weight, shape in zip(operands.weights, expected, strict=True):
        if weight.shape != shape:
            return f"a weight is {tuple(weight.shape)}, expected {shape}"
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
    kinds = _kinds(tuple(layers), tuple(ints), tuple(floats))
    inner = _intermediate_sizes(kinds, weights)
    layout = _layout(kinds, x.shape[1], inner)
    dtype, longest = compute_dtype(x), x.shape[0] if max_seqlen is None else max_seqlen
    x = x.to(dtype)
    tile_sizes = sorted({_tile(d, longest, dtype is torch.float32) for d in {layer.head_dim for layer in kinds}})
    tiles = [tiles_of(cu_seqlens, x.shape[0], tile, cache) for tile in tile_sizes]
    for layer in {layer for layer in kinds if layer.rotary >= 0}:
        check_rotary(x.as_strided((x.shape[0], 1, layer.head_dim), (0, 0, 0)), rotary[layer.rotary], max_seqlen or 0)
    tables, layouts = tables_of(rotary)
    tables = [t if t.stride(1) == 1 else t.contiguous() for t in tables]
    philox = None
    if any([any(layer.dropouts) for layer in kinds]):
        philox = draw_seeds(x.device, len(layers), 4 if any([layer.inner_dropout for layer in kinds]) else 3)
    with torch.no_grad():
        flat, kept_weights = merged(layout, weights, biases, dtype)
    form = _Form(
        flat, kept_weights, biases, norms, tiles, philox, activation, layers, ints, floats, list(inner), tile_sizes,
        tables, layouts, window_positions, weights[0].dtype, recomputes,
    )  # fmt: skip
    call = _Call(backend, form, (len(weights), len(biases), len(norms)), layout, kinds)
    return _EncoderLayers.apply(call, x.contiguous(), *weights, *biases, *norms)
