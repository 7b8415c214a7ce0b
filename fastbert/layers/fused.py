"""Layers as one op: all of an encoder, or one of its layers in training, where a backend has that.

Each function answers with something to call on the LayerContext, or with the reason why the layers run op by op. The
tree is looked at only where the device, the dtype and the modes of the process leave it to the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert import ops
from fastbert.layer_spec import LayerSpec, RotarySpec
from fastbert.layers.fingerprint import ModuleFingerprint, TreeCache
from fastbert.layers.leaves import (
    FORWARD_HOOKS,
    HOOKS,
    Container,
    get_leaf,
    is_linear,
    is_plain,
    norm_kind,
    norm_weights,
    weights_of,
)
from fastbert.layers.relative import relative_of

if TYPE_CHECKING:
    from fastbert.layers.context import LayerContext

Fused = Callable[["LayerContext"], torch.Tensor]  # -> (total_tokens, hidden_size)

_tree_cache = TreeCache("_fastbert_layers")  # what the last look at the layers below each root found


def try_fused_layers(
    root: nn.Module,
    paths: Sequence[str],
    specs: Sequence[LayerSpec],
    final_norm: str | None,
    layer_type: type[nn.Module] | None,
    x: torch.Tensor,
) -> Fused | str:
    """The layers at `paths` below `root`, of `specs`, and the norm behind the last one, as one op over x, for
    inference; or why they are called one by one.

    `layer_type`: layers of another type, or with hooks on them or on a container in them, are called; None where the
    caller has looked at them.
    """
    return _try_fused_layers("encoder_layers", root, paths, specs, final_norm, layer_type, x)


def try_fused_layers_for_training(
    root: nn.Module,
    paths: Sequence[str],
    specs: Sequence[LayerSpec],
    layer_type: type[nn.Module] | None,
    x: torch.Tensor,
    recomputes: bool = False,
) -> Fused | str:
    """The same with a backward. A norm behind the last layer is left to the caller. recomputes: of each layer only what
    goes into it is kept, as activation checkpointing has it.
    """
    if len(set(paths)) < len(paths):  # ALBERT: a gradient for each time would lie there at once
        return "a layer comes more than once"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "gradients of a layer are sent while those of the layers below it are computed"
    op = "encoder_layers_recomputing" if recomputes else "encoder_layers_training"
    return _try_fused_layers(op, root, paths, specs, None, layer_type, x)


def _try_fused_layers(
    op: str,
    root: nn.Module,
    paths: Sequence[str],
    specs: Sequence[LayerSpec],
    final_norm: str | None,
    layer_type: type[nn.Module] | None,
    x: torch.Tensor,
) -> Fused | str:
    trains = op != "encoder_layers"

    def look() -> ops.LayerOperands | str:
        if torch.compiler.is_compiling():  # a trace looks at the tree anew: see TreeCache
            return look_at_layers(root, paths, specs, final_norm, layer_type, trains)
        question = (paths, specs, final_norm, trains)
        operands = _tree_cache.get(root, question)
        if operands is None:
            operands = look_at_layers(root, paths, specs, final_norm, layer_type, trains)
            if not isinstance(operands, str):
                fingerprint = ModuleFingerprint(root)
                hooks = HOOKS if trains else FORWARD_HOOKS
                watch_layers(fingerprint, root, paths, specs, final_norm, layer_type is not None, hooks)
                _tree_cache.put(root, question, fingerprint, operands)
        return operands

    fused_call = ops.try_fused(op, x, look)
    if isinstance(fused_call, str):
        return fused_call
    layers = [get_leaf(root, path) for path in paths] if any([spec.relative_bits for spec in specs]) else []
    return _with_context(fused_call, x, layers, specs, trains)


def _with_context(
    fused_call: Callable[..., torch.Tensor] | str,
    x: torch.Tensor,
    layers: Sequence[nn.Module],
    specs: Sequence[LayerSpec],
    trains: bool,
) -> Fused | str:
    """What takes a LayerContext. `layers`: whose relative terms the op takes, none where they have none."""
    if isinstance(fused_call, str):
        return fused_call

    def run(context: LayerContext) -> torch.Tensor:
        tables = tuple([context.rotary[rotary] for rotary in _rotaries(specs)]) if context.rotary else ()
        relative = _relatives(layers, specs, context, ops.compute_dtype(x)) if layers else ()
        given, batch = (context.batch.cu_seqlens, tables, context.window_positions, relative), context.batch
        return fused_call(*given, max_seqlen=batch.max_seqlen, cache=batch.cache) if trains else fused_call(*given)

    return run


def _rotaries(specs: Sequence[LayerSpec]) -> list[RotarySpec]:
    """The kinds of rotary embedding that these layers have, in the order in which the op has their tables."""
    return list(dict.fromkeys([spec.attention.rotary for spec in specs if spec.attention.rotary is not None]))


def _relatives(
    layers: Sequence[nn.Module], specs: Sequence[LayerSpec], context: LayerContext, dtype: torch.dtype
) -> list[ops.Relative]:
    """Those of the layers that have such terms: what projects the table is called, or what it gave has been kept."""
    made = []
    for layer, spec in zip(layers, specs, strict=True):
        form = spec.attention.relative
        found = None if form is None else relative_of(layer, spec, context.relative[form], dtype)
        made += [] if found is None else [found]
    return made


def look_at_layers(
    root: nn.Module,
    paths: Sequence[str],
    specs: Sequence[LayerSpec],
    final_norm: str | None,
    layer_type: type[nn.Module] | None,
    trains: bool,
) -> ops.LayerOperands | str:
    """What the layers hold now, or which of them must be called, and why."""
    layers = [get_leaf(root, path) for path in paths]
    if not layers:
        return "there are no layers"
    if any([spec.after is not None for spec in specs]):
        return "a convolution stands behind a layer"
    if not trains and any([layer.training for layer in layers]):
        return "a layer is in training mode"
    found: list[ops.LayerWeights] = []
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
        found.append(leaves)
    last = None
    if final_norm is not None:
        leaf = get_leaf(root, final_norm)
        if norm_kind(leaf) != specs[-1].norm.kind:
            return _not_plain(final_norm, leaf)
        last = norm_weights(leaf)
    return ops.LayerOperands.of(found, _rotaries(specs), last)


def _leaves(layer: nn.Module, spec: LayerSpec) -> ops.LayerWeights | str:
    """What the leaves of a layer hold, or which of them must be called."""
    linears: list[ops.LinearWeights] = []  # annotations: torch.compile does not know list[...]()
    norms: list[ops.NormWeights | None] = []
    for path in spec.names.linears:
        leaf = get_leaf(layer, path)
        if not is_linear(leaf):
            return _not_plain(path, leaf)
        linears.append(weights_of(leaf))
    for i, path in enumerate(spec.names.norms):
        if i == 0 and not spec.has_attention_norm:
            norms.append(None)
            continue
        norm = get_leaf(layer, path)
        if norm_kind(norm) != spec.norm.kind:
            return _not_plain(path, norm)
        norms.append(norm_weights(norm))
    return ops.LayerWeights(spec, linears, (norms[0], norms[1]), layer.training)


def _not_plain(path: str, module: nn.Module) -> str:
    return f"{path} is no plain module ({type(module).__name__}; hooks, a forward of its own, or a weight that is None)"


def watch_layers(
    fingerprint: ModuleFingerprint,
    root: nn.Module,
    paths: Sequence[str],
    specs: Sequence[LayerSpec],
    final_norm: str | None,
    called: bool,
    hooks: Sequence[str] = FORWARD_HOOKS,
) -> None:
    """All by which `look_at_layers` goes. `called`: layers and the containers in them have hooks of their own."""
    for path, spec in dict(zip(paths, specs, strict=True)).items():  # ALBERT's layers come again
        fingerprint.watch_path(root, path)
        layer, names = get_leaf(root, path), spec.names
        fingerprint.hold(layer.__dict__, "training")
        for leaf in (*names.linears, *(names.norms if spec.has_attention_norm else names.norms[1:])):
            fingerprint.watch_path(layer, leaf)
            fingerprint.watch(get_leaf(layer, leaf), hooks)
        for module in (layer, *(get_leaf(layer, path) for path in names.containers)) if called else ():
            fingerprint.watch(module, hooks)
    if final_norm is not None:
        fingerprint.watch_path(root, final_norm)
        fingerprint.watch(get_leaf(root, final_norm), hooks)


def try_fused_layer(layer: nn.Module, spec: LayerSpec, x: torch.Tensor) -> Fused | str:
    """One layer over x as an op with a backward, or why its ops run one by one. Whoever asks has called its hooks."""

    def look() -> ops.LayerOperands | str:
        found = _leaves(layer, spec)
        if isinstance(found, str):
            return found
        return ops.LayerOperands.of([found], _rotaries([spec]))

    layers = [layer] if spec.relative_bits else []
    return _with_context(ops.try_fused("encoder_layers_training", x, look), x, layers, [spec], trains=True)
