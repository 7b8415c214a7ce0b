"""A whole encoder as one op, from ids to what is pooled of its last hidden state, where a backend has that.

Like fused.py, which is for layers: the answer is something to call, or the reason why embeddings, layers and pooling
run op by op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.families.schema import Embeddings, Scopes
from fastbert.layers.embeddings import is_lookup
from fastbert.layers.fingerprint import ModuleFingerprint, TreeCache
from fastbert.layers.fused import look_at_layers, watch_layers
from fastbert.layers.leaves import get_leaf, is_called, is_linear, norm_kind, norm_weights, parent_of, weights_of

_tree_cache = TreeCache("_fastbert_encoder")


def try_fused_encoder(
    root: nn.Module, config: Any, running_config: Callable[[], Any], layer_type: type[nn.Module] | None, infers: bool
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | str:
    """The encoder at `root`, of `config` (an EncoderConfig), as one op for inference; or why it runs op by op. What is
    called takes ids, types, positions, cu_seqlens, a mode of pooling, whether to normalise, and whether the pooler's
    output is wanted, too (ops/encoder.py).

    layer_type: of plain layers; None: the tree is not ours, and its owner has looked at its containers.

    `running_config()` gives the config with the layers that are there now: asked where the tree has changed. `infers`:
    nobody wants gradients, whatever the mode.
    """
    word = get_leaf(root, config.embeddings.word)
    weight = word._parameters.get("weight")
    if weight is None:
        return f"{config.embeddings.word} is called"

    def look() -> ops.EncoderOperands | str:
        held = _tree_cache.get(root, (config,))
        if held is None:
            running = running_config()
            unsupported = _unsupported(root, running)
            if unsupported is not None:
                return unsupported
            held = _look(root, running, layer_type)
            try:  # a reason is kept, too: of adapters in the layers, say, where each call asks several times
                pools = not isinstance(held, str) and bool(held.pooler)
                fingerprint = _fingerprint(root, running, layer_type is not None, pools)
                _tree_cache.put(root, (config,), fingerprint, held)
            except (KeyError, AttributeError):  # a leaf is not there any more, as what calls it will say
                if not isinstance(held, str):
                    raise
        return held if isinstance(held, str) else ops.EncoderOperands(held, infers)

    return ops.try_fused("encoder", weight, look)


def _unsupported(root: nn.Module, config: Any) -> str | None:
    """Why an encoder of this config cannot be one op, whatever is in its tree."""
    names: Embeddings = config.embeddings
    if root.training:
        return "the model is in training mode"
    if config.distances is not None:
        return "layers go by the distances of tokens, whose tables are made for each batch"
    if names.project is not None or names.token_dropout is not None or names.task_type is not None:
        return "embeddings are projected, scaled, or have task types"
    return None


def _look(root: nn.Module, config: Any, layer_type: type[nn.Module] | None) -> ops.HeldEncoder | str:
    """What the encoder holds now, or why it cannot be one op."""
    names: Embeddings = config.embeddings
    for path in _containers(root, config.scopes) if layer_type is not None else ():
        if is_called(root, path):
            return f"{path} has hooks"
    tables: dict[str, torch.Tensor | None] = {}
    for role in ("word", "position", "token_type"):
        path = getattr(names, role)
        leaf = None if path is None else get_leaf(root, path)
        if leaf is not None and not is_lookup(leaf):
            return f"{path} is called"
        tables[role] = None if leaf is None else leaf.weight
    norm = None if names.norm is None else get_leaf(root, names.norm)
    if norm is not None and norm_kind(norm) != "layer":
        return f"{names.norm} is no plain LayerNorm"
    weight, bias, eps = (None, None, 0.0) if norm is None else norm_weights(norm)
    first = None
    if config.family.positions_from_ids and names.position is not None:
        if config.padding_idx is None:
            return "positions count from padding's id, which the config does not have"
        first = config.padding_idx + 1
    layers = look_at_layers(
        root, config.layer_paths, config.layer_specs, config.family.final_norm, layer_type, trains=False
    )
    if isinstance(layers, str):
        return layers
    embeddings = (tables["word"], tables["position"], tables["token_type"], weight, bias)
    return ops.HeldEncoder(embeddings, eps, first, layers, _pooler(root, config, layer_type is not None))


def _pooler(root: nn.Module, config: Any, called: bool) -> tuple[torch.Tensor | None, ...]:
    """What the pooler's Linear holds; nothing where there is none, or it runs by itself behind the op."""
    path = config.family.pooler
    if path is None or root._modules.get(path.partition(".")[0]) is None:
        return ()
    if called and any([is_called(root, container) for container in _above(path)]):
        return ()
    leaf = get_leaf(root, path)
    if not is_linear(leaf):
        return ()
    operands = weights_of(leaf)
    dtype = get_leaf(root, config.embeddings.word).weight.dtype
    fits = operands.weight.dtype in (dtype, torch.int8) and (operands.bias is None or operands.bias.dtype is dtype)
    return tuple(operands) if fits else ()


def _above(path: str) -> list[str]:
    """The container of a leaf, if it is not the root."""
    container = parent_of(path)
    return [] if container is None else [container]


def _containers(root: nn.Module, scopes: Scopes) -> list[str]:
    """Those that a forward pass goes through, above the layers."""
    encoder = scopes.encoder if scopes.encoder in root._modules else None
    return list(dict.fromkeys(path for path in (scopes.embeddings, encoder, *scopes.groups) if path is not None))


def _fingerprint(root: nn.Module, config: Any, called: bool, pools: bool) -> ModuleFingerprint:
    """All by which `_look` goes. `called`: containers have hooks of their own. `pools`: the pooler belongs to it; one
    that does not may change as it likes, for it is looked at when it runs.
    """
    names, specs = config.embeddings, config.layer_specs
    fingerprint = ModuleFingerprint(root)
    fingerprint.hold(root.__dict__, "training")
    leaves: tuple[str | None, ...] = (names.word, names.position, names.token_type, names.norm)
    containers = _containers(root, config.scopes) if called else []
    if pools:
        containers += _above(config.family.pooler) if called else []
        leaves = (*leaves, config.family.pooler)
    for path in (*containers, *(path for path in leaves if path is not None)):
        fingerprint.watch_path(root, path)
        fingerprint.watch(get_leaf(root, path))
    watch_layers(fingerprint, root, config.layer_paths, specs, config.family.final_norm, called)
    return fingerprint
