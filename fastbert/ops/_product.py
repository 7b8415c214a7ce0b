"""The torch backend's product with a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# With AMX, oneDNN (3.12, that of torch 2.13; its issue 5717) reads a row of x in blocks of this many columns where it
# has more, and in pairs where it has fewer. The last of them reaches into the next rows, against zeros in place of the
# weight: what a neighbour has there counts as 0, but its NaN or infinity times 0 is NaN. Zeros behind x keep rows
# apart; those behind the gradient, whose rows have out_features columns, do so in backward.
_AMX_COLUMNS = 32
_HAS_AMX = torch.cpu._is_amx_tile_supported()


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of a product of x: autocast's where it is on, as F.linear has it."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


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
