"""Whole post-norm layers in one call, for inference: their calls' cost in Python is a third of a short text's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastbert.backend import Backend, register, select
from fastbert.ops._library import extension_error, needs_grad


class LinearWeights(NamedTuple):
    """What `linears` takes of one product: see there."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    weight_scale: torch.Tensor | None
    input_scale: float


def _supports_cpu(x, head_dim, *tensors) -> str | None:
    if x.device.type != "cpu":
        return f"tensors are on {x.device.type}"
    dtype = x.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {dtype} (has float32 and bfloat16)"
    if x.dim() != 2:
        return f"x has {x.dim()} dimensions, the kernels take (total_tokens, hidden_size)"
    if not 2 <= head_dim <= 256:
        return f"head_dim is {head_dim} (attention has 2 to 256)"
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses a dtype for each op"
    for t in tensors:
        if t is not None and (not t.is_cpu or (t.dtype is not dtype and t.dtype is not torch.int8)):
            return f"x is {dtype} on {x.device}, a weight {t.dtype} on {t.device}"
    if needs_grad(x, *tensors):
        return "it is for inference: autograd records each op"
    return extension_error()


register("encoder_layers", Backend.CPU, _supports_cpu, probe=lambda x, vector: (x, 64, vector))


def encoder_layers(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor,
    linears: Sequence[LinearWeights],
    norms: Sequence[torch.Tensor],
    *,
    eps: Sequence[float],
    num_heads: int,
    activation: str = "gelu",
) -> torch.Tensor | None:
    """Self-attention and feed-forward, each with its residual and LayerNorm after it (Vaswani et al. 2017, 3.1).

    Args:
        x: (total_tokens, hidden_size), packed.
        cu_seqlens: int32 (batch + 1,), the offsets of the sequences.
        linears: query, key, value, attention output, up and down, of every layer in turn.
        norms: weight and bias, (hidden_size,) each, of the attention's LayerNorm, then of the feed-forward's, likewise.
        eps: of the two LayerNorms, likewise.
        num_heads: hidden_size / num_heads is the heads' width.
        activation: a name that the op `activation` knows.

    Returns:
        (total_tokens, hidden_size); None where no backend has whole layers for this call (gradients, autocast,
        another dtype or device): the caller then runs them op by op.
    """
    weights, biases, scales, input_scales = zip(*linears, strict=True)
    head_dim = weights[0].shape[0] // num_heads
    if select("encoder_layers", None, x, head_dim, *weights, *biases, *norms) is Backend.TORCH:
        return None
    return torch.ops.fastbert.encoder_layers_cpu(
        x, cu_seqlens, weights, biases, scales, input_scales, norms, eps, num_heads, activation
    )
