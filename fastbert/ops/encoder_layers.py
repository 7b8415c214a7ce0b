"""Whole layers of any form in one call: post-norm (Vaswani et al. 2017, section 3.1) and pre-norm (Xiong et al. 2020,
figure 1). Calling their ops one by one takes a third of a short text's time in inference, and 3 % of a fine-tuning
step on 32 sentences.

Both are offers: `offer("encoder_layers", x, look)` for inference, `offer("encoder_layer", x, look)` for training, where
`look()` gives LayerOperands. What they answer is called with cu_seqlens, int32 (batch + 1,), the offsets of the
sequences, and where a layer's form says so, a tuple of Rotary and the positions that windows go by, as in `attention`.
It returns what x is, (total_tokens, hidden_size).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastbert.backend import Backend, register_offer
from fastbert.ops._common import check_devices, compute_dtype, define, extension_error, needs_grad
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
    input_scale: float


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
    input_scales: list[float]  # one for each of weight_scales
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
                    input_scales.append(input_scale)
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
_NORM_FIRST, _MERGED_QKV, _GATED, _MERGED_GATE, _RMS = (1 << i for i in range(5))


def _encoded(
    form: LayerForm, bias_bits: int, scale_bits: int, norm_bits: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Bit i: the layer's Linear i has a bias, or a weight_scale; its norms' tensor i is there."""
    flags = form.norm_first * _NORM_FIRST | form.merged_qkv * _MERGED_QKV | form.gated * _GATED
    flags |= form.merged_gate * _MERGED_GATE | (form.norm == "rms") * _RMS
    heads = (form.num_heads, form.num_kv_heads, form.head_dim)
    softmax_scale = 1.0 / math.sqrt(form.head_dim) if form.softmax_scale is None else form.softmax_scale
    whole = (*heads, *form.window_size, form.rotary, flags, bias_bits, scale_bits, norm_bits)
    return whole, (softmax_scale, *form.eps, *form.dropouts)


def _supports(x: torch.Tensor) -> str | None:
    """What training and inference have in common. int8 weights have no gradient: their layers never get to training."""
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {x.dtype} (has float32 and bfloat16)"
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, hidden_size)"
    return extension_error()


def _accepts(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if operands.objection is not None:
        return operands.objection
    # A set, not a loop with a choice for each tensor: there are a hundred, and a short text takes half a millisecond.
    tensors = (*operands.weights, *operands.biases, *operands.norms)
    if not {t.dtype if t.is_cpu else t.device for t in tensors} <= {x.dtype, torch.int8}:
        others = sorted({f"{t.dtype} on {t.device}" for t in tensors})
        return f"x is {x.dtype} on {x.device}, the weights {' and '.join(others)}"
    return None


def _tables(rotary: tuple[Rotary, ...]) -> tuple[list[torch.Tensor], list[int]]:
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
# layers, forms, numbers, final_eps and the lists before them: of LayerOperands. rotary, rotary_layouts: of `_tables`.
# versions: the weights', or none, and the kernels ask for each.

define(
    "encoder_layers_cpu",
    "(Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor[] biases, Tensor[] weight_scales, float[] input_scales,"
    " Tensor[] norms, str activation, int[] layers, int[] forms, float[] numbers, float? final_eps, Tensor[] rotary,"
    " int[] rotary_layouts, Tensor? window_positions, int[] versions) -> Tensor",
    lambda x, *others: torch.empty_like(x),
)


def _supports_inference(x: torch.Tensor) -> str | None:
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses a dtype for each op"
    return "it is for inference: autograd records each op" if needs_grad(x) else _supports(x)


def _accepts_inference(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if needs_grad(*operands.weights, *operands.biases, *operands.norms):
        return "it is for inference: autograd records each op"
    return _accepts(x, operands)


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
    tables, versions = _tables(rotary), _versions(operands.weights)
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


# --------------------------------------------------------------------------------------------------------------------
# encoder_layer on the CPU: one layer for training, forward and backward
#
# The lists, form and numbers are LayerOperands' for one layer. philox: int64 (3, 2), of attention's dropout, its
# output's and the feed-forward's, and with dropout inside of the feed-forward (4, 2), the last two being that one's and
# the output's. Products and attention run in `dtype`, everything else in x's, which may be wider: under autocast the
# residual stream stays in x's. Forward returns out, and as `kept` what backward wants. Backward returns the gradients
# of x (zero rows unless needs_dx), weights, norms and biases.

_FWD_SCHEMA = (
    "(Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor[] biases, Tensor[] norms, Tensor? philox, str activation,"
    " int[] form, float[] numbers, Tensor[] rotary, int[] rotary_layouts, Tensor? window_positions, ScalarType dtype)"
    " -> Tensor[]"
)
_BWD_SCHEMA = (
    "(Tensor dout, Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor[] norms, Tensor[] kept, Tensor? philox,"
    " str activation, int[] form, float[] numbers, Tensor[] rotary, int[] rotary_layouts, Tensor? window_positions,"
    " bool needs_dx) -> Tensor[]"
)


def _fwd_fake(x, cu_seqlens, weights, biases, norms, philox, activation, form, numbers, rotary, layouts, at, dtype):
    num_heads, num_kv_heads, head_dim, *_, flags, _, _, norm_bits = form
    tokens = x.shape[0]

    def normed():  # what a norm gives, the sum before it, its mean and rstd
        mean, rstd = (x.new_empty(n, dtype=torch.float32) for n in (0 if flags & _RMS else tokens, tokens))
        return [torch.empty_like(x), torch.empty_like(x), mean, rstd]

    has_attention_norm, norm_first = norm_bits & 1, flags & _NORM_FIRST
    first = normed()[1:] if norm_first and has_attention_norm else []
    heads = [num_heads + 2 * num_kv_heads] if flags & _MERGED_QKV else [num_heads, num_kv_heads, num_kv_heads]
    projected = [x.new_empty(tokens, n, head_dim, dtype=dtype) for n in heads]
    context = x.new_empty(tokens, num_heads, head_dim, dtype=dtype)
    softmax_stats = x.new_empty(2, num_heads, tokens, dtype=torch.float32)
    middle = normed() if norm_first or has_attention_norm else [torch.empty_like(x)]
    pre = x.new_empty(tokens, sum([w.shape[0] for w in weights[len(heads) + 1 : -1]]), dtype=dtype)
    last = [] if norm_first else normed()[1:]
    return [torch.empty_like(x), *first, *projected, context, softmax_stats, *middle, pre, *last]


def _bwd_fake(dout, x, cu_seqlens, weights, norms, kept, philox, activation, form, *others):
    needs_dx = others[-1]
    dbiases = [w.new_empty(w.shape[0]) for i, w in enumerate(weights) if form[-3] >> i & 1]
    dx = x.new_empty(x.shape[0] if needs_dx else 0, x.shape[1])
    return [dx, *map(torch.empty_like, (*weights, *norms)), *dbiases]


_FWD = define("encoder_layer_fwd_cpu", _FWD_SCHEMA, _fwd_fake)
_BWD = define("encoder_layer_bwd_cpu", _BWD_SCHEMA, _bwd_fake)


class _Call(NamedTuple):
    # A layer's, beside its tensors.
    num_weights: int
    num_norms: int
    num_biases: int
    rotary_layouts: list[int]
    form: tuple  # activation, form and numbers
    dtype: torch.dtype


class _EncoderLayer(torch.autograd.Function):
    """Autograd around the registered forward and backward of one layer. tensors: weights, norms, biases, rotary."""

    @staticmethod
    def forward(ctx, x, cu_seqlens, philox, window_positions, call, *tensors):
        norms_at, biases_at = call.num_weights, call.num_weights + call.num_norms
        rotary_at = biases_at + call.num_biases
        weights, norms = tensors[:norms_at], tensors[norms_at:biases_at]
        biases, rotary = tensors[biases_at:rotary_at], tensors[rotary_at:]
        tables = (rotary, call.rotary_layouts, window_positions)
        out, *kept = _FWD(x, cu_seqlens, weights, biases, norms, philox, *call.form, *tables, call.dtype)
        ctx.save_for_backward(x, cu_seqlens, philox, window_positions, *weights, *norms, *rotary, *kept)
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        call, needs_dx = ctx.call, ctx.needs_input_grad[0]
        num_tables = 2 * len(call.rotary_layouts)
        x, cu_seqlens, philox, window_positions, *saved = ctx.saved_tensors
        norms_at, rotary_at = call.num_weights, call.num_weights + call.num_norms
        kept_at = rotary_at + num_tables
        weights, norms, kept = saved[:norms_at], saved[norms_at:rotary_at], saved[kept_at:]
        tables = (saved[rotary_at:kept_at], call.rotary_layouts, window_positions)
        dx, *gradients = _BWD(dout, x, cu_seqlens, weights, norms, kept, philox, *call.form, *tables, needs_dx)
        return dx if needs_dx else None, None, None, None, None, *gradients, *[None] * num_tables


def _supports_training(x: torch.Tensor) -> str | None:
    if not torch.is_grad_enabled():
        return "it is for training: gradients are off"
    if compute_dtype(x) not in (torch.float32, torch.bfloat16):
        return f"autocast to {compute_dtype(x)}"
    return _supports(x)


def _accepts_training(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if not all([p.requires_grad for p in (*operands.weights, *operands.biases, *operands.norms)]):
        return "it is for training all of a layer: a weight takes no gradient"
    return _accepts(x, operands)


def _run_training(
    x: torch.Tensor,
    operands: LayerOperands,
    cu_seqlens: torch.Tensor,
    rotary: tuple[Rotary, ...] = (),
    window_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    check_devices("encoder_layer", x=x, cu_seqlens=cu_seqlens, window_positions=window_positions)
    cu_seqlens = int32_offsets("encoder_layer", cu_seqlens)
    weights, biases, _, _, norms, activation, _, form, numbers, _, _ = operands
    dropouts = numbers[-4:]
    philox = torch.randint(2**62, (4 if dropouts[2] else 3, 2), dtype=torch.int64) if any(dropouts) else None
    tables, layouts = _tables(rotary)
    call = _Call(len(weights), len(norms), len(biases), layouts, (activation, form, numbers), compute_dtype(x))
    return _EncoderLayer.apply(x, cu_seqlens, philox, window_positions, call, *weights, *norms, *biases, *tables)


register_offer("encoder_layer", Backend.CPU, _supports_training, _accepts_training, _run_training)
