"""Family: the names of a family's leaves, and the few ways in which it differs from BERT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from fastbert.config import EncoderConfig
from fastbert.layers.embeddings import EmbeddingNames
from fastbert.layers.encoder import LayerNames, LayerOptions
from fastbert.layers.leaves import get_leaf, parent_of

BERT_EMBEDDINGS = EmbeddingNames()
BERT_LAYER = LayerNames(
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    attention_output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    feed_forward_norm="output.LayerNorm",
)


@dataclass(frozen=True)
class MaskedLMNames:
    """dense -> activation -> norm -> decoder; `bias` is the decoder bias's second name, None where it has one."""

    dense: str
    norm: str
    decoder: str
    bias: str | None
    activation: str | None = None  # None: hidden_act
    order: tuple[str, ...] = ("dense", "norm")  # in which transformers registers them, as in LayerNames


@dataclass(frozen=True)
class SequenceHead:
    """[dropout ->] [dense -> activation ->] dropout -> out, over the pooled output or each sequence's first token."""

    out: str = "classifier"
    pooled: bool = True
    dense: str | None = None
    activation: Callable[[EncoderConfig], str | None] = lambda config: "tanh"
    dropout_first: bool = False
    dropout: Callable[[EncoderConfig], float] = lambda config: config.head_dropout


class Scopes(NamedTuple):
    """Containers of the base model that stand for more than one layer; None, or empty, where there is none to call.

    groups: of each run of `inner_group_num` layers. projects: whether the encoder's container holds the projection.
    """

    embeddings: str | None = None
    encoder: str | None = None
    groups: tuple[str, ...] = ()
    projects: bool = False


@dataclass(frozen=True)
class Family:
    """Paths are relative to the base model, those of heads to the model with the head."""

    model_type: str
    prefix: str  # the attribute that holds the base model in a model with a head
    masked_lm: MaskedLMNames
    embeddings: EmbeddingNames = BERT_EMBEDDINGS
    layer: LayerNames = BERT_LAYER
    layer_path: Callable[[EncoderConfig, int], str] = lambda config, i: f"encoder.layer.{i}"
    pooler: str | None = "pooler.dense"
    final_norm: str | None = None
    norm_first: bool = False
    attention_output_dropout: bool = True
    feed_forward_dropout: bool = True
    positions_from_ids: bool = False  # RoBERTa: cumsum(ids != pad) + pad
    sequence: SequenceHead = SequenceHead()
    multiple_choice: SequenceHead = SequenceHead()
    pair: str = "cls.seq_relationship"  # next sentence, or sentence order
    token_dropout: Callable[[EncoderConfig], float] = lambda config: config.head_dropout

    def layer_options(self, config: EncoderConfig) -> LayerOptions:
        return LayerOptions(
            num_attention_heads=config.num_attention_heads,
            activation=config.activation,
            attention_output_dropout=config.hidden_dropout_prob if self.attention_output_dropout else 0.0,
            attention_dropout=config.attention_probs_dropout_prob,
            feed_forward_dropout=config.hidden_dropout_prob if self.feed_forward_dropout else 0.0,
            norm_first=self.norm_first,
        )

    def layers_of(self, root: nn.Module, config: EncoderConfig) -> int | None:
        """How many layers are in `root`, ours or Hugging Face's, now: that many run, as in transformers, whatever the
        config says. None where the config counts: ALBERT's layers share weights, a model made without any has no list.
        """
        if config.num_hidden_groups or not config.num_hidden_layers:
            return None
        return len(get_leaf(root, self.layer_path(config, 0).rpartition(".")[0])._modules)

    def groups_objection(self, root: nn.Module, config: EncoderConfig) -> str | None:
        """Why ALBERT's groups in `root` are not those of `config`, which says how often each of them runs."""
        if not config.num_hidden_groups:
            return None
        for path in dict.fromkeys(path.rpartition(".")[0] for path in self.layer_paths(config)):
            parent, group, name = path.rsplit(".", 2)
            groups = get_leaf(root, parent)._modules
            count = len(groups[group]._modules[name]._modules) if group in groups else 0  # type: ignore
            if count != config.inner_group_num:
                return f"{path} holds {count} layers; its config says {config.inner_group_num}"
        return None

    def layer_paths(self, config: EncoderConfig) -> list[str]:
        """The path of the layer that runs at each depth; ALBERT's groups repeat theirs (Lan et al. 2019, 3.1)."""
        if not config.num_hidden_groups:
            return [self.layer_path(config, i) for i in range(config.num_hidden_layers)]
        paths = []
        for depth in range(config.num_hidden_layers):
            group = int(depth / (config.num_hidden_layers / config.num_hidden_groups))
            first = group * config.inner_group_num
            paths += [self.layer_path(config, first + inner) for inner in range(config.inner_group_num)]
        return paths

    def scopes(self, config: EncoderConfig, paths: list[str]) -> Scopes:
        """`paths`: those of the layers, one a depth."""
        encoder = self.layer_path(config, 0).partition(".")[0]
        projection = self.embeddings.project
        firsts = paths[:: config.inner_group_num] if config.num_hidden_groups else ()
        return Scopes(
            embeddings=parent_of(self.embeddings.word),
            encoder=encoder,
            groups=tuple(path.rsplit(".", 2)[0] for path in firsts),
            projects=projection is not None and projection.startswith(f"{encoder}."),
        )

    def linear_paths(self, config: EncoderConfig) -> list[str]:
        """The paths of the Linear leaves of all layers, below the base model; those of shared layers once."""
        return [f"{layer}.{path}" for layer in dict.fromkeys(self.layer_paths(config)) for path in self.layer.linears]

    def embedding_names(self, config: EncoderConfig) -> EmbeddingNames:
        """ALBERT always projects its embeddings to hidden_size; ELECTRA only where the sizes differ."""
        names = self.embeddings
        if names.project is None or self.model_type == "albert" or config.embedding_width != config.hidden_size:
            return names
        return replace(names, project=None)


class RunsBaseModel:
    """What runs a family's base model on fastbert's layers: our own base model itself, or the forward that takes the
    place of another library's, on the instance (fastbert.accelerate).
    """

    def family_and_config(self) -> tuple[Family, EncoderConfig]:
        """The config is as `PreTrainedModel.running_config`: with the layers that are there now."""
        raise NotImplementedError


def base_models(tree: nn.Module) -> Iterator[tuple[str, nn.Module, Family, EncoderConfig]]:
    """(name, base model, its family, its config) of every base model in a tree that runs on fastbert's layers."""
    for name, module in tree.named_modules():
        runner = module if isinstance(module, RunsBaseModel) else module.__dict__.get("forward")
        if isinstance(runner, RunsBaseModel):
            yield name, module, *runner.family_and_config()


def modules_of(root: nn.Module, family: Family, config: EncoderConfig) -> Iterator:
    """(key, path, module, the module by whose `training` packed execution goes) of all modules below `root`.

    `key` is None for a leaf, which packed execution calls. The others (containers, dropouts, activations) it does not
    call; all layers have one key, "*", since they are alike.
    """
    names, layers = family.embedding_names(config), set(family.layer_paths(config))
    leaves = {getattr(names, role) for role in names.order} | {family.final_norm, family.pooler}
    leaves |= {f"*.{getattr(family.layer, role)}" for role in family.layer.order}
    pending = [("", "", root, root)]
    for at, key_at, parent, owner in pending:  # which grows meanwhile
        for name, child in parent._modules.items():
            if child is None:
                continue
            key, goes_by = ("*", child) if at + name in layers else (key_at + name, owner)
            yield None if key in leaves else key, at + name, child, goes_by
            if child._modules and key not in leaves:
                pending.append((f"{at}{name}.", f"{key}.", child, goes_by))
