"""Whole layers of any form in one call: post-norm (Vaswani et al. 2017, section 3.1) and pre-norm (Xiong et al. 2020,
figure 1). Calling their ops one by one takes a third of a short text's time in inference, and 3 % of a fine-tuning
step on 32 sentences. encoder_layers_training.py has what has a backward.

Both are offers: `offer("encoder_layers", x, look)` for inference, `offer("encoder_layers_training", x, look)`; `look()`
gives LayerOperands. What they answer is called with cu_seqlens, int32 (batch + 1,), the offsets of the
sequences, and where a layer's form says so, a tuple of Rotary and the positions that windows go by, as in `attention`.
It returns what x is, (total_tokens, hidden_size).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastbert.backend import Backend, register_offer
from fastbert.native.availability import extension_error
from fastbert.ops._common import check_devices, define, needs_grad
from fastbert.ops.packing import int32_offsets
from fastbert.ops.rotary import Rotary


class LayerForm(NamedTuple):
    """What one layer computes: numbers and names, hashable.

    num_heads, num_kv_heads: each group of num_heads / num_kv_heads neighbouring heads shares a key and a value.
    softmax_scale: None is 1 / sqrt(head_dim).
    window_size: (left, right), -1 = unlimited, as in `attention`.
    rotary: which of the call's tables turns queries and keys; -1 is none.
    norm: "layer" (LayerNorm) or "rms" (RMSNorm).
    norm_first: pre-norm, the norms stand before the two halves; else behind them, post-norm.
    has_attention_norm: the norm of the attention's half is there.
    merged_qkv: one Linear is query, key and value, whose rows stand one after the other; else there are three.
    gated: the feed-forward is activation(gate) * up; merged_gate: one Linear is gate and up, likewise.
    activation: a name that the op `activation` knows.
    eps: of the attention's norm and of the feed-forward's.
    dropouts: of the attention's probabilities, of its output, inside of the feed-forward and of its output; in training
        only.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    rotary: int = -1
    norm: str = "layer"
    norm_first: bool = False
    has_attention_norm: bool = True
    merged_qkv: bool = False
    gated: bool = False
    merged_gate: bool = False
    activation: str = "gelu"
    eps: tuple[float, float] = (1e-12, 1e-12)
    dropouts: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    @property
    def num_linears(self) -> int:
        return (1 if self.merged_qkv else 3) + 1 + (2 if self.gated and not self.merged_gate else 1) + 1

    def objection(self) -> str | None:
        """Why the CPU's kernels cannot run it."""
        if not 2 <= self.head_dim <= 256:
            return f"head_dim is {self.head_dim} (attention has 2 to 256)"
        if self.rotary >= 0 and self.head_dim % 2:
            return f"head_dim is {self.head_dim}, rotary embedding takes the dimensions of a head in pairs"
        if self.num_heads % self.num_kv_heads:
            return f"num_heads is {self.num_heads}, no multiple of num_kv_heads, which is {self.num_kv_heads}"
        if self.softmax_scale is not None and not math.isfinite(self.softmax_scale):
            return f"softmax_scale is {self.softmax_scale}"
        if self.norm not in ("layer", "rms"):
            return f"norm is {self.norm!r} (has 'layer' and 'rms')"
        return None


class LinearWeights(NamedTuple):
    """What `linears` takes of one product: see there."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    weight_scale: torch.Tensor | None
    input_scale: torch.Tensor | None


class FinalNorm(NamedTuple):
    """The norm behind the last layer of a pre-norm stack, of the kind that this layer has."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


class LayerOperands(NamedTuple):
    """What layers run on, as the operators take it: made by `of`, which says what is what.

    The lists have the tensors that are there, and each form has bits for which they are: None costs an operator more.
    """

    weights: list[torch.Tensor]
    biases: list[torch.Tensor]
    weight_scales: list[torch.Tensor]
    input_scales: list[torch.Tensor]  # one for each of weight_scales
    norms: list[torch.Tensor]
    activation: str
    layers: list[int]  # which of the forms each layer has
    forms: list[int]
    numbers: list[float]
    final_eps: float | None
    objection: str | None

    @classmethod
    def of(
        cls,
        linears: Sequence[LinearWeights],
        norms: Sequence[torch.Tensor | None],
        forms: Sequence[LayerForm],
        final_norm: FinalNorm | None = None,
    ) -> LayerOperands:
        """
        Args:
            linears: of every layer in turn: query, key and value, or the one that is all three; attention output; up,
                or gate and up, or the one that is both; down.
            norms: likewise: weight and bias, (hidden_size,) each, of the attention's norm and of the feed-forward's;
                None where there is none.
            forms: one a layer.
        """
        weights, biases, scales, input_scales, layers = [], [], [], [], []
        codes: dict[tuple[tuple[int, ...], tuple[float, ...]], int] = {}
        objection, first = None, 0
        for at, form in enumerate(forms):
            bias_bits = scale_bits = norm_bits = 0
            for i, (weight, bias, scale, input_scale) in enumerate(linears[first : first + form.num_linears]):
                weights.append(weight)
                if bias is not None:
                    biases.append(bias)
                    bias_bits |= 1 << i
                if scale is not None:
                    scales.append(scale)
                    input_scales.append(scale.new_zeros(()) if input_scale is None else input_scale)
                    scale_bits |= 1 << i
            for i, t in enumerate(norms[4 * at : 4 * at + 4]):
                norm_bits |= (t is not None) << i
            first += form.num_linears
            code = _encoded(form, bias_bits, scale_bits, norm_bits)
            if code not in codes:
                codes[code] = len(codes)
                objection = objection or form.objection()
            if form.activation != forms[0].activation:
                objection = f"layers have {form.activation} and {forms[0].activation}"
            layers.append(codes[code])
        if first != len(linears) or 4 * len(forms) != len(norms):
            found, expected = (len(linears), len(norms)), (first, 4 * len(forms))
            raise ValueError(f"{found} Linears and tensors of norms, the forms of {len(forms)} layers have {expected}")
        if final_norm is not None:
            norms = [*norms, final_norm.weight, final_norm.bias]
            if not forms[-1].norm_first:
                objection = "there is a norm behind post-norm layers"
        return cls(
            weights,
            biases,
            scales,
            input_scales,
            [t for t in norms if t is not None],
            forms[0].activation,
            layers,
            [n for ints, _ in codes for n in ints],
            [n for _, floats in codes for n in floats],
            None if final_norm is None else final_norm.eps,
            objection,
        )


# What csrc/ops/layer_form.cpp reads: of a form its whole numbers and its others.
NORM_FIRST, MERGED_QKV, GATED, MERGED_GATE, RMS = (1 << i for i in range(5))
INTS, FLOATS = 10, 7  # how many of each a form has


def _encoded(
    form: LayerForm, bias_bits: int, scale_bits: int, norm_bits: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Bit i: the layer's Linear i has a bias, or a weight_scale; its norms' tensor i is there."""
    flags = form.norm_first * NORM_FIRST | form.merged_qkv * MERGED_QKV | form.gated * GATED
    flags |= form.merged_gate * MERGED_GATE | (form.norm == "rms") * RMS
    heads = (form.num_heads, form.num_kv_heads, form.head_dim)
    softmax_scale = 1.0 / math.sqrt(form.head_dim) if form.softmax_scale is None else form.softmax_scale
    whole = (*heads, *form.window_size, form.rotary, flags, bias_bits, scale_bits, norm_bits)
    return whole, (softmax_scale, *form.eps, *form.dropouts)


def supports(x: torch.Tensor) -> str | None:
    """What training and inference have in common. int8 weights have no gradient: their layers never get to training."""
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, hidden_size)"
    return extension_error()


def accepts(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if operands.objection is not None:
        return operands.objection
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


# --------------------------------------------------------------------------------------------------------------------
# encoder_layers on the CPU, for inference
#
# layers, forms, numbers, final_eps and the lists before them: of LayerOperands. rotary, rotary_layouts: of `tables_of`.
# versions: the weights', or none, and the kernels ask for each.

define(
    "encoder_layers_cpu",
    "(Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor[] biases, Tensor[] weight_scales, Tensor[] input_scales,"
    " Tensor[] norms, str activation, int[] layers, int[] forms, float[] numbers, float? final_eps, Tensor[] rotary,"
    " int[] rotary_layouts, Tensor? window_positions, int[] versions) -> Tensor",
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
) -> torch.Tensor:
    check_devices("encoder_layers", x=x, cu_seqlens=cu_seqlens, window_positions=window_positions)
    cu_seqlens = int32_offsets("encoder_layers", cu_seqlens)
    *of_layers, _ = operands
    tables, versions = tables_of(rotary), _versions(operands.weights)
    return torch.ops.fastbert.encoder_layers_cpu(x, cu_seqlens, *of_layers, *tables, window_positions, versions)


def _versions(weights: list[torch.Tensor]) -> list[int]:
    """Of all of them at once: one by one they take the kernels as long as a layer's LayerNorms."""
    if torch.compiler.is_compiling():  # a graph must not hold what they are now
        return []
    try:
        return [weight._version for weight in weights]
    except RuntimeError:  # one is an inference tensor, which has none
        return []


register_offer("encoder_layers", Backend.CPU, _supports_inference, _accepts_inference, _run_inference)
