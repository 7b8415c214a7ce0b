"""What is learnt about a live transformers model when it is accelerated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fastbert.acceleration.attributes import attribute_unsupported, expected_of
from fastbert.acceleration.instance import is_free
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.families.schema import ClassifierHead, Family, Head, MaskedLM, ReplacedTokens, SentencePair
from fastbert.layers.leaves import get_leaf, in_use
from fastbert.layers.sharded import class_of
from fastbert.models.inputs import TableSizes, table_sizes
from fastbert.models.tree import key_of_spec, layers_of, modules_of


def _home(family: Family) -> str:
    return f"transformers.models.{family.hf_class.folder}.modeling_{family.hf_class.folder}"


MODEL_TYPES = {(_home(family), f"{family.classes}Model"): name for name, family in FAMILIES.items()}


def relation_of(module: nn.Module) -> str | None:
    """Base models that we know are "base", classes made from one "derived", transformers' other models "other"; None:
    of another library, fastbert's own among them, which may derive from transformers' PreTrainedModel.
    """
    classes = [(cls.__module__, cls.__name__) for cls in class_of(module).__mro__]
    if any(home.startswith("fastbert.models.") for home, _ in classes):
        return None
    if not MODEL_TYPES.keys().isdisjoint(classes):
        return "base" if classes[0] in MODEL_TYPES else "derived"
    return "other" if ("transformers.modeling_utils", "PreTrainedModel") in classes else None


def _head_spec(head: str, family: Family) -> Head | None:
    return family.heads.get(head.removeprefix(f"{family.classes}For"))


def is_span_head(head: str) -> bool:
    return head.endswith("ForQuestionAnswering")


def labels_tokens(head: str, family: Family) -> bool:
    """Whether a head of this class may have labels of tokens that its loss looks at in padding, too."""
    spec = _head_spec(head, family)
    if is_span_head(head) or isinstance(spec, (ReplacedTokens, SentencePair)):
        return False
    return not isinstance(spec, ClassifierHead) or spec.pooling == "tokens"


def _read_by(head: str, family: Family, config: EncoderConfig, spans_over_real_tokens: bool) -> str:
    """What transformers' head of this class makes of last_hidden_state: see PackedPlan.reads."""
    spec = _head_spec(head, family)
    if is_span_head(head):  # a softmax over all columns
        return "tokens" if spans_over_real_tokens else "padding"
    if isinstance(spec, (MaskedLM, ReplacedTokens)):
        return "tokens"
    pooling = spec.pooling_of(config) if isinstance(spec, ClassifierHead) else "first"
    if pooling == "last" and isinstance(spec, ClassifierHead) and spec.last_by_id:
        return "last id"
    return pooling if pooling in ("tokens", "last") else "first"


@dataclass(frozen=True)
class PackedPlan:
    """What was learnt about a base model when it was accelerated.

    reads: what is made of last_hidden_state: "tokens" where each is looked at for itself and padding does not matter;
    "first", column 0, too, as poolers do; "last", the last column; "last id", the last one whose id is not padding's;
    "padding", all columns. asked: what transformers reads in its config in each call, and what it was. classes: of the
    modules that our path does not call, by key as modules_of yields them; attributes: what theirs must be, and the base
    model's own, whose key is "".
    """

    label: str
    model_type: str
    config: EncoderConfig
    reads: str
    asked: dict[str, Any] = field(default_factory=dict)
    classes: dict[str, type] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]


def live(module: Any, plan: PackedPlan) -> tuple[EncoderConfig, TableSizes]:
    """The plan's config with the layers of now, and the tables of now: both change behind a config's back."""
    config = plan.config
    # transformers' encoders run the layers that are there; ALBERT counts them by its config.
    layers = layers_of(module, config)
    count = module.config.num_hidden_layers if layers is None else layers
    config = config if count == config.num_hidden_layers else config.replace(num_hidden_layers=count)
    return config, table_sizes(module, config, module.config)


_ASKED = ("is_causal", "layer_types", "sliding_window", "use_bidirectional_attention")


def asked_of(config: Any) -> dict[str, Any]:
    """What transformers' forwards read in a config of theirs with each call: of those that families of ours have."""
    values = {name: getattr(config, name) for name in _ASKED if hasattr(config, name)}
    return {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in values.items()}


def is_patched(module: nn.Module) -> bool:
    """Whether its class, or that class's forward, is not transformers' own."""
    cls = class_of(module)
    return not (cls.__module__.startswith("transformers.") and cls.forward.__module__.startswith("transformers."))


def dropout_roles(config: EncoderConfig) -> dict[str, str | None]:
    """Which of LayerSpec.dropouts, or "embeddings", every dropout of transformers' tree is, by key as modules_of yields
    them; None: it is never called.
    """
    hf_class = config.family.hf_class
    roles: dict[str, str | None] = {}
    if hf_class.embedding_dropout is not None:
        roles[hf_class.embedding_dropout] = "embeddings" if hf_class.drops_embeddings else None
    for i, spec in enumerate(dict.fromkeys(config.layer_specs)):
        if spec.after is not None:
            roles[f"{spec.after.path}.dropout"] = "after"
        roles |= {f"{key_of_spec(i)}.{path}": role for path, role in hf_class.dropouts.items()}
    return roles


def missing_leaf(root: nn.Module, config: EncoderConfig) -> str | None:
    """The path of a leaf that packed execution calls by this config, and that is None there; KeyError: it never was."""
    names, family = config.embeddings, config.family
    paths = [*(getattr(names, role) for role in names.order), family.final_norm]
    for layer, spec in dict(zip(config.layer_paths, config.layer_specs, strict=True)).items():
        inside = (*spec.names.linears, *spec.names.relatives, *filter(None, spec.norm_paths))
        paths += [f"{layer}.{path}" for path in inside]
        paths += spec.shared_leaves
    return next((path for path in paths if path is not None and get_leaf(root, path) is None), None)


def _heads_unsupported(root: nn.Module, config: EncoderConfig) -> str | None:
    """Some families' modules have no number of heads: their projections tell it."""
    for layer, spec in zip(config.layer_paths, config.layer_specs, strict=True):
        attention, leaves = spec.attention, [get_leaf(root, f"{layer}.{path}") for path in spec.names.qkv]
        rows = [leaf.weight.shape[0] for leaf in leaves if type(leaf) is nn.Linear]
        expected = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        if len(rows) == len(leaves) and sum(rows) != expected:
            return f"{layer}'s query, key and value have {sum(rows)} features; by its config it must be {expected}"
    return None


def make_plan(module: Any, label: str, heads: list[str], spans_over_real_tokens: bool = False) -> PackedPlan | str:
    """The plan for a base model of transformers, or the reason why there is none."""
    cls = class_of(module)
    model_type = MODEL_TYPES[cls.__module__, cls.__name__]
    if module.config.model_type != model_type:
        return f"its config is of model_type {module.config.model_type!r}, not {model_type!r}"
    if not is_free(module) or is_patched(module):
        return "its forward has been replaced already"
    family = FAMILIES[model_type]
    try:
        config = EncoderConfig.from_dict(module.config.to_dict())
        if (
            family.positions_from_ids and family.padding_idx is None
        ):  # transformers counts from what the embeddings were built with
            config = config.replace(pad_token_id=module.embeddings.padding_idx)
        reads = {_read_by(head, family, config, spans_over_real_tokens) for head in heads}
        reads = reads or {"tokens" if family.hf_class.caches else "first"}  # which pad on the left, as decoders do
        first = next(r for r in ("padding", "last", "last id", "first", "tokens") if r in reads)
        plan = PackedPlan(label, model_type, config, first, asked_of(module.config))
        now = live(module, plan)[0]
        modules = [("", "", module, module), *modules_of(module, family, now)]
        if (unsupported := _learn(plan, modules, now)) is not None:
            return unsupported
        if (path := missing_leaf(module, now)) is not None:
            return f"there is no {path}, which its config asks for"
        return _heads_unsupported(module, now) or plan
    except (ConfigError, KeyError) as error:  # of a field; of a module that is not there
        return f"it is not what fastbert can run: {error}"


def _learn(plan: PackedPlan, modules: list[tuple], config: EncoderConfig) -> str | None:
    """Note the modules that our path does not call; or why they are not what the config asks for."""
    from transformers.activations import ACT2FN

    activation, dropouts = type(ACT2FN[config.hidden_act]), dropout_roles(config)
    specs: Mapping[str, Any] = {key_of_spec(i): spec for i, spec in enumerate(dict.fromkeys(config.layer_specs))}
    for key, path, child, _ in modules:
        if key is None:
            continue
        child = in_use(child)
        cls, spec = class_of(child), specs.get(key.partition(".")[0])
        if cls.__module__ in ("transformers.activations", "torch.nn.modules.activation"):
            is_right = cls is (nn.Tanh if path.startswith("pooler") else activation)
        elif cls is nn.Identity:  # in the place of a dropout of 0, and of a norm that the first layer does not have
            is_right = key in dropouts or (spec is not None and key.endswith(f".{spec.names.attention_norm}"))
        elif cls is nn.Dropout:
            is_right = key in dropouts
        else:
            is_right = cls is nn.ModuleList or not is_patched(child)
        if not is_right:
            return f"{path} is a {cls.__module__}.{cls.__name__}, which its config does not ask for"
        expected = expected_of(child, plan.config, None if spec is None else spec.attention)
        if (unsupported := attribute_unsupported(child, path, expected)) is not None:
            return unsupported
        plan.classes[key] = cls
        plan.attributes[key] = plan.attributes.get(key, {}) | expected
    return None
