"""The feed-forward half of a layer: GEMM + bias + activation, then a GEMM (Vaswani et al. 2017, section 3.3), and the
gated one, GeGLU with its relatives (Shazeer 2020, section 2)."""

from __future__ import annotations

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops import _torch
from fastbert.ops._checks import check_devices
from fastbert.ops._library import cuda_objection, needs_grad, triton_objection
from fastbert.ops.linear import check_gradient, compute_dtype, supports_gemm_cpu

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh")

_FWD = {
    Backend.TRITON: torch.ops.fastbert.feed_forward_triton,
    Backend.CUDA: torch.ops.fastbert.feed_forward_cuda,
}
_BWD = {
    Backend.TRITON: torch.ops.fastbert.feed_forward_bwd_triton,
    Backend.CUDA: torch.ops.fastbert.feed_forward_bwd_cuda,
}


def _supports_cpu(x, up_weight, up_bias, down_weight, gated) -> str | None:
    if gated:
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


def _supports_triton(x, up_weight, up_bias, down_weight, gated) -> str | None:
    return _supports_gpu(x, up_weight, up_bias, down_weight) or triton_objection(x)


def _supports_cuda(x, up_weight, up_bias, down_weight, gated) -> str | None:
    # Any intermediate_size: rows that 16-byte loads do not take go element by element.
    return _supports_gpu(x, up_weight, up_bias, down_weight) or cuda_objection(x, max_columns=None)


def _probe(x: torch.Tensor, vector: torch.Tensor) -> tuple:
    return x, x, None, x.t(), False


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
    return _torch.activation(x, name)


class _FeedForward(torch.autograd.Function):
    """Autograd around the registered forward and backward. What is kept between them is x and the first product: its
    activation is computed again."""

    @staticmethod
    def forward(ctx, x, up_weight, up_bias, down_weight, activation, gated, dtype, backend):
        operands = (x, up_weight, up_bias, down_weight)
        if backend is Backend.CPU:
            out, pre = torch.ops.fastbert.feed_forward_cpu(*operands, None, None, (0.0, 0.0), activation, dtype, True)
            ctx.bwd, ctx.options = torch.ops.fastbert.feed_forward_bwd_cpu, (activation,)
        else:
            out, pre = _FWD[backend](*operands, activation, gated, True)
            ctx.bwd, ctx.options = _BWD[backend], (activation, gated)
        ctx.save_for_backward(x, pre, up_weight, down_weight)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        x, pre, up_weight, down_weight = ctx.saved_tensors
        needs_dx, needs_dup, needs_dbias, needs_ddown = ctx.needs_input_grad[:4]
        dx, dup, dbias, ddown = ctx.bwd(
            dout, x, pre, up_weight, down_weight, *ctx.options, needs_dx, needs_dup or needs_ddown, needs_dbias
        )
        needed = zip((dx, dup, dbias, ddown), ctx.needs_input_grad, strict=False)
        return *(gradient if wanted else None for gradient, wanted in needed), None, None, None, None


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
    chosen = select("feed_forward", backend, x, up_weight, up_bias, down_weight, gated)
    check_gradient(x, weight_scales)
    if chosen is Backend.TORCH:
        return _torch.feed_forward(x, up_weight, up_bias, down_weight, weight_scales, input_scales, activation, gated)
    operands: tuple[torch.Tensor | None, ...] = (x, up_weight, up_bias, down_weight)
    dtype = compute_dtype(x)
    if chosen is not Backend.CPU:
        operands = tuple(None if t is None else t.to(dtype) for t in operands)
    if needs_grad(*operands):
        return _FeedForward.apply(*operands, activation, gated, dtype, chosen)
    if chosen is not Backend.CPU:
        return _FWD[chosen](*operands, activation, gated, False)[0]
    return torch.ops.fastbert.feed_forward_cpu(*operands, *weight_scales, input_scales, activation, dtype, False)[0]
