"""What layers run on as one op: the tensors of their leaves, or the reason why a leaf must be called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert import ops
from fastbert.layer_spec import LayerSpec, RotarySpec
from fastbert.layers.guard import ModuleGuard
from fastbert.layers.leaves import FORWARD_HOOKS, Container, get_leaf, is_linear, is_plain, weights_of
from fastbert.layers.norms import norm_type_of, norm_weights
from fastbert.layers.relative import relative_of

if TYPE_CHECKING:
    from fastbert.layers.context import LayerContext


def layer_operands(
    root: nn.Module,
    paths: Sequence[str],
    specs: Sequence[LayerSpec],
    final_norm: str | None,
    layer_type: type[nn.Module] | None,
    trains: bool,
) -> ops.LayerOperands | str:
    """What the layers at `paths` below `root`, of `specs`, and the norm behind the last one hold now; or which of them
    must be called, and why.

    `layer_type`: layers of another type, or with hooks on them or on a container in them, are called; None: the caller
    has looked at them. trains: the op has a backward.
    """
    layers = [get_leaf(root, path) for path in paths]
    if not layers:
        return "there are no layers"
    if any([spec.after is not None for spec in specs]):
        return "a convolution stands behind a layer"
    if not trains and any([layer.training for layer in layers]):
        return "a layer is in training mode"
    weights: list[ops.LayerWeights] = []
    for at, layer, spec in zip(paths, layers, specs, strict=True):
        if layer_type is not None:
            if not is_plain(layer, layer_type):
                return _not_plain(at, layer)
            for path in spec.names.containers:  # the outer ones first: what is below one that was replaced may be gone
                if not is_plain(get_leaf(layer, path), Container):
                    return _not_plain(f"{at}.{path}", get_leaf(layer, path))
        leaves = _leaves(layer, spec)
        if isinstance(leaves, str):
            return f"{at}.{leaves}"
        weights.append(leaves)
    last = None
    if final_norm is not None:
        leaf = get_leaf(root, final_norm)
        if norm_type_of(leaf) != specs[-1].norm.type:
            return _not_plain(final_norm, leaf)
        last = norm_weights(leaf)
    return ops.LayerOperands.of(weights, _rotaries(specs), last)


def operands_of_one(layer: nn.Module, spec: LayerSpec) -> ops.LayerOperands | str:
    """The same of a layer whose own hooks have been called."""
    weights = _leaves(layer, spec)
    return weights if isinstance(weights, str) else ops.LayerOperands.of([weights], _rotaries([spec]))


def run_on_context(
    call: Callable[..., torch.Tensor],
    x: torch.Tensor,
    layers: Sequence[nn.Module],
    specs: Sequence[LayerSpec],
    context: LayerContext,
) -> torch.Tensor:
    """What `ops.try_fused` has answered for layers of `specs` over x, called with what they share: (total_tokens,
    hidden_size). `layers`: they themselves, read where they have relative terms.
    """
    tables = tuple([context.rotary[rotary] for rotary in _rotaries(specs)]) if context.rotary else ()
    has_relative = bool(context.relative) and any([spec.relative_bits for spec in specs])
    relative = _relatives(layers, specs, context, ops.compute_dtype(x)) if has_relative else ()
    batch = context.batch
    return call(batch.cu_seqlens, tables, context.window_positions, relative, batch.num_keys)


def _rotaries(specs: Sequence[LayerSpec]) -> list[RotarySpec]:
    """The kinds of rotary embedding that these layers have, in the order in which the op has their tables."""
    return list(dict.fromkeys([spec.attention.rotary for spec in specs if spec.attention.rotary is not None]))


def _relatives(
    layers: Sequence[nn.Module], specs: Sequence[LayerSpec], context: LayerContext, dtype: torch.dtype
) -> list[ops.Relative]:
    """Those of the layers that have such terms: what projects the table is called, or what it gave has been kept."""
    relatives = []
    for layer, spec in zip(layers, specs, strict=True):
        relative = spec.attention.relative
        terms = None if relative is None else relative_of(layer, spec, context.relative[relative], dtype)
        relatives += [] if terms is None else [terms]
    return relatives


def _leaves(layer: nn.Module, spec: LayerSpec) -> ops.LayerWeights | str:
    """What the leaves of a layer hold, or which of them must be called."""
    linears: list[ops.LinearWeights] = []  # annotations: torch.compile does not know list[...]()
    norms: list[ops.NormWeights | None] = []
    for path in spec.names.linears:
        leaf = get_leaf(layer, path)
        if not is_linear(leaf):
            return _not_plain(path, leaf)
        linears.append(weights_of(leaf))
    for i, at in enumerate(spec.norm_paths):
        if at is None:
            norms.append(None)
            continue
        norm = get_leaf(layer, at)
        if norm_type_of(norm) != spec.norm_of(i).type:
            return _not_plain(at, norm)
        norms.append(norm_weights(norm))
    return ops.LayerWeights(spec, linears, norms, layer.training)


def _not_plain(path: str, module: nn.Module) -> str:
    return f"{path} is no plain module ({type(module).__name__}; hooks, a forward of its own, or a weight that is None)"


def watch_layers(
    guard: ModuleGuard,
    root: nn.Module,
    paths: Sequence[str],
    specs: Sequence[LayerSpec],
    called: bool,
    hooks: Sequence[str] = FORWARD_HOOKS,
) -> None:
    """All of the layers by which `layer_operands` goes. `called`: layers and the containers in them have hooks of their
    own.
    """
    for path, spec in dict(zip(paths, specs, strict=True)).items():  # ALBERT's layers come again
        guard.watch_path(root, path)
        layer, names = get_leaf(root, path), spec.names
        guard.hold(layer.__dict__, "training")
        for leaf in (*names.linears, *filter(None, spec.norm_paths)):
            guard.watch_path(layer, leaf)
            guard.watch(get_leaf(layer, leaf), hooks)
        for module in (layer, *(get_leaf(layer, path) for path in names.containers)) if called else ():
            guard.watch(module, hooks)
