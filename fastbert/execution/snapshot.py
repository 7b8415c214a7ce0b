"""What is in a model's tree: what its layers, and all of it, run on as one op, or why not. It is read once, and again
when a guard says that the tree has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fastbert import ops
from fastbert.config import EncoderConfig
from fastbert.families.schema import Scopes
from fastbert.layer_spec import LayerSpec
from fastbert.layers.embeddings import is_lookup
from fastbert.layers.guard import ModuleGuard
from fastbert.layers.leaves import get_leaf, is_called, is_linear, parent_of, weights_of
from fastbert.layers.norms import norm_type_of, norm_weights
from fastbert.layers.operands import layer_operands, watch_layers

# Layers [first, end) as one op: first, end, the norm behind them, whether the op has a backward, whether it is causal.
Stretch = tuple[int, int, "str | None", bool, bool]


class Snapshot:
    """A tree as it was when it was looked at. Nothing of the root itself is kept: the root keeps this.

    config: with the layers and the dropouts that are there. layer_type: the class of plain layers; None: the tree is
    not ours, and its owner has looked at its containers. sharded: the paths of modules under FSDP2.
    """

    def __init__(
        self, config: EncoderConfig, layer_type: type[nn.Module] | None, sharded: frozenset[str] = frozenset()
    ):
        self.config, self.layer_type, self.sharded = config, layer_type, sharded
        self._encoder: ops.HeldEncoder | str | None = None
        self._layers: dict[Stretch, ops.LayerOperands | str] = {}

    def encoder(self, root: nn.Module) -> ops.HeldEncoder | str:
        """What the whole encoder holds, or why it cannot be one op."""
        if self._encoder is None:
            self._encoder = _unsupported(root, self) or _encoder_of(root, self.config, self.layer_type)
        return self._encoder

    def layers(
        self, root: nn.Module, stretch: Stretch, paths: Sequence[str], specs: Sequence[LayerSpec]
    ) -> ops.LayerOperands | str:
        """What the layers at `paths`, those of the stretch, hold, or why they cannot be one op."""
        if stretch not in self._layers:
            _, _, final_norm, trains, _ = stretch
            self._layers[stretch] = layer_operands(root, paths, specs, final_norm, self.layer_type, trains)
        return self._layers[stretch]


def _unsupported(root: nn.Module, snapshot: Snapshot) -> str | None:
    """Why an encoder cannot be one op, whatever its leaves are."""
    config = snapshot.config
    names = config.embeddings
    if root.training:
        return "the model is in training mode"
    if snapshot.sharded:
        return "its weights are sharded over processes, as FSDP does"
    if config.distances is not None:
        return "layers go by the distances of tokens, whose tables are made for each batch"
    if names.project is not None or names.token_dropout is not None or names.task_type is not None:
        return "embeddings are projected, scaled, or have task types"
    return None


def _encoder_of(root: nn.Module, config: EncoderConfig, layer_type: type[nn.Module] | None) -> ops.HeldEncoder | str:
    names = config.embeddings
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
    if norm is not None and norm_type_of(norm) != "layer":
        return f"{names.norm} is no plain LayerNorm"
    weight, bias, eps = (None, None, 0.0) if norm is None else norm_weights(norm)
    first = None
    if config.family.positions_from_ids and names.position is not None:
        if config.padding_idx is None:
            return "positions count from padding's id, which the config does not have"
        first = config.padding_idx + 1
    layers = layer_operands(
        root, config.layer_paths, config.layer_specs, config.family.final_norm, layer_type, trains=False
    )
    if isinstance(layers, str):
        return layers
    embeddings = (tables["word"], tables["position"], tables["token_type"], weight, bias)
    return ops.HeldEncoder(embeddings, eps, first, layers, _pooler(root, config, layer_type is not None))


def _pooler(root: nn.Module, config: EncoderConfig, called: bool) -> tuple[torch.Tensor | None, ...]:
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


def guard_of(root: nn.Module, config: EncoderConfig, hooks: Sequence[str]) -> ModuleGuard:
    """All by which a Snapshot of a tree of ours goes. Raises KeyError, AttributeError: a leaf is not there any more."""
    names, path = config.embeddings, config.family.pooler
    guard = ModuleGuard(root)
    guard.hold(root.__dict__, "training")
    guard.watch_children(root)
    watched: list[str | None] = [*_containers(root, config.scopes), names.word, names.position, names.token_type]
    watched += [names.norm, config.family.final_norm]
    if path is not None and root._modules.get(path.partition(".")[0]) is not None:
        watched += [*_above(path), path]
    for path in filter(None, watched):
        guard.watch_path(root, path)
        guard.watch(get_leaf(root, path), hooks)
    watch_layers(guard, root, config.layer_paths, config.layer_specs, True, hooks)
    return guard
