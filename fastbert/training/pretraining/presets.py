"""The shapes of new models, by name, and in which families they make sense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastbert.config import EncoderConfig
from fastbert.data.vocabulary import Vocabulary
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.families.schema import Head, MaskedLM, PreTraining, ReplacedTokens
from fastbert.training.options import PretrainOptions

# Objective -> (the name of the head that learns it, its form).
HEADS: Mapping[str, tuple[str, type[Head]]] = {
    "mlm": ("MaskedLM", MaskedLM),
    "mlm+nsp": ("PreTraining", PreTraining),
    "mlm+sop": ("PreTraining", PreTraining),
    "rtd": ("PreTraining", ReplacedTokens),
    "distil": ("MaskedLM", MaskedLM),
}


@dataclass(frozen=True)
class Preset:
    """vocab_size: of a new vocabulary; None: as the family has. fields: of the config, in the preset's own family."""

    family: str
    shape: Mapping[str, Any]
    vocab_size: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


def _shape(layers: int, width: int, heads: int, inner: int) -> dict[str, int]:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    return dict(zip(names, (layers, width, heads, inner), strict=True))


PRESETS: Mapping[str, Preset] = {
    # ModernBERT's layers: BERT's and Megatron's of this width learn little more than how frequent tokens are in the
    # minutes that a baby takes (docs/pretraining.md).
    "baby": Preset("modernbert", _shape(2, 64, 2, 256), 2000),
    "tiny": Preset("bert", _shape(2, 128, 2, 512), 8000),  # BERT-tiny (Turc et al. 2019)
    "base": Preset("bert", _shape(12, 768, 12, 3072)),
    "large": Preset("bert", _shape(24, 1024, 16, 4096)),
    "modern": Preset("modernbert", _shape(22, 768, 12, 1152)),  # ModernBERT-base
}


def preset_of(options: PretrainOptions) -> Preset:
    """Raises ConfigError: there is none of that name."""
    name = options.preset or "baby"
    if name not in PRESETS:
        raise ConfigError(f"preset is {name!r}; it must be one of {', '.join(PRESETS)}")
    return PRESETS[name]


def families_with(objective: str) -> list[str]:
    """The families whose models learn an objective."""
    name, head_class = HEADS[objective]
    return sorted(key for key, family in FAMILIES.items() if isinstance(family.heads.get(name), head_class))


def check_head(model_type: str, objective: str) -> str:
    """The name of the head that learns an objective. Raises ConfigError: the family has none."""
    if model_type not in FAMILIES:
        raise ConfigError(f"family is {model_type!r}; it must be one of {', '.join(sorted(FAMILIES))}")
    if model_type not in (able := families_with(objective)):
        raise ConfigError(f"{model_type} has no head for {objective}; these families have: {', '.join(able)}")
    return HEADS[objective][0]


def family_of(preset: Preset, family: str, objective: str) -> str:
    """What was asked for, else the preset's own, else the first that learns the objective."""
    able = families_with(objective)
    chosen = family or (preset.family if preset.family in able else able[0])
    check_head(chosen, objective)
    return chosen


def new_config(preset: Preset, model_type: str, vocabulary: Vocabulary, longest: int) -> EncoderConfig:
    """A preset's shape in a family, with the vocabulary's ids and at least `longest` positions."""
    family, fields = FAMILIES[model_type], dict[str, Any](preset.shape)
    if model_type == preset.family:
        fields |= preset.fields
    if family.vocabulary.separators > 1 and family.defaults.get("type_vocab_size", 2) > 0:
        fields["type_vocab_size"] = 1  # as RoBERTa's
    if "embedding_size" in family.defaults:  # ELECTRA-base has the width of its layers, ALBERT always 128
        narrow = family.defaults["embedding_size"]
        fields["embedding_size"] = narrow if "num_hidden_groups" in family.defaults else fields["hidden_size"]
    ids = {"pad": vocabulary.id_of("pad"), "bos": vocabulary.id_of("cls"), "eos": vocabulary.id_of("sep")}
    for role, i in ids.items():
        if role == "pad" or f"{role}_token_id" in family.defaults:
            fields[f"{role}_token_id"] = i
    known, first = EncoderConfig.of_family(model_type).max_position_embeddings, 0
    if family.positions_from_ids:  # they begin behind that of padding: RoBERTa's table has 514 rows
        known, first = 512, (ids["pad"] or 0) + 1
    fields["max_position_embeddings"] = max(known, longest) + first
    return EncoderConfig.of_family(model_type, vocab_size=vocabulary.size, **fields)
