"""XLM-RoBERTa-XL (Goyal et al. 2021): XLM-RoBERTa with pre-norm layers, and no norm after the embeddings."""

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
    model_type="xlm-roberta-xl",
    classes="XLMRobertaXL",
    prefix="roberta",
    hf_class=HfClass("xlm_roberta_xl"),
    heads=heads(
        MaskedLM("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation="gelu"),
        sequence=ClassifierHead("classifier.out_proj", "first", dense="classifier.dense", drops_first=True),
        choice=ClassifierHead(dropout=FromConfig("hidden_dropout_prob")),
    ),
    defaults={
        "vocab_size": 250880,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 10240,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    embeddings=Embeddings(norm=None, pads_positions=True, order=("word", "token_type", "position")),
    layer=LayerNames(
        attention_norm="attention.self_attn_layer_norm",
        feed_forward_norm="LayerNorm",
    ),
    feed_forward_dropout=False,
    final_norm="encoder.LayerNorm",
    norm_first=True,
    positions_from_ids=True,
    vocabulary=NewVocabulary("unigram", ROBERTA_TOKENS, separators=2, gives_types=False, ignores_class=True),
)
