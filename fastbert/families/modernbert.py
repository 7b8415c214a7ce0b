"""ModernBERT (Warner et al. 2024): pre-norm, rotary positions with two thetas, local and global layers, GeGLU."""

from typing import Any

from fastbert.families.fields import ActivationName, Choice, Count, Flag, Share, Structure
from fastbert.families.rope import rotary
from fastbert.families.schema import (
    ClassifierHead,
    Embeddings,
    Family,
    FromConfig,
    HfClass,
    MaskedLM,
    NewVocabulary,
    heads,
)
from fastbert.layer_spec import AttentionSpec, FeedForwardSpec, Invalid, LayerNames, LayerSpec, NormSpec

_LAYER = LayerNames(
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    attention_output="attn.Wo",
    attention_norm="attn_norm",
    gate="mlp.Wi",
    up="mlp.Wi",
    down="mlp.Wo",
    feed_forward_norm="mlp_norm",
    order=("attention_norm", "query", "attention_output", "feed_forward_norm", "up", "down"),
)
_THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}


def _norm(config: Any) -> NormSpec:
    return NormSpec(eps=config.layer_norm_eps, bias=config.norm_bias)


def _layer_types(config: Any) -> list[str]:
    """One name a layer; where the config has none, every third layer from the first on is global."""
    types, every, count = config.layer_types, config.global_attn_every_n_layers, config.num_hidden_layers
    if types is None:
        return ["sliding_attention" if i % every else "full_attention" for i in range(max(count, 1))]
    if not isinstance(types, (list, tuple)) or len(types) < count or not all(name in list(_THETAS) for name in types):
        raise Invalid("layer_types", types, f"a list of {count} or more of {', '.join(_THETAS)}")
    return list(types)


def _spec(config: Any, depth: int) -> LayerSpec:
    layer_type, half = _layer_types(config)[depth], config.local_attention // 2
    width, count = config.hidden_size, config.num_attention_heads
    position = rotary(config, width // count, _THETAS, layer_type, hf_frequencies=f"rotary_emb.{layer_type}_inv_freq")
    window = (half, half) if layer_type == "sliding_attention" else (-1, -1)
    dropout = config.attention_probs_dropout_prob
    biases = ("query", "key", "value", "attention_output") if config.attention_bias else ()
    return LayerSpec(
        _LAYER,
        AttentionSpec(count, count, width // count, dropout=dropout, window_size=window, position=position),
        FeedForwardSpec(config.intermediate_size, config.activation, gated=True, dropout=config.mlp_dropout),
        _norm(config),
        norm_first=True,
        has_attention_norm=depth > 0,
        attention_output_dropout=dropout,
        biases=(*biases, "gate", "up", "down") if config.mlp_bias else biases,
    )


def _upgrade_config(entries: dict[str, Any]) -> dict[str, Any]:
    """Thetas and scalings as files had them before rope_parameters; transformers' other name of the window."""
    if (window := entries.pop("sliding_window", None)) is not None:
        entries["local_attention"] = 2 * window if isinstance(window, int) else window  # of True 2, as there
    rope, scaling = entries.get("rope_parameters") or {}, entries.pop("rope_scaling", None) or {}
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        return {**entries, "rope_parameters": rope if scaling == {} else scaling}  # which `_spec` refuses
    merged = dict(rope)
    for layer_type, name in zip(_THETAS, ("global_rope_theta", "local_rope_theta"), strict=True):
        entry, theta = rope.get(layer_type), entries.pop(name, None)
        entry = {"rope_type": "default"} if entry is None else entry
        others = {"rope_theta": _THETAS[layer_type] if theta is None else theta}
        merged[layer_type] = {**others, **entry, **scaling} if isinstance(entry, dict) else entry
    return {**entries, "rope_parameters": merged}


_HEAD: dict[str, Any] = {"dense": "head.dense", "dense_bias": FromConfig("classifier_bias"), "norm": "head.norm"}
_HEAD["container_pools"] = False
_HEAD |= {"activation": FromConfig("classifier_activation"), "dropout": FromConfig("classifier_dropout")}
_POOLED = ClassifierHead(pooling=FromConfig("classifier_pooling"), poolings={"cls": "first"}, **_HEAD)
_TOKENS = ClassifierHead(pooling="tokens", **_HEAD)

FAMILY = Family(
    model_type="modernbert", classes="ModernBert", prefix="model",
    hf_class=HfClass(
        "modernbert", "BaseModelOutput", embedding_dropout="embeddings.drop",
        dropouts={"attn.attention_dropout": "attention", "attn.out_drop": "attention_output", "mlp.drop": "inner"},
        embedding_arguments=("input_ids", "inputs_embeds"),
        layer_arguments=("attention_mask", "position_embeddings"),
    ),
    heads=heads(
        MaskedLM(
            "head.dense", "head.norm", "decoder", None, activation=FromConfig("classifier_activation"),
            width=FromConfig("hidden_size"), dense_bias=FromConfig("classifier_bias"),
            decoder_bias=FromConfig("decoder_bias"), sparse=FromConfig("sparse_prediction"),
        ),
        sequence=_POOLED, tokens=_TOKENS, answers=_TOKENS, choice=_POOLED,
    ),
    defaults={
        "vocab_size": 50368, "num_hidden_layers": 22, "intermediate_size": 1152, "max_position_embeddings": 8192,
        "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "classifier_dropout": 0.0,
        "type_vocab_size": 0, "layer_norm_eps": 1e-5,
        "pad_token_id": 50283, "eos_token_id": 50282, "bos_token_id": 50281,
    },
    hf_names={
        "hidden_act": "hidden_activation", "layer_norm_eps": "norm_eps",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    fields={
        "norm_bias": Flag(False), "attention_bias": Flag(False), "mlp_bias": Flag(False),
        "decoder_bias": Flag(True), "classifier_bias": Flag(False),
        "classifier_activation": ActivationName("gelu"),
        "classifier_pooling": Choice("cls", ("cls", "mean")),
        "embedding_dropout": Share(0.0), "mlp_dropout": Share(0.0), "sparse_prediction": Flag(False),
        "local_attention": Count(128, 0), "global_attn_every_n_layers": Count(3),
        "layer_types": Structure(), "rope_parameters": Structure(),
    },
    fixed=("hidden_dropout_prob", "type_vocab_size"),
    upgrade_config=_upgrade_config, vocabulary=NewVocabulary("bpe", gives_types=False, ignores_class=True),
    embeddings=Embeddings(
        "embeddings.tok_embeddings", None, None, norm="embeddings.norm", dropout=FromConfig("embedding_dropout")
    ),
    layer_path="layers.{i}", layer=_LAYER, spec=_spec, norm=_norm, pooler=None, final_norm="final_norm",
)  # fmt: skip
