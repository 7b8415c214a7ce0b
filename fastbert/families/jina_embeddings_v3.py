"""jina-embeddings-v3 (Sturua et al. 2024): XLM-RoBERTa with rotary positions; without its task adapters."""

from typing import Any

from fastbert.families.rope import rotary, upgrade_rope
from fastbert.families.schema import (
    ROBERTA_TOKENS,
    ClassifierHead,
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
    up="mlp.fc1",
    down="mlp.fc2",
    feed_forward_norm="post_mlp_layernorm",
    order=(
        *("attention_norm", "up", "down"),
        *("query", "key", "value", "attention_output", "feed_forward_norm"),
    ),
)


def _spec(config: Any, depth: int) -> LayerSpec:
    count, width, dropout = config.num_attention_heads, config.head_dim, config.hidden_dropout_prob
    position = rotary(config, width, 20_000.0, hf_frequencies="rotary_emb.inv_freq")
    return LayerSpec(
        _LAYER,
        AttentionSpec(count, count, width, dropout=config.attention_probs_dropout_prob, position=position),
        FeedForwardSpec(config.intermediate_size, config.activation),
        NormSpec(eps=config.layer_norm_eps),
        attention_output_dropout=dropout,
        feed_forward_dropout=dropout,
    )


FAMILY = Family(
    model_type="jina_embeddings_v3",
    classes="JinaEmbeddingsV3",
    prefix="roberta",
    hf_class=HfClass(
        "jina_embeddings_v3",
        "BaseModelOutputWithPooling",
        dropouts={
            "self_attn.attention_dropout": "attention",
            "post_attention_dropout": "attention_output",
            "post_mlp_dropout": "feed_forward",
        },
        counts_layers=True,
        layer_arguments=("attention_mask", "position_embeddings"),
    ),
    heads=heads(
        MaskedLM("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation="gelu"),
        sequence=ClassifierHead("classifier.out_proj", "first", dense="classifier.dense", drops_first=True),
        choice=None,
    ),
    defaults={
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    fields={"rope_parameters": Structure()},
    upgrade_config=upgrade_rope,
    embeddings=Embeddings(position=None),
    layer_path="layers.{i}",
    layer=_LAYER,
    spec=_spec,
    heads_first=True,
    pooler_first=True,
    files=(
        Rename("emb_ln", "embeddings.LayerNorm"),
        Rename("encoder.layers", "layers"),
        Rename("mixer.out_proj", "self_attn.o_proj"),
        Rename("norm1", "post_attention_layernorm"),
        Rename("norm2", "post_mlp_layernorm"),
        Split("mixer.Wqkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ),
    vocabulary=NewVocabulary("unigram", ROBERTA_TOKENS, separators=2, gives_types=False),
)
