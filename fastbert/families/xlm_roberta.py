"""XLM-RoBERTa (Conneau et al. 2019): RoBERTa over many languages."""

from fastbert.families.schema import (
    ROBERTA_TOKENS,
    ClassifierHead,
    Embeddings,
    Family,
    FromConfig,
    HfClass,
    MaskedLM,
    NewVocabulary,
    heads,
)

FAMILY = Family(
    model_type="xlm-roberta",
    classes="XLMRoberta",
    prefix="roberta",
    hf_class=HfClass("xlm_roberta"),
    heads=heads(
        MaskedLM("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation="gelu"),
        sequence=ClassifierHead("classifier.out_proj", "first", dense="classifier.dense", drops_first=True),
        choice=ClassifierHead(dropout=FromConfig("hidden_dropout_prob")),
    ),
    defaults={"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    embeddings=Embeddings(pads_positions=True, order=("word", "token_type", "norm", "position")),
    heads_first=True,
    positions_from_ids=True,
    vocabulary=NewVocabulary("unigram", ROBERTA_TOKENS, separators=2, gives_types=False),
)
