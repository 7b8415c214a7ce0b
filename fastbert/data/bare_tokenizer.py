"""Tokenizers of folders without tokenizer.json, from the bare files of a vocabulary, as transformers 5 makes them.

A family's data say which files these are, what its special tokens are called and how they stand around a text
(families/vocabulary.py).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from fastbert.checkpoint.spm_file import read_spm
from fastbert.checkpoint.tokenizer_files import (
    BERT_FLAGS,
    SETTINGS,
    flag,
    optional_json,
    token_text,
    tokenizer_settings,
)
from fastbert.errors import CheckpointError
from fastbert.families.schema import NewVocabulary
from fastbert.files import read_json

# In the order in which transformers gives ids to those that the files lack.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")  # today's name, and the old one
_MAP = "special_tokens_map.json"
_LISTED = "added_tokens_decoder"  # by id
_MAX_ID = 2**32 - 1  # of the tokenizers library
_Loaded = tuple[Tokenizer, list[AddedToken]]  # and what the files of its kind say of added tokens


class _Bare(NamedTuple):
    """A folder, the form of its family's tokens, and its settings: those of special_tokens_map.json are `mapped`."""

    folder: Path
    vocab_spec: NewVocabulary
    settings: dict[str, Any]
    mapped: dict[str, Any]

    @property
    def defaults(self) -> dict[str, str]:
        """The texts of the family's special tokens, by what tokenizer_config.json calls their roles."""
        special = {f"{role}_token": text for role, text in self.vocab_spec.special.items()}
        return {"bos_token": special["cls_token"], "eos_token": special["sep_token"], **special}

    def where(self, name: str) -> Path:
        """The file that an entry of the settings is from."""
        return self.folder / (_MAP if name in self.mapped else SETTINGS)

    def text(self, role: str) -> str:
        return token_text(self.where(role), self.settings, role) or self.defaults[role]

    def flags(self, defaults: Mapping[str, bool | None]) -> dict[str, Any]:
        return {name: flag(self.where(name), self.settings, name, default) for name, default in defaults.items()}


def read_bare(
    folder: Path,
    vocab_spec: NewVocabulary,
    lowercase: bool = False,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Tokenizer:
    """From the files that `vocab_spec` names, all of which are there. Raises CheckpointError: they are damaged.

    overrides: entries of tokenizer_config.json that hold instead of the file's.
    """
    settings = {**tokenizer_settings(folder), **overrides}
    mapped = {} if _LISTED in settings else optional_json(folder / _MAP)  # as transformers: it is older than such lists
    bare = _Bare(folder, vocab_spec, {**settings, **mapped}, mapped)
    if settings.get("split_special_tokens"):
        raise CheckpointError(f"{folder / SETTINGS}: split_special_tokens is not supported; take it out")
    tokenizer, own = {"wordpiece": _wordpiece, "bpe": _bpe, "unigram": _unigram}[vocab_spec.kind](bare, lowercase)
    for role in ("unk_token", "cls_token", "sep_token"):
        if tokenizer.token_to_id(bare.text(role)) is None:
            raise CheckpointError(f"{folder / vocab_spec.bare[0]} has no {bare.text(role)}, the {role}")
    _add_tokens(tokenizer, bare, own)
    ends = (bare.text("cls_token"), bare.text("sep_token"))
    put_around(
        tokenizer, *ends, vocab_spec.separators, trims=vocab_spec.mask_takes_space
    )  # MPNet's mask does not count its spaces
    return tokenizer


def put_around(tokenizer: Tokenizer, cls: str, sep: str, separators: int, *, trims: bool = False) -> None:
    """cls A sep B sep, where B has type 1, or cls A sep sep B sep, where all have type 0.

    trims: the place of a token in its text is without spaces, of the latter kind.
    """
    ends: Any = [(text, tokenizer.token_to_id(text)) for text in (sep, cls)]  # both are in the vocabulary
    if separators == 1:
        tokenizer.post_processor = processors.BertProcessing(ends[0], ends[1])
    else:
        tokenizer.post_processor = processors.RobertaProcessing(
            ends[0], ends[1], trim_offsets=trims, add_prefix_space=False
        )


# --------------------------------------------------------------------------------------------------------------------
# The three kinds


def _wordpiece(bare: _Bare, lowercase: bool) -> _Loaded:
    """BERT's own: clean, split, WordPiece (Devlin et al. 2018, section 3)."""
    path = bare.folder / "vocab.txt"
    flags = bare.flags(BERT_FLAGS)
    vocab = {token: i for i, token in enumerate(_text(path).removesuffix("\n").split("\n"))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=bare.text("unk_token")))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=flags["tokenize_chinese_chars"],
        strip_accents=flags["strip_accents"],
        lowercase=lowercase or flags["do_lower_case"],
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, []


def _bpe(bare: _Bare, lowercase: bool) -> _Loaded:
    """GPT-2's, over bytes (Radford et al. 2019, 2.2)."""
    flags, path = bare.flags({"do_lower_case": False, "add_prefix_space": False}), bare.folder / "vocab.json"
    if flags["do_lower_case"]:
        raise CheckpointError(f"{bare.folder / SETTINGS}: do_lower_case is true, and a byte-level BPE keeps capitals")
    vocab = read_json(path, CheckpointError)
    for token, i in vocab.items():
        if type(i) is not int or not 0 <= i <= _MAX_ID:
            entry = f"{reprlib.repr(token)} has id {reprlib.repr(i)}"
            raise CheckpointError(f"{path}: {entry}; ids are whole numbers from 0 to {_MAX_ID}")
    if len(set(vocab.values())) < len(vocab):
        raise CheckpointError(f"{path}: two tokens have the same id")
    tokenizer = Tokenizer(models.BPE(vocab, _merges(bare.folder / "merges.txt", vocab)))
    tokenizer.normalizer = normalizers.Lowercase() if lowercase else None  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=flags["add_prefix_space"])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, []


def _merges(path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), 1):
        if line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not right or not {left, right, left + right} <= vocab.keys():
            raise CheckpointError(f"{path}, line {number}: {reprlib.repr(line)} merges no two tokens of vocab.json")
        merges.append((left, right))
    return merges


def _unigram(bare: _Bare, lowercase: bool) -> _Loaded:
    """DeBERTa-v2's: sentencepiece's pieces and scores (Kudo 2018). In transformers 5 neither the file's table of
    characters nor its bytes of unknown ones are used: texts are brought to NFC, and what has no piece is unknown.
    """
    flags = bare.flags({"do_lower_case": False, "split_by_punct": False, "add_prefix_space": True})
    spm, unk = read_spm(bare.folder / "spm.model"), bare.text("unk_token")
    unknown = next((i for i, (piece, _) in enumerate(spm.pieces) if piece == unk), None)
    tokenizer = Tokenizer(models.Unigram(spm.pieces, unk_id=unknown, byte_fallback=False))
    lowered = [normalizers.Lowercase()] if lowercase or flags["do_lower_case"] else []
    spaces = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
    steps = [*lowered, spaces, normalizers.NFC(), normalizers.Strip(left=False, right=True)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme: Any = "always" if flags["add_prefix_space"] else "first"
    marks = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    isolated = [pre_tokenizers.Punctuation("isolated")] if flags["split_by_punct"] else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*isolated, marks])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    whole = [AddedToken(text, normalized=False, special=True) for text in spm.control]
    return tokenizer, [*whole, *(AddedToken(text, normalized=False, special=False) for text in spm.user_defined)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from None


# --------------------------------------------------------------------------------------------------------------------
# Tokens that are looked for in a text before anything else


def _add_tokens(tokenizer: Tokenizer, bare: _Bare, own: list[AddedToken]) -> None:
    """Those that the folder lists with ids, then the special ones by role, then the others.

    Of two of one text the first counts. What the vocabulary lacks gets the next ids, if the folder names it, or the
    family says that it stands behind. Raises CheckpointError where that is not the id that a file says.
    """
    named, extra = _named(bare), _extra(bare)
    listed = _listed(bare, {token.content for token in (*named.values(), *extra)})
    for role, text in bare.defaults.items():
        is_behind = role.removesuffix("_token") in bare.vocab_spec.behind
        if role not in named and (is_behind or tokenizer.token_to_id(text) is not None):
            named[role] = _special(bare, text, role)
    ordered = [named[role] for role in (*_ROLES, *(role for role in named if role not in _ROLES)) if role in named]
    special = {token.content for token in ordered}
    others = extra or own  # in transformers, too, a folder's list stands in the place of what spm.model says
    tokens: dict[str, AddedToken] = {}
    for token in (*listed.values(), *ordered, *others):
        token.special = token.special or token.content in special
        tokens.setdefault(token.content, token)
    tokenizer.add_tokens(list(tokens.values()))
    for i, token in listed.items():
        if (token_id := tokenizer.token_to_id(token.content)) != i:
            text, where = reprlib.repr(token.content), _list_of(bare)
            raise CheckpointError(f"{where} gives {text} the id {i}; with this vocabulary it has {token_id}")


def _named(bare: _Bare) -> dict[str, AddedToken]:
    """The tokens that the folder names, by role; a tokenizer may have more roles than BERT's ("image_token")."""
    for role in _ROLES:
        token_text(bare.where(role), bare.settings, role)  # an error, if it is none
    roles = (name for name, entry in bare.settings.items() if name.endswith("_token") and isinstance(entry, str | dict))
    named = {role: _special(bare, bare.settings[role], role) for role in roles}
    if isinstance(by_name := bare.settings.get(_EXTRA[0]), dict):
        named |= {role: _special(bare, entry, role) for role, entry in by_name.items()}
    return named


def _special(bare: _Bare, entry: Any, role: str) -> AddedToken:
    takes_space = role == "mask_token" and isinstance(entry, str) and bare.vocab_spec.mask_takes_space
    return _token(bare.where(role), entry, is_special=True, lstrip=takes_space)


def _extra(bare: _Bare) -> list[AddedToken]:
    """A list of special tokens without a role."""
    name = next((name for name in _EXTRA if bare.settings.get(name)), _EXTRA[0])
    where, entries = bare.where(name), bare.settings.get(name) or []
    if not isinstance(entries, list | dict):
        raise CheckpointError(f"{where}: {name} is {reprlib.repr(entries)}; it must be a list of tokens")
    return [_token(where, entry, is_special=True) for entry in entries] if isinstance(entries, list) else []


def _list_of(bare: _Bare) -> Path:
    return bare.folder / (SETTINGS if _LISTED in bare.settings else "added_tokens.json")


def _listed(bare: _Bare, special: set[str]) -> dict[int, AddedToken]:
    """Tokens by id, in its order: of tokenizer_config.json, or of added_tokens.json, which has their texts only.

    special: the texts of those that the folder names elsewhere, too.
    """
    where, tokens = _list_of(bare), dict[int, AddedToken]()
    entries = bare.settings[_LISTED] if _LISTED in bare.settings else optional_json(where)
    if not isinstance(entries, dict):
        raise CheckpointError(f"{where}: {_LISTED} is {reprlib.repr(entries)}; it must map ids to tokens")
    for key, entry in entries.items():
        i, entry = (key, entry) if _LISTED in bare.settings else (entry, key)
        if not str(i).isdecimal() or len(str(i)) > 10 or int(i) in tokens:
            raise CheckpointError(f"{where}: {reprlib.repr(i)} is no id of a token, or there twice")
        tokens[int(i)] = _token(where, entry, is_special=isinstance(entry, str) and entry in special)
    return {i: tokens[i] for i in sorted(tokens)}


def _token(where: Path, entry: Any, *, is_special: bool, lstrip: bool = False) -> AddedToken:
    """From its text, or from an object that has it, and how it is looked for. Raises CheckpointError."""
    entries = {"content": entry} if isinstance(entry, str) else entry
    text = entries.get("content") if isinstance(entries, dict) else None
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"{where}: {reprlib.repr(entry)} is no token; it must be a text, or hold its content")
    is_special = is_special or bool(entries.get("special"))
    usual = {"single_word": False, "lstrip": lstrip, "rstrip": False, "normalized": not is_special}
    flags = {name: entries.get(name, value) for name, value in usual.items()}
    for name, value in flags.items():
        if type(value) is not bool:
            raise CheckpointError(f"{where}: {name} of {reprlib.repr(text)} must be true or false")
    return AddedToken(text, special=is_special, **flags)
