"""ALBERT (Lan et al. 2019): factorised embeddings, layers that share their weights, sentence order prediction."""

from fastbert.families.schema import (
    ALBERT_TOKENS,
    Embeddings,
    Family,
    FromConfig,
    HfClass,
    MaskedLM,
    NewVocabulary,
    PreTraining,
    heads,
)
from fastbert.layer_spec import LayerNames

_MASKED_LM = MaskedLM(
    "predictions.dense",
    "predictions.LayerNorm",
    "predictions.decoder",
    "predictions.bias",
    order=("norm", "dense", "decoder"),
)

FAMILY = Family(
    model_type="albert",
    classes="Albert",
    prefix="albert",
    hf_class=HfClass(
        "albert",
        "BaseModelOutputWithPooling",
        dropouts={
            "attention.attention_dropout": "attention",
            "attention.output_dropout": "attention_output",
            "dropout": None,
        },
        layer_arguments=("attention_mask",),
    ),
    heads=heads(
        _MASKED_LM,
        PreTraining=PreTraining(  # sentence order: 0 is the original one, 1 switched (section 3.1)
            _MASKED_LM,
            "sop_classifier.classifier",
            pair_size=FromConfig("num_labels"),
            pair_dropout=FromConfig("head_dropout"),
            pair_label="sentence_order_label",
            pair_logits="sop_logits",
        ),
    ),
    defaults={
        "vocab_size": 30000,
        "embedding_size": 128,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": 0.1,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    hf_names={"classifier_dropout": "classifier_dropout_prob"},
    embeddings=Embeddings(project="encoder.embedding_hidden_mapping_in", always_projects=True),
    layer=LayerNames(
        query="attention.query",
        key="attention.key",
        value="attention.value",
        attention_output="attention.dense",
        attention_norm="attention.LayerNorm",
        up="ffn",
        down="ffn_output",
        feed_forward_norm="full_layer_layer_norm",
        order=(
            "feed_forward_norm",
            "query",
            "key",
            "value",
            "attention_output",
            "attention_norm",
            "up",
            "down",
        ),
    ),
    layer_path="encoder.albert_layer_groups.{group}.albert_layers.{inner}",
    pooler="pooler",
    feed_forward_dropout=False,
    vocabulary=NewVocabulary("unigram", ALBERT_TOKENS, gives_types=False),
)
