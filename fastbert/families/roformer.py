"""RoFormer (Su et al. 2021): BERT with rotary positions, dimension 2i paired with 2i + 1, from a saved table."""

from typing import Any

from fastbert.families.schema import (
    BERT_ARGUMENTS,
    ONLY_VALUES,
    ClassifierHead,
    Embeddings,
    Family,
    Flag,
    FromConfig,
    HfClass,
    MaskedLM,
    NewVocabulary,
    heads,
)
from fastbert.layer_spec import AttentionSpec, FeedForwardSpec, LayerNames, LayerSpec, NormSpec, RotarySpec

_LAYER = LayerNames()
_DROPOUT = FromConfig("hidden_dropout_prob")


def _spec(config: Any, depth: int) -> LayerSpec:
    count, dropout = config.num_attention_heads, config.hidden_dropout_prob
    width = config.hidden_size // count
    table = "encoder.embed_positions"
    position = RotarySpec(10_000.0, width, interleaved=True, rotates_values=config.rotary_value, table=table)
    return LayerSpec(
        _LAYER,
        AttentionSpec(count, count, width, dropout=config.attention_probs_dropout_prob, position=position),
        FeedForwardSpec(config.intermediate_size, config.activation),
        NormSpec(eps=config.layer_norm_eps),
        attention_output_dropout=dropout,
        feed_forward_dropout=dropout,
    )


FAMILY = Family(
    model_type="roformer",
    classes="RoFormer",
    prefix="roformer",
    hf_class=HfClass(
        "roformer",
        "BaseModelOutputWithPastAndCrossAttentions",
        embedding_arguments=("input_ids", "token_type_ids", "inputs_embeds"),
        layer_arguments=("attention_mask", "sinusoidal_pos", *BERT_ARGUMENTS[1:], "output_attentions"),
        layer_returns="both",
    ),
    heads=heads(
        MaskedLM(),
        sequence=ClassifierHead(
            "classifier.out_proj",
            "first",
            dense="classifier.dense",
            activation=FromConfig("hidden_act"),
            dropout=_DROPOUT,
            drops_first=True,
        ),
        tokens=ClassifierHead(pooling="tokens", dropout=_DROPOUT),
        choice=ClassifierHead(pooling="last", dropout=FromConfig("summary_last_dropout")),
    ),
    defaults={"vocab_size": 50000, "max_position_embeddings": 1536},
    fields={"rotary_value": Flag(False)},
    only_values={
        **ONLY_VALUES,
        "summary_type": ("last",),
        "summary_use_proj": (False,),
        "summary_activation": (None, ""),
    },
    embeddings=Embeddings(position=None, project="embeddings_project"),
    spec=_spec,
    pooler=None,
    vocabulary=NewVocabulary(gives_types=False),
)
