"""GTE (Zhang et al. 2024, "mGTE"): post-norm layers with rotary positions and GeGLU, dropout inside of it."""

from dataclasses import replace
from typing import Any

from fastbert.families.rope import rotary, upgrade_rope
from fastbert.families.schema import (
    Embeddings,
    Family,
    HfClass,
    MaskedLM,
    NewVocabulary,
    Rename,
    Split,
    Structure,
    heads,
)
from fastbert.layer_spec import AttentionSpec, FeedForwardSpec, LayerNames, LayerSpec, NormSpec

_LAYER = LayerNames(
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    attention_output="self_attn.o_proj",
    attention_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    feed_forward_norm="post_mlp_layernorm",
    order=(
        *("attention_norm", "gate", "up", "down"),
        *("query", "key", "value", "attention_output", "feed_forward_norm"),
    ),
)


def _spec(config: Any, depth: int) -> LayerSpec:
    count, width, dropout = config.num_attention_heads, config.head_dim, config.hidden_dropout_prob
    position = rotary(config, width, 160_000.0, hf_frequencies="rotary_emb.inv_freq")
    return LayerSpec(
        _LAYER,
        AttentionSpec(count, count, width, dropout=config.attention_probs_dropout_prob, position=position),
        FeedForwardSpec(config.intermediate_size, config.activation, gated=True, dropout=dropout),
        NormSpec(eps=config.layer_norm_eps),
        attention_output_dropout=dropout,
        feed_forward_dropout=dropout,
        biases=("query", "key", "value", "attention_output", "down"),
    )


def _embeddings(config: Any) -> Embeddings:
    """gte-base-en-v1.5 has no token types, the others do."""
    names = Embeddings(position=None)
    return names if config.type_vocab_size else replace(names, token_type=None)


FAMILY = Family(
    model_type="gte",
    classes="Gte",
    prefix="gte",
    hf_class=HfClass(
        "gte",
        "BaseModelOutputWithPooling",
        dropouts={
            "self_attn.attention_dropout": "attention",
            "post_attention_dropout": "attention_output",
            "mlp.dropout": "inner",
            "post_mlp_dropout": "feed_forward",
        },
        counts_layers=True,
        layer_arguments=("attention_mask", "position_embeddings"),
    ),
    heads=heads(
        MaskedLM("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", None, activation="gelu"),
        answers=None,
        choice=None,
    ),
    defaults={
        "vocab_size": 250048,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "pad_token_id": 1,
    },
    fields={"rope_parameters": Structure()},
    upgrade_config=upgrade_rope,
    embeddings=_embeddings,
    layer_path="layers.{i}",
    layer=_LAYER,
    spec=_spec,
    has_pooler=False,
    pooler_first=True,
    files=(
        Rename("new", ""),
        Rename("encoder.layer", "layers"),
        Rename("attention.o_proj", "self_attn.o_proj"),
        Rename("attn_ln", "post_attention_layernorm"),
        Rename("mlp_ln", "post_mlp_layernorm"),
        Rename("lm_head.norm", "lm_head.layer_norm"),
        Split("attention.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        Split("mlp.up_gate_proj", ("mlp.up_proj", "mlp.gate_proj")),
    ),
    vocabulary=NewVocabulary(gives_types=False),
)
