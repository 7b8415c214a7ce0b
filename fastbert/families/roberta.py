"""RoBERTa (Liu et al. 2019): positions counted from the ids, other head names."""

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
    model_type="roberta",
    classes="Roberta",
    prefix="roberta",
    hf_class=HfClass("roberta"),
    heads=heads(
        MaskedLM("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation="gelu"),
        sequence=ClassifierHead("classifier.out_proj", "first", dense="classifier.dense", drops_first=True),
        choice=ClassifierHead(dropout=FromConfig("hidden_dropout_prob")),
    ),
    defaults={"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    embeddings=Embeddings(pads_positions=True, order=("word", "token_type", "norm", "position")),
    positions_from_ids=True,
    vocabulary=NewVocabulary("bpe", ROBERTA_TOKENS, separators=2, gives_types=False),
)
