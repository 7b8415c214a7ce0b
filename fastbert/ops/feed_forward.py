"""The feed-forward half of a layer: GEMM + bias + activation, then a GEMM (Vaswani et al. 2017, section 3.3)."""

from __future__ import annotations

import torch

from fastbert.backend import declare, select
from fastbert.ops import _torch

declare("linear_gelu")
declare("feed_forward")


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """Elementwise: "gelu" (exact, by erf), "gelu_tanh" (Hendrycks & Gimpel 2016, section 2), "relu", "tanh", "silu"."""
    return _torch.activation(x, name)


def linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str = "gelu",
    backend: str | None = None,
) -> torch.Tensor:
    """activation(x weight^T + bias): x (total_tokens, in_features) -> (total_tokens, out_features).

    `activation` is a name that the op `activation` knows.
    """
    select("linear_gelu", backend, x, weight, bias)
    return _torch.linear_gelu(x, weight, bias, activation)


def feed_forward(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    *,
    activation: str = "gelu",
    backend: str | None = None,
) -> torch.Tensor:
    """activation(x up_weight^T + up_bias) down_weight^T, without the second bias: add_layer_norm takes that one.

    x (total_tokens, hidden_size), up_weight (intermediate_size, hidden_size), down_weight (hidden_size,
    intermediate_size) -> (total_tokens, hidden_size).
    """
    select("feed_forward", backend, x, up_weight, up_bias, down_weight)
    return _torch.feed_forward(x, up_weight, up_bias, down_weight, activation)
