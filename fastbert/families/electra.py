"""ELECTRA (Clark et al. 2020): a small generator masks, a discriminator says which tokens were replaced."""

from fastbert.families.schema import (
    ClassifierHead,
    Embeddings,
    Family,
    FromConfig,
    HfClass,
    MaskedLM,
    ReplacedTokens,
    heads,
)

FAMILY = Family(
    model_type="electra",
    classes="Electra",
    prefix="electra",
    hf_class=HfClass("electra", "BaseModelOutputWithPastAndCrossAttentions"),
    heads=heads(
        MaskedLM(
            "generator_predictions.dense",
            "generator_predictions.LayerNorm",
            "generator_lm_head",
            None,
            activation="gelu",
            order=("norm", "dense", "decoder"),
        ),
        sequence=ClassifierHead(
            "classifier.out_proj", "first", dense="classifier.dense", activation="gelu", drops_first=True
        ),
        choice=ClassifierHead(
            pooling="first",
            dense="sequence_summary.summary",
            activation=FromConfig("summary_activation"),
            dropout=FromConfig("summary_last_dropout"),
        ),
        PreTraining=ReplacedTokens(),
    ),
    defaults={
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "summary_activation": "gelu",
        "summary_last_dropout": 0.1,
    },
    embeddings=Embeddings(project="embeddings_project"),
    pooler=None,
)
