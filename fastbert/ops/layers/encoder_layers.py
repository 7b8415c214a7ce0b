"""Whole layers of any spec in one call: post-norm (Vaswani et al. 2017, section 3.1) and pre-norm (Xiong et al. 2020,
figure 1). Calling their ops one by one takes a third of a short text's time in inference, and 3 % of a fine-tuning
step on 32 sentences. encoder_layers_training.py has what has a backward.

Both are fused ops: `try_fused("encoder_layers", x, find_operands)` for inference, and for training
`try_fused("encoder_layers_training", x, find_operands)`; `find_operands()` gives LayerOperands. What they answer is
called with cu_seqlens, int32 (batch + 1,), the offsets of the sequences, and where a layer's spec says so, a tuple of
Rotary and the positions that windows go by, as in `attention`. It returns what x is, (total_tokens, hidden_size).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch

from fastbert.backend import Backend, register_fused
from fastbert.layer_spec import NORMS, LayerSpec, NormType, RotarySpec
from fastbert.native.availability import extension_error
from fastbert.ops._common import check_devices, define, for_kernels, needs_grad
from fastbert.ops.attention.relative import Relative
from fastbert.ops.attention.rotary import Rotary
from fastbert.ops.layers.layer_numbers import LayerNumbers
from fastbert.ops.packing import int32_offsets


class LinearWeights(NamedTuple):
    """What `linears` takes of one product: see there."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    weight_scale: torch.Tensor | None
    input_scale: torch.Tensor | None


class NormWeights(NamedTuple):
    """A norm's weight and bias, (hidden_size,), and its eps."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


class LayerWeights(NamedTuple):
    """What one layer runs on.

    spec: what it computes; the eps are its norms' own. linears: query, key and value, or the one that is all three;
    attention output; up, or gate and up, or the one that is both; down. norms: by the order of layer_spec.NORMS; None
    where there is none. trains: its dropouts drop.
    """

    spec: LayerSpec
    linears: Sequence[LinearWeights]
    norms: Sequence[NormWeights | None]
    trains: bool = False


class LayerOperands(NamedTuple):
    """What layers run on, as the operators take it: made by `of`, which says what is what.

    The lists have the tensors that are there, and each layer's numbers say which they are: None costs an operator more.
    kinds: the LayerNumbers that differ. layers: which of them each layer has. ints, floats: theirs, as C++ reads them.
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    weight_scales: list[torch.Tensor]
    input_scales: list[torch.Tensor]  # one for each of weight_scales
    norms: list[torch.Tensor]
    activation: str
    layers: list[int]
    ints: list[int]
    floats: list[float]
    final_eps: float | None
    kinds: tuple[LayerNumbers, ...]
    unsupported: str | None

    @classmethod
    def of(
        cls,
        layer_weights: Sequence[LayerWeights],
        rotaries: Sequence[RotarySpec] = (),
        final_norm: NormWeights | None = None,
    ) -> LayerOperands:
        """Of layers one after the other. `rotaries`: whose tables the call has, in their order. `final_norm`: behind
        the last layer of a pre-norm stack, of the kind that this layer has. Raises ValueError: other Linears than the
        spec names.
        """
        weights, biases, scales, input_scales, norms, layers = [], [], [], [], [], []
        kinds: dict[LayerNumbers, int] = {}
        unsupported, activation = None, layer_weights[0].spec.feed_forward.activation
        for layer in layer_weights:
            spec, position = layer.spec, layer.spec.attention.rotary
            if len(layer.linears) != len(spec.names.linears):
                raise ValueError(f"a layer has {len(layer.linears)} Linears, and its spec {len(spec.names.linears)}")
            bias_bits = scale_bits = norm_bits = 0
            for i, (weight, bias, scale, input_scale) in enumerate(layer.linears):
                weights.append(weight)
                if bias is not None:
                    biases.append(bias)
                    bias_bits |= 1 << i
                if scale is not None:
                    scales.append(scale)
                    input_scales.append(scale.new_zeros(()) if input_scale is None else input_scale)
                    scale_bits |= 1 << i
            eps = [0.0] * len(NORMS)
            for i, norm in enumerate(layer.norms):
                if norm is not None:
                    eps[i] = norm.eps
                    norms += [norm.weight] if norm.bias is None else [norm.weight, norm.bias]
                    norm_bits |= (1 if norm.bias is None else 3) << 2 * i
            rotary = -1 if position is None else rotaries.index(position)
            numbers = LayerNumbers.of(spec, rotary, (bias_bits, scale_bits, norm_bits), eps, layer.trains)
            if numbers not in kinds:
                kinds[numbers] = len(kinds)
                unsupported = unsupported or _unsupported(spec)
            if spec.feed_forward.activation != activation:
                unsupported = f"layers have {spec.feed_forward.activation} and {activation}"
            layers.append(kinds[numbers])
        if final_norm is not None:
            norms += [final_norm.weight] if final_norm.bias is None else [final_norm.weight, final_norm.bias]
            if not layer_weights[-1].spec.norm_first:
                unsupported = "there is a norm behind post-norm layers"
        return cls(
            weights,
            biases,
            scales,
            input_scales,
            norms,
            activation,
            layers,
            [n for numbers in kinds for n in numbers.ints],
            [n for numbers in kinds for n in numbers.floats],
            None if final_norm is None else final_norm.eps,
            tuple(kinds),
            unsupported,
        )


def _unsupported(spec: LayerSpec) -> str | None:
    """Why the CPU's kernels cannot run a layer."""
    attention, position = spec.attention, spec.attention.rotary
    if spec.relative_bits and attention.num_kv_heads != attention.num_heads:
        return "attention has relative terms and grouped keys"
    if spec.names.per_head or spec.names.query_bias is not None:
        return "the rows of query, key and value stand head by head, and their biases in no Linear"
    if not 2 <= attention.head_dim <= 256:
        return f"head_dim is {attention.head_dim} (attention has 2 to 256)"
    if attention.num_heads % attention.num_kv_heads:
        return f"num_heads is {attention.num_heads}, no multiple of num_kv_heads, which is {attention.num_kv_heads}"
    if attention.softmax_scale is not None and not math.isfinite(attention.softmax_scale):
        return f"softmax_scale is {attention.softmax_scale}"
    if position is not None and position.rotates_values:
        return "attention rotates values, too"
    if position is not None and position.dim < attention.head_dim:
        return f"rotary embedding turns {position.dim} of a head's {attention.head_dim} dimensions"
    if spec.norm.type not in get_args(NormType):
        return f"norm is {spec.norm.type!r} (has {', '.join(map(repr, get_args(NormType)))})"
    if attention.norm is not None and spec.merges_qkv:
        return "one Linear is query, key and value, of which two have norms of their heads"
    return None


def supports(x: torch.Tensor) -> str | None:
    """What training and inference have in common. int8 weights have no gradient: their layers never get to training."""
    if not x.is_cpu:
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, hidden_size)"
    return extension_error()


def accepts(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if operands.unsupported is not None:
        return operands.unsupported
    # A set, not a loop with a choice for each tensor: there are a hundred, and a short text takes half a millisecond.
    tensors = (*operands.weights, *operands.biases, *operands.norms)
    if not {t.dtype if t.is_cpu else t.device for t in tensors} <= {x.dtype, torch.int8}:
        others = sorted({f"{t.dtype} on {t.device}" for t in tensors})
        return f"x is {x.dtype} on {x.device}, the weights {' and '.join(others)}"
    return None


def tables_of(rotary: tuple[Rotary, ...]) -> tuple[list[torch.Tensor], list[int]]:
    """cos and sin of each, and its layout: bit 0 interleaved, bit 1 by_token."""
    tables: list[torch.Tensor] = []
    layouts: list[int] = []
    for cos, sin, interleaved, by_token in rotary:
        tables += cos, sin
        layouts.append(interleaved | by_token << 1)
    return tables, layouts


def relative_lists(
    relative: Sequence[Relative],
) -> tuple[torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """rows and positions, which layers share, and their terms one layer after the other."""
    rows, positions, terms = None, None, []
    bias = in_fp32 = None
    for each in relative:
        rows, positions = each.rows, each.positions
        if each.bias is not bias:  # MPNet's layers share one
            bias = each.bias
            in_fp32 = None if bias is None else bias.float()
        terms += [t for t in (each.key, each.query, in_fp32) if t is not None]
    return rows, positions, terms


# --------------------------------------------------------------------------------------------------------------------
# encoder_layers on the CPU, for inference
#
# layers, ints, floats, final_eps and the lists before them: of LayerOperands. rotary, rotary_layouts: of `tables_of`.
# relative_rows, relative_positions, relative: of `Relative`, of all layers; each has as many of the last as its numbers
# say. versions: the weights', or none, and the kernels ask for each.

define(
    "encoder_layers_cpu",
    "(Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor[] biases, Tensor[] weight_scales, Tensor[] input_scales,"
    " Tensor[] norms, str activation, int[] layers, int[] ints, float[] floats, float? final_eps, Tensor[] rotary,"
    " int[] rotary_layouts, Tensor? window_positions, Tensor? num_keys, Tensor? relative_rows,"
    " Tensor? relative_positions, Tensor[] relative, int[] versions) -> Tensor",
    lambda x, *others: torch.empty_like(x),
)


def _supports_inference(x: torch.Tensor) -> str | None:
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses a dtype for each op"
    return "it is for inference: autograd records each op" if needs_grad(x) else supports(x)


def _accepts_inference(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if needs_grad(*operands.weights, *operands.biases, *operands.norms):
        return "it is for inference: autograd records each op"
    return accepts(x, operands)


def _run_inference(
    x: torch.Tensor,
    operands: LayerOperands,
    cu_seqlens: torch.Tensor,
    rotary: tuple[Rotary, ...] = (),
    window_positions: torch.Tensor | None = None,
    relative: Sequence[Relative] = (),
    num_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """relative: of each layer that has such terms; they share their rows and positions."""
    check_devices("encoder_layers", x=x, cu_seqlens=cu_seqlens, window_positions=window_positions, num_keys=num_keys)
    cu_seqlens = int32_offsets("encoder_layers", cu_seqlens)
    weights, *of_layers, _, _ = operands
    tables, versions = tables_of(rotary), versions_of(operands.weights)
    shared = (window_positions, num_keys, *relative_lists(relative), versions)
    return torch.ops.fastbert.encoder_layers_cpu(x, cu_seqlens, for_kernels(weights), *of_layers, *tables, *shared)


def versions_of(weights: list[torch.Tensor]) -> list[int]:
    """Of all of them at once: one by one they take the kernels as long as a layer's LayerNorms."""
    if torch.compiler.is_compiling():  # a graph must not hold what they are now
        return []
    try:
        return [weight._version for weight in weights]
    except RuntimeError:  # one is an inference tensor, which has none
        return []


register_fused("encoder_layers", Backend.CPU, _supports_inference, _accepts_inference, _run_inference)
