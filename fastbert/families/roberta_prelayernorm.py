"""RoBERTa-PreLayerNorm (Ott et al. 2019, "fairseq"): RoBERTa with its norms before each sublayer."""

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
from fastbert.layer_spec import LayerNames

FAMILY = Family(
    model_type="roberta-prelayernorm",
    classes="RobertaPreLayerNorm",
    prefix="roberta_prelayernorm",
    hf_class=HfClass("roberta_prelayernorm"),
    heads=heads(
        MaskedLM("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation="gelu"),
        sequence=ClassifierHead("classifier.out_proj", "first", dense="classifier.dense", drops_first=True),
        choice=ClassifierHead(dropout=FromConfig("hidden_dropout_prob")),
    ),
    defaults={"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    embeddings=Embeddings(pads_positions=True, order=("word", "token_type", "norm", "position")),
    layer=LayerNames(
        attention_norm="attention.LayerNorm",
        feed_forward_norm="intermediate.LayerNorm",
        order=(
            *("query", "key", "value", "attention_output", "attention_norm"),
            *("feed_forward_norm", "up", "down"),
        ),
    ),
    final_norm="LayerNorm",
    norm_first=True,
    positions_from_ids=True,
    vocabulary=NewVocabulary("bpe", ROBERTA_TOKENS, separators=2, gives_types=False),
)
