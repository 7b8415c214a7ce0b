"""Gemma 3 (Gemma Team 2025, section 2; EmbeddingGemma, Schechter Vera et al. 2025): Llama's layers with a norm before
and one behind each sublayer, norms of queries' and keys' heads, and layers that see a window between those that see
all.
"""

from dataclasses import replace
from typing import Any

from fastbert.families.llama import LAST_TOKEN, LAYER, layer_types, llama_spec
from fastbert.families.rope import rotary
from fastbert.families.schema import (
    ONLY_VALUES,
    Count,
    Embeddings,
    Family,
    Flag,
    HfClass,
    NewVocabulary,
    Number,
    Structure,
)
from fastbert.layer_spec import LayerSpec, NormSpec

_LAYER = replace(
    LAYER,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    attention_output_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_output_norm="post_feedforward_layernorm",
    order=(
        *(*LAYER.order[:4], "query_norm", "key_norm", *LAYER.order[4:7]),
        *("attention_norm", "attention_output_norm", "feed_forward_norm", "feed_forward_output_norm"),
    ),
)
_THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}


def _norm(config: Any) -> NormSpec:
    return NormSpec("zero_centered_rms", config.layer_norm_eps, bias=False)


def _types(config: Any) -> list[str]:
    """Where a config has none, the last of `sliding_window_pattern` layers sees all."""
    pattern, count = config.sliding_window_pattern, max(config.num_hidden_layers, 1)
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    return layer_types(config, default)


def _spec(config: Any, depth: int) -> LayerSpec:
    layer_type, width = _types(config)[depth], config.sliding_window
    position = rotary(config, config.head_dim, _THETAS, layer_type, hf_frequencies=f"rotary_emb.{layer_type}_inv_freq")
    left = width - 1 if layer_type == "sliding_attention" else -1  # a window counts the query's own token
    window, norm = (left, left if config.use_bidirectional_attention else 0), _norm(config)
    scale = config.query_pre_attn_scalar**-0.5
    return llama_spec(config, position, _LAYER, norm, window, softmax_scale=scale)


def _embeddings(config: Any) -> Embeddings:
    """Words are multiplied by the root of hidden_size."""
    return Embeddings("embed_tokens", None, None, norm=None, dropout=0.0, word_scale=config.hidden_size**0.5)


def _upgrade_config(entries: dict[str, Any]) -> dict[str, Any]:
    """Thetas and a scaling as files had them before rope_parameters; and a window that goes both ways, w in a file,
    which is w // 2 + 1, as in transformers.
    """
    rope, scaling = entries.get("rope_parameters") or {}, entries.pop("rope_scaling", None) or {}
    thetas = entries.pop("rope_theta", None), entries.pop("rope_local_base_freq", None)
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        return {**entries, "rope_parameters": rope if scaling == {} else scaling}  # which `_spec` refuses
    merged = dict(rope)
    for (layer_type, default), theta in zip(_THETAS.items(), thetas, strict=True):
        entry = rope.get(layer_type)
        entry = {"rope_type": "default"} if entry is None else entry
        others = {"rope_theta": default if theta is None else theta}
        extra = scaling if layer_type == "full_attention" else {}
        merged[layer_type] = {**others, **entry, **extra} if isinstance(entry, dict) else entry
    window = entries.get("sliding_window", 4096)
    if entries.get("use_bidirectional_attention") and type(window) is int:
        entries["sliding_window"] = window // 2 + 1
    return {**entries, "rope_parameters": merged}


def _written_config(entries: dict[str, Any]) -> dict[str, Any]:
    """The window as files have it: an odd one comes back as one less, as from transformers."""
    width = entries["sliding_window"]
    return {**entries, "sliding_window": (width - 1) * 2} if entries["use_bidirectional_attention"] else entries


FAMILY = Family(
    model_type="gemma3_text", classes="Gemma3Text", prefix="model",
    hf_class=HfClass(
        "gemma3", "BaseModelOutputWithPast", {"self_attn.attention_dropout": "attention"}, None, counts_layers=True,
        caches=True, layer_arguments=("position_embeddings", "attention_mask", "position_ids", "cache"),
    ),
    heads={"SequenceClassification": LAST_TOKEN},
    defaults={
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "hidden_act": "gelu_pytorch_tanh", "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 131_072, "type_vocab_size": 0,
        "layer_norm_eps": 1e-6, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    },
    hf_names={
        "hidden_act": "hidden_activation", "layer_norm_eps": "rms_norm_eps",
        "attention_probs_dropout_prob": "attention_dropout",
    },
    fields={
        "num_key_value_heads": Count(4), "head_dim": Count(256), "attention_bias": Flag(False),
        "query_pre_attn_scalar": Number(256), "sliding_window": Count(4096), "sliding_window_pattern": Count(6),
        "use_bidirectional_attention": Flag(False), "layer_types": Structure(), "rope_parameters": Structure(),
    },
    fixed=("hidden_dropout_prob", "type_vocab_size"),
    only_values={**ONLY_VALUES, "attn_logit_softcapping": (None,), "is_causal": (True,)},
    upgrade_config=_upgrade_config, written_config=_written_config, vocabulary=NewVocabulary("bpe", gives_types=False),
    embeddings=_embeddings, layer_path="layers.{i}", layer=_LAYER, spec=_spec, norm=_norm, pooler=None,
    final_norm="norm", overflows_float16=True,
)  # fmt: skip
