"""Qwen3 (Yang et al. 2025; Qwen3-Embedding, Zhang et al. 2025): Llama's layers with norms of queries' and keys' heads;
a token sees those before it, unless a config says otherwise.
"""

from dataclasses import replace
from typing import Any

from fastbert.families.llama import LAST_TOKEN, LAYER, LAYER_ARGUMENTS, layer_types, llama_spec, rms_norm
from fastbert.families.rope import rotary, upgrade_rope
from fastbert.families.schema import (
    ONLY_VALUES,
    ClassifierHead,
    Count,
    Embeddings,
    Family,
    Flag,
    HfClass,
    NewVocabulary,
    Structure,
)
from fastbert.layer_spec import Invalid, LayerSpec

_LAYER = replace(
    LAYER,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    order=(*LAYER.order[:4], "query_norm", "key_norm", *LAYER.order[4:]),
)


def _types(config: Any) -> list[str]:
    """Where a config has none, the layers behind `max_window_layers` have windows, if it uses them."""
    has_windows = config.use_sliding_window and config.sliding_window is not None
    first = config.max_window_layers if has_windows else config.num_hidden_layers
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(config.num_hidden_layers)]
    types = layer_types(config, default or ["full_attention"])
    if "sliding_attention" in types and not has_windows:
        raise Invalid("sliding_window", config.sliding_window, "used and a number: layer_types has sliding_attention")
    return types


def _spec(config: Any, depth: int) -> LayerSpec:
    position = rotary(config, config.head_dim, 10_000.0, hf_frequencies="rotary_emb.inv_freq")
    has_window, width = _types(config)[depth] == "sliding_attention", config.sliding_window
    # A causal window counts the query's own token, and one to both sides does not, as in transformers.
    window = (width, width) if has_window else (-1, -1)
    if config.is_causal:
        window = (width - 1, 0) if has_window else (-1, 0)
    return llama_spec(config, position, _LAYER, window_size=window)


def _upgrade_config(entries: dict[str, Any]) -> dict[str, Any]:
    """A window that is not used is none, as in transformers; and rotary entries of old files."""
    width = entries.get("sliding_window", 4096)
    is_unused = type(width) is int and 0 < width < 2**31 and not entries.get("use_sliding_window", False)
    return upgrade_rope({**entries, "sliding_window": None if is_unused else width})


FAMILY = Family(
    model_type="qwen3", classes="Qwen3", prefix="model",
    hf_class=HfClass(
        "qwen3", "BaseModelOutputWithPast", {"self_attn.attention_dropout": "attention"}, None, counts_layers=True,
        caches=True, layer_arguments=LAYER_ARGUMENTS,
    ),
    heads={
        "SequenceClassification": LAST_TOKEN,
        "TokenClassification": ClassifierHead(out="score", pooling="tokens"),
    },
    defaults={
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 32768, "type_vocab_size": 0, "layer_norm_eps": 1e-6, "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    hf_names={
        "layer_norm_eps": "rms_norm_eps", "attention_probs_dropout_prob": "attention_dropout",
    },
    fields={
        "num_key_value_heads": Count(32), "head_dim": Count(128), "attention_bias": Flag(False),
        "use_sliding_window": Flag(False), "sliding_window": Count(None), "max_window_layers": Count(28, 0),
        "is_causal": Flag(True), "layer_types": Structure(), "rope_parameters": Structure(),
    },
    # The head for tokens drops classifier_dropout, and where that is null, 0.1.
    fixed=("hidden_dropout_prob", "type_vocab_size"),
    only_values={**ONLY_VALUES, "token_classification_bias": (True,), "hidden_dropout": (None, 0.1)},
    upgrade_config=_upgrade_config, vocabulary=NewVocabulary("bpe", gives_types=False),
    embeddings=Embeddings("embed_tokens", None, None, norm=None, dropout=0.0),
    layer_path="layers.{i}", layer=_LAYER, spec=_spec, norm=rms_norm, pooler=None, final_norm="norm",
)  # fmt: skip
