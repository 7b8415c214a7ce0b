"""EncoderConfig: one dataclass with Hugging Face's field names. Reads and writes any family's config.json."""

from __future__ import annotations

import copy
import dataclasses
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastbert.config.hf_access import ConfigAccess, check_label2id
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.families.fields import ACTIVATIONS, MAX_FLOAT32, Count, Flag, is_number
from fastbert.families.schema import Embeddings, Family, Scopes
from fastbert.files import read_json
from fastbert.layer_spec import Distances, Invalid, LayerSpec, RotarySpec

MAX_SIZE = 2**31 - 1  # kernels count in 32 bits
MAX_ELEMENTS = 2**40  # of one table: 4 TB in float32
MAX_LAYERS = 10_000  # that one token passes; the deepest Transformers have 1,000 (Wang et al. 2022, "DeepNet")
MAX_LABELS = 2**24  # each gets a name in config.json

# Integers: the least and the largest value. embedding_size may be None, too.
_RANGES = {
    "vocab_size": (1, MAX_SIZE),
    "hidden_size": (1, MAX_SIZE),
    "num_hidden_layers": (0, MAX_LAYERS),
    "num_attention_heads": (1, MAX_SIZE),
    "intermediate_size": (1, MAX_SIZE),
    "max_position_embeddings": (1, MAX_SIZE),
    "type_vocab_size": (0, MAX_SIZE),
    "embedding_size": (1, MAX_SIZE),
    "num_hidden_groups": (0, MAX_LAYERS),
    "inner_group_num": (1, MAX_LAYERS),
    "num_labels": (0, MAX_LABELS),
}
_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "qa_dropout",
    "summary_last_dropout",
)

# What no tensor's shape need show, but what the numbers in it depend on, and what does show: see `shapes`.
_SHAPES = tuple(name for name in _RANGES if name not in ("embedding_size", "num_labels"))


@dataclass
class EncoderConfig(ConfigAccess):
    """The shape and the behaviour of an encoder and its heads. Defaults are BERT-base's.

    If `embedding_size` is None, it is hidden_size. If `classifier_dropout` is None, it is hidden_dropout_prob. If
    `type_vocab_size` is 0, the family has no token types. `own` holds the fields that only the model_type's family has
    (families/), with its defaults; they are read as attributes, too. `extra` keeps the entries of a config.json that
    fastbert does not read, so that saving loses nothing.
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
    summary_activation: str | None = None  # None, or transformers' "": no activation
    summary_last_dropout: float = 0.0
    num_labels: int = 2
    problem_type: str | None = None
    id2label: Mapping[int, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model_type, str) or self.model_type not in FAMILIES:
            raise ConfigError(f"unknown model_type {_shown(self.model_type)}; fastbert has: {_known_types()}")
        fields = self.family.fields
        if not isinstance(self.own, Mapping):
            raise ConfigError(f"own is {_shown(self.own)}; it must map the names of fields to values")
        if unknown := [name for name in self.own if name not in fields]:
            raise ConfigError(f"{self.model_type} has no field {_shown(unknown[0])}")
        own = {name: self.own.get(name, spec.default) for name, spec in fields.items()}
        self.own = own
        for name, spec in fields.items():
            if (allowed := spec.unsupported(own[name])) is not None:
                raise ConfigError(f"{self.family.hf_names.get(name, name)} is {_shown(own[name])}; {allowed}")
        for name in self.family.fixed:
            default = self.family.defaults.get(name, self.__dataclass_fields__[name].default)
            if self.__dict__[name] != default:
                raise ConfigError(f"{name} is {_shown(self.__dict__[name])}; {self.model_type} has only {default!r}")
        self._check_sizes()
        summary = self.summary_activation
        activations = {
            "hidden_act": self.hidden_act,
            "summary_activation": "gelu" if summary in (None, "") else summary,
        }
        for name, value in activations.items():
            if not isinstance(value, str) or value not in ACTIVATIONS:
                raise ConfigError(f"{name} {_shown(value)} is not one of: {', '.join(ACTIVATIONS)}")
        for name in _DROPOUTS:
            value = self.__dict__[name]
            if not (is_number(value) and 0.0 <= value < 1.0) and (value is not None or name != "classifier_dropout"):
                raise ConfigError(f"{name} is {_shown(value)}; it must be at least 0 and below 1")
        for name in ("layer_norm_eps", "initializer_range"):
            value = self.__dict__[name]
            if not is_number(value) or not 0 <= value <= MAX_FLOAT32:
                raise ConfigError(f"{name} is {_shown(value)}; it must be a number of at least 0 that float32 holds")
        self._check_tokens_and_labels()
        if type(self.tie_word_embeddings) is not bool:
            raise ConfigError(f"tie_word_embeddings is {_shown(self.tie_word_embeddings)}; it must be true or false")
        if self.problem_type is not None and not isinstance(self.problem_type, str):
            raise ConfigError(f"problem_type is {_shown(self.problem_type)}; it must be a text or null")
        names = self.extra.get("architectures")
        if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)):
            raise ConfigError(f"architectures is {_shown(names)}; it must be a list of class names")
        for name, values in self.family.only_values.items():
            chosen = self.extra.get(name, self.__dict__.get(name, values[0]))
            if chosen not in values:
                raise ConfigError(f"{name}={_shown(chosen)} is not supported; fastbert has {values[0]!r}")
        try:
            self._derived = self.family.derive(self)
        except Invalid as error:
            raise ConfigError(f"{error.name} is {_shown(error.value)}; it must be {error.allowed}") from None

    def _check_sizes(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = self.__dict__[name]
            if name == "embedding_size" and value is None:
                continue
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} is {_shown(value)}; it must be an integer from {low} to {high}")
        if self.own.get("head_dim") is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        width = ("hidden_size", self.hidden_size)
        narrow = width if self.embedding_size is None else ("embedding_size", self.embedding_size)
        rows = {
            "hidden_size": width,
            "intermediate_size": width,
            "num_labels": width,
            "vocab_size": narrow,
            "max_position_embeddings": narrow,
            "type_vocab_size": narrow,
        }
        for name, (other, columns) in rows.items():
            if self.__dict__[name] * columns > MAX_ELEMENTS:
                product = f"{name} {self.__dict__[name]} times {other} {columns}"
                raise ConfigError(f"{product} is a table of more than {MAX_ELEMENTS} values")
        for name in ("num_hidden_layers", "num_hidden_groups"):
            if self.__dict__[name] * self.inner_group_num > MAX_LAYERS:
                raise ConfigError(
                    f"{name} {self.__dict__[name]} times inner_group_num {self.inner_group_num} is more than"
                    f" {MAX_LAYERS} layers"
                )

    def _check_tokens_and_labels(self) -> None:
        pad = self.pad_token_id
        if pad is not None and type(pad) is not int:
            raise ConfigError(f"pad_token_id is {_shown(pad)}; it must be an integer or null")
        if pad is not None and not 0 <= pad < self.vocab_size:
            raise ConfigError(f"pad_token_id {_shown(pad)} is outside the vocabulary of {self.vocab_size}")
        for name in ("bos_token_id", "eos_token_id"):  # transformers has lists of them, and ids outside
            value = self.__dict__[name]
            if value is not None and any(type(i) is not int for i in (value if isinstance(value, list) else [value])):
                raise ConfigError(f"{name} is {_shown(value)}; it must be an integer, a list of integers or null")
        if not isinstance(self.id2label, Mapping):
            raise ConfigError(f"id2label is {_shown(self.id2label)}; it must map integers to texts")
        for i, label in self.id2label.items():
            if type(i) is not int or not isinstance(label, str):
                raise ConfigError(f"id2label maps {_shown(i)} to {_shown(label)}; it must map integers to texts")
        if self.id2label and len(self.id2label) != self.num_labels:
            raise ConfigError(f"id2label names {len(self.id2label)} labels, and num_labels is {self.num_labels}")
        if not self.id2label:
            self.id2label = {i: f"LABEL_{i}" for i in range(self.num_labels)}

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """What the layer at each depth computes."""
        return self.__dict__["_derived"].layer_specs

    @property
    def layer_paths(self) -> tuple[str, ...]:
        """Where the layer that runs at each depth is, below the base model; shared layers come again."""
        return self.__dict__["_derived"].layer_paths

    @property
    def distances(self) -> Distances | None:
        """What in the layers goes by the distance of two tokens; None: nothing does."""
        return self.__dict__["_derived"].distances

    @property
    def rotaries(self) -> tuple[RotarySpec, ...]:
        """The kinds of rotary embedding that the layers have."""
        return () if self.distances is None else self.distances.rotaries

    @property
    def padding_idx(self) -> int | None:
        """The id that is padding to the word table and where positions are counted from the ids."""
        return self.pad_token_id if self.family.padding_idx is None else self.family.padding_idx

    @property
    def scopes(self) -> Scopes:
        return self.__dict__["_derived"].scopes

    @property
    def embeddings(self) -> Embeddings:
        """The embedding leaves."""
        return self.__dict__["_derived"].embeddings

    @property
    def head_dim(self) -> int:
        return self.own.get("head_dim") or self.hidden_size // self.num_attention_heads

    @property
    def activation(self) -> str:
        """The name that ops use for hidden_act. The exact GELU (erf) and its tanh form are never exchanged."""
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

    def shapes(self) -> dict[str, Any]:
        """The fields that decide the shapes of tensors, as JSON has them. Configs that differ here need other weights.

        The number of labels is not among them: a base model has no such tensor, and a head's own shape tells it.
        """
        shapes = {name: self.__dict__[name] for name in ("model_type", *_SHAPES, "tie_word_embeddings")}
        own = {name: self.own[name] for name, spec in self.family.fields.items() if isinstance(spec, (Count, Flag))}
        quantization = self.extra.get("quantization_config")
        return {**shapes, **own, "embedding_size": self.embedding_width, "quantization_config": quantization}

    def replace(self, **changes: Any) -> EncoderConfig:
        """A copy with other fields.

        If the number of labels changes, the names of the old labels are dropped; names say how many there are.
        """
        changes = self.sorted_out(changes)
        label2id = changes.pop("label2id", None)
        if changes.get("id2label"):
            changes["id2label"] = _read_labels(changes["id2label"])
            changes.setdefault("num_labels", len(changes["id2label"]))
        elif changes.get("num_labels", self.num_labels) != self.num_labels:
            changes.setdefault("id2label", {})
        if own := {name: changes.pop(name) for name in self.own if name in changes}:
            changes["own"] = {**self.own, **own}
        changed = dataclasses.replace(self, **changes)
        if label2id is not None:
            check_label2id(label2id, changed.id2label)
        return changed

    def with_dropouts(self, dropouts: Mapping[tuple[str, str], float]) -> EncoderConfig:
        """The same, but for dropouts of a live tree that are not the fields': by (path of a layer, role), as in
        LayerSpec.dropouts; ("", "embeddings") is that of the embeddings.
        """
        changed = copy.copy(self)
        object.__setattr__(changed, "_derived", self.__dict__["_derived"].with_dropouts(self, dropouts))
        return changed

    @classmethod
    def of_family(cls, model_type: str, **fields: Any) -> EncoderConfig:
        """A configuration of `model_type`. Fields that are not given have that family's defaults."""
        family = FAMILIES.get(model_type)
        if family is None:
            return cls(model_type=model_type, **fields)
        own = {name: fields.pop(name) for name in family.fields if name in fields}
        return cls(**{"model_type": model_type, **family.defaults, "own": own, **fields})

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> EncoderConfig:
        """A configuration from the entries of a config.json. Raises ConfigError, naming the field, if it cannot run."""
        entries = dict(entries)
        model_type = entries.pop("model_type", None)
        if not isinstance(model_type, str):
            raise ConfigError(f"config.json has no model_type; fastbert has: {_known_types()}")
        family = FAMILIES.get(model_type)
        names = {} if family is None else family.hf_names
        if family is not None and family.upgrade_config is not None:
            entries = family.upgrade_config(entries)
        known = {f.name for f in dataclasses.fields(cls)} - {"model_type", "own", "extra", "id2label", "num_labels"}
        known -= set() if family is None else {*family.fixed}  # an entry of that name is none that transformers reads
        fields: dict[str, Any] = {}
        for name in (*known, *(() if family is None else family.fields)):
            aliases = (name,) if family is not None and name in family.aliases else ()
            for theirs in (names.get(name, name), *aliases):  # as in transformers, the last one counts
                if theirs in entries:
                    fields[name] = entries.pop(theirs)
        id2label = _read_labels(entries.pop("id2label", None))
        entries.pop("label2id", None)  # which follows from it
        num_labels = entries.pop("num_labels", None)
        fields["num_labels"] = len(id2label) or (2 if num_labels is None else num_labels)
        return cls.of_family(model_type, id2label=id2label, extra=entries, **fields)

    @classmethod
    def from_file(cls, path: str | Path) -> EncoderConfig:
        return cls.from_dict(read_json(Path(path), ConfigError))

    def to_dict(self) -> dict[str, Any]:
        """The entries of the family's config.json, under Hugging Face's names. `from_dict` reads them."""
        family = self.family
        names, defaults = family.hf_names, EncoderConfig.of_family(self.model_type)
        entries: dict[str, Any] = {"model_type": self.model_type}
        for f in dataclasses.fields(self):
            value = self.__dict__[f.name]
            if f.name in ("model_type", "own", "extra", "id2label", "num_labels", *family.fixed):
                continue
            # A field that only other families have stands at its neutral default, and is not theirs to write.
            if f.name in _OWN_FIELDS and value == defaults.__dict__[f.name] and f.name not in family.defaults:
                continue
            entries[names.get(f.name, f.name)] = value
        entries |= {names.get(name, name): value for name, value in self.own.items()}
        entries["id2label"] = {str(i): label for i, label in self.id2label.items()}
        entries["label2id"] = self.label2id
        entries = {**self.extra, **entries}
        return entries if family.written_config is None else family.written_config(entries)


def _known_types() -> str:
    return ", ".join(sorted(FAMILIES))


def _read_labels(entry: Any) -> dict[int, str]:
    """config.json's id2label, whose keys are texts there, and whose labels may be numbers. Raises ConfigError."""
    labels: dict[int, str] = {}
    if entry is None:
        return labels
    if not isinstance(entry, Mapping):
        raise ConfigError(f"id2label is {_shown(entry)}; it must map integers to texts")
    for key, label in entry.items():
        try:
            i = int(key)
        except (ValueError, TypeError):
            raise ConfigError(f"id2label has the key {_shown(key)}, which is no integer") from None
        if i in labels:
            raise ConfigError(f"id2label names label {i} twice")
        labels[i] = str(label) if is_number(label) else label
    return labels


def _shown(value: Any) -> str:
    """A value in a message, however long it is or deeply nested."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print some
        return f"an integer of {value.bit_length()} bits"
    return reprlib.repr(value)


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
