"""An encoder in steps: embeddings, layers in stretches or one by one, and what is wanted on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastbert import ops
from fastbert.errors import InputError
from fastbert.execution.calls import LAYERS
from fastbert.execution.request import EncoderInputs, EncoderOutput, Wanted
from fastbert.families.schema import value_of
from fastbert.layer_spec import LayerSpec
from fastbert.layers.context import make_context
from fastbert.layers.convolution import run_convolution
from fastbert.layers.embeddings import EmbeddingIds, run_embeddings
from fastbert.layers.encoder import add_norm, run_probs
from fastbert.layers.leaves import get_leaf, has_hooks, is_called, linear, within
from fastbert.layers.operands import run_on_context
from fastbert.layers.sharded import is_sharded, without_views

if TYPE_CHECKING:
    from fastbert.execution.tree import Tree


class Steps:
    """One forward pass over the leaves of a tree. Layers between those of which something is wanted run as one op,
    where they can; containers with hooks are called.
    """

    def __init__(self, tree: Tree, inputs: EncoderInputs, wanted: Wanted):
        """Raises InputError: a causal pass through a convolution."""
        self.tree, self.root, self.inputs, self.wanted = tree, tree.root, inputs, wanted
        self.config = config = tree.running_config
        self.num_layers = len(config.layer_paths)
        self.count = count = wanted.layers_to_run(self.num_layers)
        self.paths, self.specs = config.layer_paths[:count], config.layer_specs[:count]
        if wanted.is_causal:
            if any(spec.after is not None for spec in self.specs):
                raise InputError(
                    "the model has a convolution, which sees the tokens on both sides: it cannot be causal"
                )
            self.specs = tuple(spec.causal() for spec in self.specs)
        # The one behind all layers.
        self.final_norm = config.family.final_norm if count == self.num_layers else None
        self.marked = wanted.hidden_states | wanted.probs
        self.scopes = tree.scopes(config)
        self.hidden_states: list[torch.Tensor] = []
        self.probs: list[torch.Tensor] = []
        batch = inputs.batch
        context = make_context(self.root, config.distances, batch, inputs.rotary_positions, inputs.window_positions)
        if wanted.unpacked:
            show = partial(_shown, self.root, batch.unpack_attentions, batch.pack_attentions)
            context = replace(context, show_probs=show)
        self.context = context

    def run(self) -> EncoderOutput:
        scopes = self.scopes
        x = within(self.root, scopes.embeddings, self._embeddings, *self.inputs.ids)
        x = x if scopes.projects else self._projected(x)
        scope = scopes.encoder if scopes.encoder in self.root._modules else None  # a model made without layers has none
        x = within(self.root, scope, self._encoder, x)
        return self._output(x if scopes.ends else self._normed(x))

    def run_encoder(self, x: torch.Tensor) -> EncoderOutput:
        """What the encoder's container alone stands for, of x (total_tokens, its width)."""
        return self._output(self._encoder(x))

    def _output(self, x: torch.Tensor) -> EncoderOutput:
        """x, behind the last layer, and what was noted on the way."""
        wanted, x = self.wanted, _as_autocast_has_it(x)
        if self.count in wanted.hidden_states:
            x = self._keep(x)
        states: tuple[torch.Tensor | None, ...] = tuple(self.hidden_states)
        last = None
        if wanted.shows_states:
            by_number = dict(zip(sorted(wanted.hidden_states), states, strict=True))
            states, last = tuple(by_number.get(i) for i in range(self.count + 1)), by_number.get(self.count)
        return EncoderOutput(x, states or None, tuple(self.probs) or None, last=last)

    def _keep(self, x: torch.Tensor) -> torch.Tensor:
        """Note a hidden state; returns what the pass goes on with."""
        if not self.wanted.unpacked:
            self.hidden_states.append(_as_autocast_has_it(x))
            return x
        batch = self.inputs.batch
        state, goes_on = _shown(self.root, lambda x: batch.unpack(_as_autocast_has_it(x)), batch.pack, x)
        self.hidden_states.append(state)
        return goes_on

    # ----------------------------------------------------------------------------------------------------------------
    # From ids to the first layer, and behind the last one

    def _embeddings(self, *ids: torch.Tensor | None) -> torch.Tensor:
        names = self.config.embeddings
        dropout_p = value_of(names.dropout, self.config) if self.root.training else 0.0
        return run_embeddings(self.root, names, EmbeddingIds(*ids), dropout_p, self.inputs.batch.cu_seqlens)

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        names = self.config.embeddings
        return x if names.project is None or names.projects_first else linear(get_leaf(self.root, names.project), x)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.final_norm is None else add_norm(get_leaf(self.root, self.final_norm), x, None, None, 0.0)

    # ----------------------------------------------------------------------------------------------------------------
    # The layers

    def _encoder(self, x: torch.Tensor) -> torch.Tensor:
        scopes, count = self.scopes, self.count
        x = self._projected(x) if scopes.projects else x
        # The groups of ALBERT, which nothing below looks at; a list, so that each is asked whether it is a container.
        called = scopes.groups and any([is_called(self.root, path) for path in dict.fromkeys(scopes.groups)])
        if not called:
            reason = self.tree.layers_unsupported()
            if reason is not None:
                self.tree.note(LAYERS, reason)
            return self._layers(0, count, x, as_one_op=reason is None)
        self.tree.note(LAYERS, f"{scopes.groups[0]} has hooks")
        size = self.config.inner_group_num  # layers of each of ALBERT's groups, as often as it runs
        for i, path in zip(range(0, count, size), scopes.groups, strict=False):
            x = within(self.root, path, partial(self._layers, i, min(i + size, count)), x)
        return x

    def _layers(self, first: int, last: int, x: torch.Tensor, as_one_op: bool = False) -> torch.Tensor:
        """Layers [first, last), with the norm behind all of them if that belongs to them."""
        has_ended = False
        while first < last:
            if first in self.wanted.hidden_states:
                x = self._keep(x)
            end = self._end_of_stretch(first, last) if as_one_op else first + 1
            result = None
            if as_one_op and (end - first > 1 or not self.marked):  # each alone would take as long to ask
                result = self._as_one_op(first, end, x)
            if result is not None:
                x, has_ended = result
            else:
                for i in range(first, end):
                    x = self._layer(i, x)
            first = end
        return self._normed(x) if last == self.count and self.scopes.ends and not has_ended else x

    def _end_of_stretch(self, first: int, last: int) -> int:
        """Where the next layer begins of which something is wanted."""
        end = first + 1
        while first not in self.wanted.probs and end < last and end not in self.marked:
            end += 1
        return end

    def _as_one_op(self, first: int, end: int, x: torch.Tensor) -> tuple[torch.Tensor, bool] | None:
        """Layers [first, end) as one op, and whether the norm behind them is in it; None where they run one by one."""
        specs, paths = self.specs[first:end], self.paths[first:end]
        ends = end == self.count and self.scopes.ends
        for op in self._ops_for(paths):
            trains = op != "encoder_layers"  # whose op takes the norm behind all layers, too
            norm = self.final_norm if ends and not trains else None
            stretch = first, end, norm, trains, self.wanted.is_causal
            call = ops.try_fused(op, x, partial(self.tree.layers, stretch, paths, specs))
            if callable(call):
                self.tree.note(LAYERS, "")
                layers = [get_leaf(self.root, path) for path in paths] if self.context.relative else ()
                return run_on_context(call, x, layers, specs, self.context), ends and not trains
            self.tree.note(LAYERS, call)
        return None

    def _ops_for(self, paths: Sequence[str]) -> list[str]:
        """The ops that may serve, the one for inference first."""
        candidates = [] if self.root.training else ["encoder_layers"]
        if not torch.is_grad_enabled():
            reason = "it is in training mode, and gradients are off"
        elif self.tree.recomputes:
            reason = "gradient checkpointing is on, which runs each layer by itself"
        elif len(set(paths)) < len(paths):  # ALBERT: a gradient for each time would lie there at once
            reason = "a layer comes more than once"
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            reason = "gradients of a layer are sent while those of the layers below it are computed"
        else:
            return [*candidates, "encoder_layers_training"]
        self.tree.note(LAYERS, reason)
        return candidates

    def _layer(self, i: int, x: torch.Tensor) -> torch.Tensor:
        spec, leaves, wants_probs = self.specs[i], get_leaf(self.root, self.paths[i]), i in self.wanted.probs
        if self.wanted.ends_with_probs(i, self.num_layers) and not _is_watched(leaves, spec):
            self.probs.append(run_probs(leaves, spec, x, self.context))
            return x
        out, probs = self.tree.run_layer(leaves, spec, x, self.context, wants_probs)
        if probs is not None:
            self.probs.append(probs)
        if spec.after is None:
            return out
        return run_convolution(self.root, spec.after, x, out, self.context, self.tree.is_ours)


def _shown(root: nn.Module, unpack: Callable, pack: Callable, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as the caller gets it, and what the pass goes on with: made of that where gradients are recorded."""
    shown = unpack(x)
    shown = without_views(shown) if is_sharded(root) else shown
    return shown, pack(shown).to(x.dtype) if shown.requires_grad else x


def _is_watched(layer: nn.Module, spec: LayerSpec) -> bool:
    """Whether hooks of a layer or of its containers wait for all of it to run."""
    return has_hooks(layer) or any([is_called(layer, path) for path in spec.names.containers])


def _as_autocast_has_it(x: torch.Tensor) -> torch.Tensor:
    """What a LayerNorm gives under autocast is fp32 to the caller, whatever runs between layers."""
    return x.float() if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64 else x
