"""Nomic BERT (Nussbaum et al. 2024): post-norm layers with rotary positions and SwiGLU, without biases."""

from typing import Any

from fastbert.families.rope import rotary, upgrade_rope
from fastbert.families.schema import (
    Count,
    Embeddings,
    Family,
    HfClass,
    MaskedLM,
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
    position = rotary(config, width, 1000.0, hf_frequencies="rotary_emb.inv_freq")
    return LayerSpec(
        _LAYER,
        AttentionSpec(count, count, width, dropout=config.attention_probs_dropout_prob, position=position),
        FeedForwardSpec(config.intermediate_size, config.activation, gated=True),
        NormSpec(eps=config.layer_norm_eps),
        attention_output_dropout=dropout,
        feed_forward_dropout=dropout,
        biases=(),
    )


FAMILY = Family(
    model_type="nomic_bert",
    classes="NomicBert",
    prefix="nomic_bert",
    hf_class=HfClass(
        "nomic_bert",
        "BaseModelOutputWithPooling",
        dropouts={
            "self_attn.attention_dropout": "attention",
            "post_attention_dropout": "attention_output",
            "post_mlp_dropout": "feed_forward",
        },
        counts_layers=True,
        layer_arguments=("attention_mask", "position_embeddings"),
    ),
    heads=heads(MaskedLM(norm="cls.predictions.transform.layer_norm"), answers=None, choice=None),
    defaults={
        "vocab_size": 30528,
        "hidden_act": "silu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 2048,
    },
    fields={"head_dim": Count(None), "rope_parameters": Structure()},
    upgrade_config=upgrade_rope,
    embeddings=Embeddings(position=None),
    layer_path="layers.{i}",
    layer=_LAYER,
    spec=_spec,
    has_pooler=False,
    pooler_first=True,
    files=(
        Rename("encoder.layers", "layers"),
        Rename("emb_ln", "embeddings.LayerNorm"),
        Rename("attn.out_proj", "self_attn.o_proj"),
        Rename("fc11", "up_proj"),
        Rename("fc12", "gate_proj"),
        Rename("fc2", "down_proj"),
        Rename("norm1", "post_attention_layernorm"),
        Rename("norm2", "post_mlp_layernorm"),
        Split("attn.Wqkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ),
)
