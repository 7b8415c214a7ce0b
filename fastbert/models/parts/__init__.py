"""Parts of a model that are called by themselves, as transformers' modules are: embeddings, layers, the encoder, the
pooler and heads. They take hidden states (batch, columns, width), or packed ones (total_tokens, width) with cu_seqlens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.config import EncoderConfig
from fastbert.errors import InputError
from fastbert.execution.calls import Calls
from fastbert.execution.request import EncoderInputs, Wanted, run_pooler
from fastbert.execution.steps import Steps
from fastbert.execution.tree import OwnTree
from fastbert.families.schema import value_of
from fastbert.layer_spec import Disentangled, Distances, LayerSpec
from fastbert.layers.context import LayerContext, make_context
from fastbert.layers.embeddings import EmbeddingIds, run_embeddings
from fastbert.layers.leaves import get_leaf, parent_of, set_module
from fastbert.models.inputs import embedding_sizes, prepare_inputs
from fastbert.models.outputs import ModelOutput
from fastbert.models.parts.given import given_bias, given_rotary, given_table, name_of_given
from fastbert.packed_inputs import ModelInputs
from fastbert.packing import PackedBatch

_NOTHING = EmbeddingIds(None, None, None, None, None)
Run = Callable[..., Any]  # (model, module, *what the user passed)


def _call(cls: type[nn.Module], config: EncoderConfig, path: str, run: Run, module: nn.Module, *args, **options) -> Any:
    """A user's call of the module at `path` below a model: `run` gets a model of `cls` that holds nothing else."""
    model: Any = cls.__new__(cls)
    nn.Module.__init__(model)
    model.config, model.training, model.calls = config, module.training, Calls()
    model.gradient_checkpointing = model.has_pooler = False
    set_module(model, path, module)
    return run(model, module, *args, **options)


def _scored(
    compute: Callable[..., Any],
    pools: bool,
    model: Any,
    module: nn.Module,
    *hidden: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    **named: Any,
) -> Any:
    """Of a head or a pooler: what `compute`, a method of the model's class, makes of vectors.

    pools: of the first column of each sequence, which is a vector; else of each hidden state. Arguments by name are in
    their order: transformers' heads have many names for them.
    """
    states = [*hidden, *(value for value in named.values() if value is not None)]
    for x in states:
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() < 2:
            raise InputError(f"a head takes hidden states, not {_shape_of(x)}")
    if pools:
        return compute(model, *(_first_of(x, cu_seqlens) for x in states))
    made = compute(model, *(x.flatten(0, -2) for x in states))
    if isinstance(made, tuple):
        return tuple(one.unflatten(0, x.shape[:-1]) for one, x in zip(made, states, strict=True))
    return made.unflatten(0, states[0].shape[:-1])


def head_parts(runs: Mapping[str | None, Any], pools: bool = False) -> dict[str, Run]:
    """By path, of methods that run inside of the containers of a head; None: there is no such container."""
    return {path: partial(_scored, run.__func__, pools) for path, run in runs.items() if path is not None}


def encoder_parts(config: EncoderConfig, has_pooler: bool) -> dict[str, Run]:
    """By path, of a base model."""
    scopes, pooler = config.scopes, parent_of(config.family.pooler or "")
    parts: dict[str | None, Run] = {scopes.embeddings: _call_embeddings, scopes.encoder: _call_encoder}
    parts |= dict.fromkeys(scopes.groups, _call_group)
    if has_pooler:
        parts[pooler] = partial(_scored, _pooled, True)
    family = config.family
    parts |= {family.path_of_layer(config, i): _call_layer for i in range(config.num_unique_layers)}
    return {path: run for path, run in parts.items() if path is not None}


def place_parts(model: Any, parts: Mapping[str, Run]) -> None:
    """Tell the modules at these paths below a model what calling them computes."""
    for path, run in parts.items():
        parent, _, name = path.rpartition(".")
        modules: dict[str, Any] = (get_leaf(model, parent) if parent else model)._modules
        if name in modules:  # a model made without layers has no encoder
            modules[name].part = partial(_call, type(model), model.config, path, run)


# --------------------------------------------------------------------------------------------------------------------
# What users pass


def _named(names: tuple[str, ...], args: tuple, options: dict[str, Any], allowed: set[str]) -> dict[str, Any]:
    """The arguments by name, but for those that say nothing. Raises TypeError."""
    if len(args) > len(names) or (twice := set(names[: len(args)]) & options.keys()):
        raise TypeError(f"it takes {', '.join(names)} by position" + ("" if len(args) > len(names) else f": {twice}"))
    named = dict(zip(names, args, strict=False)) | options
    named = {name: value for name, value in named.items() if isinstance(value, torch.Tensor) or value}
    if unknown := sorted(named.keys() - allowed):
        raise TypeError(f"it takes no {', '.join(unknown)}; it has {', '.join(sorted(allowed))}")
    return named


def _shape_of(x: Any) -> str:
    return f"a tensor of {x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def _first_of(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The first vector of each sequence, (batch, width): as in transformers, of column 0."""
    if x.dim() != (3 if cu_seqlens is None else 2):
        raise InputError(f"hidden states are (batch, columns, width), or packed with cu_seqlens, not {_shape_of(x)}")
    if cu_seqlens is None:
        return x[:, 0]
    return ops.pooling(x, PackedBatch.from_cu_seqlens(cu_seqlens, None, x.shape[0]).cu_seqlens, mode="cls")


def _packed(x: Any, width: int, named: dict[str, Any], window: tuple[int, int]) -> tuple[torch.Tensor, PackedBatch]:
    """Hidden states as the tokens that are real, and where they are. Raises InputError."""
    cu_seqlens, mask = named.get("cu_seqlens"), named.get("attention_mask")
    dims = 3 if cu_seqlens is None else 2
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() != dims or x.shape[-1] != width:
        raise InputError(
            f"hidden states are (batch, columns, {width}), or (total_tokens, {width}) with cu_seqlens,"
            f" not {_shape_of(x)}"
        )
    if cu_seqlens is None:
        batch = PackedBatch.from_mask(_key_mask(mask, x, window), x.shape[0], x.shape[1], x.device)
        return batch.pack(x), batch
    if mask is not None:
        raise InputError("attention_mask and cu_seqlens exclude each other: a packed batch has no padding")
    return x, PackedBatch.from_cu_seqlens(cu_seqlens, named.get("max_seqlen"), x.shape[0])


def _key_mask(mask: torch.Tensor | None, x: torch.Tensor, window: tuple[int, int]) -> torch.Tensor | None:
    """(batch, columns), of that or of what transformers makes of it: a mask of scores, (batch, 1, columns, columns) or
    (batch, 1, 1, columns), bool, of 1 and 0, or what is added to the scores. Raises InputError: it hides more than
    padding and what is outside of the layer's window.
    """
    if mask is None or mask.dim() < 3:
        return mask
    mask = mask if mask.dim() == 4 else mask[:, None]
    batch_size, seqlen = x.shape[:2]
    if mask.shape[0] not in (1, batch_size) or mask.shape[2] not in (1, seqlen) or mask.shape[3] != seqlen:
        raise InputError(f"attention_mask has shape {tuple(mask.shape)}; it must be ({batch_size}, {seqlen})")
    allowed = mask > 0
    if mask.is_floating_point() and not allowed.any():
        allowed = mask == 0
    wrong = mask.is_floating_point() & ((mask != 0) & (mask != 1) & (mask > -1e4)).any()
    if allowed.shape[-2] == 1:
        keys = allowed[:, :, 0]
    else:
        places = torch.arange(allowed.shape[-1], device=mask.device)
        distance = places - places[:, None]  # of a key from a query
        left, right = (limit if limit >= 0 else len(places) for limit in window)
        keys = allowed.diagonal(dim1=-2, dim2=-1)
        expected = keys[..., None, :] & (distance >= -left) & (distance <= right)
        wrong = wrong | ((allowed != expected) & keys[..., None]).any()
    if wrong or (keys != keys[:, :1]).any():
        raise InputError(
            "attention_mask hides something else than padding: give (batch, columns), 1 at real tokens and 0 at padding"
        )
    return keys[:, 0].expand(batch_size, seqlen)


# --------------------------------------------------------------------------------------------------------------------
# The parts of a base model


def _pooled(model: Any, first: torch.Tensor) -> torch.Tensor:
    return run_pooler(model, model.family, first)


def _call_embeddings(model: Any, module: nn.Module, *args: Any, **options: Any) -> torch.Tensor:
    """As the embeddings of the family in transformers. Masked tokens give zeros where there is a mask."""
    config, layout = model.config, {"attention_mask", "mask", "cu_seqlens", "max_seqlen"}
    names = config.family.hf_class.embedding_arguments
    ids = {"input_ids", "inputs_embeds", "position_ids", "token_type_ids", "task_type_ids"}
    named = _named(names, args, options, ids | layout)
    if "mask" in named:  # DeBERTa's name
        named["attention_mask"] = named.pop("mask")
    if "attention_mask" in named:
        named["attention_mask"] = _embedded_mask(named["attention_mask"])
    inputs = prepare_inputs(config, embedding_sizes(model, config, config), ModelInputs(**named))
    dropout_p = value_of(config.embeddings.dropout, config) if module.training else 0.0
    x = run_embeddings(model, config.embeddings, inputs.ids, dropout_p, inputs.batch.cu_seqlens)
    return inputs.batch.unpack(x)


def _embedded_mask(mask: torch.Tensor) -> torch.Tensor:
    """(batch, columns), of that or of (batch, 1, 1, columns)."""
    return mask if mask.dim() < 3 else mask.flatten(1)


def _call_encoder(model: Any, module: nn.Module, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
    """As transformers' encoder, from what the embeddings give to what is behind its last layer."""
    config, defaults = model.config, model.family.hf_class.encoder_defaults
    flags = {"output_hidden_states": False, "output_attentions": False, "return_dict": True} | defaults
    flags |= {name: options.pop(name) for name in flags if options.get(name) is not None}
    allowed = {"attention_mask", "cu_seqlens", "max_seqlen", "position_ids", "position_embeddings"}
    named = _named(("attention_mask",), args, options, allowed)
    width = config.embedding_width if config.scopes.projects else config.hidden_size
    x, batch = _packed(hidden_states, width, named, (-1, -1))
    tree, distances = OwnTree(model), config.distances
    columns = None if distances is None else batch.columns_with_gaps(distances.are_absolute)
    states, probs = flags["output_hidden_states"], flags["output_attentions"]
    wanted = Wanted.of_all(len(tree.running_config.layer_paths), states, probs, False)
    steps = Steps(tree, EncoderInputs(batch, _NOTHING, _turned(batch, named, columns), columns), wanted)
    if "position_embeddings" in named and distances is not None:
        rotary = {each: given_rotary(each, named["position_embeddings"], batch) for each in distances.rotaries}
        steps.context = replace(steps.context, rotary=rotary)
    encoded = steps.run_encoder(x)
    output = ModelOutput(last_hidden_state=encoded.last_state(batch), **encoded.extras())
    return output if flags["return_dict"] else output.to_tuple()


def _call_layer(model: Any, layer: Any, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
    """As transformers' layer of the family."""
    theirs, given_as = model.family.hf_class, name_of_given(layer.spec)
    allowed = {"attention_mask", "position_ids", "cu_seqlens", "max_seqlen", "output_attentions"}
    allowed |= {"relative_pos", "is_causal", *filter(None, [given_as])}
    named = _named(theirs.layer_arguments, args, options, allowed)
    window = layer.spec.attention.window_size
    if "is_causal" in named and window[1] != 0:
        raise InputError("is_causal=True: the layer is not causal, as its config says")
    x, batch = _packed(hidden_states, model.config.hidden_size, named, window)
    spec, context = _context_of(model, layer.spec, batch, named)
    if "output_attentions" in named or theirs.layer_returns == "both":
        out, probs = layer.run(x, context, True, spec)
        return batch.unpack(out), batch.unpack_attentions(probs)
    out = batch.unpack(layer.run(x, context, False, spec))
    return {"tensor": out, "tuple": (out,), "pair": (out, None)}[theirs.layer_returns]


def _turned(batch: PackedBatch, named: dict[str, Any], columns: torch.Tensor | None) -> torch.Tensor | None:
    """By what rotary embedding turns: position_ids, where a user gives some."""
    given = named.get("position_ids")
    if given is None:
        return columns
    return given if batch.seqlen is None else batch.pack(given.expand(batch.batch_size, -1))


def _context_of(
    model: Any, spec: LayerSpec, batch: PackedBatch, named: dict[str, Any]
) -> tuple[LayerSpec, LayerContext]:
    """What a layer by itself computes, and its context: with the tables that a user gives, which transformers' encoder
    makes of leaves that stand beside the layer; without terms of distances where there is none of these.
    """
    attention, name = spec.attention, name_of_given(spec)
    rotary, given, has_windows = attention.rotary, named.get(name or ""), attention.window_size != (-1, -1)
    distances = Distances((rotary,) if rotary else (), has_windows, (attention.relative,) if attention.relative else ())
    columns = batch.columns_with_gaps(distances.are_absolute)
    is_made = given is None and rotary is not None and rotary.table is None
    made = Distances((rotary,) if is_made and rotary else (), has_windows)
    context = make_context(model, made, batch, _turned(batch, named, columns), columns)
    if given is None and isinstance(attention.relative, Disentangled):
        raise InputError(
            "rel_embeddings is missing: the layer projects it. Give the rows of the encoder's table, normed"
        )
    if given is None and not is_made:
        return replace(spec, attention=replace(attention, position=None)), context
    if given is not None and rotary is not None:
        return spec, replace(context, rotary={rotary: given_rotary(rotary, given, batch)})
    if given is None or attention.relative is None:
        return spec, context
    if isinstance(attention.relative, Disentangled):
        table = given_table(attention.relative, given, named.get("relative_pos"), batch)
    else:
        table = given_bias(given, batch)
    return spec, replace(context, relative={attention.relative: table})


def _call_group(model: Any, module: nn.Module, hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
    """ALBERT's layers that run one behind the other as often as their group does."""
    (layers,) = module._modules.values()
    for layer in layers:  # type: ignore[union-attr]
        hidden_states = layer(hidden_states, *args, **options)
    return hidden_states
