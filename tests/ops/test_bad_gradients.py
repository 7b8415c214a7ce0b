"""Backward operators name a weight that does not fit any more: it may be given other data after forward."""

from __future__ import annotations

import pytest
import torch
from attention_cases import needs_extension
from layer_specs import CASES, HIDDEN, TOKENS, fused, make

from fastbert import ops

CHANGES = {
    "fewer outputs": lambda t: t[::2],
    "more outputs": lambda t: torch.cat([t, t]),
    "fewer inputs": lambda t: t[:, ::2],
    "more inputs": lambda t: torch.cat([t, t], 1),
}
each_change = pytest.mark.parametrize("change", CHANGES)


def refuses(out: torch.Tensor, weight: torch.Tensor, change: str) -> None:
    weight.data = CHANGES[change](weight.data).contiguous()
    with pytest.raises(RuntimeError, match=r"(weight|dout|pre) has shape|weights have .* features, pre"):
        out.sum().backward()


@needs_extension
@each_change
def test_linears(change):
    weights = [torch.randn(64, 96, requires_grad=True) for _ in range(2)]
    outs = ops.linears(torch.randn(20, 96, requires_grad=True), weights, [None, None], backend="cpu")
    refuses(torch.cat(outs, 1), weights[1], change)


@needs_extension
@each_change
@pytest.mark.parametrize("leaf", range(6))
def test_a_layer(leaf, change):
    layer = make(CASES["post"]).map(lambda t: t.requires_grad_())
    out = fused("encoder_layers_training", [layer], torch.randn(TOKENS, HIDDEN, requires_grad=True))
    refuses(out, layer.linears[leaf].weight, change)
