"""Layers as one op: all of an encoder for inference, one for training, where a backend offers that.

Each function answers with something to call on cu_seqlens, or with the reason why the layers run op by op. The tree is
looked at only where the device, the dtype and the modes of the process leave it to the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert import ops
from fastbert.layers.leaves import Container, get_leaf, is_linear, is_norm, is_plain, weights_of
from fastbert.layers.snapshot import Remembered, Snapshot

if TYPE_CHECKING:
    from fastbert.layers.encoder import LayerNames, LayerOptions

Fused = Callable[[torch.Tensor], torch.Tensor]  # cu_seqlens -> (total_tokens, hidden_size)

_remembered = Remembered()


def forget_layers(root: nn.Module) -> None:
    """Let go of the weights of `root`'s layers, which are otherwise held until it runs again."""
    _remembered.forget(root)


def offer_layers(
    root: nn.Module,
    paths: Sequence[str],
    layer_type: type[nn.Module] | None,
    names: LayerNames,
    options: LayerOptions,
    x: torch.Tensor,
) -> Fused | str:
    """The layers at `paths` below `root` as one op over x, for inference, or why they are called one by one.

    `layer_type`: layers of another type, or with hooks on them or on a container in them, are called; None where the
    caller has looked at them.
    """

    def look() -> ops.LayerOperands | str:
        if torch.compiler.is_compiling():  # a trace looks at the tree anew: see Remembered
            return _operands(root, paths, layer_type, names, options)
        question = (paths, options.num_attention_heads, options.activation, options.norm_first)
        operands = _remembered.get(root, question)
        if operands is None:
            operands = _operands(root, paths, layer_type, names, options)
            if not isinstance(operands, str):
                _remembered.put(root, question, _snapshot(root, paths, names, layer_type is not None), operands)
        return operands

    return ops.offer("encoder_layers", x, look)


def _operands(
    root: nn.Module, paths: Sequence[str], layer_type: type[nn.Module] | None, names: LayerNames, options: LayerOptions
) -> ops.LayerOperands | str:
    """What the layers hold now, or which of them must be called, and why."""
    layers = [get_leaf(root, path) for path in paths]
    if not layers:
        return "there are no layers"
    if any([layer.training for layer in layers]):
        return "a layer is in training mode"
    linears: list[ops.LinearWeights] = []
    norms: list[torch.Tensor | None] = []
    forms: list[ops.LayerForm] = []
    for at, layer in zip(paths, layers, strict=True):
        if layer_type is not None:
            if not is_plain(layer, layer_type):
                return _not_plain(at, layer)
            for path in names.containers:  # the outer ones first: below one that was replaced nothing is looked for
                if not is_plain(get_leaf(layer, path), Container):
                    return _not_plain(f"{at}.{path}", get_leaf(layer, path))
        leaves = _leaves(layer, names, f"{at}.")
        if isinstance(leaves, str):
            return leaves
        linears.extend(leaves[0])
        norms.extend(leaves[1])
        forms.append(_form(options, *leaves, is_training=False))
    return ops.LayerOperands.of(linears, norms, forms)


def _leaves(
    layer: nn.Module, names: LayerNames, prefix: str = ""
) -> tuple[list[ops.LinearWeights], list[torch.Tensor | None], list[float]] | str:
    """A layer's Linears, its norms' weights and biases, and their eps; or which leaf must be called, and why."""
    linears: list[ops.LinearWeights] = []
    norms: list[torch.Tensor | None] = []
    eps: list[float] = []
    for path in names.linears:
        leaf = get_leaf(layer, path)
        if not is_linear(leaf):
            return _not_plain(prefix + path, leaf)
        linears.append(weights_of(leaf))
    for path in names.norms:
        norm = get_leaf(layer, path)
        if not is_norm(norm):
            return _not_plain(prefix + path, norm)
        norms += norm.weight, norm.bias
        eps.append(norm.eps)
    return linears, norms, eps


def _form(
    options: LayerOptions, linears: list[ops.LinearWeights], norms: list, eps: list[float], is_training: bool
) -> ops.LayerForm:
    heads, dropouts = options.num_attention_heads, (0.0, 0.0, 0.0, 0.0)
    if is_training:
        attention, output, last = (
            options.attention_dropout, options.attention_output_dropout, options.feed_forward_dropout
        )  # fmt: skip
        dropouts = (attention, output, 0.0, last)
    return ops.LayerForm(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=linears[0].weight.shape[0] // heads,
        norm_first=options.norm_first,
        activation=options.activation,
        eps=(eps[0], eps[1]),
        dropouts=dropouts,
    )


def _not_plain(path: str, module: nn.Module) -> str:
    return f"{path} is no plain module ({type(module).__name__}; hooks, a forward of its own, or a weight that is None)"


def _snapshot(root: nn.Module, paths: Sequence[str], names: LayerNames, called: bool) -> Snapshot:
    """All by which `_operands` goes. `called`: layers and the containers in them have hooks of their own."""
    snapshot = Snapshot()
    for path in dict.fromkeys(paths):  # ALBERT's layers come again
        snapshot.watch_path(root, path)
        layer = get_leaf(root, path)
        snapshot.hold(layer.__dict__, "training")
        for leaf in (*names.linears, *names.norms):
            snapshot.watch_path(layer, leaf)
            snapshot.watch(get_leaf(layer, leaf))
        for module in (layer, *(get_leaf(layer, path) for path in names.containers)) if called else ():
            snapshot.watch(module)
    return snapshot


def offer_layer(layer: nn.Module, names: LayerNames, options: LayerOptions, x: torch.Tensor) -> Fused | str:
    """One layer over x as an op with a backward, or why its ops run one by one. Whoever asks has called its hooks."""

    def look() -> ops.LayerOperands | str:
        leaves = _leaves(layer, names)
        if isinstance(leaves, str):
            return leaves
        return ops.LayerOperands.of(*leaves[:2], [_form(options, *leaves, layer.training)])

    return ops.offer("encoder_layer", x, look)
