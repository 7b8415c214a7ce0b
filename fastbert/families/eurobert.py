"""EuroBERT (Boizard et al. 2025): a Llama encoder: RMSNorm, grouped queries, rotary positions, SwiGLU."""

from typing import Any

from fastbert.families.llama import LAYER, LAYER_ARGUMENTS, llama_spec, rms_norm
from fastbert.families.rope import rotary, upgrade_rope
from fastbert.families.schema import (
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
    Structure,
    heads,
)
from fastbert.layer_spec import LayerSpec


def _spec(config: Any, depth: int) -> LayerSpec:
    position = rotary(config, config.head_dim, 10_000.0, hf_frequencies="rotary_emb.inv_freq")
    return llama_spec(config, position, has_mlp_bias=config.mlp_bias)


FAMILY = Family(
    model_type="eurobert",
    classes="EuroBert",
    prefix="model",
    hf_class=HfClass(
        "eurobert",
        "BaseModelOutput",
        {"self_attn.attention_dropout": "attention"},
        None,
        counts_layers=True,
        layer_arguments=LAYER_ARGUMENTS,
    ),
    heads=heads(
        MaskedLM(None, None, "lm_head", None, decoder_bias=FromConfig("mlp_bias"), order=("decoder",)),
        sequence=ClassifierHead(
            pooling=FromConfig("classifier_pooling"),
            poolings={"bos": "first"},
            dense="dense",
            activation="gelu",
            dropout=0.0,
        ),
        tokens=ClassifierHead(pooling="tokens", dropout=0.0),
        answers=None,
        choice=None,
    ),
    defaults={
        "vocab_size": 128256,
        "hidden_act": "silu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 8192,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 128001,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "tie_word_embeddings": False,
    },
    hf_names={"layer_norm_eps": "rms_norm_eps", "attention_probs_dropout_prob": "attention_dropout"},
    fields={
        "num_key_value_heads": Count(None),
        "head_dim": Count(None),
        "attention_bias": Flag(False),
        "mlp_bias": Flag(False),
        "classifier_pooling": Choice("late", ("late", "bos", "mean")),
        "rope_parameters": Structure(),
    },
    fixed=("hidden_dropout_prob", "type_vocab_size"),
    upgrade_config=upgrade_rope,
    embeddings=Embeddings("embed_tokens", None, None, norm=None, dropout=0.0),
    layer_path="layers.{i}",
    layer=LAYER,
    spec=_spec,
    norm=rms_norm,
    pooler=None,
    final_norm="norm",
    vocabulary=NewVocabulary("bpe", gives_types=False),
)
