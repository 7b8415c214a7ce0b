"""Every registered op on one page: schema, fake kernel, lazily imported implementation, and what it supports.

The backend stands in the op's name, so the choice is visible in profiles and compiled graphs, and each name has one
kernel per dispatch key (DESIGN 4.4). Autograd lives outside, in the op's own file. The C++ extension registers its
kernels when it is loaded; Triton kernels are imported by the functions below on their first call.
"""

from __future__ import annotations

import torch

# --------------------------------------------------------------------------------------------------------------------
# Availability: asked once, in `supports`, never at import.

_extension_error: str | None = "not asked yet"


def extension_error() -> str | None:
    """None when the C++ extension is loaded, else why it is not."""
    global _extension_error
    if _extension_error == "not asked yet":
        try:
            import fastbert._C  # noqa: F401  (loading it registers its kernels)

            _extension_error = None
        except ImportError as error:
            _extension_error = f"the C++ extension is not built ({error})"
    return _extension_error


_triton_error: str | None = "not asked yet"


def triton_error() -> str | None:
    """None when Triton can be imported, else why not."""
    global _triton_error
    if _triton_error == "not asked yet":
        try:
            import triton  # noqa: F401

            _triton_error = None
        except ImportError as error:
            _triton_error = f"Triton is not installed ({error})"
    return _triton_error


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo (0.7 s): a trace calls the two
# functions instead of tracing their imports, also when it is the process's first call.
extension_error._dynamo_marked_constant = True  # type: ignore[attr-defined]
triton_error._dynamo_marked_constant = True  # type: ignore[attr-defined]


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd must record this call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


# --------------------------------------------------------------------------------------------------------------------
# add_layer_norm
#
#   summed, (total_tokens, hidden_size): dropout(x + x_bias) + residual
#   out, (total_tokens, hidden_size): (summed - mean) * rstd * weight + bias; mean, rstd: fp32 (total_tokens,)
#
# The sum is rounded to x's dtype before it is normalised: backward differentiates exactly what forward computed.
# philox is int64 (2,) = [seed, offset] on x's device, read only when dropout_p > 0. `summed` has zero rows unless
# return_sum; mean and rstd are empty unless return_stats. In backward dx has zero rows unless dropout_p > 0: without
# dropout it equals dsummed. dx_bias is fp32-accumulated over tokens and empty unless has_x_bias.

_ADD_LAYER_NORM_FWD = (
    "(Tensor x, Tensor? x_bias, Tensor? residual, Tensor weight, Tensor? bias, Tensor? philox, float dropout_p,"
    " float eps, bool return_sum, bool return_stats) -> (Tensor out, Tensor summed, Tensor mean, Tensor rstd)"
)
_ADD_LAYER_NORM_BWD = (
    "(Tensor dout, Tensor? dsum, Tensor summed, Tensor mean, Tensor rstd, Tensor weight, Tensor? philox,"
    " float dropout_p, bool has_x_bias) -> (Tensor dx, Tensor dsummed, Tensor dx_bias, Tensor dweight, Tensor dbias)"
)


def _add_layer_norm_fwd_fake(x, x_bias, residual, weight, bias, philox, dropout_p, eps, return_sum, return_stats):
    tokens, hidden_size = x.shape
    stats = tokens if return_stats else 0
    summed = x.new_empty(tokens if return_sum else 0, hidden_size)
    mean, rstd = (x.new_empty(stats, dtype=torch.float32) for _ in range(2))
    return x.new_empty(tokens, hidden_size), summed, mean, rstd


def _add_layer_norm_bwd_fake(dout, dsum, summed, mean, rstd, weight, philox, dropout_p, has_x_bias):
    tokens, hidden_size = dout.shape
    dx = dout.new_empty(tokens if dropout_p > 0 else 0, hidden_size)
    dx_bias = weight.new_empty(hidden_size if has_x_bias else 0)
    return dx, dout.new_empty(tokens, hidden_size), dx_bias, torch.empty_like(weight), torch.empty_like(weight)


def _add_layer_norm_fwd_triton(*args):
    from fastbert.kernels.layer_norm import add_layer_norm_fwd

    return add_layer_norm_fwd(*args)


def _add_layer_norm_bwd_triton(*args):
    from fastbert.kernels.layer_norm import add_layer_norm_bwd

    return add_layer_norm_bwd(*args)


for _name in ("cpu", "triton"):
    torch.library.define(f"fastbert::add_layer_norm_fwd_{_name}", _ADD_LAYER_NORM_FWD)
    torch.library.define(f"fastbert::add_layer_norm_bwd_{_name}", _ADD_LAYER_NORM_BWD)
    torch.library.register_fake(f"fastbert::add_layer_norm_fwd_{_name}", _add_layer_norm_fwd_fake)
    torch.library.register_fake(f"fastbert::add_layer_norm_bwd_{_name}", _add_layer_norm_bwd_fake)
# The CPU key of the Triton ops exists for TRITON_INTERPRET=1, which is how they are tested without a GPU.
for _key in ("CUDA", "CPU"):
    torch.library.impl("fastbert::add_layer_norm_fwd_triton", _key, _add_layer_norm_fwd_triton)
    torch.library.impl("fastbert::add_layer_norm_bwd_triton", _key, _add_layer_norm_bwd_triton)


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
    torch.library.define(f"fastbert::{_op}", _schema)
    torch.library.register_fake(f"fastbert::{_op}", _fake)


# --------------------------------------------------------------------------------------------------------------------
# embed_layer_norm on the CPU
#
#   out, (total_tokens, width): word[input_ids] + token_type[token_type_ids] + position[position_ids]
#
# rounded once, and its LayerNorm where weight is given (inference; autograd has add_layer_norm for that). Without
# input_ids `word` holds the tokens' own rows; without token_type_ids every token is of type 0.
# Backward gives one table's gradient, dense; row padding_idx takes none (-1: every row does).

_EMBED_FWD = (
    "(Tensor? input_ids, Tensor position_ids, Tensor? token_type_ids, Tensor word, Tensor position,"
    " Tensor? token_type, Tensor? weight, Tensor? bias, float eps) -> Tensor"
)
_EMBED_BWD = "(Tensor dout, Tensor ids, Tensor table, int padding_idx) -> Tensor"


def _embed_fwd_fake(input_ids, position_ids, token_type_ids, word, position, token_type, weight, bias, eps):
    return position.new_empty(position_ids.shape[0], position.shape[1])


def _embed_bwd_fake(dout, ids, table, padding_idx):
    return torch.empty_like(table)


torch.library.define("fastbert::embed_fwd_cpu", _EMBED_FWD)
torch.library.register_fake("fastbert::embed_fwd_cpu", _embed_fwd_fake)
torch.library.define("fastbert::embed_bwd_cpu", _EMBED_BWD)
torch.library.register_fake("fastbert::embed_bwd_cpu", _embed_bwd_fake)


# --------------------------------------------------------------------------------------------------------------------
# dropout on the CPU: x (..., width) by the mask of philox, which add_layer_norm would have for the same rows; backward
# is the same op over dout

torch.library.define("fastbert::dropout_cpu", "(Tensor x, Tensor philox, float dropout_p) -> Tensor")
torch.library.register_fake(
    "fastbert::dropout_cpu", lambda x, philox, dropout_p: torch.empty_like(x, memory_format=torch.contiguous_format)
)


# --------------------------------------------------------------------------------------------------------------------
# attention
#
#   out, (total_tokens, num_heads, head_dim): dropout(softmax(q k^T * softmax_scale)) v within each sequence
#   softmax_stats, fp32 (2, num_heads, total_tokens): each query's top q k^T and its sum of
#     exp(softmax_scale * (q k^T - top)); two numbers, for their log-sum-exp in fp32 loses digits where scores are large
#
# philox as above; softmax_stats is (0, num_heads, total_tokens) unless return_stats. Results are contiguous whatever
# the strides of q, k and v, and zeros in slack rows.

_ATTENTION_FWD = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? philox, float softmax_scale, float dropout_p,"
    " bool return_stats) -> (Tensor out, Tensor softmax_stats)"
)
_ATTENTION_BWD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_stats, Tensor cu_seqlens, Tensor? philox,"
    " float softmax_scale, float dropout_p) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def _attention_fwd_fake(q, k, v, cu_seqlens, philox, softmax_scale, dropout_p, return_stats):
    tokens, num_heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty(2 if return_stats else 0, num_heads, tokens, dtype=torch.float32)


def _attention_bwd_fake(dout, q, k, v, out, softmax_stats, cu_seqlens, philox, softmax_scale, dropout_p):
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


torch.library.define("fastbert::attention_fwd_cpu", _ATTENTION_FWD)
torch.library.define("fastbert::attention_bwd_cpu", _ATTENTION_BWD)
torch.library.register_fake("fastbert::attention_fwd_cpu", _attention_fwd_fake)
torch.library.register_fake("fastbert::attention_bwd_cpu", _attention_bwd_fake)


# --------------------------------------------------------------------------------------------------------------------
# encoder_layers on the CPU: post-norm layers for inference, from the kernels above
#
# weights, biases, weight_scales, input_scales: query, key, value, attention output, up, down of every layer; norms:
# weight and bias of the attention's LayerNorm, then of the feed-forward's, of every layer.

torch.library.define(
    "fastbert::encoder_layers_cpu",
    "(Tensor x, Tensor cu_seqlens, Tensor[] weights, Tensor?[] biases, Tensor?[] weight_scales, float[] input_scales,"
    " Tensor[] norms, float[] eps, int num_heads, str activation) -> Tensor",
)
torch.library.register_fake("fastbert::encoder_layers_cpu", lambda x, *others: torch.empty_like(x))


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


torch.library.define("fastbert::encoder_layer_fwd_cpu", _ENCODER_LAYER_FWD)
torch.library.define("fastbert::encoder_layer_bwd_cpu", _ENCODER_LAYER_BWD)
torch.library.register_fake("fastbert::encoder_layer_fwd_cpu", _encoder_layer_fwd_fake)
torch.library.register_fake("fastbert::encoder_layer_bwd_cpu", _encoder_layer_bwd_fake)
