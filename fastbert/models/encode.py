"""One forward pass of an encoder over the leaves of a tree, ours or Hugging Face's: embed, run the layers, pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from fastbert import ops
from fastbert.config import EncoderConfig
from fastbert.families.schema import Family, Scopes, value_of
from fastbert.layer_spec import LayerSpec
from fastbert.layers.context import LayerContext, make_context
from fastbert.layers.convolution import run_convolution
from fastbert.layers.embeddings import EmbeddingIds, run_embeddings
from fastbert.layers.encoder import add_norm
from fastbert.layers.fused import try_fused_layers, try_fused_layers_for_training
from fastbert.layers.leaves import get_leaf, is_called, linear, within
from fastbert.models.inputs import EncoderInputs
from fastbert.packing import PackedBatch


class EncoderOutput(NamedTuple):
    """The packed last hidden state (total_tokens, hidden_size); where they were asked for, the packed hidden states
    that went into each layer and came out of the last, and the probabilities (batch, heads, max_seqlen, max_seqlen).
    """

    packed: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None
    probs: tuple[torch.Tensor, ...] | None = None


# Runs one layer: (layer, its spec, x, context, wants_probs) -> (x, probs or None).
RunLayer = Callable[[nn.Module, LayerSpec, torch.Tensor, LayerContext, bool], tuple[torch.Tensor, torch.Tensor | None]]


def run_encoder(
    root: nn.Module,
    config: EncoderConfig,
    inputs: EncoderInputs,
    run_one_layer: RunLayer,
    layer_type: type[nn.Module] | None = None,
    wants_hidden_states: bool = False,
    wants_probs: bool = False,
    sharded: frozenset[str] = frozenset(),
    calls_layers: bool = False,
) -> EncoderOutput:
    """A forward pass up to the last hidden state, over the leaves of `root`, ours or Hugging Face's.

    `layer_type`: all layers may run as one op, if they are plain ones of that type; None: the tree is not ours, and its
    owner has looked at its containers, of which those that are `sharded` are called. `calls_layers`: each layer runs by
    itself, as activation checkpointing has it.
    """
    family, names = config.family, config.embeddings
    paths, specs = config.layer_paths, config.layer_specs
    dropout_p = value_of(names.dropout, config) if root.training else 0.0
    scopes = Scopes() if layer_type is None else config.scopes
    if sharded:
        scopes = _sharded_scopes(config.scopes, sharded)
    hidden_states: list[torch.Tensor] = []
    probs: list[torch.Tensor] = []
    context = make_context(root, config.distances, inputs.batch, inputs.rotary_positions, inputs.window_positions)

    def embeddings(*ids):
        return run_embeddings(root, names, EmbeddingIds(*ids), dropout_p, inputs.batch.cu_seqlens)

    def project(x):
        return x if names.project is None or names.projects_first else linear(get_leaf(root, names.project), x)

    def layers(first, last):
        def run(x):
            given = x
            for path, spec in zip(paths[first:last], specs[first:last], strict=True):
                if wants_hidden_states:
                    hidden_states.append(_as_autocast_has_it(x))
                x, found = run_one_layer(get_leaf(root, path), spec, x, context, wants_probs)
                if spec.after is not None:
                    x = run_convolution(root, spec.after, given, x, context, layer_type is not None)
                if found is not None:
                    probs.append(found)
            return x

        return run

    def encoder(x):
        x = project(x) if scopes.projects else x
        # The groups of ALBERT, which nothing below looks at; a list, so that each is asked whether it is a container.
        called = scopes.groups and any([is_called(root, path) for path in dict.fromkeys(scopes.groups)])
        if not (wants_probs or wants_hidden_states or called or sharded or calls_layers):
            if not root.training:
                fused = try_fused_layers(root, paths, specs, family.final_norm if scopes.ends else None, layer_type, x)
                if callable(fused):
                    return fused(context)
            trained = try_fused_layers_for_training(root, paths, specs, layer_type, x)
            if callable(trained):
                return final_norm(trained(context)) if scopes.ends else trained(context)
        if not scopes.groups:
            x = layers(0, None)(x)
        else:  # the layers of each of ALBERT's groups, as often as it runs
            for i, path in zip(range(0, len(paths), config.inner_group_num), scopes.groups, strict=True):
                x = within(root, path, layers(i, i + config.inner_group_num), x)
        return final_norm(x) if scopes.ends else x

    def final_norm(x):
        return x if family.final_norm is None else add_norm(get_leaf(root, family.final_norm), x, None, None, 0.0)

    x = within(root, scopes.embeddings, embeddings, *inputs.ids)
    x = x if scopes.projects else project(x)
    scope = scopes.encoder if scopes.encoder in root._modules else None  # a model made without layers has none
    x = within(root, scope, encoder, x)
    x = _as_autocast_has_it(x if scopes.ends else final_norm(x))
    if wants_hidden_states:
        hidden_states.append(x)
    return EncoderOutput(
        x, tuple(hidden_states) if wants_hidden_states else None, tuple(probs) if wants_probs else None
    )


def _sharded_scopes(scopes: Scopes, sharded: frozenset[str]) -> Scopes:
    """Those of another library's tree that have to be called."""
    if scopes.encoder not in sharded:
        scopes = Scopes(scopes.embeddings)
    return scopes._replace(embeddings=scopes.embeddings if scopes.embeddings in sharded else None, groups=())


def _as_autocast_has_it(x: torch.Tensor) -> torch.Tensor:
    """What a LayerNorm gives under autocast is fp32 to the caller, whatever runs between layers."""
    return x.float() if torch.is_autocast_enabled(x.device.type) and x.dtype is not torch.float64 else x


def first_tokens(packed: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """(total_tokens, hidden_size) -> each sequence's first real token, (batch, hidden_size); zeros if it has none."""
    if batch.indices is None and batch.seqlen is not None:  # no padding: nothing to look for
        return packed.view(batch.batch_size, batch.seqlen, -1)[:, 0]
    return ops.pooling(packed, batch.cu_seqlens, mode="cls")


def run_pooler(root: nn.Module, family: Family, first: torch.Tensor) -> torch.Tensor:
    """tanh(dense(first token)) (Devlin et al. 2018, appendix A.2): (batch, hidden_size)."""
    assert family.pooler is not None
    return torch.tanh(linear(get_leaf(root, family.pooler), first))


def unpacked_extras(output: EncoderOutput, batch: PackedBatch) -> dict[str, tuple[torch.Tensor, ...]]:
    """`hidden_states` and `attentions` of an output, as far as it has them, in the layout of the caller's input."""
    extras = {}
    if output.hidden_states is not None:
        extras["hidden_states"] = tuple(batch.unpack(x) for x in output.hidden_states)
    if output.probs is not None:
        extras["attentions"] = tuple(batch.unpack_attentions(p) for p in output.probs)
    return extras
