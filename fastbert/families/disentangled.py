"""What DeBERTa's versions have in common: the fields of their configs, and their heads (He et al. 2021, "DeBERTa")."""

from typing import Any

from fastbert.families.fields import Field
from fastbert.families.schema import (
    ActivationName,
    ClassifierHead,
    Count,
    Embeddings,
    Flag,
    FromConfig,
    MaskedLM,
    Share,
    Structure,
)
from fastbert.layer_spec import Invalid


def terms(config: Any) -> list[str]:
    """The terms of the scores that depend on a distance, as the config names them: c2p, p2c. Without relative attention
    there are none, whatever the names are; of DeBERTa's first version their number still scales the scores.
    """
    value = config.pos_att_type
    names = [name.strip() for name in value.lower().split("|")] if isinstance(value, str) else value or []
    known = ("c2p", "p2c") if config.relative_attention else names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name in known for name in names):
        raise Invalid("pos_att_type", value, "a list of c2p and p2c, or null")
    return list(names)


def checked_widths(config: Any) -> None:
    """Raise Invalid for widths that transformers reads and no tensor here could have."""
    widths = {
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "pooler_hidden_size": config.hidden_size,
    }
    for name, width in widths.items():
        if config.extra.get(name, width) != width:
            raise Invalid(name, config.extra[name], f"{width}, by hidden_size and num_attention_heads")
    if not config.legacy and config.embedding_width != config.hidden_size:
        raise Invalid("embedding_size", config.embedding_width, f"hidden_size, {config.hidden_size}, without legacy")


def span_of(config: Any) -> int:
    """How far a distance is counted: transformers takes max_position_embeddings where the config has none."""
    span = config.max_relative_positions
    return config.max_position_embeddings if span < 1 else span


def embeddings_of(config: Any) -> Embeddings:
    return Embeddings(
        position="embeddings.position_embeddings" if config.position_biased_input else None,
        token_type="embeddings.token_type_embeddings" if config.type_vocab_size else None,
        project="embeddings.embed_proj",
        projects_first=True,
        order=("word", "position", "token_type", "task_type", "project", "norm"),
    )


def masked_lm() -> MaskedLM:
    """BERT's head where the config says `legacy`; else that of the paper, which reads the word table itself."""
    own = MaskedLM(
        "lm_predictions.lm_head.dense",
        "lm_predictions.lm_head.LayerNorm",
        None,
        "lm_predictions.lm_head.bias",
        width=FromConfig("hidden_size"),
        decoder_bias=False,
    )
    return MaskedLM(instead=("legacy", own))


POOLED = ClassifierHead(
    pooling="first",
    dense="pooler.dense",
    activation=FromConfig("pooler_hidden_act"),
    drops_first=True,
    first_dropout=FromConfig("pooler_dropout"),
    soft_labels=True,
)
SPECIAL: dict[str, str] = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
TOKENS = ClassifierHead(pooling="tokens", dropout=FromConfig("hidden_dropout_prob"))
DROPOUTS = {
    "attention.self.dropout": "attention",
    "attention.self.pos_dropout": "relative",
    "attention.output.dropout": "attention_output",
    "output.dropout": "feed_forward",
}
CALLS: dict[str, Any] = {
    "embedding_arguments": ("input_ids", "token_type_ids", "position_ids", "mask", "inputs_embeds"),
    "layer_arguments": ("attention_mask", "query_states", "relative_pos", "rel_embeddings", "output_attentions"),
    "layer_returns": "pair",
    "encoder_defaults": {"output_hidden_states": True},
}
FIELDS: dict[str, Field] = {
    "relative_attention": Flag(False),
    "max_relative_positions": Count(-1, -1),
    "pos_att_type": Structure(),
    "position_biased_input": Flag(True),
    "pooler_dropout": Share(0.0),
    "pooler_hidden_act": ActivationName("gelu"),
    "legacy": Flag(True),
}
