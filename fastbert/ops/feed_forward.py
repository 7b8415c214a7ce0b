"""The feed-forward half of a layer: GEMM + bias + activation, then a GEMM (Vaswani et al. 2017, section 3.3)."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops._checks import check_devices
from fastbert.ops._library import needs_grad, triton_objection
from fastbert.ops.linear import check_gradient, compute_dtype, supports_gemm_cpu


def _supports_triton(x, *weights) -> str | None:
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, in_features)"
    for t in weights:
        if t is not None and (t.device != x.device or not t.is_floating_point()):
            return f"a weight is {t.dtype} on {t.device}, x is on {x.device}"
        if t is not None and t.dtype is not x.dtype and not torch.is_autocast_enabled(x.device.type):
            return f"a weight is {t.dtype}, x is {x.dtype}"
    return triton_objection(x)


register("feed_forward", Backend.CPU, supports_gemm_cpu)
register("feed_forward", Backend.TRITON, _supports_triton)


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """Elementwise: "gelu" (exact, by erf), "gelu_tanh" (Hendrycks & Gimpel 2016, section 2), "relu", "tanh", "silu"."""
    return _torch.activation(x, name)


class _FeedForward(torch.autograd.Function):
    """Autograd around the registered forward and backward. What is kept between them is x and the first product: its
    activation is computed again."""

    @staticmethod
    def forward(ctx, x, up_weight, up_bias, down_weight, activation, dtype, backend):
        operands = (x, up_weight, up_bias, down_weight)
        if backend is Backend.CPU:
            out, pre = torch.ops.fastbert.feed_forward_cpu(*operands, None, None, (0.0, 0.0), activation, dtype, True)
            ctx.bwd = torch.ops.fastbert.feed_forward_bwd_cpu
        else:
            out, pre = torch.ops.fastbert.feed_forward_triton(*operands, activation, True)
            ctx.bwd = torch.ops.fastbert.feed_forward_bwd_triton
        ctx.save_for_backward(x, pre, up_weight, down_weight)
        ctx.activation = activation
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        x, pre, up_weight, down_weight = ctx.saved_tensors
        needs_dx, needs_dup, needs_dbias, needs_ddown = ctx.needs_input_grad[:4]
        dx, dup, dbias, ddown = ctx.bwd(
            dout, x, pre, up_weight, down_weight, ctx.activation, needs_dx, needs_dup or needs_ddown, needs_dbias
        )
        needed = zip((dx, dup, dbias, ddown), ctx.needs_input_grad, strict=False)
        return *(gradient if wanted else None for gradient, wanted in needed), None, None, None


def feed_forward(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    *,
    activation: str = "gelu",
    weight_scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    input_scales: tuple[float, float] = (0.0, 0.0),
    backend: str | None = None,
) -> torch.Tensor:
    """activation(x up_weight^T + up_bias) down_weight^T, without the second bias: add_layer_norm takes that one.

    x (total_tokens, hidden_size), up_weight (intermediate_size, hidden_size), down_weight (hidden_size,
    intermediate_size) -> (total_tokens, hidden_size). `weight_scales` and `input_scales` go with int8 weights, as in
    `linears`. Raises as `linears` does.
    """
    check_devices(
        "feed_forward", x=x, up_weight=up_weight, up_bias=up_bias, down_weight=down_weight,
        up_scale=weight_scales[0], down_scale=weight_scales[1],
    )  # fmt: skip
    chosen = select("feed_forward", backend, x, up_weight, up_bias, down_weight)
    check_gradient(x, weight_scales)
    if chosen is Backend.TORCH:
        inner = _torch.linear(x, up_weight, up_bias, weight_scales[0], input_scales[0], activation)
        return _torch.linear(inner, down_weight, None, weight_scales[1], input_scales[1], "none")
    dtype = compute_dtype(x)
    if chosen is Backend.TRITON:
        x, up_weight, down_weight = (t.to(dtype) for t in (x, up_weight, down_weight))
        up_bias = None if up_bias is None else up_bias.to(dtype)
    if needs_grad(x, up_weight, up_bias, down_weight):
        return _FeedForward.apply(x, up_weight, up_bias, down_weight, activation, dtype, chosen)
    if chosen is Backend.TRITON:
        return torch.ops.fastbert.feed_forward_triton(x, up_weight, up_bias, down_weight, activation, False)[0]
    return torch.ops.fastbert.feed_forward_cpu(
        x, up_weight, up_bias, down_weight, *weight_scales, input_scales, activation, dtype, False
    )[0]
