"""What packed execution would not honour: of a call's arguments, and of what is in the tree now."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from fastbert.acceleration.plan import Plan, dropouts_of
from fastbert.config import EncoderConfig
from fastbert.layers.leaves import FORWARD, HOOKS, has_global_hooks
from fastbert.layers.snapshot import Remembered, Snapshot
from fastbert.models.inputs import TableSizes
from fastbert.models.tree import groups_objection, modules_of

TENSORS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "task_type_ids")
OPTIONS = ("output_attentions", "output_hidden_states", "return_dict")
# What an encoder's forward ignores: a cache is the decoder's, the Trainer's count of items the loss's.
_ARGUMENTS = {*TENSORS, *OPTIONS, "use_cache", "num_items_in_batch"}

# Those that compute softmax(q k^T / sqrt(d)) v and nothing else: which of them is asked for makes no difference.
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")


def call_objection(module: Any, plan: Plan, tables: TableSizes, given: dict, options: dict) -> str | None:
    """Why this call must be transformers' own; what is wrong with an input is left to prepare_inputs to say."""
    for name, value in given.items():
        if name not in _ARGUMENTS and value is not None and value is not False:
            return f"the argument {name} is not one that fastbert reads"
    if (objection := _config_objection(module.config, plan, given, options)) is not None:
        return objection
    tensors = {name: given[name] for name in TENSORS if given.get(name) is not None}
    for name, t in tensors.items():
        if type(t) not in (torch.Tensor, nn.Parameter) or t.device.type == "meta":
            return f"{name} is no ordinary tensor"
    grid: tuple[int, ...] = next((tensors[n].shape[:2] for n in ("input_ids", "inputs_embeds") if n in tensors), ())
    if len(grid) != 2 or 0 in grid:
        return "the batch is empty" if 0 in grid else None
    for name in ("attention_mask", "token_type_ids", "position_ids", "task_type_ids"):
        shape = tensors[name].shape if name in tensors else grid
        if shape != grid and (name != "position_ids" or shape != (1, *grid[1:])):
            return f"{name} is not of shape (batch, seqlen)"
    counted = plan.family.positions_from_ids and "position_ids" not in tensors
    limit = tables.longest(plan.config)
    if counted and limit is not None and grid[-1] > limit:
        return "the batch is wider than the position table: transformers lets padding be out there"
    mask = tensors.get("attention_mask")
    if mask is None or plan.reads == "tokens":
        return None
    if plan.reads == "padding" and not mask.all():
        return "its head's softmax runs over the padding (that of fastbert's own head does not)"
    if plan.reads == "last" and not mask[:, -1].all():
        return "padding on the right: the last column, which its head reads, holds no token"
    if (late := mask[:, 0] == 0).any() and mask[late].any():
        return "padding on the left: column 0, which poolers and heads read, holds no token; pad on the right"
    return None


def _config_objection(config: Any, plan: Plan, given: dict, options: dict) -> str | None:
    """Of what transformers' forward reads in its config with each call."""
    live = vars(config)  # not every family's config has these
    causal, attention = live.get("is_decoder") or live.get("is_causal"), live.get("_attn_implementation_internal")
    if causal or attention not in _ATTENTION:
        return "its config asks for causal attention, or for an implementation that fastbert does not know"
    if not isinstance(options["output_hidden_states"], bool | None):
        return "output_hidden_states selects some of them"
    if options["output_hidden_states"] and live.get("tie_last_hidden_states") is False:
        return "its config asks for the last hidden state as it is before the final norm"
    distances = plan.config.distances
    if distances is None:
        return None
    if distances.has_windows:
        windows = {max(spec.attention.window_size) for spec in plan.config.layer_specs} - {-1}
        if windows != {config.sliding_window}:
            return f"its config's window is {config.sliding_window}; when the model was accelerated it was {windows}"
    if distances.rotaries and given.get("position_ids") is not None and str(attention).startswith("flash"):
        return "flash attention takes position_ids that start again for the beginning of another sequence"
    return None


_remembered = Remembered()  # models in whose trees the last look found no objection


def tree_objection(root: nn.Module, plan: Plan, config: EncoderConfig) -> str | None:
    """Why our path would not do what calling every module of the tree does; None where it does."""
    if has_global_hooks():
        return "global module hooks are registered"
    if _remembered.get(root, (plan, config)):
        return None
    snapshot = Snapshot()  # of all that is read below
    if objection := groups_objection(root, config) or _count_objection(root, config, snapshot):
        return objection
    dropouts = dropouts_of(config)
    snapshot.watch_children(root)
    snapshot.hold(root.__dict__, "training")
    for key, path, module, owner in modules_of(root, plan.family, config):
        if key is None:
            snapshot.hold(module.__dict__, "_forward_pre_hooks")
            hooks = module._forward_pre_hooks.values()
            if any(isinstance(h, partial) and h.func.__module__.startswith("peft.") for h in hooks):
                return "PEFT's adapter_names and alora_offsets choose by the row of a batch"
            continue
        snapshot.watch(module, ())
        snapshot.watch_children(module)
        snapshot.hold(module.__dict__, "training", *HOOKS)  # not none of them: transformers' recorder may stay
        known: Any = plan.classes.get(key)
        if type(module) is not known:
            return f"{path} is a {type(module).__name__}, which was not there when the model was accelerated"
        if FORWARD in module.__dict__:
            return f"{path} has a forward of its own on the instance"
        if _has_hooks(module):
            return f"{path} has hooks, and packed execution does not call that module"
        for name, value in plan.numbers[key].items():
            snapshot.hold(module.__dict__, name)
            if module.__dict__.get(name) != value:
                return f"{path}.{name} is {module.__dict__.get(name)}; when the model was accelerated it was {value}"
        for name, p, expected in _dropouts_in(module, key, dropouts):
            snapshot.hold(module.__dict__, name)
            if expected is not None and (p if module.training else 0.0) != (expected if owner.training else 0.0):
                where = path if name == "p" else f"{path}.{name}"
                state = f"has p={p}, training={module.training}; by config and owner {expected}, {owner.training}"
                return f"{where} {state}"
    _remembered.put(root, (plan, config), snapshot, True)
    return None


def _dropouts_in(module: nn.Module, key: str, dropouts: dict[str, float | None]):
    """(attribute, its value, what it must be) of a module that is a dropout, or stands for one, or keeps numbers."""
    if key in dropouts:
        yield "p", 0.0 if type(module) is nn.Identity else module.p, dropouts[key]
    for name in module.__dict__:
        if (inner := f"{key}.{name}") in dropouts:
            yield name, module.__dict__[name], dropouts[inner]


def _count_objection(root: Any, config: EncoderConfig, snapshot: Snapshot) -> str | None:
    if not config.family.theirs.counts_layers:
        return None
    snapshot.hold(vars(root.config), "num_hidden_layers")
    count = root.config.num_hidden_layers
    return (
        f"its config counts {count} layers of {config.num_hidden_layers}" if count < config.num_hidden_layers else None
    )


def _has_hooks(module: nn.Module) -> bool:
    """Hooks other than those with which transformers records hidden states and attentions: we return them ourselves."""
    recorder, hooks = "transformers.utils.output_capturing", module._forward_hooks
    others = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(others) or (bool(hooks) and any(hook.__module__ != recorder for hook in hooks.values()))
