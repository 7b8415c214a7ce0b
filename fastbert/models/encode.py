"""One forward pass of an encoder over the leaves of a tree, ours or Hugging Face's: embed, run the layers, pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fastbert import ops
from fastbert.config import EncoderConfig
from fastbert.errors import InputError
from fastbert.families.schema import Family, Scopes, value_of
from fastbert.layer_spec import LayerSpec
from fastbert.layers.context import LayerContext, make_context
from fastbert.layers.convolution import run_convolution
from fastbert.layers.embeddings import EmbeddingIds, run_embeddings
from fastbert.layers.encoder import add_norm, run_probs
from fastbert.layers.fused import try_fused_layers, try_fused_layers_for_training
from fastbert.layers.fused_encoder import try_fused_encoder
from fastbert.layers.leaves import get_leaf, has_hooks, is_called, linear, within
from fastbert.layers.sharded import is_sharded, without_views
from fastbert.models.inputs import EncoderInputs
from fastbert.packed_inputs import ModelInputs, PackedInputs
from fastbert.packing import PackedBatch, is_all_ones


class Wanted(NamedTuple):
    """What a forward pass leaves beside the last hidden state, by the numbers of layers.

    hidden_states: what goes into each of these layers; the number of all layers: what comes out of the last one.
    probs: the attention probabilities of these. stops: no layer behind the last of these runs, nor of that one what
    lies behind its probabilities, if these are all; the last hidden state is then what the last layer that ran gave.
    is_causal: no token sees those behind it. pooler: what the pooler makes, too, where one op does all of it. unpacked:
    hidden states and probabilities are in the layout of the caller's input. What comes next is then made of them where
    gradients are recorded, so that they have gradients. shows_states: hidden states were asked for, if only by numbers
    that no layer has: the output has a place for each of them.
    """

    hidden_states: frozenset[int] = frozenset()
    probs: frozenset[int] = frozenset()
    stops: bool = False
    is_causal: bool = False
    pooler: bool = False
    unpacked: bool = False
    shows_states: bool = False

    @classmethod
    def of_all(cls, num_layers: int, hidden_states: bool | int | Sequence[int], probs: bool, pooler: bool) -> Wanted:
        """As output_hidden_states, which may name some of them, also from the end, and output_attentions have it."""
        count = num_layers + 1
        asked = [hidden_states] if isinstance(hidden_states, int) else hidden_states
        asked = range(count) if hidden_states is True else asked if hidden_states else ()
        states = frozenset(i % count for i in asked if -count <= i < count)  # others select nothing in transformers
        shows = bool(hidden_states)
        every = frozenset(range(num_layers if probs else 0))
        return cls(states, every, pooler=pooler, unpacked=shows or bool(probs), shows_states=shows)

    def layers_to_run(self, num_layers: int) -> int:
        return max(0, *self.hidden_states, *(i + 1 for i in self.probs)) if self.stops else num_layers

    def ends_with_probs(self, i: int, num_layers: int) -> bool:
        """Whether of layer i the probabilities are all that somebody reads."""
        is_last = self.stops and i + 1 == self.layers_to_run(num_layers)
        return is_last and i in self.probs and i + 1 not in self.hidden_states


NOTHING_ELSE = Wanted()


class EncoderOutput(NamedTuple):
    """The packed last hidden state (total_tokens, hidden_size); where they were asked for, packed hidden states and
    probabilities (batch, heads, max_seqlen, max_seqlen), in the order of the layers, or unpacked ones, and None for
    hidden states that were not among those. pooled: what the pooler made, (batch, hidden_size), and last, the unpacked
    last hidden state, where they are there already.
    """

    packed: torch.Tensor
    hidden_states: tuple[Any, ...] | None = None
    probs: tuple[torch.Tensor, ...] | None = None
    pooled: torch.Tensor | None = None
    last: torch.Tensor | None = None


# Runs one layer: (layer, its spec, x, context, wants_probs) -> (x, probs or None).
RunLayer = Callable[[nn.Module, LayerSpec, torch.Tensor, LayerContext, bool], tuple[torch.Tensor, torch.Tensor | None]]


def run_encoder(
    root: nn.Module,
    config: EncoderConfig,
    inputs: EncoderInputs,
    run_one_layer: RunLayer,
    layer_type: type[nn.Module] | None = None,
    wanted: Wanted = NOTHING_ELSE,
    sharded: frozenset[str] = frozenset(),
    calls_layers: bool = False,
    recomputes: bool = False,
) -> EncoderOutput:
    """A forward pass up to the last hidden state, over the leaves of `root`, ours or Hugging Face's.

    `layer_type`: layers may run as one op, if they are plain ones of that type; None: the tree is not ours, and its
    owner has looked at its containers, of which those that are `sharded` are called. `calls_layers`: each layer runs by
    itself, as activation checkpointing has it. Layers between those of which something is wanted may run as one op.
    `recomputes`: such an op keeps only what goes into its layers; where none does, `run_one_layer` sees to it.
    """
    if wanted._replace(pooler=False) == NOTHING_ELSE and not (sharded or calls_layers or recomputes):
        found = _as_one_op(root, config, inputs, layer_type, wanted.pooler)
        if found is not None:
            return EncoderOutput(found[0], pooled=found[1])
    family, names = config.family, config.embeddings
    count = wanted.layers_to_run(len(config.layer_paths))
    paths, specs = config.layer_paths[:count], config.layer_specs[:count]
    if wanted.is_causal:
        if any(spec.after is not None for spec in specs):
            raise InputError("the model has a convolution, which sees the tokens on both sides: it cannot be causal")
        specs = tuple(spec.causal() for spec in specs)
    norm = family.final_norm if count == len(config.layer_paths) else None  # the one behind all layers
    marked = wanted.hidden_states | wanted.probs
    dropout_p = value_of(names.dropout, config) if root.training else 0.0
    scopes = Scopes() if layer_type is None else config.scopes
    if sharded:
        scopes = _sharded_scopes(config.scopes, sharded)
    hidden_states: list[torch.Tensor] = []
    probs: list[torch.Tensor] = []
    batch = inputs.batch
    context = make_context(root, config.distances, batch, inputs.rotary_positions, inputs.window_positions)
    if wanted.unpacked:
        context = replace(context, show_probs=partial(_shown, root, batch.unpack_attentions, batch.pack_attentions))

    def keep(x):
        """Note a hidden state; returns what the pass goes on with."""
        if not wanted.unpacked:
            hidden_states.append(_as_autocast_has_it(x))
            return x
        state, goes_on = _shown(root, lambda x: batch.unpack(_as_autocast_has_it(x)), batch.pack, x)
        hidden_states.append(state)
        return goes_on

    def embeddings(*ids):
        return run_embeddings(root, names, EmbeddingIds(*ids), dropout_p, batch.cu_seqlens)

    def project(x):
        return x if names.project is None or names.projects_first else linear(get_leaf(root, names.project), x)

    def layer(i, x):
        spec, leaves = specs[i], get_leaf(root, paths[i])
        if wanted.ends_with_probs(i, len(config.layer_paths)) and not _is_watched(leaves, spec):
            probs.append(run_probs(leaves, spec, x, context))
            return x
        out, found = run_one_layer(leaves, spec, x, context, i in wanted.probs)
        if found is not None:
            probs.append(found)
        return out if spec.after is None else run_convolution(root, spec.after, x, out, context, layer_type is not None)

    def final_norm(x):
        return x if norm is None else add_norm(get_leaf(root, norm), x, None, None, 0.0)

    def layers(first, last, x, as_one_op=False):
        """Layers [first, last), with the norm behind all of them if that belongs to them. as_one_op: those between two
        of which something is wanted run as one op, where they can."""
        while first < last:
            end = first + 1
            if first in wanted.hidden_states:
                x = keep(x)
            while as_one_op and first not in wanted.probs and end < last and end not in marked:
                end += 1
            if as_one_op and (end - first > 1 or not marked):  # each alone would make the tree be looked at each time
                stretch = root, paths[first:end], specs[first:end]
                ends = end == count and scopes.ends
                if not root.training:
                    fused = try_fused_layers(*stretch, norm if ends else None, layer_type, x)
                    if callable(fused):
                        x, first = fused(context), end
                        if ends:
                            return x
                        continue
                trained = try_fused_layers_for_training(*stretch, layer_type, x, recomputes)
                if callable(trained):
                    x, first = trained(context), end
                    continue
            for i in range(first, end):
                x = layer(i, x)
            first = end
        return final_norm(x) if last == count and scopes.ends else x

    def encoder(x):
        x = project(x) if scopes.projects else x
        # The groups of ALBERT, which nothing below looks at; a list, so that each is asked whether it is a container.
        called = scopes.groups and any([is_called(root, path) for path in dict.fromkeys(scopes.groups)])
        if not called:
            return layers(0, count, x, as_one_op=not (sharded or calls_layers))
        size = config.inner_group_num  # layers of each of ALBERT's groups, as often as it runs
        for i, path in zip(range(0, count, size), scopes.groups, strict=False):
            x = within(root, path, partial(layers, i, min(i + size, count)), x)
        return x

    x = within(root, scopes.embeddings, embeddings, *inputs.ids)
    x = x if scopes.projects else project(x)
    scope = scopes.encoder if scopes.encoder in root._modules else None  # a model made without layers has none
    x = within(root, scope, encoder, x)
    x = _as_autocast_has_it(x if scopes.ends else final_norm(x))
    if count in wanted.hidden_states:
        x = keep(x)
    states: tuple[torch.Tensor | None, ...] = tuple(hidden_states)
    last = None
    if wanted.shows_states:
        by_number = dict(zip(sorted(wanted.hidden_states), states, strict=True))
        states, last = tuple(by_number.get(i) for i in range(count + 1)), by_number.get(count)
    return EncoderOutput(x, states or None, tuple(probs) or None, last=last)


def _shown(root: nn.Module, unpack: Callable, pack: Callable, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as the caller gets it, and what the pass goes on with: made of that where gradients are recorded."""
    shown = unpack(x)
    shown = without_views(shown) if is_sharded(root) else shown
    return shown, pack(shown).to(x.dtype) if shown.requires_grad else x


# What a fused encoder gives: what was asked for, and what the pooler made of it, if that was.
Pooled = tuple[torch.Tensor, torch.Tensor | None]


def _as_one_op(
    root: nn.Module, config: EncoderConfig, inputs: EncoderInputs, layer_type: type[nn.Module] | None, pools: bool
) -> Pooled | None:
    """The packed last hidden state, where one op does all of it."""
    ids = inputs.ids
    if ids.input_ids is None or not inputs.batch.total_tokens:
        return None
    given = ids.input_ids, ids.token_type_ids, ids.position_ids, inputs.batch.cu_seqlens, "none", False, pools
    return _served(try_fused_encoder(root, config, lambda: config, layer_type, infers=False), *given)


def _served(fused: Callable[..., Pooled] | str, *given: Any) -> Pooled | None:
    """What a fused encoder gives; None where there is none, or it does not serve this."""
    if isinstance(fused, str):
        return None
    try:
        return fused(*given)
    except IndexError:  # an id that is in no table, a text that is too long, or tensors of several dtypes
        return None


def run_as_one_op(
    base: Any, packed: PackedInputs, layer_type: type[nn.Module], pooling: str, normalizes: bool, infers: bool
) -> torch.Tensor | None:
    """EncoderModel.as_one_op of `base`, for whose call nobody waits. Ids need not have been checked."""
    batch, types = packed["batch"], packed.get("token_type_ids")
    has_more = "position_ids" in packed or "task_type_ids" in packed or batch.seqlen is not None
    if has_more or not batch.total_tokens or (types is not None and base.config.embeddings.token_type is None):
        return None
    fused = try_fused_encoder(base, base.config, lambda: base.running_config, layer_type, infers)
    found = _served(fused, packed["input_ids"], types, None, batch.cu_seqlens, pooling, normalizes, False)
    if found is None:
        return None
    base.calls.ran_packed()
    return found[0]


def run_grid_as_one_op(
    root: nn.Module,
    config: EncoderConfig,
    running_config: Callable[[], EncoderConfig],
    given: ModelInputs,
    layer_type: type[nn.Module] | None,
    pools: bool,
) -> tuple[EncoderOutput, PackedBatch] | None:
    """What the encoder at `root` gives, with `pools` its pooler, too, and the batch, where one op does all of it for
    padded ids that have no padding, as one text has none; else None. Nothing of `given` need have been checked. The
    others are as of try_fused_encoder.
    """
    ids, mask, types = given.input_ids, given.attention_mask, given.token_type_ids
    others = (given.position_ids, given.inputs_embeds, given.cu_seqlens, given.batch, given.task_type_ids)
    if any([t is not None for t in others]) or not _is_grid(ids) or not ids.numel():
        return None
    if ops.transform_unsupported() is not None:  # of which a mask may have no values to look at
        return None
    if mask is not None and not (_is_grid(mask) and mask.shape == ids.shape and is_all_ones(mask)):
        return None
    if types is not None:
        if not _is_grid(types) or types.shape != ids.shape or config.embeddings.token_type is None:
            return None
        types = types.flatten()
    batch = PackedBatch.from_mask(None, ids.shape[0], ids.shape[1], ids.device)
    fused = try_fused_encoder(root, config, running_config, layer_type, infers=False)
    found = _served(fused, ids.flatten(), types, None, batch.cu_seqlens, "none", False, pools)
    return None if found is None else (EncoderOutput(found[0], pooled=found[1]), batch)


def _is_grid(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.is_cpu and t.dtype is torch.int64 and t.dim() == 2


def _is_watched(layer: nn.Module, spec: LayerSpec) -> bool:
    """Whether hooks of a layer or of its containers wait for all of it to run."""
    return has_hooks(layer) or any([is_called(layer, path) for path in spec.names.containers])


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
    return linear(get_leaf(root, family.pooler), first, "tanh")


def last_state(output: EncoderOutput, batch: PackedBatch) -> torch.Tensor:
    """The last hidden state in the layout of the caller's input."""
    return batch.unpack(output.packed) if output.last is None else output.last


def extras_of(output: EncoderOutput) -> dict[str, tuple[torch.Tensor, ...]]:
    """`hidden_states` and `attentions`, as far as it has them."""
    found = {"hidden_states": output.hidden_states, "attentions": output.probs}
    return {name: tensors for name, tensors in found.items() if tensors is not None}
