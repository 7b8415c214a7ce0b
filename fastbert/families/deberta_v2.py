"""DeBERTa-v2 (He et al. 2021), DeBERTa-v3 and mDeBERTa: disentangled attention, over buckets of distances."""

from typing import Any

from fastbert.families.disentangled import (
    CALLS,
    DROPOUTS,
    FIELDS,
    POOLED,
    SPECIAL,
    TOKENS,
    checked_widths,
    embeddings_of,
    masked_lm,
    span_of,
    terms,
)
from fastbert.families.schema import ActivationName, Count, Family, Flag, HfClass, NewVocabulary, Structure, heads
from fastbert.layer_spec import (
    AttentionSpec,
    ConvSpec,
    Disentangled,
    FeedForwardSpec,
    Invalid,
    LayerNames,
    LayerSpec,
    NormSpec,
)

_QKV = ("query", "key", "value")


def _norms_table(config: Any) -> bool:
    value = config.norm_rel_ebd
    norm_types = [name.strip() for name in value.lower().split("|")] if isinstance(value, str) else None
    if norm_types is None or not all(name in ("none", "layer_norm") for name in norm_types):
        raise Invalid("norm_rel_ebd", value, "none or layer_norm")
    if "layer_norm" in norm_types and not config.relative_attention:
        raise Invalid("norm_rel_ebd", value, "none where relative_attention is false, and there is no table")
    return "layer_norm" in norm_types


def _spec(config: Any, depth: int) -> LayerSpec:
    checked_widths(config)
    count, dropout = config.num_attention_heads, config.hidden_dropout_prob
    width, score_terms = config.hidden_size // count, terms(config)
    used_terms, norms_table = {"c2p", "p2c"}.intersection(score_terms), _norms_table(config)
    position, key, query = None, None, None
    if config.relative_attention:
        buckets, longest = config.position_buckets, span_of(config)
        position = Disentangled(
            "encoder.rel_embeddings",
            buckets if buckets > 0 else longest,
            norm="encoder.LayerNorm" if norms_table else None,
            buckets=max(buckets, 0),
            max_distance=longest,
        )
        own = not config.share_att_key
        key = "attention.self.pos_key_proj" if own else "attention.self.key_proj"
        query = "attention.self.pos_query_proj" if own else "attention.self.query_proj"
    names = LayerNames(
        query="attention.self.query_proj",
        key="attention.self.key_proj",
        value="attention.self.value_proj",
        relative_key=key if "c2p" in used_terms else None,
        relative_query=query if "p2c" in used_terms else None,
        order=(
            *(*_QKV, "relative_key", "relative_query", "attention_output", "attention_norm"),
            *("up", "down", "feed_forward_norm"),
        ),
    )
    after = None
    if config.conv_kernel_size and depth == 0:
        if not config.conv_kernel_size % 2:
            raise Invalid("conv_kernel_size", config.conv_kernel_size, "odd: a sequence keeps its length")
        if config.hidden_size % config.conv_groups:
            raise Invalid("conv_groups", config.conv_groups, f"a divisor of hidden_size, {config.hidden_size}")
        after = ConvSpec("encoder.conv", config.conv_kernel_size, config.conv_groups, config.conv_act, dropout)
    return LayerSpec(
        names,
        AttentionSpec(
            count,
            count,
            width,
            softmax_scale=(width * (1 + len(used_terms))) ** -0.5,
            dropout=config.attention_probs_dropout_prob,
            position=position,
            relative_dropout=dropout,
        ),
        FeedForwardSpec(config.intermediate_size, config.activation),
        NormSpec(eps=config.layer_norm_eps),
        attention_output_dropout=dropout,
        feed_forward_dropout=dropout,
        after=after,
    )


FAMILY = Family(
    model_type="deberta-v2", classes="DebertaV2", prefix="deberta",
    hf_class=HfClass("deberta_v2", "BaseModelOutput", dropouts=DROPOUTS, **CALLS),
    heads=heads(masked_lm(), sequence=POOLED, tokens=TOKENS, choice=POOLED),
    masked_tokens_attend=False,  # its mask is of queries, too
    defaults={
        "vocab_size": 128100, "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24,
        "intermediate_size": 6144, "type_vocab_size": 0, "layer_norm_eps": 1e-7,
    },
    hf_names={"classifier_dropout": "cls_dropout"},
    fields={
        **FIELDS, "position_buckets": Count(-1, -1), "share_att_key": Flag(False), "norm_rel_ebd": Structure("none"),
        "conv_kernel_size": Count(0, 0), "conv_groups": Count(1), "conv_act": ActivationName("tanh"),
    },
    ignores_types=True, vocabulary=NewVocabulary("unigram", SPECIAL, bare=("spm.model",), behind=("mask",)),
    embeddings=embeddings_of, spec=_spec, pooler=None,
    ignored_keys=("position_embeddings.weight",),
)  # fmt: skip
