"""Whole post-norm layers (Vaswani et al. 2017, section 3.1) in one call. Calling their ops one by one takes a third of
a short text's time in inference, and 3 % of a fine-tuning step on 32 sentences.

Both are offers: `offer("encoder_layers", x, look)` for inference, `offer("encoder_layer", x, look)` for training, where
`look()` gives LayerOperands. What they answer is called with cu_seqlens, int32 (batch + 1,), the offsets of the
sequences, and returns what x is, (total_tokens, hidden_size).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastbert.backend import Backend, register_offer
from fastbert.ops._common import check_devices, compute_dtype, define, extension_error, needs_grad
from fastbert.ops.packing import int32_offsets

# encoder_layers on the CPU: post-norm layers for inference, from the CPU's kernels
#
# weights, biases, weight_scales, input_scales: query, key, value, attention output, up, down of every layer; norms:
# weight and bias of the attention's LayerNorm, then of the feed-forward's, of every layer; versions: the weights', or
# none, and the kernels ask for each.

define(
    "encoder_layers_cpu",
    "(Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor?[] biases, Tensor?[] weight_scales, float[] input_scales,"
    " Tensor[] norms, float[] eps, int num_heads, str activation, int[] versions) -> Tensor",
    lambda x, *others: torch.empty_like(x),
)


# encoder_layer on the CPU: one post-norm layer for training, forward and backward
#
# weights and biases as above, norms those of one layer; philox int64 (3, 2): attention's dropout, its output's, the
# feed-forward's. Products and attention run in `dtype`, everything else in x's, which may be wider (autocast).
# Forward returns out and what backward wants as `kept`: q, k, v, context, softmax_stats, then of the first
# add_layer_norm summed, mean, rstd and out, the feed-forward's pre, of the second summed, mean and rstd. Backward
# returns the gradients of x (zero rows unless needs_dx), weights, biases and norms.

_ENCODER_LAYER_FWD = (
    "(Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor[] biases, Tensor[] norms, Tensor? philox, float[] dropouts,"
    " float[] eps, int num_heads, str activation, ScalarType dtype) -> Tensor[]"
)
_ENCODER_LAYER_BWD = (
    "(Tensor dout, Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor[] norms, Tensor[] kept, Tensor? philox,"
    " float[] dropouts, str activation, bool needs_dx) -> Tensor[]"
)


def _encoder_layer_fwd_fake(x, cu_seqlens, weights, biases, norms, philox, dropouts, eps, num_heads, activation, dtype):
    tokens, width = x.shape[0], weights[0].shape[0]
    heads = [x.new_empty(tokens, num_heads, width // num_heads, dtype=dtype) for _ in range(4)]
    softmax_stats = x.new_empty(2, num_heads, tokens, dtype=torch.float32)
    mean, rstd, mean2, rstd2 = (x.new_empty(tokens, dtype=torch.float32) for _ in range(4))
    out, summed, middle, summed2 = (torch.empty_like(x) for _ in range(4))
    pre = x.new_empty(tokens, weights[4].shape[0], dtype=dtype)
    return [out, *heads, softmax_stats, summed, mean, rstd, middle, pre, summed2, mean2, rstd2]


def _encoder_layer_bwd_fake(dout, x, cu_seqlens, weights, norms, kept, philox, dropouts, activation, needs_dx):
    dbiases = [w.new_empty(w.shape[0]) for w in weights]
    dx = x.new_empty(x.shape[0] if needs_dx else 0, x.shape[1])
    return [dx, *map(torch.empty_like, weights), *dbiases, *map(torch.empty_like, norms)]


define("encoder_layer_fwd_cpu", _ENCODER_LAYER_FWD, _encoder_layer_fwd_fake)
define("encoder_layer_bwd_cpu", _ENCODER_LAYER_BWD, _encoder_layer_bwd_fake)


class LinearWeights(NamedTuple):
    """What `linears` takes of one product: see there."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    weight_scale: torch.Tensor | None
    input_scale: float


class LayerOperands(NamedTuple):
    """What layers run on.

    weights, biases, weight_scales, input_scales: query, key, value, attention output, up and down, of every layer in
        turn, each as `linears` takes it.
    norms: weight and bias, (hidden_size,) each, of the attention's LayerNorm, then of the feed-forward's, likewise.
    eps: of the two LayerNorms, likewise.
    num_heads: hidden_size / num_heads is the heads' width.
    activation: a name that the op `activation` knows.
    dropouts: of the attention's probabilities, of its output and of the feed-forward's; in training only.
    """

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    weight_scales: tuple[torch.Tensor | None, ...]
    input_scales: tuple[float, ...]
    norms: Sequence[torch.Tensor]
    eps: Sequence[float]
    num_heads: int
    activation: str
    dropouts: tuple[float, float, float]

    @classmethod
    def of(
        cls, linears: Sequence[LinearWeights], norms, eps, num_heads: int, activation: str, dropouts=(0.0, 0.0, 0.0)
    ) -> LayerOperands:
        weights, biases, scales, input_scales = zip(*linears, strict=True)
        return cls(weights, biases, scales, input_scales, norms, eps, num_heads, activation, dropouts)


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
    head_dim = operands.weights[0].shape[0] // operands.num_heads
    if not 2 <= head_dim <= 256:
        return f"head_dim is {head_dim} (attention has 2 to 256)"
    # A set, not a loop with a choice for each tensor: there are a hundred, and a short text takes half a millisecond.
    tensors = (*operands.weights, *operands.biases, *operands.norms)
    if not {t.dtype if t.is_cpu else t.device for t in tensors if t is not None} <= {x.dtype, torch.int8}:
        others = sorted({f"{t.dtype} on {t.device}" for t in tensors if t is not None})
        return f"x is {x.dtype} on {x.device}, the weights {' and '.join(others)}"
    return None


# --------------------------------------------------------------------------------------------------------------------
# encoder_layers, for inference


def _supports_inference(x: torch.Tensor) -> str | None:
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses a dtype for each op"
    return "it is for inference: autograd records each op" if needs_grad(x) else _supports(x)


def _accepts_inference(x: torch.Tensor, operands: LayerOperands) -> str | None:
    if needs_grad(*operands.weights, *operands.biases, *operands.norms):
        return "it is for inference: autograd records each op"
    return _accepts(x, operands)


def _run_inference(x: torch.Tensor, operands: LayerOperands, cu_seqlens: torch.Tensor) -> torch.Tensor:
    check_devices("encoder_layers", x=x, cu_seqlens=cu_seqlens)
    cu_seqlens = int32_offsets("encoder_layers", cu_seqlens)
    *of_layers, _ = operands
    return torch.ops.fastbert.encoder_layers_cpu(x, cu_seqlens, *of_layers, _versions(operands.weights))


def _versions(weights: tuple[torch.Tensor, ...]) -> list[int]:
    """Of all of them at once: one by one they take the kernels as long as a layer's LayerNorms."""
    if torch.compiler.is_compiling():  # a graph must not hold what they are now
        return []
    try:
        return [weight._version for weight in weights]
    except RuntimeError:  # one is an inference tensor, which has none
        return []


register_offer("encoder_layers", Backend.CPU, _supports_inference, _accepts_inference, _run_inference)


# --------------------------------------------------------------------------------------------------------------------
# encoder_layer, for training: under autocast products and attention run in its dtype, the residual stream stays in x's


class _EncoderLayer(torch.autograd.Function):
    """Autograd around the registered forward and backward of one layer."""

    @staticmethod
    def forward(ctx, x, cu_seqlens, philox, dropouts, eps, num_heads, activation, dtype, *parameters):
        weights, biases, norms = parameters[:6], parameters[6:12], parameters[12:]
        out, *kept = torch.ops.fastbert.encoder_layer_fwd_cpu(
            x, cu_seqlens, weights, biases, norms, philox, dropouts, eps, num_heads, activation, dtype
        )
        ctx.save_for_backward(x, cu_seqlens, philox, *weights, *norms, *kept)
        ctx.options = (dropouts, activation)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        x, cu_seqlens, philox, *saved = ctx.saved_tensors
        weights, norms, kept = saved[:6], saved[6:10], saved[10:]
        needs_dx = ctx.needs_input_grad[0]
        dx, *gradients = torch.ops.fastbert.encoder_layer_bwd_cpu(
            dout, x, cu_seqlens, weights, norms, kept, philox, *ctx.options, needs_dx
        )
        return dx if needs_dx else None, None, None, None, None, None, None, None, *gradients


def _supports_training(x: torch.Tensor) -> str | None:
    if not torch.is_grad_enabled():
        return "it is for training: gradients are off"
    if compute_dtype(x) not in (torch.float32, torch.bfloat16):
        return f"autocast to {compute_dtype(x)}"
    return _supports(x)


def _accepts_training(x: torch.Tensor, operands: LayerOperands) -> str | None:
    parameters = (*operands.weights, *operands.biases, *operands.norms)
    if any(p is None or not p.requires_grad for p in parameters):
        return "it is for training all of a layer: a weight takes no gradient, or is not there"
    return _accepts(x, operands)


def _run_training(x: torch.Tensor, operands: LayerOperands, cu_seqlens: torch.Tensor) -> torch.Tensor:
    check_devices("encoder_layer", x=x, cu_seqlens=cu_seqlens)
    cu_seqlens = int32_offsets("encoder_layer", cu_seqlens)
    weights, biases, _, _, norms, eps, num_heads, activation, dropouts = operands
    philox = torch.randint(2**62, (3, 2), dtype=torch.int64) if any(dropouts) else None
    return _EncoderLayer.apply(
        x, cu_seqlens, philox, dropouts, tuple(eps), num_heads, activation, compute_dtype(x), *weights, *biases, *norms
    )


register_offer("encoder_layer", Backend.CPU, _supports_training, _accepts_training, _run_training)
