"""Loads a folder's tokenizer with Hugging Face's `tokenizers`, from tokenizer.json or from a family's bare files."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer, normalizers

from fastbert.checkpoint.tokenizer_files import (
    BERT_FLAGS,
    SETTINGS,
    files_of,
    flag,
    token_text,
    tokenizer_settings,
    vocab_spec_of,
)
from fastbert.errors import CheckpointError
from fastbert.families.schema import NewVocabulary
from fastbert.files import write_text

NO_LIMIT = 2**31 - 1  # tokens of a text

_ATTRIBUTES = dict(zip(BERT_FLAGS, ("handle_chinese_chars", "strip_accents", "lowercase"), strict=True))
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # of transformers: they take a tokenizer.json as it is
_BERT = NewVocabulary(bare=("vocab.txt",))  # as which a vocab.txt is read whose family says nothing of bare files


def load_tokenizer(folder: Path, *, lowercase: bool = False, vocab_spec: NewVocabulary | None = None) -> Tokenizer:
    """The tokenizer of a model's folder; `lowercase` makes one that keeps case lower it.

    vocab_spec: of the model's family, where the folder does not say what that is. Raises CheckpointError:
    no tokenizer that can be read, or a damaged one.
    """
    tokenizer = _read(folder, lowercase, vocab_spec)
    tokenizer.no_truncation()
    return tokenizer


def load_cutting_tokenizer(
    folder: Path, *, lowercase: bool = False, overrides: Mapping[str, Any] | None = None
) -> Tokenizer:
    """As load_tokenizer; texts are to be cut at the side that the folder says, as in transformers.

    overrides: entries of tokenizer_config.json, `truncation_side` or `do_lower_case`, that hold instead of the file's.

    No text is cut yet: the tokenizer's `truncation` has the side for a caller with a length. Raises CheckpointError.
    """
    overrides = overrides or {}
    tokenizer = _read(folder, lowercase, overrides=overrides)
    side = {**tokenizer_settings(folder), **overrides}.get("truncation_side")
    side = side or (tokenizer.truncation or {}).get("direction")
    if side not in (None, "left", "right"):
        raise CheckpointError(f"{folder / SETTINGS}: truncation_side is {reprlib.repr(side)}; it must be left or right")
    tokenizer.enable_truncation(NO_LIMIT, direction=side or "right")
    return tokenizer


def _read(
    folder: Path,
    lowercase: bool,
    vocab_spec: NewVocabulary | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        tokenizer = _from_json(folder / "tokenizer.json", lowercase, overrides)
    else:
        from fastbert.data.bare_tokenizer import read_bare  # here: few folders need it, and to import it takes time

        vocab_spec = vocab_spec_of(folder, vocab_spec)
        vocab_spec = vocab_spec if vocab_spec.bare else _BERT
        if not all((folder / name).is_file() for name in vocab_spec.bare):
            raise CheckpointError(_nothing_to_read(folder, vocab_spec))
        tokenizer = read_bare(folder, vocab_spec, lowercase, overrides)
    tokenizer.no_padding()
    _check_unknown(tokenizer, folder)
    return tokenizer


def _check_unknown(tokenizer: Tokenizer, folder: Path) -> None:
    """Whether it takes a text of which it knows nothing: otherwise the first such text would be the one that fails."""
    try:
        tokenizer.encode("\U0001fae8")  # a face of 2022, which normalizers keep
    except Exception as error:  # tokenizers raises Exception itself
        raise CheckpointError(f"{folder}: its tokenizer fails at what it does not know: {error}") from None


def _nothing_to_read(folder: Path, vocab_spec: NewVocabulary) -> str:
    if (folder / "bpe_encoder.bin").is_file():
        reason = f": bpe_encoder.bin is a pickle, which is never loaded; {' and '.join(vocab_spec.bare)} hold the same"
    else:
        others = ", ".join(path.name for path in files_of(folder))
        reason = "; with transformers installed, AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes a"
        reason = f"{f' (but {others})' if others else ''}{reason} tokenizer.json"
    return f"{folder} has neither tokenizer.json nor {' and '.join(vocab_spec.bare)}{reason}"


def _from_json(path: Path, lowercase: bool, overrides: Mapping[str, Any]) -> Tokenizer:
    try:
        # from_file and from_str raise a bare Exception; from_buffer raises this.
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
    _follow(tokenizer, path.parent, overrides)
    if lowercase and not _lowers(json.loads(tokenizer.to_str())["normalizer"]):
        own = tokenizer.normalizer
        if isinstance(own, normalizers.BertNormalizer):  # by its own switch, which transformers reads, too
            own.strip_accents, own.lowercase = bool(own.strip_accents), True  # None would strip them now
            tokenizer.normalizer = own
        else:
            then = [] if own is None else [own]
            tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *then])
    return tokenizer


def _follow(tokenizer: Tokenizer, folder: Path, overrides: Mapping[str, Any]) -> None:
    """Where tokenizer_config.json contradicts a BERT normalizer of tokenizer.json, it holds, as in transformers.

    `overrides` hold instead of its entries.
    """
    normalizer, settings = tokenizer.normalizer, {**tokenizer_settings(folder), **overrides}
    if not isinstance(normalizer, normalizers.BertNormalizer) or settings.get("tokenizer_class") in _GENERIC:
        return
    for name, attribute in _ATTRIBUTES.items():
        if name in settings and getattr(normalizer, attribute) != flag(
            folder / SETTINGS, settings, name, BERT_FLAGS[name]
        ):
            setattr(normalizer, attribute, settings[name])
            tokenizer.normalizer = normalizer


def save_lowering(tokenizer: Tokenizer, folder: Path) -> None:
    """Let the folder of a model lower case as this tokenizer does: one of `load_tokenizer(lowercase=True)`, whose own
    files keep case, and stand in the folder. transformers reads no sentence_bert_config.json, and of classes that are
    not BERT's no normalizer: these keep case there. Raises OSError.
    """
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.no_truncation()
    write_text(folder / "tokenizer.json", copy.to_str(pretty=True))
    if isinstance(
        copy.normalizer, normalizers.BertNormalizer
    ):  # of which the settings may say something else: they hold
        accents = copy.normalizer.strip_accents
        settings = {**tokenizer_settings(folder), "do_lower_case": True}
        settings |= {} if accents is None else {"strip_accents": accents}
        write_text(folder / SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _lowers(normalizer: dict[str, Any] | None) -> bool:
    """Whether a tokenizer.json's normalizer lowers case, itself or in one of its steps."""
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any(_lowers(step) for step in normalizer["normalizers"])
    return normalizer["type"] == "Lowercase" or bool(normalizer.get("lowercase"))


def mask_token(folder: Path, tokenizer: Tokenizer) -> str | None:
    """The text of the tokenizer's mask token; None if it has none. Raises CheckpointError."""
    named = token_text(folder / SETTINGS, tokenizer_settings(folder), "mask_token")
    for name in (named, vocab_spec_of(folder).special.get("mask"), "[MASK]", "<mask>"):
        if name is not None and tokenizer.token_to_id(name) is not None:
            return name
    return None
