"""The feed-forward half of a layer: GEMM + bias + activation, then a GEMM (Vaswani et al. 2017, section 3.3), and the
gated one, GeGLU with its relatives (Shazeer 2020, section 2)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops._common import (
    Differentiable,
    Rule,
    check_devices,
    compute_dtype,
    cuda_objection,
    define,
    define_triton,
    needs_grad,
    triton_objection,
)
from fastbert.ops._linear_torch import ACTIVATIONS_IN_PLACE, activation_torch, linear_torch
from fastbert.ops.linear import check_gradient, supports_gemm_cpu

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")

# out: (total_tokens, hidden_size) in `dtype`; pre: the first product, which backward needs, no rows unless return_pre.
# The CPU's operands are as those of `linears`; input_scales are those of the two products. On GPUs all operands have
# one dtype, which is the results', too. gated: up_weight, up_bias and pre are twice as wide as the second product's
# operand, which is activation(first half of pre) * second half. Gradients that are not needed are empty.

_FWD_CPU_SCHEMA = (
    "(Tensor x, Tensor up_weight, Tensor? up_bias, Tensor down_weight, Tensor? up_scale, Tensor? down_scale,"
    " float[] input_scales, str activation, ScalarType dtype, bool return_pre) -> (Tensor out, Tensor pre)"
)
_BWD_CPU_SCHEMA = (
    "(Tensor dout, Tensor x, Tensor pre, Tensor up_weight, Tensor down_weight, str activation, bool needs_dx,"
    " bool needs_dweight, bool needs_dbias) -> (Tensor dx, Tensor dup_weight, Tensor dup_bias, Tensor ddown_weight)"
)
_FWD_GPU_SCHEMA = (
    "(Tensor x, Tensor up_weight, Tensor? up_bias, Tensor down_weight, str activation, bool gated, bool return_pre)"
    " -> (Tensor out, Tensor pre)"
)
_BWD_GPU_SCHEMA = _BWD_CPU_SCHEMA.replace("str activation,", "str activation, bool gated,")


def _fwd_cpu_fake(x, up_weight, up_bias, down_weight, up_scale, down_scale, scales, activation, dtype, return_pre):
    pre = x.new_empty(x.shape[0] if return_pre else 0, up_weight.shape[0], dtype=dtype)
    return x.new_empty(x.shape[0], down_weight.shape[0], dtype=dtype), pre


def _bwd_cpu_fake(dout, x, pre, up_weight, down_weight, activation, needs_dx, needs_dweight, needs_dbias):
    dup, ddown = (w.new_empty(w.shape[0] if needs_dweight else 0, w.shape[1]) for w in (up_weight, down_weight))
    dup_bias = up_weight.new_empty(up_weight.shape[0] if needs_dbias else 0)
    return x.new_empty(x.shape[0] if needs_dx else 0, x.shape[1]), dup, dup_bias, ddown


def _fwd_gpu_fake(x, up_weight, up_bias, down_weight, activation, gated, return_pre):
    return _fwd_cpu_fake(x, up_weight, up_bias, down_weight, None, None, None, activation, x.dtype, return_pre)


def _bwd_gpu_fake(dout, x, pre, up_weight, down_weight, activation, gated, *needs):
    return _bwd_cpu_fake(dout, x, pre, up_weight, down_weight, activation, *needs)


_FWD = {
    Backend.CPU: define("feed_forward_cpu", _FWD_CPU_SCHEMA, _fwd_cpu_fake),
    Backend.TRITON: define_triton("feed_forward", _FWD_GPU_SCHEMA, "feed_forward", _fwd_gpu_fake),
    Backend.CUDA: define("feed_forward_cuda", _FWD_GPU_SCHEMA, _fwd_gpu_fake),
}
_BWD = {
    Backend.CPU: define("feed_forward_bwd_cpu", _BWD_CPU_SCHEMA, _bwd_cpu_fake),
    Backend.TRITON: define_triton("feed_forward_bwd", _BWD_GPU_SCHEMA, "feed_forward", _bwd_gpu_fake),
    Backend.CUDA: define("feed_forward_bwd_cuda", _BWD_GPU_SCHEMA, _bwd_gpu_fake),
}


class FeedForwardOptions(NamedTuple):
    activation: str
    gated: bool
    input_scales: tuple[float, float]
    dtype: torch.dtype


def _feed_forward_torch(x, up_weight, up_bias, down_weight, weight_scales, options):
    (up_scale, down_scale), (up_input, down_input) = weight_scales, options.input_scales
    inner = linear_torch(x, up_weight, up_bias, up_scale, up_input, "none" if options.gated else options.activation)
    if options.gated:
        first, second = inner.chunk(2, -1)
        if inner.requires_grad:
            inner = activation_torch(first, options.activation) * second
        else:
            inner = ACTIVATIONS_IN_PLACE[options.activation](first).mul_(second)
    return linear_torch(inner, down_weight, None, down_scale, down_input, "none")


def _supports_cpu(x, up_weight, up_bias, down_weight, options) -> str | None:
    if options.gated:
        return "it has no gated feed-forward"
    return supports_gemm_cpu(x, up_weight, up_bias, down_weight)


def _supports_gpu(x, *weights) -> str | None:
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, in_features)"
    for t in weights:
        if t is not None and not t.is_floating_point():
            return f"a weight is {t.dtype}"
        if t is not None and t.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
            return f"a weight is {t.dtype}, x is {x.dtype}"
    return None


def _supports_triton(x, up_weight, up_bias, down_weight, options) -> str | None:
    return _supports_gpu(x, up_weight, up_bias, down_weight) or triton_objection(x)


def _supports_cuda(x, up_weight, up_bias, down_weight, options) -> str | None:
    # Any intermediate_size: rows that 16-byte loads do not take go element by element.
    return _supports_gpu(x, up_weight, up_bias, down_weight) or cuda_objection(x, max_columns=None)


def _probe(x: torch.Tensor, vector: torch.Tensor) -> tuple:
    return x, x, None, x.t(), FeedForwardOptions("gelu", False, (0.0, 0.0), x.dtype)


# On a GPU both backends are cuBLAS's products with a kernel between them; `auto` takes CUDA's where it is built.
# Triton's product with an epilogue is nobody's before `make gpu` has shown where it wins (kernels/feed_forward.py).
register("feed_forward", Backend.CPU, _supports_cpu, _probe)
register("feed_forward", Backend.TRITON, _supports_triton)
register("feed_forward", Backend.CUDA, _supports_cuda)


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """Elementwise: "gelu" (exact, by erf), "gelu_tanh" (Hendrycks & Gimpel 2016, section 2), "relu", "tanh", "silu".

    NaN stays NaN. In the products' epilogues (`linears`, `feed_forward`) infinities give the functions' limits, as in
    gelu(-inf) = 0; here, and in the torch backend, they give what PyTorch makes of them, NaN for gelu and silu of -inf.
    """
    return activation_torch(x, name)


def _launch(backend, options, operands, weight_scales, return_pre):
    """Returns out and pre."""
    activation, gated, input_scales, dtype = options
    if backend is Backend.CPU:
        return _FWD[backend](*operands, *weight_scales, input_scales, activation, dtype, return_pre)
    return _FWD[backend](*operands, activation, gated, return_pre)


def _forward(backend, options, *operands):
    """What is kept is x and the first product: its activation is computed again."""
    x, up_weight, _, down_weight = operands
    out, pre = _launch(backend, options, operands, (None, None), True)
    return out, (x, pre, up_weight, down_weight)


def _backward(backend, options, needed, saved, dout):
    needs_dx, needs_dup, needs_dbias, needs_ddown = needed
    form = (options.activation,) if backend is Backend.CPU else (options.activation, options.gated)
    return _BWD[backend](dout, *saved, *form, needs_dx, needs_dup or needs_ddown, needs_dbias)


_RULE = Rule(_forward, _backward)


def _check(x, up_weight, up_bias, down_weight, activation: str, gated: bool) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; valid names: {', '.join(ACTIVATIONS)}")
    up_size = (2 if gated else 1) * down_weight.shape[1]
    if tuple(up_weight.shape) != (up_size, x.shape[-1]):
        whose = f"x {tuple(x.shape)} and down_weight {tuple(down_weight.shape)}{', gated' if gated else ''}"
        raise ValueError(f"up_weight is {tuple(up_weight.shape)}, {whose} need {(up_size, x.shape[-1])}")
    if up_bias is not None and tuple(up_bias.shape) != (up_size,):
        raise ValueError(f"up_bias is {tuple(up_bias.shape)}, up_weight needs {(up_size,)}")


def feed_forward(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    *,
    activation: str = "gelu",
    gated: bool = False,
    weight_scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    input_scales: tuple[float, float] = (0.0, 0.0),
    backend: str | None = None,
) -> torch.Tensor:
    """inner down_weight^T, without the second bias: add_layer_norm takes that one. With pre = x up_weight^T + up_bias,
    inner is activation(pre), or, gated, activation(first half of pre's columns) * second half: GeGLU where the
    activation is "gelu", SwiGLU where it is "silu", ReGLU where it is "relu".

    Args:
        x: (total_tokens, hidden_size).
        up_weight: (intermediate_size, hidden_size), or, gated, (2 * intermediate_size, hidden_size).
        up_bias: as many as up_weight has rows, or None.
        down_weight: (hidden_size, intermediate_size).
        activation: a name that the op `activation` knows.
        weight_scales, input_scales: go with int8 weights, as in `linears`.
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        (total_tokens, hidden_size), in x's dtype, or autocast's.

    Raises:
        ValueError: an unknown activation, or shapes that do not fit.
        BackendError: the backend that was asked for cannot serve the call.
        RuntimeError: a gradient is wanted through an int8 weight.
    """
    check_devices(
        "feed_forward", x=x, up_weight=up_weight, up_bias=up_bias, down_weight=down_weight,
        up_scale=weight_scales[0], down_scale=weight_scales[1],
    )  # fmt: skip
    _check(x, up_weight, up_bias, down_weight, activation, gated)
    options = FeedForwardOptions(activation, gated, input_scales, compute_dtype(x))
    chosen = select("feed_forward", backend, x, up_weight, up_bias, down_weight, options)
    check_gradient(x, weight_scales)
    if chosen is Backend.TORCH:
        return _feed_forward_torch(x, up_weight, up_bias, down_weight, weight_scales, options)
    operands: tuple[torch.Tensor | None, ...] = (x, up_weight, up_bias, down_weight)
    if chosen is not Backend.CPU:
        operands = tuple(None if t is None else t.to(options.dtype) for t in operands)
    if needs_grad(*operands):
        return Differentiable.apply(_RULE, chosen, options, *operands)
    return _launch(chosen, options, operands, weight_scales, False)[0]
