"""A convolution over the columns of a batch, behind a layer (LayerSpec.after)."""

from __future__ import annotations

import torch
from torch import nn

from fastbert import ops
from fastbert.layer_spec import ConvSpec, NormSpec
from fastbert.layers.context import LayerContext
from fastbert.layers.encoder import add_norm
from fastbert.layers.leaves import get_leaf, set_module, within
from fastbert.layers.norms import make_norm


def place_convolution(root: nn.Module, spec: ConvSpec, norm: NormSpec, hidden_size: int) -> None:
    conv = nn.Conv1d(
        hidden_size, hidden_size, spec.kernel_size, padding=(spec.kernel_size - 1) // 2, groups=spec.groups
    )
    set_module(root, f"{spec.path}.conv", conv)
    set_module(root, f"{spec.path}.LayerNorm", make_norm(norm, hidden_size))


def _convolved(root: nn.Module, spec: ConvSpec, x: torch.Tensor, context: LayerContext) -> torch.Tensor:
    """activation(dropout(conv(x))) of x (total_tokens, hidden_size).

    The leaf is called with a padded batch, (batch, hidden_size, columns), as transformers calls it: it is one product
    in all of a deep model, and a hole in a mask is a column of zeros.
    """
    batch = context.batch
    width, slots = batch.grid_slots()
    grid = x.new_zeros(batch.batch_size * width + 1, x.shape[1]).index_copy_(0, slots, x)
    columns = grid[:-1].view(batch.batch_size, width, -1).transpose(1, 2)
    out = get_leaf(root, f"{spec.path}.conv")(columns).transpose(1, 2).flatten(0, 1)
    packed = torch.cat((out, out.new_zeros(1, out.shape[1]))).index_select(0, slots)
    return ops.activation(ops.dropout(packed, spec.dropout if root.training else 0.0), spec.activation)


def run_convolution(
    root: nn.Module,
    spec: ConvSpec,
    x: torch.Tensor,
    out: torch.Tensor,
    context: LayerContext,
    calls_container: bool,
) -> torch.Tensor:
    """norm(out + activation(dropout(conv(x)))), all (total_tokens, hidden_size). calls_container: the tree is ours,
    and its container is called where it has hooks.
    """

    def run(x, out):
        return add_norm(get_leaf(root, f"{spec.path}.LayerNorm"), _convolved(root, spec, x, context), None, out, 0.0)

    return within(root, spec.path if calls_container else None, run, x, out)
