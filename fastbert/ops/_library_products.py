"""The schemas of products and of whole layers: _library.py's second page."""

from __future__ import annotations

import torch

from fastbert.ops._library import define, define_triton

# --------------------------------------------------------------------------------------------------------------------
# linear and feed_forward on the CPU
#
#   out_i, (total_tokens, out_features_i) in `dtype`: activation(x weight_i^T + bias_i), for every weight of the list
#
# x is fp32 or bf16; weights are fp32, bf16, or int8 with weight_scales fp32 (out_features,). An input scale is read for
# int8 weights only: 0 quantises each row of x by its own largest value. The kernels pack a weight on its first use and
# keep the copy until the weight changes or dies. With return_pre each out is followed by its value before the
# activation, which backward needs. feed_forward's input_scales are those of its two products, its `pre` has zero rows
# unless return_pre. Gradients come in the dtypes of x and of the weights, a bias's in its weight's; those that are not
# needed are empty.

_LINEAR = (
    "(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor?[] weight_scales, float[] input_scales, str activation,"
    " ScalarType dtype, bool return_pre) -> Tensor[]"
)
_LINEAR_BWD = (
    "(Tensor[] douts, Tensor x, Tensor[] weights, Tensor[] pres, str activation, bool needs_dx, bool needs_dweight,"
    " bool needs_dbias) -> (Tensor dx, Tensor[] dweights, Tensor[] dbiases)"
)
_FEED_FORWARD = (
    "(Tensor x, Tensor up_weight, Tensor? up_bias, Tensor down_weight, Tensor? up_scale, Tensor? down_scale,"
    " float[] input_scales, str activation, ScalarType dtype, bool return_pre) -> (Tensor out, Tensor pre)"
)
_FEED_FORWARD_BWD = (
    "(Tensor dout, Tensor x, Tensor pre, Tensor up_weight, Tensor down_weight, str activation, bool needs_dx,"
    " bool needs_dweight, bool needs_dbias) -> (Tensor dx, Tensor dup_weight, Tensor dup_bias, Tensor ddown_weight)"
)


def _linear_fake(x, weights, biases, weight_scales, input_scales, activation, dtype, return_pre):
    copies = 2 if return_pre else 1
    return [x.new_empty(x.shape[0], w.shape[0], dtype=dtype) for w in weights for _ in range(copies)]


def _linear_bwd_fake(douts, x, weights, pres, activation, needs_dx, needs_dweight, needs_dbias):
    dweights = [torch.empty_like(w) for w in weights] if needs_dweight else []
    dbiases = [w.new_empty(w.shape[0]) for w in weights] if needs_dbias else []
    return x.new_empty(x.shape[0] if needs_dx else 0, x.shape[1]), dweights, dbiases


def _feed_forward_fake(x, up_weight, up_bias, down_weight, up_scale, down_scale, scales, activation, dtype, return_pre):
    pre = x.new_empty(x.shape[0] if return_pre else 0, up_weight.shape[0], dtype=dtype)
    return x.new_empty(x.shape[0], down_weight.shape[0], dtype=dtype), pre


def _feed_forward_bwd_fake(dout, x, pre, up_weight, down_weight, activation, needs_dx, needs_dweight, needs_dbias):
    dup, ddown = (w.new_empty(w.shape[0] if needs_dweight else 0, w.shape[1]) for w in (up_weight, down_weight))
    dup_bias = up_weight.new_empty(up_weight.shape[0] if needs_dbias else 0)
    return x.new_empty(x.shape[0] if needs_dx else 0, x.shape[1]), dup, dup_bias, ddown


for _op, _schema, _fake in (
    ("linear_cpu", _LINEAR, _linear_fake),
    ("linear_bwd_cpu", _LINEAR_BWD, _linear_bwd_fake),
    ("feed_forward_cpu", _FEED_FORWARD, _feed_forward_fake),
    ("feed_forward_bwd_cpu", _FEED_FORWARD_BWD, _feed_forward_bwd_fake),
):
    define(_op, _schema, _fake)


# feed_forward on GPUs: all operands in one dtype, which is the results', too
#
# gated: up_weight, up_bias and pre are twice as wide as the second product's operand, which is
# activation(first half of pre) * second half.

_FEED_FORWARD_GPU = (
    "(Tensor x, Tensor up_weight, Tensor? up_bias, Tensor down_weight, str activation, bool gated, bool return_pre)"
    " -> (Tensor out, Tensor pre)"
)
_FEED_FORWARD_BWD_GPU = _FEED_FORWARD_BWD.replace("str activation,", "str activation, bool gated,")


def _feed_forward_gpu_fake(x, up_weight, up_bias, down_weight, activation, gated, return_pre):
    return _feed_forward_fake(x, up_weight, up_bias, down_weight, None, None, None, activation, x.dtype, return_pre)


def _feed_forward_bwd_gpu_fake(dout, x, pre, up_weight, down_weight, activation, gated, *needs):
    return _feed_forward_bwd_fake(dout, x, pre, up_weight, down_weight, activation, *needs)


define("feed_forward_cuda", _FEED_FORWARD_GPU, _feed_forward_gpu_fake)
define("feed_forward_bwd_cuda", _FEED_FORWARD_BWD_GPU, _feed_forward_bwd_gpu_fake)
define_triton("feed_forward", _FEED_FORWARD_GPU, "feed_forward", _feed_forward_gpu_fake)
define_triton("feed_forward_bwd", _FEED_FORWARD_BWD_GPU, "feed_forward", _feed_forward_bwd_gpu_fake)


# --------------------------------------------------------------------------------------------------------------------
# cross_entropy in Triton: the loss over labelled tokens and, unless needs_grad is False, its gradients for a dloss of 1


def _cross_entropy_fake(hidden_states, weight, bias, labels, ignore_index, label_smoothing, z_loss, needs_grad):
    loss = hidden_states.new_empty((), dtype=torch.float32)
    empty = weight.new_empty(0)
    if not needs_grad:
        return loss, hidden_states.new_empty(0), empty, weight.new_empty(0)
    dbias = empty if bias is None else torch.empty_like(bias)
    return loss, torch.empty_like(hidden_states), torch.empty_like(weight), dbias


define_triton(
    "cross_entropy",
    "(Tensor hidden_states, Tensor weight, Tensor? bias, Tensor labels, int? ignore_index, float label_smoothing,"
    " float z_loss, bool needs_grad) -> (Tensor loss, Tensor dhidden_states, Tensor dweight, Tensor dbias)",
    "cross_entropy",
    _cross_entropy_fake,
)


# --------------------------------------------------------------------------------------------------------------------
# encoder_layers on the CPU: post-norm layers for inference, from the kernels above
#
# weights, biases, weight_scales, input_scales: query, key, value, attention output, up, down of every layer; norms:
# weight and bias of the attention's LayerNorm, then of the feed-forward's, of every layer.

define(
    "encoder_layers_cpu",
    "(Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor?[] biases, Tensor?[] weight_scales, float[] input_scales,"
    " Tensor[] norms, float[] eps, int num_heads, str activation) -> Tensor",
    lambda x, *others: torch.empty_like(x),
)


# --------------------------------------------------------------------------------------------------------------------
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
