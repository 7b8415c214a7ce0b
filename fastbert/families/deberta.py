"""DeBERTa (He et al. 2021): disentangled attention, over distances that are clamped to a span."""

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
from fastbert.families.schema import ONLY_VALUES, Family, HfClass, NewVocabulary, heads
from fastbert.layer_spec import AttentionSpec, Disentangled, FeedForwardSpec, LayerNames, LayerSpec, NormSpec

_QKV = "attention.self.in_proj"


def _spec(config: Any, depth: int) -> LayerSpec:
    checked_widths(config)
    count, dropout, score_terms = config.num_attention_heads, config.hidden_dropout_prob, terms(config)
    width, is_relative = config.hidden_size // count, config.relative_attention
    names = LayerNames(
        query=_QKV,
        key=_QKV,
        value=_QKV,
        per_head=True,
        query_bias="attention.self.q_bias",
        value_bias="attention.self.v_bias",
        relative_key="attention.self.pos_proj" if is_relative and "c2p" in score_terms else None,
        relative_query="attention.self.pos_q_proj" if is_relative and "p2c" in score_terms else None,
        order=(
            *("query", "relative_key", "relative_query", "attention_output", "attention_norm"),
            *("up", "down", "feed_forward_norm"),
        ),
    )
    return LayerSpec(
        names,
        AttentionSpec(
            count,
            count,
            width,
            softmax_scale=(width * (1 + len(score_terms))) ** -0.5,
            dropout=config.attention_probs_dropout_prob,
            position=Disentangled("encoder.rel_embeddings", span_of(config)) if is_relative else None,
            relative_dropout=dropout,
        ),
        FeedForwardSpec(config.intermediate_size, config.activation),
        NormSpec(eps=config.layer_norm_eps),
        attention_output_dropout=dropout,
        feed_forward_dropout=dropout,
        biases=("attention_output", "up", "down", "relative_query"),
    )


FAMILY = Family(
    model_type="deberta",
    classes="Deberta",
    prefix="deberta",
    hf_class=HfClass("deberta", "BaseModelOutput", dropouts=DROPOUTS, **CALLS),
    heads=heads(masked_lm(), sequence=POOLED, tokens=TOKENS, choice=None),
    masked_tokens_attend=False,  # its mask is of queries, too
    defaults={"vocab_size": 50265, "type_vocab_size": 0, "layer_norm_eps": 1e-7},
    hf_names={"classifier_dropout": "cls_dropout"},
    fields=FIELDS,
    only_values={**ONLY_VALUES, "talking_head": (False,)},
    ignores_types=True,
    embeddings=embeddings_of,
    spec=_spec,
    pooler=None,
    ignored_keys=("position_embeddings.weight",),
    vocabulary=NewVocabulary("bpe", SPECIAL, separators=2, bare=("vocab.json", "merges.txt")),
)
