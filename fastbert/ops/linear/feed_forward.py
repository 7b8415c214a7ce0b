"""The feed-forward sublayer: GEMM + bias + activation, then a GEMM (Vaswani et al. 2017, section 3.3), and the
gated one, GeGLU with its relatives (Shazeer 2020, section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops._common import (
    Differentiable,
    Rule,
    check_devices,
    compute_dtype,
    cuda_unsupported,
    define,
    define_triton,
    for_kernels,
    needs_grad,
    triton_unsupported,
)
from fastbert.ops.dropout import dropout_torch
from fastbert.ops.linear.linear import check_gradient, supports_gemm_cpu
from fastbert.ops.linear.torch_backend import ACTIVATIONS_IN_PLACE, activation_torch, linear_torch, may_write_over
from fastbert.ops.seeds import draw_seeds

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")

# out: (total_tokens, hidden_size) in `dtype`; pre: the first product, which backward needs, no rows unless return_pre.
# Gated, pre is gate and up beside each other, of gate_weight and up_weight, or of up_weight, which then holds both.
# Operands on the CPU are as those of `linears`, input_scales those of gate (if there is one), up and down; on GPUs all
# have one dtype, which is the results', too. philox is int64 (2,) = [seed, offset] on x's device, read only when
# dropout_p > 0. Gradients that are not needed are empty, and so are lists of them; lists are in the order of pre.

_FWD_CPU_SCHEMA = (
    "(Tensor x, Tensor up_weight, Tensor? up_bias, Tensor down_weight, Tensor? gate_weight, Tensor? gate_bias,"
    " Tensor? up_scale, Tensor? down_scale, Tensor? gate_scale, Tensor?[] input_scales, Tensor? philox,"
    " float dropout_p, str activation, bool gated, ScalarType dtype, bool return_pre) -> (Tensor out, Tensor pre)"
)
_BWD_CPU_SCHEMA = (
    "(Tensor dout, Tensor x, Tensor pre, Tensor up_weight, Tensor down_weight, Tensor? gate_weight, Tensor? philox,"
    " float dropout_p, str activation, bool gated, bool needs_dx, bool needs_dweight, bool needs_dbias)"
    " -> (Tensor dx, Tensor[] dups, Tensor[] dup_biases, Tensor ddown_weight)"
)
_FWD_GPU_SCHEMA = (
    "(Tensor x, Tensor up_weight, Tensor? up_bias, Tensor down_weight, Tensor? gate_weight, Tensor? gate_bias,"
    " str activation, bool gated, bool return_pre) -> (Tensor out, Tensor pre)"
)
_BWD_GPU_SCHEMA = _BWD_CPU_SCHEMA.replace(" Tensor? philox, float dropout_p,", "")


def _fwd_cpu_fake(
    x,
    up_weight,
    up_bias,
    down_weight,
    gate_weight,
    gate_bias,
    up_scale,
    down_scale,
    gate_scale,
    input_scales,
    philox,
    dropout_p,
    activation,
    gated,
    dtype,
    return_pre,
):
    width = up_weight.shape[0] + (0 if gate_weight is None else gate_weight.shape[0])
    pre = x.new_empty(x.shape[0] if return_pre else 0, width, dtype=dtype)
    return x.new_empty(x.shape[0], down_weight.shape[0], dtype=dtype), pre


def _bwd_fake(dout, x, pre, up_weight, down_weight, gate_weight, *rest):
    needs_dx, needs_dweight, needs_dbias = rest[-3:]
    ups = (up_weight,) if gate_weight is None else (gate_weight, up_weight)
    dups = [up.new_empty(up.shape) for up in ups] if needs_dweight else []
    dbiases = [up.new_empty(up.shape[0]) for up in ups] if needs_dbias else []
    ddown = down_weight.new_empty(down_weight.shape[0] if needs_dweight else 0, down_weight.shape[1])
    return x.new_empty(x.shape[0] if needs_dx else 0, x.shape[1]), dups, dbiases, ddown


def _fwd_gpu_fake(x, up_weight, up_bias, down_weight, gate_weight, gate_bias, activation, gated, return_pre):
    operands = (x, up_weight, up_bias, down_weight, gate_weight, gate_bias)
    return _fwd_cpu_fake(*operands, None, None, None, (), None, 0.0, activation, gated, x.dtype, return_pre)


_FWD = {
    Backend.CPU: define("feed_forward_cpu", _FWD_CPU_SCHEMA, _fwd_cpu_fake),
    Backend.TRITON: define_triton("feed_forward", _FWD_GPU_SCHEMA, "feed_forward", _fwd_gpu_fake),
    Backend.CUDA: define("feed_forward_cuda", _FWD_GPU_SCHEMA, _fwd_gpu_fake),
}
_BWD = {
    Backend.CPU: define("feed_forward_bwd_cpu", _BWD_CPU_SCHEMA, _bwd_fake),
    Backend.TRITON: define_triton("feed_forward_bwd", _BWD_GPU_SCHEMA, "feed_forward", _bwd_fake),
    Backend.CUDA: define("feed_forward_bwd_cuda", _BWD_GPU_SCHEMA, _bwd_fake),
}


class FeedForwardOptions(NamedTuple):
    activation: str
    gated: bool
    dropout_p: float
    input_scales: tuple[torch.Tensor | None, ...]
    dtype: torch.dtype


def _feed_forward_torch(x, up_weight, up_bias, down_weight, gate_weight, gate_bias, weight_scales, options):
    *_, up_scale, down_scale = weight_scales
    *_, up_input, down_input = options.input_scales
    name = "none" if options.gated else options.activation
    inner = linear_torch(x, up_weight, up_bias, up_scale, up_input, name)
    if options.gated:
        if gate_weight is None:
            gate, up = inner.chunk(2, -1)
        else:
            up = inner
            gate = linear_torch(x, gate_weight, gate_bias, weight_scales[0], options.input_scales[0], "none")
        if may_write_over(gate, up):
            inner = ACTIVATIONS_IN_PLACE[options.activation](gate).mul_(up)
        else:
            inner = activation_torch(gate, options.activation) * up
    inner = dropout_torch(inner, options.dropout_p)
    return linear_torch(inner, down_weight, None, down_scale, down_input, "none")


def _supports_cpu(x, up_weight, up_bias, down_weight, gate_weight, gate_bias, options) -> str | None:
    return supports_gemm_cpu(x, up_weight, up_bias, down_weight, gate_weight, gate_bias)


def _supports_gpu(x, up_weight, up_bias, down_weight, gate_weight, gate_bias, options) -> str | None:
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, in_features)"
    for t in (up_weight, up_bias, down_weight, gate_weight, gate_bias):
        if t is not None and not t.is_floating_point():
            return f"a weight is {t.dtype}"
        if t is not None and t.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
            return f"a weight is {t.dtype}, x is {x.dtype}"
    if options.dropout_p > 0:
        return "it has no dropout before the second product"
    return None


def _supports_triton(x, *operands) -> str | None:
    return _supports_gpu(x, *operands) or triton_unsupported(x)


def _supports_cuda(x, *operands) -> str | None:
    # Any intermediate_size: rows that 16-byte loads do not take go element by element.
    return _supports_gpu(x, *operands) or cuda_unsupported(x, max_columns=None)


def _probe(x: torch.Tensor, vector: torch.Tensor) -> tuple:
    return x, x, None, x.t(), None, None, FeedForwardOptions("gelu", False, 0.0, (None, None), x.dtype)


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


def _launch(backend, options, operands, weight_scales, philox, return_pre):
    """Returns out and pre."""
    activation, gated, dropout_p, input_scales, dtype = options
    if backend is not Backend.CPU:
        return _FWD[backend](*operands, activation, gated, return_pre)
    x, up_weight, up_bias, down_weight, gate_weight, gate_bias = operands
    up_weight, down_weight, gate_weight = for_kernels((up_weight, down_weight, gate_weight))
    operands = (x, up_weight, up_bias, down_weight, gate_weight, gate_bias)
    scales = (*weight_scales, input_scales)
    return _FWD[backend](*operands, *scales, philox, dropout_p, activation, gated, dtype, return_pre)


def _forward(backend, options, *operands):
    """What is kept is x and the first product: its activation is computed again."""
    x, up_weight, _, down_weight, gate_weight, _, philox = operands
    out, pre = _launch(backend, options, operands[:-1], (None, None, None), philox, True)
    return out, (x, pre, up_weight, down_weight, gate_weight, philox)


def _backward(backend, options, needed, saved, dout):
    needs_dx, needs_dup, needs_dup_bias, needs_ddown, needs_dgate, needs_dgate_bias, _ = needed
    needs = (needs_dx, needs_dup or needs_ddown or needs_dgate, needs_dup_bias or needs_dgate_bias)
    *saved, philox = saved
    dropout = (philox, options.dropout_p) if backend is Backend.CPU else ()
    dx, dups, dbiases, ddown = _BWD[backend](dout, *saved, *dropout, options.activation, options.gated, *needs)
    dgate, dup = (None, None, *dups)[-2:]
    dgate_bias, dup_bias = (None, None, *dbiases)[-2:]
    return dx, dup, dup_bias, ddown, dgate, dgate_bias, None


_RULE = Rule(_forward, _backward)


def _check(x, up_weight, up_bias, down_weight, gate_weight, gate_bias, activation: str, gated: bool) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; valid names: {', '.join(ACTIVATIONS)}")
    if not gated and (gate_weight is not None or gate_bias is not None):
        raise ValueError("gate_weight and gate_bias go with gated=True")
    if gate_weight is None and gate_bias is not None:
        raise ValueError("gate_bias goes with gate_weight; where one weight holds both products, so does up_bias")
    size = (2 if gated and gate_weight is None else 1) * down_weight.shape[1]
    _check_product("up", x, up_weight, up_bias, down_weight, size)
    if gate_weight is not None:
        _check_product("gate", x, gate_weight, gate_bias, down_weight, size)


def _check_product(name: str, x, weight, bias, down_weight, size: int) -> None:
    if tuple(weight.shape) != (size, x.shape[-1]):
        whose = f"x {tuple(x.shape)} and down_weight {tuple(down_weight.shape)}"
        gated = ", gated" if size != down_weight.shape[1] else ""
        raise ValueError(f"{name}_weight is {tuple(weight.shape)}, {whose}{gated} need {(size, x.shape[-1])}")
    if bias is not None and tuple(bias.shape) != (size,):
        raise ValueError(f"{name}_bias is {tuple(bias.shape)}, {name}_weight needs {(size,)}")


def feed_forward(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    *,
    activation: str = "gelu",
    gated: bool = False,
    gate_weight: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    weight_scales: Sequence[torch.Tensor | None] | None = None,
    input_scales: Sequence[torch.Tensor | None] | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """dropout(inner) down_weight^T, without the second bias: add_layer_norm takes that one.

    inner is activation(x up_weight^T + up_bias), or, gated, activation(gate) * up: GeGLU where the activation is
    "gelu", SwiGLU where it is "silu", ReGLU where it is "relu". Then gate = x gate_weight^T + gate_bias where these are
    given, and up is that of up_weight and up_bias; else these hold both, gate in their first half and up in the second.

    Args:
        x: (total_tokens, hidden_size).
        up_weight: (intermediate_size, hidden_size); where it holds both, (2 * intermediate_size, hidden_size).
        up_bias: as many as up_weight has rows, or None.
        down_weight: (hidden_size, intermediate_size).
        activation: a name that the op `activation` knows.
        gate_weight, gate_bias: (intermediate_size, hidden_size) and (intermediate_size,); gated only.
        dropout_p: with this probability an element of inner is zeroed; the others are divided by 1 - dropout_p.
        weight_scales, input_scales: go with int8 weights, as in `linears`: gate's if there is one, up's and down's.
        backend: None follows `use_backend`; a name forces that backend for this call.

    Returns:
        (total_tokens, hidden_size), in x's dtype, or autocast's.

    Raises:
        ValueError: an unknown activation, shapes that do not fit, or gate_weight without gated.
        BackendError: the backend that was asked for cannot serve the call.
        RuntimeError: a gradient is wanted through an int8 weight.
    """
    products = 2 if gate_weight is None else 3
    scales = (None,) * products if weight_scales is None else tuple(weight_scales)
    inputs = (None,) * products if input_scales is None else tuple(input_scales)
    if len(scales) != products or len(inputs) != products:
        counts = f"{len(scales)} and {len(inputs)} elements"
        raise ValueError(f"weight_scales and input_scales have {counts}, there are {products} weights")
    gate_scale, up_scale, down_scale = scales if products == 3 else (None, *scales)
    check_devices(
        "feed_forward",
        x=x,
        up_weight=up_weight,
        up_bias=up_bias,
        down_weight=down_weight,
        gate_weight=gate_weight,
        gate_bias=gate_bias,
        up_scale=up_scale,
        down_scale=down_scale,
        gate_scale=gate_scale,
        **{f"input_scale {i}": t for i, t in enumerate(inputs)},
    )
    weights = (up_weight, up_bias, down_weight, gate_weight, gate_bias)
    _check(x, *weights, activation, gated)
    options = FeedForwardOptions(activation, gated, dropout_p, inputs, compute_dtype(x))
    chosen = select("feed_forward", backend, x, *weights, options)
    check_gradient(x, scales)
    if chosen is Backend.TORCH:
        return _feed_forward_torch(x, *weights, scales, options)
    operands: tuple[torch.Tensor | None, ...] = (x, *weights)
    if chosen is not Backend.CPU:
        operands = tuple(None if t is None else t.to(options.dtype) for t in operands)
    philox = draw_seeds(x.device) if dropout_p > 0 else None
    if needs_grad(*operands):
        return Differentiable.apply(_RULE, chosen, options, *operands, philox)
    return _launch(chosen, options, operands, (up_scale, down_scale, gate_scale), philox, False)[0]
