"""EncoderConfig as transformers' users and tools take a config: entries by attribute, assignments, its JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.files import write_text

# What transformers' code reads of any config, as it stands there where config.json says nothing of it.
THEIR_DEFAULTS: dict[str, Any] = {
    "architectures": None,
    "dtype": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "prefix": None,
    "return_dict": True,
    "sub_configs": {},
    "task_specific_params": None,
    "tokenizer_class": None,
    "use_cache": False,
    "_attn_implementation": None,
    "_commit_hash": None,
}
# Fields that a model which is there does not compute by: they can be assigned whenever one likes.
_FREE = {"bos_token_id", "eos_token_id", "extra", "id2label", "num_labels", "pad_token_id", "problem_type"}
_IN_USE = "_in_use"


class ConfigAccess:
    """Reading and assigning by attribute. What is assigned is checked as what a config is made from."""

    extra: Mapping[str, Any]
    id2label: Mapping[int, str]
    own: Mapping[str, Any]
    __dataclass_fields__: ClassVar[dict[str, Any]]
    _name_or_path = ""  # no field: what it was loaded from, under the name that sentence-transformers reads

    model_type: str
    family: Any

    def __new__(cls, *args: Any, **fields: Any) -> Any:
        """Raises ConfigError: `fields` has a name that is no argument; it says where the field of a family belongs."""
        if unknown := [name for name in fields if name not in cls.__dataclass_fields__]:
            raise ConfigError(
                _where(unknown[0], fields.get("model_type", cls.__dataclass_fields__["model_type"].default))
            )
        return super().__new__(cls)

    def replace(self, **changes: Any) -> Any:
        raise NotImplementedError

    def our_name(self, name: str) -> str:
        """A field's name, if `name` is what the family's config.json calls it."""
        return next((ours for ours, theirs in self.family.hf_names.items() if theirs == name), name)

    def sorted_out(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """`changes` under our names of fields; entries that config.json may have besides are under `extra`.

        Raises ConfigError: neither this family's config nor any of transformers' has an entry of that name.
        """
        fields = {self.our_name(name): value for name, value in changes.items()}
        known = {*self.__dataclass_fields__, *self.own, "label2id"}
        others = {name: fields.pop(name) for name in list(fields) if name not in known}
        if unknown := [name for name in others if name not in self.extra and name not in THEIR_DEFAULTS]:
            raise ConfigError(f"{self.model_type} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}")
        return {**fields, "extra": {**self.extra, **others}} if others else fields

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError

    @classmethod
    def from_file(cls, path: str | Path) -> Any:
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        for entries in (state.get("own", {}), state.get("extra", {}), THEIR_DEFAULTS):
            if name in entries:
                return entries[name]
        if not name.startswith("_") and "model_type" in state and (ours := self.our_name(name)) != name:
            return getattr(self, ours)
        raise AttributeError(f"EncoderConfig has no field {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """As in transformers: a name that no field has becomes an entry of config.json; "_names" are not saved.

        Raises ConfigError: a value that is not allowed, or a field that a model which has this config computes by.
        """
        state = self.__dict__
        if "_derived" not in state or name.startswith("_"):  # it is being made
            state[name] = value
            return
        if name == "label2id":
            check_label2id(value, self.id2label)
            return
        if name == "name_or_path":
            state[f"_{name}"] = value
            return
        name = self.our_name(name)
        is_field = name in self.__dataclass_fields__ or name in self.own
        if is_field and _IN_USE in state and name not in _FREE and value != getattr(self, name):
            raise ConfigError(
                f"{name} cannot be assigned: a model of this config is there, and computes by it. Give it to"
                f" from_pretrained({name}=...), or make a model of config.replace({name}=...)"
            )
        if name == "pad_token_id" and _IN_USE in state and self.family.positions_from_ids and value != state[name]:
            raise ConfigError(
                f"pad_token_id cannot be assigned to a model of {self.model_type}, which counts positions by it"
            )
        self.set_checked(**({name: value} if is_field else {"extra": {**self.extra, name: value}}))

    def set_checked(self, **changes: Any) -> None:
        """Become what `replace` gives, for every holder of this config: its model has changed with it."""
        self.__dict__.update(self.replace(**changes).__dict__)

    def __delattr__(self, name: str) -> None:
        if name not in self.extra:
            raise AttributeError(f"{name} cannot be deleted from an EncoderConfig")
        self.extra = {key: value for key, value in self.extra.items() if key != name}

    def in_use(self) -> Any:
        """Itself if a model has it, else a copy for a model, which what the caller does to this one leaves alone."""
        if _IN_USE in self.__dict__:
            return self
        copy = self.replace()
        copy.__dict__.update({name: value for name, value in self.__dict__.items() if name not in copy.__dict__})
        copy.__dict__[_IN_USE] = True
        return copy

    def option(self, name: str, asked: Any) -> Any:
        """What a call gets of output_attentions and the like: what it asked for, or else what the config has."""
        return self.extra.get(name, THEIR_DEFAULTS[name]) if asked is None else asked

    @property
    def name_or_path(self) -> str:
        """What it was loaded from; not saved."""
        return self._name_or_path

    @name_or_path.setter
    def name_or_path(self, value: str) -> None:
        self._name_or_path = value

    @property
    def label2id(self) -> dict[str, int]:
        return {label: i for i, label in self.id2label.items()}

    @property
    def use_return_dict(self) -> bool:
        return self.option("return_dict", None)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **options: Any) -> Any:
        """The config of a folder or hub id; options of the hub (revision, token, ...), and entries to change."""
        from fastbert.hub import HubOptions, resolve

        hub_options = {name: options.pop(name) for name in HubOptions.__dataclass_fields__ if name in options}
        folder = resolve(pretrained_model_name_or_path, config_only=True, options=HubOptions(**hub_options))
        return cls.from_file(folder / "config.json").replace(**options)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """Itself: there is no other modality."""
        return self

    def update(self, entries: Mapping[str, Any]) -> None:
        for name, value in entries.items():
            setattr(self, name, value)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json alone; a model's save_pretrained writes it with the weights."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_text(Path(folder) / "config.json", self.to_json_string())


def _where(name: str, model_type: Any) -> str:
    """That a config has no field `name`, and how the families that have it take it."""
    types = [owner for owner, family in FAMILIES.items() if name in family.fields]
    if not types:
        return f"EncoderConfig has no field {name!r}"
    owner = model_type if model_type in types else types[0]
    also = "" if owner == model_type else f", and model_type is {model_type!r}"
    return (
        f"{name} is a field of {', '.join(types)} only{also}: give it to EncoderConfig.of_family({owner!r}, {name}=...)"
    )


def check_label2id(label2id: Any, id2label: Mapping[int, str]) -> None:
    """Raise ConfigError unless `label2id` says of each label what id2label says."""
    expected = {label: i for i, label in id2label.items()}
    if not isinstance(label2id, Mapping) or dict(label2id) != expected:
        raise ConfigError(f"label2id is {label2id!r}; id2label asks for {expected!r}: give id2label, which decides")
