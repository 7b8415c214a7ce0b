"""What is in a live transformers model now: whether packed execution does all that calling its modules does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from fastbert.acceleration.attributes import attribute_unsupported
from fastbert.acceleration.plan import PackedPlan, dropout_roles, missing_leaf
from fastbert.config import EncoderConfig
from fastbert.execution.calls import Calls
from fastbert.execution.snapshot import Snapshot
from fastbert.execution.tree import Tree, snapshots
from fastbert.families.schema import Scopes
from fastbert.layer_spec import LayerSpec
from fastbert.layers.adapters import layer_by_place
from fastbert.layers.context import LayerContext
from fastbert.layers.encoder import run_layer
from fastbert.layers.guard import ModuleGuard
from fastbert.layers.leaves import FORWARD, FORWARD_HOOKS, HOOKS, get_leaf, has_global_hooks, home_of, in_use, parent_of
from fastbert.layers.sharded import HOOKS_FROM, call_sharded, class_of, is_sharded
from fastbert.models.tree import groups_unsupported, modules_of
from fastbert.ops import with_same_seeds


class LiveTree(Tree):
    """Of transformers' own model, in which `take_snapshot` has found nothing that our path would not do."""

    is_ours = False

    def __init__(self, root: nn.Module, snapshot: Snapshot, calls: Calls):
        self.root, self.config, self.calls, self._snapshot = root, snapshot.config, calls, snapshot

    @property
    def running_config(self) -> EncoderConfig:
        return self._snapshot.config

    @property
    def sharded(self) -> frozenset[str]:
        """The paths of modules under FSDP2, which are called."""
        return self._snapshot.sharded

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def scopes(self, config: EncoderConfig) -> Scopes:
        theirs, sharded = config.scopes, self.sharded
        if not sharded:
            return Scopes()
        whole = theirs if theirs.encoder in sharded else Scopes()
        return whole._replace(embeddings=theirs.embeddings if theirs.embeddings in sharded else None, groups=())

    def layers_unsupported(self) -> str | None:
        if self.sharded:
            return "its weights are sharded over processes, as FSDP does"
        if any([_is_checkpointed(get_leaf(self.root, path)) for path in self.config.layer_paths]):
            return "gradient checkpointing is on, which calls each layer by itself"
        return None

    def run_layer(
        self, layer: nn.Module, spec: LayerSpec, x: torch.Tensor, context: LayerContext, wants_probs: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        def run(x):
            return run_layer(layer, spec, x, context, wants_probs)

        if _is_checkpointed(layer):
            checkpoint: Any = in_use(layer)._gradient_checkpointing_func
            run = partial(checkpoint, with_same_seeds(run))
        return call_sharded(layer, run, x) if self.sharded and is_sharded(layer) else run(x)


def _is_checkpointed(layer: nn.Module) -> Any:
    """Whether gradient_checkpointing_enable() has set this layer so."""
    return layer.training and in_use(layer).__dict__.get("gradient_checkpointing")


def take_snapshot(root: nn.Module, plan: PackedPlan, config: EncoderConfig) -> Snapshot | str:
    """What is there now, or why our path would not do what calling every module of the tree does."""
    if has_global_hooks():
        return "global module hooks are registered"
    hooks = HOOKS if torch.is_grad_enabled() else FORWARD_HOOKS
    if (known := snapshots.get(root, (plan, config, hooks))) is not None:
        return known
    guard = ModuleGuard(root)  # of all that is read below
    if unsupported := groups_unsupported(root, config) or _count_unsupported(root, config, guard):
        return unsupported
    if (path := missing_leaf(root, config)) is not None:
        return f"there is no {path} any more"
    roles = dropout_roles(config)
    dropouts: dict[tuple[str, str], float] = {}  # by the path of a layer, "" for the embeddings, and the role there
    sharded: list[str] = []
    guard.watch_children(root)
    guard.hold(root.__dict__, "training", *plan.attributes[""])
    if unsupported := attribute_unsupported(root, "", plan.attributes[""]):
        return unsupported
    for key, path, module, owner in modules_of(root, plan.family, config):
        used = guard.watch_in_use(module)
        held = (module,) if used is module else (module, used)
        if key is None:
            if unsupported := _leaf_unsupported(held, path, hooks, guard):
                return unsupported
            continue
        if unsupported := _passed_by_unsupported(held, path, plan.classes.get(key), hooks, guard):
            return unsupported
        if is_sharded(module):
            sharded.append(path)
        module = used
        guard.hold(module.__dict__, *plan.attributes[key])
        if unsupported := attribute_unsupported(module, path, plan.attributes[key]):
            return unsupported
        for name, p, role in _dropouts_in(module, key, roles):
            guard.hold(module.__dict__, name)
            if role is None:  # no forward calls it
                continue
            where = path if name == "p" else f"{path}.{name}"
            if module.training != owner.training and p:
                return f"{where} has p={p}, training={module.training}; what it is in has training={owner.training}"
            if not (type(p) in (int, float) and 0.0 <= p < 1.0):
                return f"{where} has p={p}, training={module.training}; packed execution takes 0 <= p < 1"
            at = _layer_of(key, path), role
            if dropouts.setdefault(at, p) != p:
                return f"{where} has p={p}; another dropout of the same values has p={dropouts[at]}"
    callable_ones = {config.scopes.embeddings, config.scopes.encoder, parent_of(plan.family.pooler or "")}
    if beyond := [path for path in sharded if path not in callable_ones.union(config.layer_paths)]:
        return f"{beyond[0]} is sharded by itself; fully_shard the layers, the embeddings or the whole model instead"
    snapshot = Snapshot(config.with_dropouts(dropouts), None, frozenset(sharded))
    snapshots.put(root, (plan, config, hooks), guard, snapshot)
    return snapshot


def _leaf_unsupported(held: tuple[nn.Module, ...], path: str, hooks: tuple[str, ...], guard: ModuleGuard) -> str | None:
    """Why a leaf cannot be called with packed tensors. held: the leaf, and the copy of PEFT's that it calls."""
    leaf = held[-1]
    # Of PEFT's layers, a quantiser's; what makes a weight (torch.nn.utils.parametrize) sees no token.
    inside = [each for name, each in leaf.named_modules() if name and "parametrizations" not in name.split(".")]
    for each in (*held, *inside):
        guard.watch(each, hooks)
        if each._modules:
            guard.watch_children(each)
        if (unsupported := _called_beside(each, path, hooks, _HOOKS_OF_LEAVES)) is not None:
            return unsupported
        if FORWARD in each.__dict__ and not _is_dispatched(each):
            return f"{path} has a forward of its own on the instance"
        if (by_place := layer_by_place(each)) is not None:
            return f"{path}: {by_place}"
        if not _home_of_class(each).startswith(_CLASSES_FROM):
            return f"{path} is a {type(each).__name__}, which may look at the places of tokens in a batch"
    if isinstance(leaf, nn.Embedding):
        guard.hold(leaf.__dict__, "scale_grad_by_freq")
        if leaf.scale_grad_by_freq:
            return f"{path} has scale_grad_by_freq=True: its gradient depends on how often padding is looked up"
    return None


def _passed_by_unsupported(
    held: tuple[nn.Module, ...], path: str, expected: type[nn.Module] | None, hooks: tuple[str, ...], guard: ModuleGuard
) -> str | None:
    """Why a module that packed execution does not call would do more than it takes it to do. held: the module, and the
    copy of PEFT's that it calls; expected: the class that it had when the model was accelerated.
    """
    for each in held:
        guard.watch(each, hooks)
        guard.watch_children(each)
        guard.hold(each.__dict__, "training")
    if class_of(held[-1]) is not expected:
        return f"{path} is a {type(held[-1]).__name__}, which was not there when the model was accelerated"
    for each in held:
        if FORWARD in each.__dict__:
            return f"{path} has a forward of its own on the instance"
        if (unsupported := _called_beside(each, path, hooks, _HOOKS_AROUND)) is not None:
            return unsupported
        if len(held) > 1 and (is_sharded(each) or each.training != held[0].training):
            return f"{path} has a copy of PEFT's in its place, which is sharded by itself or has a mode of its own"
    return None


# Hooks, by where they are defined, that neither look at where a token is in a batch, nor change what a module gives by
# it: FSDP2's, which gather weights, and those with which transformers records what we return ourselves.
_HOOKS_AROUND = (f"{HOOKS_FROM}.", "transformers.utils.output_capturing.")
# Of what is called also torch's pruning, weight_norm and spectral_norm, which make a weight; our own calibration; and
# those of transformers and PEFT that set requires_grad of what the table of words gives.
_PEFT = ("peft_model", "mixed_model", "utils.other")
_HOOKS_OF_LEAVES = (
    *(*_HOOKS_AROUND, "torch.nn.utils.", "fastbert.quantization."),
    "transformers.modeling_utils.make_inputs_require_grads",
    *(f"peft.{home}.make_inputs_require_grad" for home in _PEFT),
)

# Classes of leaves that give each row its own result, whatever is beside it: torch's that act on the last dimension
# (what calls DeBERTa's convolution knows its rows), the families' norms and tables, PEFT's layers, and what quantisers
# put in a Linear's place.
_OF_TORCH = ("linear", "sparse", "normalization", "dropout", "activation", "container", "conv")
_QUANTISERS = (
    *("aqlm.", "auto_gptq.", "auto_round.", "awq.", "bitsandbytes.", "compressed_tensors.", "eetq.", "gptqmodel."),
    *("hqq.", "nncf.", "optimum.quanto.", "quark.", "spqr_quant.", "torch.ao.", "torchao.", "vptq."),
)
_CLASSES_FROM = (
    *(f"torch.nn.modules.{home}" for home in _OF_TORCH),
    "transformers.",
    "peft.",
    "fastbert.",
    *_QUANTISERS,
)


def _called_beside(module: nn.Module, path: str, hooks: tuple[str, ...], allowed: tuple[str, ...]) -> str | None:
    """The hook, of those that count, which sees the tensors of a batch: it must see them as transformers has them."""
    for name in hooks:
        for hook in module.__dict__.get(name, {}).values():
            home = home_of(hook)
            if not f"{home}.{getattr(hook, '__name__', '')}".startswith(allowed):
                return f"{path} has hooks ({home}), which see padded tensors"
    return None


def _is_dispatched(module: nn.Module) -> bool:
    """Whether the forward on its instance is Accelerate's, which brings tensors to a module's device, around the one of
    its class. Accelerate puts other hooks, and users' own, in the same place.
    """
    attributes = module.__dict__
    hook, before = type(attributes.get("_hf_hook")), attributes.get("_old_forward")
    is_theirs = home_of(attributes[FORWARD]) == hook.__module__ == "accelerate.hooks"
    return (
        is_theirs and hook.__name__ == "AlignDevicesHook" and getattr(before, "__func__", None) is type(module).forward
    )


def _home_of_class(module: nn.Module) -> str:
    """Where its class is defined; of a parametrized one, the class that it was made of."""
    return next(cls.__module__ for cls in class_of(module).__mro__ if cls.__module__ != "torch.nn.utils.parametrize")


def _dropouts_in(module: nn.Module, key: str, roles: dict[str, str | None]) -> Iterator[tuple]:
    """(attribute, its value, its role) of what is a dropout, or stands for one, or keeps numbers."""
    if key in roles:
        yield "p", 0.0 if type(module) is nn.Identity else module.p, roles[key]
    for name in module.__dict__:
        if (inner := f"{key}.{name}") in roles:
            yield name, module.__dict__[name], roles[inner]


def _layer_of(key: str, path: str) -> str:
    """The path of the layer that a module is in, "" for the embeddings; key and path as modules_of yields them."""
    if not key.startswith("*"):
        return ""
    inside = key.partition(".")[2]
    return path.removesuffix(inside).removesuffix(".") if inside else path


def _count_unsupported(root: Any, config: EncoderConfig, guard: ModuleGuard) -> str | None:
    if not config.family.hf_class.counts_layers:
        return None
    guard.hold(vars(root.config), "num_hidden_layers")
    count = root.config.num_hidden_layers
    if count >= (before := config.num_hidden_layers):
        return None
    return f"its config's num_hidden_layers is {count}; when the model was accelerated it was {before}"
