"""MPNet (Song et al. 2020): RoBERTa's positions, and a bias of the scores by distance that all layers share."""

from typing import Any

from fastbert.families.schema import (
    ClassifierHead,
    Count,
    Embeddings,
    Family,
    FromConfig,
    HfClass,
    MaskedLM,
    NewVocabulary,
    heads,
)
from fastbert.layer_spec import AttentionSpec, FeedForwardSpec, LayerNames, LayerSpec, NormSpec, RelativeBias

_LAYER = LayerNames(
    query="attention.attn.q",
    key="attention.attn.k",
    value="attention.attn.v",
    attention_output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)
_DROPOUT = FromConfig("hidden_dropout_prob")


def _spec(config: Any, depth: int) -> LayerSpec:
    count, dropout = config.num_attention_heads, config.hidden_dropout_prob
    # transformers has 32 buckets whatever the config says, which is how many rows the table has.
    position = RelativeBias("encoder.relative_attention_bias", config.relative_attention_num_buckets)
    return LayerSpec(
        _LAYER,
        AttentionSpec(
            count, count, config.hidden_size // count, dropout=config.attention_probs_dropout_prob, position=position
        ),
        FeedForwardSpec(config.intermediate_size, config.activation),
        NormSpec(eps=config.layer_norm_eps),
        attention_output_dropout=dropout,
        feed_forward_dropout=dropout,
    )


FAMILY = Family(
    model_type="mpnet",
    classes="MPNet",
    prefix="mpnet",
    hf_class=HfClass(
        "mpnet",
        "BaseModelOutputWithPooling",
        dropouts={
            "attention.attn.dropout": "attention",
            "attention.dropout": "attention_output",
            "output.dropout": "feed_forward",
        },
        embedding_arguments=("input_ids", "position_ids", "inputs_embeds"),
        layer_arguments=("attention_mask", "position_bias", "output_attentions"),
        layer_returns="tuple",
        encoder_defaults={"return_dict": False},
    ),
    heads=heads(
        MaskedLM("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", activation="gelu"),
        sequence=ClassifierHead(
            "classifier.out_proj", "first", dense="classifier.dense", dropout=_DROPOUT, drops_first=True
        ),
        tokens=ClassifierHead(pooling="tokens", dropout=_DROPOUT),
        choice=ClassifierHead(dropout=_DROPOUT),
    ),
    defaults={
        "vocab_size": 30527, "type_vocab_size": 0, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2
    },
    fields={"relative_attention_num_buckets": Count(32, 32)},
    fixed=("type_vocab_size",),
    embeddings=Embeddings(token_type=None, pads_positions=True),
    spec=_spec,
    positions_from_ids=True,
    padding_idx=1,
    vocabulary=NewVocabulary(
        special={"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "[UNK]", "mask": "<mask>"}, separators=2,
        bare=("vocab.txt",), mask_takes_space=True, gives_types=False,
    ),
)  # fmt: skip
