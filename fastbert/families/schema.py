"""The schema of a family's file: plain data in dataclasses, without torch.

A default is BERT's (Devlin et al. 2018), so a file says what is different. What depends on a config's values is a
`FromConfig`, which names the field, or a small named function over the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from fastbert.families.fields import ActivationName, Choice, Count, Field, Flag, Number, Share, Structure
from fastbert.families.vocabulary import ALBERT_TOKENS, ROBERTA_TOKENS, NewVocabulary
from fastbert.layer_spec import LINEARS, AttentionSpec, Distances, FeedForwardSpec, LayerNames, LayerSpec, NormSpec

# Which family files take here.
__all__ = [
    "ALBERT_TOKENS",
    "ROBERTA_TOKENS",
    "ActivationName",
    "Choice",
    "Count",
    "Flag",
    "NewVocabulary",
    "Number",
    "Share",
    "Structure",
]


@dataclass(frozen=True)
class FromConfig:
    """The value that this field of the config has, in the place of a value."""

    field: str


def value_of(value: Any, config: Any) -> Any:
    return getattr(config, value.field) if isinstance(value, FromConfig) else value


# --------------------------------------------------------------------------------------------------------------------
# What stands before and behind the layers


class TokenDropout(NamedTuple):
    """Mask tokens' words are zeros; all are scaled by (1 - share) / (1 - the share of mask tokens in the sequence), as
    dropout would: in pre-training a `share` of them was masked (Lin et al. 2022). A sequence of mask tokens alone gives
    zeros.
    """

    mask_token_id: int
    share: float


@dataclass(frozen=True)
class Embeddings:
    """Where the embedding leaves are, below the base model; None where the family has no such leaf.

    project: embedding_size -> hidden_size, where they differ, or always; projects_first: before the norm, which is then
    as wide as the layers, and without a bias. skips_given: inputs_embeds are the result, and nothing is added to them.
    word_scale: what rows of the word table are multiplied by, rounded to the table's dtype; not inputs_embeds. dropout:
    of the sum. `order` is the order in which transformers registers the leaves.
    """

    word: str = "embeddings.word_embeddings"
    position: str | None = "embeddings.position_embeddings"
    token_type: str | None = "embeddings.token_type_embeddings"
    task_type: str | None = None
    norm: str | None = "embeddings.LayerNorm"
    project: str | None = None
    always_projects: bool = False
    projects_first: bool = False
    pads_positions: bool = False  # whether the position table has a padding row, which takes no gradient
    token_dropout: TokenDropout | None = None
    skips_given: bool = False
    word_scale: float | None = None
    dropout: float | FromConfig = FromConfig("hidden_dropout_prob")
    order: tuple[str, ...] = ("word", "position", "token_type", "task_type", "norm", "project")


@dataclass(frozen=True)
class MaskedLM:
    """[dense -> activation -> [second -> activation ->] norm ->] decoder, whose weight is the word table where the
    config ties them.

    decoder: None: the word table itself. bias: the decoder bias's second name, None where it has one; where the decoder
    has no bias, one that stands alone. width: what `dense` makes, and where there is no `second`, the decoder takes;
    that one makes hidden_size of it. instead: a Flag of the config, and the head of models where it is false.
    """

    dense: str | None = "cls.predictions.transform.dense"
    norm: str | None = "cls.predictions.transform.LayerNorm"
    decoder: str | None = "cls.predictions.decoder"
    bias: str | None = "cls.predictions.bias"
    second: str | None = None
    activation: str | FromConfig = FromConfig("hidden_act")
    width: int | FromConfig = FromConfig("embedding_width")
    dense_bias: bool | FromConfig = True
    decoder_bias: bool | FromConfig = True
    sparse: bool | FromConfig = False  # logits of labelled tokens only, where there are labels
    may_tie: bool = True
    order: tuple[str, ...] = ("dense", "norm", "decoder")  # in which transformers registers them
    instead: tuple[str, MaskedLM] | None = None

    def of(self, config: Any) -> MaskedLM:
        """The head of a model with this config."""
        return self if self.instead is None or getattr(config, self.instead[0]) else self.instead[1]


Pooling = Literal["pooler", "first", "last", "mean", "late", "tokens"]


@dataclass(frozen=True)
class ClassifierHead:
    """[dropout ->] [dense -> activation [-> norm]] -> dropout -> out.

    pooling: what it runs over: the pooler's output, each sequence's first token, its last, the mean of its tokens, or
    its tokens; "late" is the mean of what comes out for the tokens. The last token is a real one, where transformers
    reads the last column, padding or not; or, `last_by_id`, the last token whose id is not padding's. poolings: other
    names that a config has for these. drops_first: there is a dropout before `dense`, too, of `first_dropout`; None: of
    the same. soft_labels: where the config has no problem_type, labels (batch, num_labels) are shares of classes, and
    classes below 0 are left out. container_pools: whether transformers' module around `dense` takes the first column
    itself, where the head runs over that.
    """

    out: str = "classifier"
    pooling: str | FromConfig = "pooler"
    poolings: Mapping[str, Pooling] = field(default_factory=dict)
    last_by_id: bool = False
    dense: str | None = None
    dense_bias: bool | FromConfig = True
    activation: str | FromConfig | None = "tanh"
    norm: str | None = None
    out_bias: bool = True
    dropout: float | FromConfig = FromConfig("head_dropout")
    drops_first: bool = False
    first_dropout: float | FromConfig | None = None
    soft_labels: bool = False
    container_pools: bool = True

    def pooling_of(self, config: Any) -> str:
        name = value_of(self.pooling, config)
        return self.poolings.get(name, name)


@dataclass(frozen=True)
class SentencePair:
    """Two scores of a pair of sentences, from the pooler's output: next sentence, or sentence order."""

    out: str = "cls.seq_relationship"


@dataclass(frozen=True)
class PreTraining:
    """Masked LM and a sentence pair in one model; the names are those of its arguments and results."""

    masked_lm: MaskedLM
    pair: str = "cls.seq_relationship"
    pair_size: int | FromConfig = 2
    pair_dropout: float | FromConfig = 0.0
    pair_label: str = "next_sentence_label"
    pair_logits: str = "seq_relationship_logits"


@dataclass(frozen=True)
class ReplacedTokens:
    """ELECTRA's discriminator: dense -> hidden_act -> out."""

    dense: str = "discriminator_predictions.dense"
    out: str = "discriminator_predictions.dense_prediction"


Head = MaskedLM | ClassifierHead | SentencePair | PreTraining | ReplacedTokens


def heads(
    masked_lm: MaskedLM,
    sequence: ClassifierHead = ClassifierHead(),
    tokens: ClassifierHead = ClassifierHead(pooling="tokens"),
    answers: ClassifierHead | None = ClassifierHead(
        out="qa_outputs", pooling="tokens", dropout=FromConfig("qa_dropout")
    ),
    choice: ClassifierHead | None = ClassifierHead(),
    **others: Head,
) -> dict[str, Head]:
    """The heads that nearly every family has, by the names that transformers' classes end in, and `others`."""
    by_name: dict[str, Head] = {"MaskedLM": masked_lm, **others}
    by_name |= {"SequenceClassification": sequence, "TokenClassification": tokens}
    if answers is not None:
        by_name["QuestionAnswering"] = answers
    return by_name if choice is None else {**by_name, "MultipleChoice": choice}


# --------------------------------------------------------------------------------------------------------------------
# Files that are laid out otherwise than the tree


class Rename(NamedTuple):
    """`old`, in a key of a hub file, is `new` in the tree: whole names between dots ("attn.out_proj").

    is_written: whether the files that we write have `old`, too; else older programs wrote it.
    """

    old: str
    new: str
    is_written: bool = True


class Split(NamedTuple):
    """One tensor of a hub file holds, along its first dimension, those of several leaves in the tree.

    shares: of a config, how the rows are shared out, as counts of anything (query heads, key heads, value heads); None:
    equal parts.
    """

    old: str
    new: tuple[str, ...]
    shares: Callable[[Any], tuple[int, ...]] | None = None

    def shares_of(self, config: Any) -> tuple[int, ...]:
        return (1,) * len(self.new) if self.shares is None else self.shares(config)


# --------------------------------------------------------------------------------------------------------------------
# The family


_DROPOUTS: Mapping[str, str | None] = {
    "attention.self.dropout": "attention",
    "attention.output.dropout": "attention_output",
    "output.dropout": "feed_forward",
}


BERT_ARGUMENTS = ("attention_mask", "encoder_hidden_states", "encoder_attention_mask", "cache")  # of its layers


class HfClass(NamedTuple):
    """Where transformers has the base model: transformers.models.{folder}.modeling_{folder}, and what it returns.

    dropouts: where its layers keep the dropouts, as a module or as a number, below the layer -> which of
    LayerSpec.dropouts it is; None: no forward calls it. embedding_dropout: that of the embeddings; drops_embeddings:
    whether a forward calls it. counts_layers: it runs no more layers than its config counts. caches: a call may ask for
    the keys and values of its tokens, as decoders' do. scaling: the factor of the scores that its attention keeps;
    None: 1 / sqrt(head_dim).

    How its parts are called: embedding_arguments are those of the embeddings by position, layer_arguments those of a
    layer behind the hidden states. layer_returns: what a layer gives where nothing is asked for: a tensor; a tuple of
    it; a pair of it and None; or of it and of the attention probabilities. encoder_defaults: of the encoder's flags,
    where they are others than BERT's.
    """

    folder: str
    output: str = "BaseModelOutputWithPoolingAndCrossAttentions"
    dropouts: Mapping[str, str | None] = _DROPOUTS
    embedding_dropout: str | None = "embeddings.dropout"
    drops_embeddings: bool = True
    counts_layers: bool = False
    caches: bool = False
    scaling: float | None = None
    embedding_arguments: tuple[str, ...] = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
    layer_arguments: tuple[str, ...] = BERT_ARGUMENTS
    layer_returns: Literal["tensor", "tuple", "pair", "both"] = "tensor"
    encoder_defaults: Mapping[str, bool] = {}


# Fields of which only the values given here are implemented; a config.json may ask for these.
ONLY_VALUES: Mapping[str, tuple[Any, ...]] = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
    "embedding_size_per_layer": (None,),
    "summary_type": ("first",),
    "summary_use_proj": (True,),
}


class Scopes(NamedTuple):
    """Containers of the base model that stand for more than one layer; None, or empty, where there is none to call.

    groups: of each run of `inner_group_num` layers. projects: whether the encoder's container holds the projection.
    ends: whether it holds the final norm.
    """

    embeddings: str | None = None
    encoder: str | None = None
    groups: tuple[str, ...] = ()
    projects: bool = False
    ends: bool = True


class Derived(NamedTuple):
    """What follows from a config by its family's data."""

    embeddings: Embeddings
    layer_paths: tuple[str, ...]  # where the layer that runs at each depth is; shared layers come again
    layer_specs: tuple[LayerSpec, ...]  # what it computes
    distances: Distances | None  # None: nothing goes by the distance of two tokens
    scopes: Scopes

    def with_dropouts(self, config: Any, rates: Mapping[tuple[str, str], float]) -> Derived:
        """EncoderConfig.with_dropouts."""
        specs = list(self.layer_specs)
        for i, (path, spec) in enumerate(zip(self.layer_paths, specs, strict=True)):
            now = {role: rates.get(("" if role == "after" else path, role), p) for role, p in spec.dropouts.items()}
            specs[i] = spec if now == spec.dropouts else spec.with_dropouts(now)
        p = value_of(self.embeddings.dropout, config)
        now_p = rates.get(("", "embeddings"), p)
        embeddings = self.embeddings if now_p == p else replace(self.embeddings, dropout=now_p)
        return self._replace(embeddings=embeddings, layer_specs=tuple(specs))


@dataclass(frozen=True)
class Family:
    """Paths are relative to the base model, those of heads to the model with the head."""

    model_type: str
    classes: str  # what the names of its classes begin with: "Bert" is BertModel, BertForMaskedLM, ...
    prefix: str  # the attribute that holds the base model in a model with a head
    hf_class: HfClass
    heads: Mapping[str, Head]

    # The config
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that a config.json leaves out; else BERT's
    hf_names: Mapping[str, str] = field(default_factory=dict)  # our names of fields -> theirs
    aliases: tuple[str, ...] = ()  # of these, our names that config.json may use, too: transformers' attribute_map
    fields: Mapping[str, Field] = field(default_factory=dict)  # that only this family, or few, have
    ignores_types: bool = False  # a model without token types takes token_type_ids, which its tokenizer makes
    # Whether transformers computes hidden states of masked tokens as of others, if nothing attends to them.
    masked_tokens_attend: bool = True
    fixed: tuple[str, ...] = ()  # fields that its config.json does not have: only the default is possible
    only_values: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: ONLY_VALUES)
    upgrade_config: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # entries of files -> ours
    written_config: Callable[[dict[str, Any]], dict[str, Any]] | None = (
        None  # and back, of what has another value there
    )

    # The tree
    embeddings: Embeddings | Callable[[Any], Embeddings] = Embeddings()
    layer_path: str = "encoder.layer.{i}"  # {group} and {inner}: where layers share their weights
    layer: LayerNames = field(default_factory=LayerNames)
    norm: Callable[[Any], NormSpec] | None = None  # None: a LayerNorm of layer_norm_eps
    spec: Callable[[Any, int], LayerSpec] | None = None  # of the layer at a depth; None: what the next three say
    norm_first: bool = False
    attention_output_dropout: bool = True
    feed_forward_dropout: bool = True
    heads_first: bool = False  # whether transformers registers a model's head before its base model
    pooler: str | None = "pooler.dense"
    pooler_first: bool = False  # whether transformers registers it before the layers
    has_pooler: bool = True  # whether a base model has it where it was not asked for
    final_norm: str | None = None
    positions_from_ids: bool = False  # RoBERTa: cumsum(ids != pad) + pad
    padding_idx: int | None = None  # the pad of that rule and of the word table, whatever pad_token_id says
    overflows_float16: bool = False  # hidden states leave its range: no model is loaded in it
    unused: Callable[[Any], Mapping[str, tuple[int, int]]] | None = None  # Linears that no forward runs: (in, out)

    # The files
    vocabulary: NewVocabulary = field(default_factory=NewVocabulary)
    files: tuple[Rename | Split, ...] = ()
    ignored_keys: tuple[str, ...] = ()  # endings of keys that old files hold and the model may not need

    def unused_linears(self, config: Any) -> Mapping[str, tuple[int, int]]:
        return {} if self.unused is None else self.unused(config)

    def norm_spec(self, config: Any) -> NormSpec:
        return NormSpec(eps=config.layer_norm_eps) if self.norm is None else self.norm(config)

    def layer_spec(self, config: Any, depth: int) -> LayerSpec:
        """What the layer at this depth computes."""
        if self.spec is not None:
            return self.spec(config, depth)
        heads, dropout = config.num_attention_heads, config.hidden_dropout_prob
        attention = AttentionSpec(
            heads, heads, config.hidden_size // heads, dropout=config.attention_probs_dropout_prob
        )
        return LayerSpec(
            self.layer,
            attention,
            FeedForwardSpec(config.intermediate_size, config.activation),
            self.norm_spec(config),
            norm_first=self.norm_first,
            attention_output_dropout=dropout if self.attention_output_dropout else 0.0,
            feed_forward_dropout=dropout if self.feed_forward_dropout else 0.0,
            biases=tuple(role for role in LINEARS if role != "gate"),
        )

    def layer_specs(self, config: Any) -> tuple[LayerSpec, ...]:
        """What the layers compute, one spec a depth; those that are alike are one object."""
        unique: dict[LayerSpec, LayerSpec] = {}
        specs = (self.layer_spec(config, depth) for depth in range(len(self.layer_paths(config))))
        return tuple(unique.setdefault(spec, spec) for spec in specs)

    def path_of_layer(self, config: Any, i: int) -> str:
        """The path of the layer that comes i-th in the tree."""
        group, inner = divmod(i, config.inner_group_num)
        return self.layer_path.format(i=i, group=group, inner=inner)

    def layer_paths(self, config: Any) -> tuple[str, ...]:
        """The path of the layer that runs at each depth; ALBERT's groups repeat theirs (Lan et al. 2019, 3.1)."""
        if not config.num_hidden_groups:
            return tuple(self.path_of_layer(config, i) for i in range(config.num_hidden_layers))
        paths: list[str] = []
        for depth in range(config.num_hidden_layers):
            group = int(depth / (config.num_hidden_layers / config.num_hidden_groups))
            first = group * config.inner_group_num
            paths += [self.path_of_layer(config, first + inner) for inner in range(config.inner_group_num)]
        return tuple(paths)

    def embedding_spec(self, config: Any) -> Embeddings:
        """The embedding leaves that a model of this config has."""
        leaves = self.embeddings if isinstance(self.embeddings, Embeddings) else self.embeddings(config)
        is_needed = leaves.always_projects or config.embedding_width != config.hidden_size
        return leaves if leaves.project is None or is_needed else replace(leaves, project=None)

    def derive(self, config: Any) -> Derived:
        """Worked out once for a config: a model looks at it in every call."""
        embeddings, paths, specs = self.embedding_spec(config), self.layer_paths(config), self.layer_specs(config)
        attentions = dict.fromkeys(spec.attention for spec in specs)
        rotaries = dict.fromkeys(attn.rotary for attn in attentions if attn.rotary is not None)
        relatives = dict.fromkeys(attn.relative for attn in attentions if attn.relative is not None)
        has_windows = any(attn.window_size != (-1, -1) for attn in attentions)
        distances = Distances(tuple(rotaries), has_windows, tuple(relatives))
        layers = self.path_of_layer(config, 0).partition(".0")[0]
        encoder = layers.partition(".")[0] if "." in layers else None
        inside = "" if encoder is None else f"{encoder}."
        firsts = paths[:: config.inner_group_num] if config.num_hidden_groups else ()
        scopes = Scopes(
            embeddings=embeddings.word.rpartition(".")[0] or None,
            encoder=encoder,
            groups=tuple(path.rsplit(".", 2)[0] for path in firsts),
            projects=embeddings.project is not None and embeddings.project.startswith(inside),
            ends=self.final_norm is None or self.final_norm.startswith(inside),
        )
        return Derived(embeddings, paths, specs, distances if any(distances) else None, scopes)
