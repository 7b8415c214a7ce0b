"""EncoderConfig: one frozen dataclass with Hugging Face's field names, from and to a config.json of any family."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field, its value and what is allowed."""


def read_json(path: Path, error: type[ValueError], expected: type = dict) -> Any:
    """A JSON object, or list. Raises `error`, naming the file, where it is absent, damaged or not that."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as reason:
        raise error(f"{path} is not valid JSON: {reason}") from None
    if not isinstance(entries, expected):
        raise error(f"{path} holds a {type(entries).__name__}, not a {expected.__name__}")
    return entries


# transformers' names of activations, and ours.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}

# Fields that a family's config.json calls otherwise: ours -> theirs.
_THEIR_NAMES = {
    "distilbert": {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "classifier_dropout": "seq_classif_dropout",
    },
    "albert": {"classifier_dropout": "classifier_dropout_prob"},
}

# What a config.json that leaves a field out means by it, where a family differs from BERT.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "xlm-roberta": {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "distilbert": {"num_hidden_layers": 6, "type_vocab_size": 0, "classifier_dropout": 0.2, "qa_dropout": 0.1},
    "albert": {
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
    "electra": {
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "summary_activation": "gelu",
        "summary_last_dropout": 0.1,
    },
    "megatron-bert": {
        "vocab_size": 29056,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}

# A config.json may ask for these; nothing but the value given here is implemented.
_ONLY_VALUES = {
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "position_embedding_type": ("absolute",),
    "embedding_size_per_layer": (None,),
    "summary_type": ("first",),
    "summary_use_proj": (True,),
}


@dataclass(frozen=True)
class EncoderConfig:
    """The shape and the behaviour of an encoder and its heads. Defaults are BERT-base's.

    `embedding_size` None means hidden_size; `classifier_dropout` None means hidden_dropout_prob; `type_vocab_size` 0
    means that the family has no token types. `extra` keeps the entries of a config.json that fastbert does not read, so
    that saving loses nothing.
    """

    model_type: str = "bert"
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    tie_word_embeddings: bool = True
    embedding_size: int | None = None
    classifier_dropout: float | None = None
    qa_dropout: float = 0.0
    num_hidden_groups: int = 0  # ALBERT: groups of layers that share their weights; 0: every layer has its own
    inner_group_num: int = 1
    summary_activation: str | None = None
    summary_last_dropout: float = 0.0
    num_labels: int = 2
    problem_type: str | None = None
    id2label: Mapping[int, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.model_type not in _FAMILY_DEFAULTS:
            known = ", ".join(sorted(_FAMILY_DEFAULTS))
            raise ConfigError(f"unknown model_type {self.model_type!r}; fastbert has: {known}")
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "max_position_embeddings",
        ):
            value = self.__dict__[name]
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} is {value!r}; it must be a positive integer")
        for name in ("num_hidden_layers", "type_vocab_size", "num_labels"):
            value = self.__dict__[name]
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} is {value!r}; it must be an integer of at least 0")
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        for name, value in (("hidden_act", self.hidden_act), ("summary_activation", self.summary_activation or "gelu")):
            if not isinstance(value, str) or value not in ACTIVATIONS:
                raise ConfigError(f"{name} {value!r} is not one of: {', '.join(ACTIVATIONS)}")
        for name in (
            "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "qa_dropout",
            "summary_last_dropout",
        ):  # fmt: skip
            value = self.__dict__[name]
            if value is not None and not (isinstance(value, (int, float)) and 0.0 <= value < 1.0):
                raise ConfigError(f"{name} is {value!r}; it must be at least 0 and below 1")
        for name in ("layer_norm_eps", "initializer_range"):
            value = self.__dict__[name]
            if not isinstance(value, (int, float)) or value < 0:
                raise ConfigError(f"{name} is {value!r}; it must be a number of at least 0")
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ConfigError(f"pad_token_id {self.pad_token_id} is outside the vocabulary of {self.vocab_size}")
        for name, allowed in _ONLY_VALUES.items():
            if name in self.extra and self.extra[name] not in allowed:
                raise ConfigError(f"{name}={self.extra[name]!r} is not supported; fastbert has {allowed[0]!r}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def activation(self) -> str:
        """The op-level name of hidden_act: erf and tanh GELU are never swapped."""
        return ACTIVATIONS[self.hidden_act]

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def head_dropout(self) -> float:
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout

    @property
    def num_unique_layers(self) -> int:
        return self.num_hidden_groups * self.inner_group_num if self.num_hidden_groups else self.num_hidden_layers

    def replace(self, **changes: Any) -> EncoderConfig:
        return dataclasses.replace(self, **changes)

    @classmethod
    def of_family(cls, model_type: str, **fields: Any) -> EncoderConfig:
        """A configuration of `model_type` with that family's defaults where `fields` says nothing."""
        return cls(**{"model_type": model_type, **_FAMILY_DEFAULTS.get(model_type, {}), **fields})

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> EncoderConfig:
        """From the entries of a config.json. Raises ConfigError, naming the field, for what cannot be run."""
        entries = dict(entries)
        model_type = entries.pop("model_type", None)
        if not isinstance(model_type, str):
            raise ConfigError("config.json has no model_type; fastbert has: " + ", ".join(sorted(_FAMILY_DEFAULTS)))
        names = _THEIR_NAMES.get(model_type, {})
        known = {f.name for f in dataclasses.fields(cls)} - {"model_type", "extra", "id2label", "num_labels"}
        fields: dict[str, Any] = {}
        for name in known:
            for theirs in (names.get(name, name), name):
                if theirs in entries:
                    fields[name] = entries.pop(theirs)
                    break
        id2label = {int(i): str(label) for i, label in (entries.pop("id2label", None) or {}).items()}
        num_labels = entries.pop("num_labels", None)
        fields["num_labels"] = len(id2label) or (2 if num_labels is None else num_labels)
        return cls.of_family(model_type, id2label=id2label, extra=entries, **fields)

    @classmethod
    def from_file(cls, path: str | Path) -> EncoderConfig:
        return cls.from_dict(read_json(Path(path), ConfigError))

    def to_dict(self) -> dict[str, Any]:
        """The entries of the family's config.json: what from_dict reads, under Hugging Face's names."""
        names = _THEIR_NAMES.get(self.model_type, {})
        defaults = EncoderConfig.of_family(self.model_type)
        entries: dict[str, Any] = {"model_type": self.model_type}
        for f in dataclasses.fields(self):
            value = self.__dict__[f.name]
            if f.name in ("model_type", "extra", "id2label", "num_labels"):
                continue
            # A field that only other families have stands at its neutral default, and is not theirs to write.
            if (
                f.name in _OWN_FIELDS
                and value == defaults.__dict__[f.name]
                and f.name not in _FAMILY_DEFAULTS[self.model_type]
            ):
                continue
            entries[names.get(f.name, f.name)] = value
        if self.model_type == "distilbert":
            del entries["type_vocab_size"], entries["layer_norm_eps"]  # fixed in that family: not in its config.json
        id2label = self.id2label or {i: f"LABEL_{i}" for i in range(self.num_labels)}
        entries["id2label"] = {str(i): label for i, label in id2label.items()}
        entries["label2id"] = {label: i for i, label in id2label.items()}
        return {**self.extra, **entries}


_OWN_FIELDS = (
    "embedding_size",
    "num_hidden_groups",
    "inner_group_num",
    "summary_activation",
    "summary_last_dropout",
    "qa_dropout",
    "classifier_dropout",
    "problem_type",
)
