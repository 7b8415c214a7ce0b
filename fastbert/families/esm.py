"""ESM-2 (Lin et al. 2022), and ESM-1b, which has absolute positions: pre-norm encoders of protein sequences."""

from typing import Any

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
    Number,
    Rename,
    TokenDropout,
    heads,
)
from fastbert.layer_spec import AttentionSpec, FeedForwardSpec, Invalid, LayerNames, LayerSpec, NormSpec, RotarySpec

_LAYER = LayerNames(attention_norm="attention.LayerNorm", feed_forward_norm="LayerNorm")
_DROPOUT = FromConfig("hidden_dropout_prob")
_FREQUENCIES = "rotary_embeddings.inv_freq"


def _embeddings(config: Any) -> Embeddings:
    masked = None
    if config.token_dropout:
        if config.mask_token_id is None:
            raise Invalid("mask_token_id", None, "an integer where token_dropout is true")
        masked = TokenDropout(config.mask_token_id, 0.15 * 0.8)
    return Embeddings(
        position="embeddings.position_embeddings" if config.position_embedding_type == "absolute" else None,
        token_type=None,
        norm="embeddings.layer_norm" if config.emb_layer_norm_before else None,
        pads_positions=True,
        token_dropout=masked,
        skips_given=True,
        dropout=0.0,
        order=("word", "norm", "position"),
    )


def _spec(config: Any, depth: int) -> LayerSpec:
    count, dropout = config.num_attention_heads, config.hidden_dropout_prob
    width, turns = config.hidden_size // count, config.position_embedding_type == "rotary"
    position = RotarySpec(float(config.rope_theta), width, frequencies=_FREQUENCIES) if turns else None
    return LayerSpec(
        _LAYER,
        AttentionSpec(count, count, width, dropout=config.attention_probs_dropout_prob, position=position),
        FeedForwardSpec(config.intermediate_size, "gelu"),
        NormSpec(eps=config.layer_norm_eps),
        norm_first=True,
        attention_output_dropout=dropout,
        feed_forward_dropout=dropout,
    )


def _contact_head(config: Any) -> dict[str, tuple[int, int]]:
    """A logistic regression over all attention probabilities."""
    return {"contact_head.regression": (config.num_hidden_layers * config.num_attention_heads, 1)}


FAMILY = Family(
    model_type="esm",
    classes="Esm",
    prefix="esm",
    hf_class=HfClass(
        "esm",
        drops_embeddings=False,
        scaling=1.0,  # queries are scaled before
        embedding_arguments=("input_ids", "attention_mask", "position_ids", "inputs_embeds"),
        layer_arguments=("attention_mask", "encoder_hidden_states", "encoder_attention_mask", "position_embeddings"),
    ),
    masked_tokens_attend=False,  # their embeddings are zeros
    heads=heads(
        MaskedLM(
            "lm_head.dense",
            "lm_head.layer_norm",
            "lm_head.decoder",
            "lm_head.bias",
            activation="gelu",
            decoder_bias=False,
        ),
        sequence=ClassifierHead(
            "classifier.out_proj", "first", dense="classifier.dense", dropout=_DROPOUT, drops_first=True
        ),
        tokens=ClassifierHead(pooling="tokens", dropout=_DROPOUT),
        answers=None,
        choice=None,
    ),
    defaults={
        "vocab_size": 33,
        "max_position_embeddings": 1026,
        "type_vocab_size": 0,
        "pad_token_id": None,
        "eos_token_id": 2,
    },
    fields={
        "mask_token_id": Count(None, 0),
        "rope_theta": Number(10_000.0, 1.0),
        "position_embedding_type": Choice("absolute", ("absolute", "rotary")),
        "emb_layer_norm_before": Flag(None),
        "token_dropout": Flag(False),
    },
    fixed=("hidden_act", "type_vocab_size"),
    only_values={**ONLY_VALUES, "is_folding_model": (False, None)},
    embeddings=_embeddings,
    layer=_LAYER,
    spec=_spec,
    final_norm="encoder.emb_layer_norm_after",
    positions_from_ids=True,
    unused=_contact_head,
    files=(
        Rename("encoder.layer.0.attention.self.rotary_embeddings", "rotary_embeddings", is_written=False),
        Rename("encoder.layer.*.attention.self.rotary_embeddings", "rotary_embeddings", is_written=False),
    ),
    ignored_keys=(f".{_FREQUENCIES}", "embeddings.position_embeddings.weight"),
    vocabulary=NewVocabulary(gives_types=False),
)
