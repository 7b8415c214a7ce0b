"""What a layer on a GPU is made of, by backend: functions that launch and allocate, and nothing else.

Attention, its rotation and dropout are Triton's for both backends. CUDA has norms, of one dtype throughout, and
feed-forwards without dropout inside; where it has not, it does as the ops would, and takes Triton's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fastbert.backend import Backend


class LayerKernels(NamedTuple):
    """norm_fwd, norm_bwd: add_layer_norm's (ops/layer_norm.py). attention_fwd, attention_bwd, rotate (in place) and
    dropout are as in kernels/.

    feed_forward(h, up, up_bias, down, activation, gated, philox, dropout_p) -> (out, pre).
    feed_forward_bwd(dout, h, pre, up, down, activation, gated, philox, dropout_p, dup, ddown, dh, bias_dtype) ->
    (dh, dbias): fills dup and ddown, and adds its dh to the one that is given, in place; dbias is in bias_dtype, and
    None without it.
    """

    norm_fwd: Callable[..., Any]
    norm_bwd: Callable[..., Any]
    attention_fwd: Callable[..., Any]
    attention_bwd: Callable[..., Any]
    rotate: Callable[..., Any]
    dropout: Callable[..., Any]
    feed_forward: Callable[..., Any]
    feed_forward_bwd: Callable[..., Any]


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def project_back(dout: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor | None) -> torch.Tensor:
    """dout weight, added to dx inside of the product, and in its place."""
    return torch.mm(dout, weight) if dx is None else dx.addmm_(dout, weight)


@functools.cache
def layer_kernels(backend: Backend) -> LayerKernels:
    names = ("attention_bwd", "attention_fwd", "dropout", "feed_forward", "layer_norm", "rotary")
    attention_bwd, attention_fwd, dropout, feed_forward, layer_norm, rotary = (
        importlib.import_module(f"fastbert.kernels.{name}") for name in names
    )

    def feed_forward_fwd(h, up, up_bias, down, activation, gated, philox, dropout_p):
        pre = project(h, up, up_bias)
        inner = pre.new_empty(pre.shape[0], down.shape[1])
        feed_forward.activation_fwd(pre, inner, activation, gated)
        if dropout_p > 0:
            inner = dropout.dropout(inner, philox, dropout_p)
        return torch.mm(inner, down.t()), pre

    def feed_forward_bwd(
        dout, h, pre, up, down, activation, gated, philox, dropout_p, dup, ddown, dh, bias_dtype
    ):  # fmt: skip
        dinner = torch.mm(dout, down)
        if dropout_p > 0:
            dinner = dropout.dropout(dinner, philox, dropout_p)
        dpre, inner = (torch.empty_like(pre), dinner) if gated else (dinner, torch.empty_like(pre))
        has_bias = bias_dtype is not None
        shares = feed_forward.dbias_shares(pre) if has_bias else pre.new_empty(0, dtype=torch.float32)
        feed_forward.activation_bwd(dinner, pre, dpre, inner, shares, activation, gated, has_bias)
        if dropout_p > 0:
            inner = dropout.dropout(inner, philox, dropout_p)
        torch.mm(dout.t(), inner, out=ddown)
        torch.mm(dpre.t(), h, out=dup)
        dbias = torch.sum(shares, 0, dtype=bias_dtype) if has_bias else None
        return project_back(dpre, up, dh), dbias

    triton = LayerKernels(
        layer_norm.add_layer_norm_fwd,
        layer_norm.add_layer_norm_bwd,
        attention_fwd.attention_fwd,
        attention_bwd.attention_bwd,
        rotary.rotate_in_place,
        dropout.dropout,
        feed_forward_fwd,
        feed_forward_bwd,
    )
    return triton if backend is Backend.TRITON else _with_cuda(triton)


def _with_cuda(triton: LayerKernels) -> LayerKernels:
    ops = torch.ops.fastbert

    def norm_fwd(x, x_bias, residual, weight, *rest):
        has_it = weight.dtype is x.dtype
        return (ops.add_layer_norm_fwd_cuda if has_it else triton.norm_fwd)(x, x_bias, residual, weight, *rest)

    def norm_bwd(dout, dsum, summed, mean, rstd, weight, *rest):
        has_it = weight.dtype is dout.dtype
        return (ops.add_layer_norm_bwd_cuda if has_it else triton.norm_bwd)(
            dout, dsum, summed, mean, rstd, weight, *rest
        )

    def feed_forward(h, up, up_bias, down, activation, gated, philox, dropout_p):
        if dropout_p > 0:
            return triton.feed_forward(h, up, up_bias, down, activation, gated, philox, dropout_p)
        return ops.feed_forward_cuda(h, up, up_bias, down, None, None, activation, gated, True)

    def feed_forward_bwd(
        dout, h, pre, up, down, activation, gated, philox, dropout_p, dup, ddown, dh, bias_dtype
    ):  # fmt: skip
        if dropout_p > 0:
            rest = (philox, dropout_p, dup, ddown, dh, bias_dtype)
            return triton.feed_forward_bwd(dout, h, pre, up, down, activation, gated, *rest)
        needs = (True, True, bias_dtype is not None)
        dx, dups, dbiases, made = ops.feed_forward_bwd_cuda(dout, h, pre, up, down, None, activation, gated, *needs)
        dup.copy_(dups[0])
        ddown.copy_(made)
        return dx if dh is None else dh.add_(dx), dbiases[0].to(bias_dtype) if dbiases else None

    return triton._replace(
        norm_fwd=norm_fwd, norm_bwd=norm_bwd, feed_forward=feed_forward, feed_forward_bwd=feed_forward_bwd
    )
