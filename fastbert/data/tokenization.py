"""Loads a folder's tokenizer with Hugging Face's `tokenizers`, from tokenizer.json or from a WordPiece vocab.txt."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fastbert.checkpoint.pretrained import CheckpointError
from fastbert.files import read_json

SETTINGS = "tokenizer_config.json"
NO_LIMIT = 2**31 - 1  # tokens of a text

# BertNormalizer's options and BERT's own choice; None follows do_lower_case.
_FLAGS = {"tokenize_chinese_chars": True, "strip_accents": None, "do_lower_case": True}
_ATTRIBUTES = dict(zip(_FLAGS, ("handle_chinese_chars", "strip_accents", "lowercase"), strict=True))
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # of transformers: they take a tokenizer.json as it is

_SPECIAL_TOKENS = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "mask_token": "[MASK]",
}


def load_tokenizer(folder: Path, *, lowercase: bool = False) -> Tokenizer:
    """The tokenizer of a model's folder; `lowercase` makes one that keeps case lower it.

    Raises CheckpointError: no tokenizer that can be read, or a damaged one.
    """
    tokenizer = _read(folder, lowercase)
    tokenizer.no_truncation()
    return tokenizer


def load_cutting_tokenizer(folder: Path, *, lowercase: bool = False, side: str | None = None) -> Tokenizer:
    """As load_tokenizer; texts are to be cut at `side`, "left" or "right", or where the folder says, as transformers.

    No text is cut yet: the tokenizer's `truncation` has the side for who sets the length. Raises CheckpointError.
    """
    tokenizer = _read(folder, lowercase)
    side = side or tokenizer_settings(folder).get("truncation_side") or (tokenizer.truncation or {}).get("direction")
    if side not in (None, "left", "right"):
        raise CheckpointError(f"{folder / SETTINGS}: truncation_side is {reprlib.repr(side)}; it must be left or right")
    tokenizer.enable_truncation(NO_LIMIT, direction=side or "right")
    return tokenizer


def _read(folder: Path, lowercase: bool) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        tokenizer = _from_json(folder / "tokenizer.json", lowercase)
    elif (folder / "vocab.txt").is_file():
        tokenizer = _from_vocab(folder, lowercase)
    else:
        raise CheckpointError(
            f"{folder} has neither tokenizer.json nor vocab.txt; with transformers installed,"
            " AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes a tokenizer.json"
        )
    tokenizer.no_padding()
    return tokenizer


def _from_json(path: Path, lowercase: bool) -> Tokenizer:
    try:
        # from_file and from_str raise a bare Exception; from_buffer raises this.
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
    _follow(tokenizer, path.parent)
    if lowercase and not _lowers(json.loads(tokenizer.to_str())["normalizer"]):
        then = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *then])
    return tokenizer


def _follow(tokenizer: Tokenizer, folder: Path) -> None:
    """Where tokenizer_config.json contradicts a BERT normalizer of tokenizer.json, it holds, as in transformers."""
    normalizer, settings = tokenizer.normalizer, tokenizer_settings(folder)
    if not isinstance(normalizer, normalizers.BertNormalizer) or settings.get("tokenizer_class") in _GENERIC:
        return
    for name, attribute in _ATTRIBUTES.items():
        if name in settings and getattr(normalizer, attribute) != _flag(folder, settings, name):
            setattr(normalizer, attribute, settings[name])
            tokenizer.normalizer = normalizer


def _lowers(normalizer: dict[str, Any] | None) -> bool:
    """Whether a tokenizer.json's normalizer lowers case, itself or in one of its steps."""
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any(_lowers(step) for step in normalizer["normalizers"])
    return normalizer["type"] == "Lowercase" or bool(normalizer.get("lowercase"))


def _from_vocab(folder: Path, lowercase: bool) -> Tokenizer:
    """BERT's own: clean, split, WordPiece, [CLS] text [SEP] (Devlin et al. 2018, section 3)."""
    path, settings = folder / "vocab.txt", tokenizer_settings(folder)
    try:
        vocab = {token: i for i, token in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))}
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None
    names = {role: _token_text(folder, settings, role) or default for role, default in _SPECIAL_TOKENS.items()}
    flags: dict[str, Any] = {name: _flag(folder, settings, name) for name in _FLAGS}
    for role in ("unk_token", "cls_token", "sep_token"):
        if names[role] not in vocab:
            raise CheckpointError(f"{path} has no {names[role]}, the {role}")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=names["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=flags["tokenize_chinese_chars"],
        strip_accents=flags["strip_accents"],
        lowercase=lowercase or flags["do_lower_case"],
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([name for name in names.values() if name in vocab])
    ends = ((names[role], vocab[names[role]]) for role in ("sep_token", "cls_token"))
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer


def _flag(folder: Path, settings: dict[str, Any], name: str) -> bool | None:
    """An option of BERT's normalizer. Raises CheckpointError."""
    flag = settings.get(name, _FLAGS[name])
    if type(flag) is not bool and (flag is not None or _FLAGS[name] is not None):
        raise CheckpointError(f"{folder / SETTINGS}: {name} is {reprlib.repr(flag)}; it must be true or false")
    return flag


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty where there is none."""
    path = folder / SETTINGS
    return read_json(path, CheckpointError) if path.is_file() else {}


def mask_token(folder: Path, tokenizer: Tokenizer) -> str | None:
    """The text of the tokenizer's mask token; None if it has none. Raises CheckpointError."""
    for name in (_token_text(folder, tokenizer_settings(folder), "mask_token"), "[MASK]", "<mask>"):
        if name is not None and tokenizer.token_to_id(name) is not None:
            return name
    return None


def _token_text(folder: Path, settings: dict[str, Any], role: str) -> str | None:
    """A token of tokenizer_config.json is its text, or an object that holds it. Raises CheckpointError."""
    entry = settings.get(role)
    text = entry.get("content") if isinstance(entry, dict) else entry
    if not isinstance(text, str) and entry is not None:
        raise CheckpointError(f"{folder / SETTINGS}: {role} is {reprlib.repr(entry)}; it must be a text")
    return text
