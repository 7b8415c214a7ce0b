"""A base model's tree in one call: ours, or transformers' live one (acceleration/tree.py), asked once what is in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from fastbert import ops
from fastbert.config import EncoderConfig
from fastbert.execution.calls import WHOLE, Calls
from fastbert.execution.snapshot import Snapshot, Stretch, guard_of
from fastbert.families.schema import Scopes
from fastbert.layer_spec import LayerSpec
from fastbert.layers.context import LayerContext
from fastbert.layers.encoder import EncoderLayer, call_checkpointed
from fastbert.layers.guard import TreeCache
from fastbert.layers.leaves import FORWARD_HOOKS, HOOKS
from fastbert.layers.operands import layer_operands

snapshots = TreeCache("_fastbert_snapshot")  # of each root


class Tree:
    """What the two kinds of trees have in common. A call makes one.

    config: by which the words' table is found. infers: without gradients, whatever the mode. recomputes: only what
    goes into each layer is kept for backward. was_refused: the whole encoder has been asked for as one op in this call,
    and it is none.
    """

    is_ours: ClassVar[bool]
    root: Any
    config: EncoderConfig
    calls: Calls
    infers = False
    recomputes = False
    was_refused = False

    @property
    def running_config(self) -> EncoderConfig:
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """What is in the tree; looked up once a call."""
        raise NotImplementedError

    def run_layer(
        self, layer: nn.Module, spec: LayerSpec, x: torch.Tensor, context: LayerContext, wants_probs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer by itself: its result, and its attention probabilities where they are wanted."""
        raise NotImplementedError

    def scopes(self, config: EncoderConfig) -> Scopes:
        """The containers that are called where they have hooks."""
        raise NotImplementedError

    def layers_unsupported(self) -> str | None:
        """Why each layer runs by itself, whatever a backend has."""
        return None

    def layers(self, stretch: Stretch, paths: Sequence[str], specs: Sequence[LayerSpec]) -> ops.LayerOperands | str:
        """What a stretch of layers runs on as one op, or why not."""
        if torch.compiler.is_compiling():  # a trace looks at the tree anew: see TreeCache
            _, _, final_norm, trains, _ = stretch
            return layer_operands(self.root, paths, specs, final_norm, EncoderLayer if self.is_ours else None, trains)
        return self.snapshot().layers(self.root, stretch, paths, specs)

    def note(self, way: str, reason: str) -> None:
        """Why a way did not serve this call; empty: it did. The whole encoder is the first of them."""
        if not torch.compiler.is_compiling():  # what a graph reads of a model it is compiled for
            self.calls.ways = {way: reason} if way == WHOLE else {**self.calls.ways, way: reason}


class OwnTree(Tree):
    """Of fastbert's own base model, an EncoderModel. is_causal: no token sees those behind it."""

    is_ours = True

    def __init__(self, root: Any, infers: bool = False, is_causal: bool = False):
        self.root, self.config, self.calls = root, root.config, root.calls
        self.infers, self.is_causal = infers, is_causal
        self._records = not infers and torch.is_grad_enabled()
        self.recomputes = self._records and root.gradient_checkpointing and root.training
        self._snapshot: Snapshot | None = None

    @property
    def running_config(self) -> EncoderConfig:
        return self.root.running_config

    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            self._snapshot = snapshots.get(self.root, (self.config, self._records)) or self._take_snapshot()
        return self._snapshot

    def _take_snapshot(self) -> Snapshot:
        snapshot = Snapshot(self.running_config, EncoderLayer)
        try:
            guard = guard_of(self.root, snapshot.config, HOOKS if self._records else FORWARD_HOOKS)
        except (KeyError, AttributeError):  # a leaf is not there any more, as what calls it will say
            return snapshot
        snapshots.put(self.root, (self.config, self._records), guard, snapshot)
        return snapshot

    def run_layer(
        self, layer: nn.Module, spec: LayerSpec, x: torch.Tensor, context: LayerContext, wants_probs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        arguments = (x, context, wants_probs, spec) if self.is_causal else (x, context, wants_probs)
        out = call_checkpointed(layer, *arguments) if self.recomputes else layer(*arguments)
        return out if wants_probs else (out, None)

    def scopes(self, config: EncoderConfig) -> Scopes:
        return config.scopes
