"""The torch backend of products with a weight: plain, traceable, differentiable PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from fastbert.backend import transform_unsupported
from fastbert.ops._common import at_least_fp32, compute_dtype

_ACTIVATIONS = {
    "gelu": F.gelu,  # exact, by erf (Hendrycks & Gimpel 2016)
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
    "silu": F.silu,
}

ACTIVATIONS_IN_PLACE = {
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "relu": torch.relu_,
    "tanh": torch.tanh_,
    "silu": lambda x: F.silu(x, inplace=True),
}


def may_write_over(*tensors: torch.Tensor) -> bool:
    """Whether no derivative needs what they hold; of a transform's nested tensors only the outermost would say."""
    return transform_unsupported() is None and not any([t.requires_grad for t in tensors])


def activation_torch(x: torch.Tensor, name: str) -> torch.Tensor:
    return _ACTIVATIONS[name](x)


# With AMX, oneDNN (3.12, that of torch 2.13; its issue 5717) reads a row of x in blocks of this many columns where it
# has more, and in pairs where it has fewer. The last of them reaches into the next rows, against zeros in place of the
# weight: what a neighbour has there counts as 0, but its NaN or infinity times 0 is NaN. Zeros behind x keep rows
# apart; those behind the gradient, whose rows have out_features columns, do so in backward.
_AMX_COLUMNS = 32
_HAS_AMX = torch.cpu._is_amx_tile_supported()


def _beyond(columns: int) -> int:
    """Columns of a row's last block that are not its own."""
    return -columns % (_AMX_COLUMNS if columns > _AMX_COLUMNS else 2)


def product(x, weight, bias):
    """F.linear in which no row reaches another one's output or gradient."""
    if not _HAS_AMX or x.device.type != "cpu" or compute_dtype(x).itemsize != 2:
        return F.linear(x, weight, bias)
    has_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    rest_in, rest_out = _beyond(weight.shape[1]), _beyond(weight.shape[0])
    rest_out = rest_out if has_grad else 0
    if rest_in:
        x = F.pad(x, (0, rest_in))
    if rest_in or rest_out:
        weight = F.pad(weight, (0, rest_in, 0, rest_out))
    if rest_out:
        bias = None if bias is None else F.pad(bias, (0, rest_out))
        return F.linear(x, weight, bias)[..., :-rest_out].contiguous()
    return F.linear(x, weight, bias)


def check_input_scale(scale: torch.Tensor) -> None:
    """On a GPU its value is not waited for, and a graph of torch.compile does not know it."""
    if scale.device.type == "cpu" and not torch.compiler.is_compiling() and not 0 <= scale.item() < math.inf:
        raise RuntimeError(f"input_scale is {scale.item():g}; it must be 0 or positive")


def _linear_int8(x, weight, bias, weight_scale, input_scale):
    rows = at_least_fp32(x)
    largest = rows.abs().amax(-1, keepdim=True)
    scale = largest / 127
    if input_scale is not None:
        check_input_scale(input_scale)
        # A static scale must not hide what is not finite behind the clamp: 0 times it is NaN.
        scale = torch.where(input_scale == 0, scale, input_scale + 0 * largest)
    quantized = (rows / torch.where(scale > 0, scale, 1.0)).round_().clamp_(-127, 127)
    with torch.autocast(x.device.type, enabled=False):  # which would round the sums
        y = F.linear(quantized, weight.to(rows.dtype)).mul_(scale * weight_scale)
    return (y if bias is None else y.add_(bias.to(rows.dtype))).to(compute_dtype(x))


def linear_torch(x, weight, bias, weight_scale, input_scale, activation_name):
    if weight_scale is None:
        y = product(x, weight, bias)
    else:
        y = _linear_int8(x, weight, bias, weight_scale, input_scale)
    if activation_name == "none":
        return y
    # Where backward does not need what went in, no second buffer of the largest size is made (1 % of an fp32 forward).
    return (ACTIVATIONS_IN_PLACE[activation_name] if may_write_over(y) else _ACTIVATIONS[activation_name])(y)
