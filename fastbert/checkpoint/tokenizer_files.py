"""The files of a tokenizer: which there are, what their settings say, and how they come into another folder."""

from __future__ import annotations

import reprlib
import shutil
from pathlib import Path
from typing import Any

from fastbert.errors import CheckpointError
from fastbert.families import FAMILIES
from fastbert.families.schema import NewVocabulary
from fastbert.files import read_json, writing

SETTINGS = "tokenizer_config.json"
# By the names that transformers' tokenizers write.
NAMES = (
    "tokenizer.json",
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "spm.model",
    "tokenizer.model",
)
# The classes of transformers 5 that tell a model which token is of which text. Some are aliases of BertTokenizer.
# A family's name is no key: transformers has no ErnieTokenizer, and takes its generic class, which gives no types.
GIVE_TYPES = frozenset(
    (
        "BertTokenizer",
        "CanineTokenizer",
        "ConvBertTokenizer",
        "DPRContextEncoderTokenizer",
        "DPRQuestionEncoderTokenizer",
        "DebertaTokenizer",
        "DebertaV2Tokenizer",
        "ElectraTokenizer",
        "FNetTokenizer",
        "LayoutLMTokenizer",
        "LayoutLMv2Tokenizer",
        "LxmertTokenizer",
        "MarkupLMTokenizer",
        "MobileBertTokenizer",
        "SqueezeBertTokenizer",
        "TapasTokenizer",
    )
)
# BertNormalizer's options and BERT's own choice; None follows do_lower_case.
BERT_FLAGS = {"tokenize_chinese_chars": True, "strip_accents": None, "do_lower_case": True}


def files_of(folder: Path) -> list[Path]:
    return [folder / name for name in NAMES if (folder / name).is_file()]


def copy_tokenizer(source: Path | None, target: Path) -> None:
    """Copy a tokenizer's files, unless the target has a tokenizer: a user's, perhaps with new words. Raises OSError."""
    if source is None or files_of(target):
        return
    for path in files_of(source):
        with writing(target / path.name) as new:
            shutil.copyfile(path, new)  # follows the links of the hub's cache


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty where there is none. Raises CheckpointError."""
    return optional_json(folder / SETTINGS)


def optional_json(path: Path) -> dict[str, Any]:
    """Empty where there is no such file. Raises CheckpointError."""
    return read_json(path, CheckpointError) if path.is_file() else {}


def vocab_spec_of(folder: Path, default: NewVocabulary | None = None) -> NewVocabulary:
    """What the tokens of a folder's family are; `default`, or BERT's, where its files name no family of ours.

    The class of the tokenizer counts before that of the model, as in transformers: there are models of DeBERTa's
    architecture with a BertTokenizer. Raises CheckpointError.
    """
    config = optional_json(folder / "config.json")
    named = _class_of(folder, config)
    of_class = (family.vocabulary for family in FAMILIES.values() if f"{family.classes}Tokenizer" == named)
    return next(of_class, None) or _vocab_spec_of_model(config, default) or default or NewVocabulary()


def _class_of(folder: Path, config: dict[str, Any]) -> str | None:
    """The class of the tokenizer that a folder's files name, without the "Fast" of older releases."""
    named = tokenizer_settings(folder).get("tokenizer_class") or config.get("tokenizer_class")
    return named.removesuffix("Fast") if isinstance(named, str) else None


def _vocab_spec_of_model(config: dict[str, Any], default: NewVocabulary | None) -> NewVocabulary | None:
    """By the model_type; None for one that is not ours, `default` where there is none."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return default
    return FAMILIES[model_type].vocabulary if model_type in FAMILIES else None


def gives_types(folder: Path, default: NewVocabulary | None = None) -> bool:
    """Whether transformers' tokenizer of a folder tells a model which token is of which text.

    Its settings say so (model_input_names), or else its class does, or the model_type's. Where its files name neither,
    `default` does, of the model that they are to go with. Raises CheckpointError.
    """
    names = tokenizer_settings(folder).get("model_input_names")
    if names is None:
        config = optional_json(folder / "config.json")
        named, vocab_spec = _class_of(folder, config), _vocab_spec_of_model(config, default)
        if named is not None and not (vocab_spec is not None and vocab_spec.ignores_class):
            return named in GIVE_TYPES
        return vocab_spec is not None and vocab_spec.gives_types
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{folder / SETTINGS}: model_input_names is {reprlib.repr(names)}; it must be a list of texts"
        )
    return "token_type_ids" in names


def flag(where: Path, settings: dict[str, Any], name: str, default: bool | None) -> Any:
    """An entry of settings in the file `where` that is true or false, or null where that is the default, too.

    Raises CheckpointError.
    """
    value = settings.get(name, default)
    if type(value) is not bool and (value is not None or default is not None):
        raise CheckpointError(f"{where}: {name} is {reprlib.repr(value)}; it must be true or false")
    return value


def token_text(where: Path, settings: dict[str, Any], role: str) -> str | None:
    """A token of settings in the file `where` is its text, or an object that holds it. Raises CheckpointError."""
    entry = settings.get(role)
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str) and entry is not None:
        raise CheckpointError(f"{where}: {role} is {reprlib.repr(entry)}; it must be a text")
    return text
