"""UltraBERT (DMIS Lab 2026): a Llama encoder whose layers see a window or all, with two thetas."""

from typing import Any

from fastbert.families.llama import LAYER, LAYER_ARGUMENTS, layer_types, llama_spec, rms_norm
from fastbert.families.rope import rotary
from fastbert.families.schema import (
    ONLY_VALUES,
    Choice,
    ClassifierHead,
    Count,
    Embeddings,
    Family,
    Flag,
    FromConfig,
    HfClass,
    MaskedLM,
    NewVocabulary,
    Rename,
    Structure,
    heads,
)
from fastbert.layer_spec import LayerSpec

_THETAS = {"full_attention": 2_560_000.0, "sliding_attention": 10_000.0}


def _every_third(num_hidden_layers: int) -> list[str]:
    """Of each three layers the last one sees all."""
    return ["sliding_attention" if (i + 1) % 3 else "full_attention" for i in range(max(num_hidden_layers, 1))]


def _spec(config: Any, depth: int) -> LayerSpec:
    layer_type, width = layer_types(config, _every_third(config.num_hidden_layers))[depth], config.sliding_window
    position = rotary(config, config.head_dim, _THETAS, layer_type, hf_frequencies=f"rotary_emb.{layer_type}_inv_freq")
    window = (width, width) if layer_type == "sliding_attention" else (-1, -1)
    return llama_spec(config, position, window_size=window, has_mlp_bias=config.mlp_bias)


def _upgrade_config(entries: dict[str, Any]) -> dict[str, Any]:
    """Windows and thetas a layer, as the first files had them. Of thetas that differ in one type of layer the last one
    counts, and of windows the first, as in transformers.
    """
    windows, thetas = entries.pop("attention_windows", None), entries.pop("rope_theta", None)
    if isinstance(windows, (list, tuple)):
        entries["sliding_window"] = next(filter(None, windows), entries.get("sliding_window", 128))
        if entries.get("layer_types") is None:
            entries["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    if isinstance(thetas, (list, tuple)) and entries.get("rope_parameters") is None:
        types = entries.get("layer_types") or _every_third(len(thetas))
        each = zip(types, thetas, strict=False)
        entries["rope_parameters"] = {name: {"rope_type": "default", "rope_theta": theta} for name, theta in each}
    return entries


FAMILY = Family(
    model_type="ultrabert", classes="Ultrabert", prefix="model",
    hf_class=HfClass(
        "ultrabert", "BaseModelOutput", {"self_attn.attention_dropout": "attention"}, None,
        layer_arguments=LAYER_ARGUMENTS,
    ),
    heads=heads(
        MaskedLM(
            "head.linear1", None, "head.decoder", None, second="head.linear2", activation="gelu_pytorch_tanh",
            width=FromConfig("prediction_head_size"), dense_bias=False, decoder_bias=False,
            order=("dense", "second", "decoder"),
        ),
        sequence=ClassifierHead(
            pooling=FromConfig("classifier_pooling"), poolings={"cls": "first"},
            dropout=FromConfig("classifier_dropout"),
        ),
        tokens=ClassifierHead(pooling="tokens", dropout=FromConfig("classifier_dropout")),
        answers=ClassifierHead(out="qa_outputs", pooling="tokens", dropout=0.0),
        choice=None,
    ),
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0, "max_position_embeddings": 32768,
        "type_vocab_size": 0, "layer_norm_eps": 1e-6, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
        "tie_word_embeddings": False,
    },
    hf_names={"layer_norm_eps": "rms_norm_eps", "attention_probs_dropout_prob": "attention_dropout"},
    fields={
        "num_key_value_heads": Count(None), "head_dim": Count(None), "attention_bias": Flag(False),
        "mlp_bias": Flag(False), "classifier_pooling": Choice("cls", ("cls", "mean")),
        "sliding_window": Count(128), "prediction_head_size": Count(768),
        "layer_types": Structure(), "rope_parameters": Structure(),
    },
    fixed=("hidden_dropout_prob", "type_vocab_size"), only_values={**ONLY_VALUES, "rope_scaling": (None,)},
    upgrade_config=_upgrade_config, vocabulary=NewVocabulary("bpe", gives_types=False),
    files=(Rename("ultrabert", "model"), Rename("cls", "head.decoder")),
    embeddings=Embeddings("embed_tokens", None, None, norm=None, dropout=0.0),
    layer_path="layers.{i}", layer=LAYER, spec=_spec, norm=rms_norm, pooler=None, final_norm="norm",
)  # fmt: skip
