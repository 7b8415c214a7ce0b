"""Layers as one op: all of an encoder for inference, one for training, where a backend offers that.

Each function answers with something to call on the LayerContext, or with the reason why the layers run op by op. The
tree is looked at only where the device, the dtype and the modes of the process leave it to the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert import ops
from fastbert.families.form import LayerSpec
from fastbert.layers.leaves import Container, get_leaf, is_linear, is_plain, norm_kind, norm_weights, weights_of
from fastbert.layers.snapshot import Remembered, Snapshot

if TYPE_CHECKING:
    from fastbert.layers.context import LayerContext

Fused = Callable[["LayerContext"], torch.Tensor]  # -> (total_tokens, hidden_size)

_remembered = Remembered()


def forget_layers(root: nn.Module) -> None:
    """Let go of the weights of `root`'s layers, which are otherwise held until it runs again."""
    _remembered.forget(root)


def _objection(spec: LayerSpec) -> str | None:
    plain = not spec.norm_first and spec.norm.kind == "layer" and not spec.feed_forward.gated
    return None if plain and spec.attention.position is None else "layers of this kind run op by op"


def offer_layers(
    root: nn.Module,
    paths: Sequence[str],
    specs: Sequence[LayerSpec],
    layer_type: type[nn.Module] | None,
    x: torch.Tensor,
) -> Fused | str:
    """The layers at `paths` below `root`, of `specs`, as one op over x, for inference, or why they are called one by
    one.

    `layer_type`: layers of another type, or with hooks on them or on a container in them, are called; None where the
    caller has looked at them.
    """

    def look() -> ops.LayerOperands | str:
        if torch.compiler.is_compiling():  # a trace looks at the tree anew: see Remembered
            return _operands(root, paths, specs, layer_type)
        question = (paths, specs)
        operands = _remembered.get(root, question)
        if operands is None:
            operands = _operands(root, paths, specs, layer_type)
            if not isinstance(operands, str):
                _remembered.put(root, question, _snapshot(root, paths, specs, layer_type is not None), operands)
        return operands

    if specs and (objection := _objection(specs[0])):
        return objection
    made = ops.offer("encoder_layers", x, look)
    return made if isinstance(made, str) else lambda context: made(context.batch.cu_seqlens)


def _operands(
    root: nn.Module, paths: Sequence[str], specs: Sequence[LayerSpec], layer_type: type[nn.Module] | None
) -> ops.LayerOperands | str:
    """What the layers hold now, or which of them must be called, and why."""
    layers = [get_leaf(root, path) for path in paths]
    if not layers:
        return "there are no layers"
    if any([layer.training for layer in layers]):
        return "a layer is in training mode"
    linears: list[ops.LinearWeights] = []
    norms: list[torch.Tensor] = []
    eps: list[float] = []
    for at, layer, spec in zip(paths, layers, specs, strict=True):
        names = spec.names
        if layer_type is not None:
            if not is_plain(layer, layer_type):
                return _not_plain(at, layer)
            for path in names.containers:  # the outer ones first: below one that was replaced nothing is looked for
                if not is_plain(get_leaf(layer, path), Container):
                    return _not_plain(f"{at}.{path}", get_leaf(layer, path))
        found = _leaves(layer, spec)
        if isinstance(found, str):
            return f"{at}.{found}"
        linears += found[0]
        norms += found[1]
        eps += found[2]
    return ops.LayerOperands.of(linears, norms, eps, specs[0].attention.num_heads, specs[0].feed_forward.activation)


def _leaves(layer: nn.Module, spec: LayerSpec) -> tuple[list, list, list] | str:
    """The Linear leaves' weights, the norms' weights and biases, and their eps; or which leaf must be called."""
    linears, norms, eps = [], [], []
    for path in spec.names.linears:
        leaf = get_leaf(layer, path)
        if not is_linear(leaf):
            return _not_plain(path, leaf)
        linears.append(weights_of(leaf))
    for path in spec.names.norms if spec.has_attention_norm else spec.names.norms[1:]:
        norm = get_leaf(layer, path)
        if norm_kind(norm) != spec.norm.kind:
            return _not_plain(path, norm)
        *vectors, norm_eps = norm_weights(norm)
        if spec.norm.kind == "layer" and spec.norm.bias and vectors[1] is None:
            return _not_plain(path, norm)
        norms += vectors
        eps.append(norm_eps)
    return linears, norms, eps


def _not_plain(path: str, module: nn.Module) -> str:
    return f"{path} is no plain module ({type(module).__name__}; hooks, a forward of its own, or a weight that is None)"


def _snapshot(root: nn.Module, paths: Sequence[str], specs: Sequence[LayerSpec], called: bool) -> Snapshot:
    """All by which `_operands` goes. `called`: layers and the containers in them have hooks of their own."""
    snapshot = Snapshot()
    for path, spec in dict(zip(paths, specs, strict=True)).items():  # ALBERT's layers come again
        snapshot.watch_path(root, path)
        layer, names = get_leaf(root, path), spec.names
        snapshot.hold(layer.__dict__, "training")
        for leaf in (*names.linears, *(names.norms if spec.has_attention_norm else names.norms[1:])):
            snapshot.watch_path(layer, leaf)
            snapshot.watch(get_leaf(layer, leaf))
        for module in (layer, *(get_leaf(layer, path) for path in names.containers)) if called else ():
            snapshot.watch(module)
    return snapshot


def offer_layer(layer: nn.Module, spec: LayerSpec, x: torch.Tensor) -> Fused | str:
    """One layer over x as an op with a backward, or why its ops run one by one. Whoever asks has called its hooks."""

    def look() -> ops.LayerOperands | str:
        found = _leaves(layer, spec)
        if isinstance(found, str):
            return found
        linears, norms, eps = found
        dropouts = (spec.attention.dropout, spec.attention_output_dropout, spec.feed_forward_dropout)
        return ops.LayerOperands.of(
            linears,
            norms,
            eps,
            spec.attention.num_heads,
            spec.feed_forward.activation,
            dropouts if layer.training else (0.0, 0.0, 0.0),
        )

    if objection := _objection(spec):
        return objection
    made = ops.offer("encoder_layer", x, look)
    return made if isinstance(made, str) else lambda context: made(context.batch.cu_seqlens)
