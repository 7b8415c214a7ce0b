"""fastbert.accelerate(hf_model) makes a live transformers model faster, in place. Its parameters stay its own.

Each base model in the tree gets a new forward, on the instance. It packs the batch, runs fastbert's encoder over the
model's own leaves, and unpacks the result. Nothing is registered in the module tree. Before anything is launched it
looks for what it would not honour. Such a call runs in transformers' own forward, and a warning says why, once.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from fastbert import ops
from fastbert.config import ConfigError, EncoderConfig
from fastbert.families import FAMILIES
from fastbert.families.form import Family
from fastbert.layers.encoder import run_layer
from fastbert.layers.leaves import FORWARD, HOOKS, has_global_hooks
from fastbert.layers.snapshot import Remembered, Snapshot
from fastbert.models.base import first_tokens, run_encoder, run_pooler, unpacked_extras
from fastbert.models.inputs import EncoderInputs, TableSizes, prepare_inputs, table_sizes
from fastbert.models.tree import RunsBaseModel, groups_objection, layers_of, modules_of


def _home(family: Family) -> str:
    return f"transformers.models.{family.theirs.folder}.modeling_{family.theirs.folder}"


_MODEL_TYPES = {(_home(family), f"{family.classes}Model"): name for name, family in FAMILIES.items()}
_SUPPORTED = f"base models, alone or under a head, of {', '.join(sorted(FAMILIES))} (transformers' own classes)"

_TENSORS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds", "task_type_ids")
_OPTIONS = ("output_attentions", "output_hidden_states", "return_dict")
# What an encoder's forward ignores: a cache is the decoder's, the Trainer's count of items the loss's.
_ARGUMENTS = {*_TENSORS, *_OPTIONS, "use_cache", "num_items_in_batch"}

# Those that compute softmax(q k^T / sqrt(d)) v and nothing else: which of them is asked for makes no difference.
_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
_ATTENTION_DROPOUT = ("attention.self.dropout", "attention.dropout", "attention.attention_dropout")

# Heads that look at each token for itself: nothing at padding matters to them. Any other user of a base model may read
# column 0, as poolers do, where a batch that is padded on the left has no token. Span heads read all of the padding.
_TOKEN_HEADS = ("ForMaskedLM", "ForTokenClassification", "ElectraForPreTraining")
_SPAN_HEADS = ("ForQuestionAnswering",)


@dataclass(frozen=True)
class _Plan:
    """What was learnt about a base model when it was accelerated."""

    label: str
    model_type: str
    config: EncoderConfig
    classes: dict[str, type]  # of the modules that our path does not call; keys as modules_of yields them
    reads: str  # what is made of last_hidden_state: "tokens", "first" (column 0, too) or "padding"

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]


def _live(module: Any, plan: _Plan) -> tuple[EncoderConfig, TableSizes]:
    """The plan's config with the layers of now, and the tables of now: both change behind a config's back."""
    config = plan.config
    # transformers' encoders run the layers that are there; ALBERT counts them by its config.
    layers = layers_of(module, config)
    count = module.config.num_hidden_layers if layers is None else layers
    config = config if count == config.num_hidden_layers else config.replace(num_hidden_layers=count)
    return config, table_sizes(module, config, module.config)


def _is_patched(module: nn.Module) -> bool:
    """Whether its class, or that class's forward, is not transformers' own."""
    kind = type(module)
    return not (kind.__module__.startswith("transformers.") and kind.forward.__module__.startswith("transformers."))


def _has_hooks(module: nn.Module) -> bool:
    """Hooks other than those with which transformers records hidden states and attentions: we return them ourselves."""
    recorder, hooks = "transformers.utils.output_capturing", module._forward_hooks
    others = module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(others) or (bool(hooks) and any(hook.__module__ != recorder for hook in hooks.values()))


_remembered = Remembered()  # models in whose trees the last look found no objection


def _tree_objection(root: nn.Module, plan: _Plan, config: EncoderConfig) -> str | None:
    """Why our path would not do what calling every module of the tree does; None where it does."""
    if has_global_hooks():
        return "global module hooks are registered"
    if _remembered.get(root, (plan, config)):
        return None
    if objection := groups_objection(root, config):
        return objection
    snapshot = Snapshot()  # of all that is read below
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
        if type(module) is nn.Dropout:
            attention = path.endswith(_ATTENTION_DROPOUT)
            p = config.attention_probs_dropout_prob if attention else config.hidden_dropout_prob
            if (module.p if module.training else 0.0) != (p if owner.training else 0.0):
                return f"{path} has p={module.p}, training={module.training}; by config and owner {p}, {owner.training}"
    _remembered.put(root, (plan, config), snapshot, True)
    return None


@lru_cache(maxsize=32)
def _signature(kind: Any) -> inspect.Signature:
    signature = inspect.signature(kind.forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])  # without self


class _Forward(RunsBaseModel):
    """The forward of one accelerated base model, which it holds weakly: dropping the model frees its weights at once.

    A copy of the model (deepcopy, pickle, torch.save) gets a forward bound to the copy.
    """

    def __init__(self, module: nn.Module, plan: _Plan):
        self._module, self.plan = weakref.ref(module), plan
        self.said: set[str] = set()
        # Under torch.compile the checks still run, and run each time: a graph would keep the answers of its first call.
        self._admit = torch.compiler.disable(self.admit, reason="fastbert checks and packs batches on the host")

    @property
    def module(self) -> Any:
        module = self._module()
        if module is None:
            raise ReferenceError(f"the accelerated model {self.plan.label} is gone; only its forward was kept")
        return module

    def config_now(self) -> EncoderConfig:
        return _live(self.module, self.plan)[0]

    @property
    def __signature__(self) -> inspect.Signature:
        """transformers' own: the Trainer, PEFT and sentence-transformers choose arguments by it."""
        return _signature(self.module.__class__)

    __code__ = property(lambda self: _Forward.__call__.__code__)  # torch.export names a base model's graph by it

    def __reduce__(self):
        return _Forward, (self.module, self.plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, admitted = self.module, None
        args = args[1:] if args and args[0] is module else args  # HF accelerate rebinds what it unwraps as a method
        is_exporting = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()  # 2.11 mixes them up
        if torch.jit.is_tracing() or is_exporting:
            self.say("torch.jit.trace and torch.export record transformers' own code")
        else:
            admitted = self._admit(module, args, kwargs)
        return type(module).forward(module, *args, **kwargs) if admitted is None else self.run(module, *admitted)

    def admit(self, module: Any, args: tuple, kwargs: dict) -> tuple | None:
        """What `run` takes, or None where transformers' own forward must run. Raises InputError."""
        names = [name for name in _signature(module.__class__).parameters if name != "kwargs"]
        given = {**dict(zip(names, args)), **kwargs}  # noqa: B905  (transformers complains about too many)
        if len(given) < len(args) + len(kwargs):
            return None
        older = "return_dict" in names  # the older kind of forward takes an option of None for not given
        absent = {name for name in _OPTIONS if name not in given or (older and given[name] is None)}
        options = {name: getattr(module.config, name) if name in absent else given[name] for name in _OPTIONS}
        try:
            config, tables = _live(module, self.plan)
            objection = self._objection(module, tables, given, options) or _tree_objection(module, self.plan, config)
        except KeyError as error:
            objection = f"there is no {error} where transformers had it"
        if objection is not None:
            self.say(objection)
            return None
        tensors = {name: given.get(name) if name in names else None for name in _TENSORS}  # it swallows others
        if config.embeddings.token_type is None:
            tensors["token_type_ids"] = None  # as DistilBERT's forward, which swallows what a BERT tokenizer made
        if config.embeddings.task_type is None:
            tensors["task_type_ids"] = None
        if tensors["attention_mask"] is not None:
            tensors["attention_mask"] = tensors["attention_mask"] != 0  # every other value is "real" to transformers
        inputs = prepare_inputs(config, tables, **tensors, cu_seqlens=None, max_seqlen=None)
        return config, inputs, options, older

    def say(self, reason: str) -> None:
        if reason not in self.said:
            self.said.add(reason)
            warnings.warn(f"fastbert: {self.plan.label} runs transformers' own forward: {reason}", stacklevel=4)

    def _objection(self, module: Any, tables: TableSizes, given: dict, options: dict) -> str | None:
        """Why this call must be transformers' own; what is wrong with an input is left to prepare_inputs to say."""
        for name, value in given.items():
            if name not in _ARGUMENTS and value is not None and value is not False:
                return f"the argument {name} is not one that fastbert reads"
        live = vars(module.config)  # not every family's config has these
        causal = live.get("is_decoder") or live.get("is_causal")
        if causal or live.get("_attn_implementation_internal") not in _ATTENTION:
            return "its config asks for causal attention, or for an implementation that fastbert does not know"
        if not isinstance(options["output_hidden_states"], bool | None):
            return "output_hidden_states selects some of them"
        tensors = {name: given[name] for name in _TENSORS if given.get(name) is not None}
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
        counted = self.plan.family.positions_from_ids and "position_ids" not in tensors
        limit = tables.longest(self.plan.config)
        if counted and limit is not None and grid[-1] > limit:
            return "the batch is wider than the position table: transformers lets padding be out there"
        mask = tensors.get("attention_mask")
        if mask is None or self.plan.reads == "tokens":
            return None
        if self.plan.reads == "padding" and not mask.all():
            return "its head's softmax runs over the padding (that of fastbert's own head does not)"
        if (late := mask[:, 0] == 0).any() and mask[late].any():
            return "padding on the left: column 0, which poolers and heads read, holds no token; pad on the right"
        return None

    def run(self, module: Any, config: EncoderConfig, inputs: EncoderInputs, options: dict, older: bool) -> Any:
        """Encode, pool and unpack; transformers' own output, down to its habits."""
        family, batch = self.plan.family, inputs.batch

        def run_one_layer(layer, spec, x, context, wants_probs):
            def run(x):
                return run_layer(layer, spec, x, context, wants_probs)

            # What gradient_checkpointing_enable() sets on transformers' layers.
            checkpointed = layer.training and layer.__dict__.get("gradient_checkpointing")
            return layer._gradient_checkpointing_func(run, x) if checkpointed else run(x)

        wants_hidden_states, wants_probs = bool(options["output_hidden_states"]), bool(options["output_attentions"])
        made = run_encoder(module, config, inputs, run_one_layer, None, wants_hidden_states, wants_probs)
        fields: dict[str, Any] = {"last_hidden_state": batch.unpack(made.packed)}
        if family.pooler is not None:
            first = None if module.pooler is None else first_tokens(made.packed, batch)
            fields["pooler_output"] = None if first is None else run_pooler(module, family, first)
        fields |= unpacked_extras(made, batch)

        if older and not options["return_dict"]:
            return tuple(fields.values())  # which keeps the place of a pooled output that there is not
        if wants_probs and not older and "cross_attentions" in module._can_record_outputs:
            fields["cross_attentions"] = ()  # transformers' recorder has found none
        from transformers import modeling_outputs

        output = getattr(modeling_outputs, family.theirs.output)(**fields)
        return output.to_tuple() if options["return_dict"] is False else output


def _make_plan(module: Any, label: str, heads: list[str]) -> _Plan | str:
    """The plan for a base model of transformers, or the reason why there is none."""
    from transformers.activations import ACT2FN

    model_type = _MODEL_TYPES[type(module).__module__, type(module).__name__]
    if module.config.model_type != model_type:
        return f"its config is of model_type {module.config.model_type!r}, not {model_type!r}"
    if FORWARD in module.__dict__ or _is_patched(module):
        return "its forward has been replaced already"
    reads = "tokens" if heads and all(head.endswith(_TOKEN_HEADS) for head in heads) else "first"
    reads = "padding" if any(head.endswith(_SPAN_HEADS) for head in heads) else reads
    family = FAMILIES[model_type]
    try:
        config = EncoderConfig.from_dict(module.config.to_dict())
        if family.positions_from_ids:  # transformers counts from what the embeddings were built with
            config = config.replace(pad_token_id=module.embeddings.padding_idx)
        plan = _Plan(label, model_type, config, {}, reads)
        found = [module for module in modules_of(module, family, _live(module, plan)[0]) if module[0] is not None]
    except (ConfigError, KeyError) as error:  # of a field; of a module that is not there
        return f"it is not what fastbert can run: {error}"
    activation = type(ACT2FN[config.hidden_act])
    expected: dict[str, Any] = {"pooler.activation": nn.Tanh, "pooler_activation": nn.Tanh}
    of_layers = ("intermediate.intermediate_act_fn", "ffn.activation", "activation")
    numbers = range(len(dict.fromkeys(config.layer_specs)))
    expected |= {f"*{i}.{path}": activation for i in numbers for path in of_layers}
    for key, path, child, _ in found:
        kind = plan.classes[key] = type(child)
        plain = (expected[key],) if key in expected else (nn.Dropout, nn.ModuleList)
        if kind not in plain and (key in expected or _is_patched(child)):
            return f"{path} is a {kind.__module__}.{kind.__name__}, which its config does not ask for"
    return plan


def _relation(module: nn.Module) -> str | None:
    """Base models of ours are "base", classes made from one "derived", transformers' other models "other"."""
    kinds = [(kind.__module__, kind.__name__) for kind in type(module).__mro__]
    if not _MODEL_TYPES.keys().isdisjoint(kinds):
        return "base" if kinds[0] in _MODEL_TYPES else "derived"
    return "other" if ("transformers.modeling_utils", "PreTrainedModel") in kinds else None


def _is_accelerated(module: nn.Module) -> bool:
    forward = module.__dict__.get("forward")
    return isinstance(getattr(forward, "__func__", forward), _Forward)


def accelerate(hf_model: Any) -> Any:
    """Speed up a live transformers model in place: its base models run packed, on fastbert's ops.

    Parameters, state dict, config, saving and training stay those of transformers. Modules that replace a Linear, a
    LayerNorm or an Embedding (LoRA, quantised ones), and hooks on these, are called with packed tensors.

    Outputs are those of transformers at every real token, and zeros at padding. A call that needs more than that (a
    mask of another shape, a cache, hooks on an inner container, a head that reads padding, torch.export) runs in
    transformers' own forward, and a warning says why. An id out of range raises InputError before any launch.

    Args:
        hf_model: any module that holds base models of BERT, RoBERTa, XLM-RoBERTa, DistilBERT, ALBERT, ELECTRA or
            Megatron-BERT: a base model, a model with a head, a SentenceTransformer, a PEFT model.

    Returns `hf_model`; `restore` undoes it. Raises ValueError if there is nothing to accelerate, and says why.
    """
    ops.warn_of_missing_kernels()
    modules = dict(hf_model.named_modules()) if isinstance(hf_model, nn.Module) else {}
    heads: dict[int, list[str]] = {}
    for parent in modules.values():
        for child in parent.children():
            if _relation(parent) == "other" and _relation(child) == "base":
                heads.setdefault(id(child), []).append(type(parent).__name__)
    reasons, others = list[str](), tuple[str, ...]()
    for path, module in modules.items():
        label = f"{path} ({type(module).__name__})" if path else type(module).__name__
        relation = _relation(module)
        if relation == "derived":
            reasons.append(f"{label}: a class of its own, whose forward may differ from transformers'")
        elif relation == "other" and not path.startswith(others):
            if not any(_relation(child) in ("base", "derived") for child in module.modules()):
                others += (f"{path}." if path else "",)
                reasons.append(f"{label}: fastbert does not have this model")
        elif relation == "base" and not _is_accelerated(module):
            plan = _make_plan(module, label, heads.get(id(module), []))
            if isinstance(plan, str):
                reasons.append(f"{label}: {plan}")
                continue
            module.forward = _Forward(module, plan)
            if (objection := _tree_objection(module, plan, _live(module, plan)[0])) is not None:
                module.forward.say(objection)
    if not any(map(_is_accelerated, modules.values())):
        kind, why = type(hf_model).__name__, "; ".join(reasons) or "it holds no model of transformers"
        raise ValueError(f"{kind} has nothing to accelerate ({why}); fastbert speeds up {_SUPPORTED}")
    for reason in reasons:
        warnings.warn(f"fastbert: not accelerated: {reason}", stacklevel=2)
    return hf_model


def restore(hf_model: Any) -> Any:
    """Undo `accelerate`: every base model in `hf_model` runs its class's forward again. Returns `hf_model`."""
    for module in hf_model.modules():
        if _is_accelerated(module):
            del module.forward
    return hf_model
