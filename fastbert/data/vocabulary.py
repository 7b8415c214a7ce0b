"""Vocabularies: read from a folder, or trained on a corpus by `tokenizers`, with the special tokens of a family."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from fastbert.checkpoint.tokenizer_files import (
    SETTINGS,
    copy_tokenizer,
    files_of,
    gives_types,
    tokenizer_settings,
    vocab_spec_of,
)
from fastbert.data.bare_tokenizer import put_around
from fastbert.data.sources import Source, check_columns, check_texts, import_datasets, load_source
from fastbert.data.tokenization import load_tokenizer
from fastbert.errors import ConfigError, InputError
from fastbert.families.schema import NewVocabulary
from fastbert.files import write_text

KINDS = ("wordpiece", "bpe", "unigram")
MOST_TEXTS = 1_000_000  # that a vocabulary is learnt from; of more, every second, third, ... one
_BATCH = 1000
_SPECIAL = {"pad": ("[PAD]", "<pad>"), "cls": ("[CLS]", "<s>"), "sep": ("[SEP]", "</s>")}  # where a folder names none


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the files that it is saved as. folder: where these are; None: they are written anew.

    vocab_spec: of the model's family, where the folder does not say what that is.
    """

    tokenizer: Tokenizer
    folder: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json of a new one
    vocab_spec: NewVocabulary | None = None

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @property
    def gives_types(self) -> bool:
        """Whether a model beside its files is told, by transformers' tokenizer, which token is of which text."""
        if self.folder is None:
            return "token_type_ids" in self.settings.get("model_input_names", ("token_type_ids",))
        return gives_types(self.folder, self.vocab_spec)

    def id_of(self, role: str) -> int | None:
        """Of a special token: "cls", "pad", ... None: there is none."""
        known = self.settings if self.folder is None else tokenizer_settings(self.folder)
        entry = known.get(f"{role}_token")
        named = entry.get("content") if isinstance(entry, dict) else entry
        usual = None if self.folder is None else vocab_spec_of(self.folder, self.vocab_spec).special.get(role)
        texts = (text for text in (named, usual, *_SPECIAL.get(role, ())) if isinstance(text, str))
        ids = map(self.tokenizer.token_to_id, texts)
        return next((i for i in ids if i is not None), None)

    def save(self, folder: Path) -> None:
        """Write what transformers' AutoTokenizer loads. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is not None:
            copy_tokenizer(self.folder, folder)
            return
        contents = {"tokenizer.json": self.tokenizer.to_str(pretty=True), SETTINGS: json.dumps(self.settings, indent=2)}
        for name, text in contents.items():
            write_text(folder / name, text)


def read_vocabulary(folder: Path, vocab_spec: NewVocabulary | None = None) -> Vocabulary:
    """Of a folder, as it is; `vocab_spec`: see `load_tokenizer`. Raises CheckpointError."""
    return Vocabulary(load_tokenizer(folder, vocab_spec=vocab_spec), folder, vocab_spec=vocab_spec)


def has_vocabulary(folder: Path) -> bool:
    return bool(files_of(folder))


@dataclass(frozen=True)
class Design:
    """What a new vocabulary is to be like. `special`: role -> text, in the order of their ids.

    separators: between two sequences. has_types: whether the model has token types. cased: capitals stay. Byte-level
    BPE always keeps them, as in RoBERTa.
    """

    kind: str
    size: int
    special: Mapping[str, str]
    separators: int = 1
    has_types: bool = True
    cased: bool = False
    max_length: int = 512

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"vocab_kind is {self.kind!r}; it must be one of {', '.join(KINDS)}")
        least = len(self.special) + (256 if self.kind == "bpe" else 1)
        if self.size <= least:
            raise ConfigError(f"vocab_size is {self.size}; a vocabulary of {self.kind} needs more than {least} tokens")

    @property
    def settings(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        named = {f"{role}_token": text for role, text in self.special.items()}
        inputs = (
            ["input_ids", "token_type_ids", "attention_mask"] if self.has_types else ["input_ids", "attention_mask"]
        )
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named,
            "model_max_length": self.max_length,
            "model_input_names": inputs,
            "clean_up_tokenization_spaces": False,
        }


def train_vocabulary(
    source: Source, design: Design, *, column: str = "text", delimiter: str | None = None
) -> Vocabulary:
    """A vocabulary of the corpus of `source` (see `load_source`, for `delimiter`, too). One of the same texts and
    design is made once.

    Raises InputError: no such column, or no texts.
    """
    datasets = import_datasets()
    rows = load_source(source, delimiter=delimiter)
    where = str(source) if isinstance(source, (str, os.PathLike)) else "the corpus"
    check_columns(rows, [column], where)
    known = json.dumps([rows._fingerprint, column, *vars(design).values()], default=dict)
    name = f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.json"
    kept = Path(datasets.config.HF_DATASETS_CACHE) / "fastbert_vocabularies" / name
    if kept.is_file():
        return Vocabulary(Tokenizer.from_str(kept.read_text(encoding="utf-8")), None, design.settings)
    tokenizer = _untrained(design)
    tokenizer.train_from_iterator(_texts(rows, column, where), _trainer(design))
    for text in design.special.values():
        assert tokenizer.token_to_id(text) is not None
    if len(tokenizer.get_vocab()) <= len(design.special) + (256 if design.kind == "bpe" else 0):
        raise InputError("the corpus has no words to make a vocabulary of")
    put_around(tokenizer, design.special["cls"], design.special["sep"], design.separators)
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_text(kept, tokenizer.to_str())
    return Vocabulary(tokenizer, None, design.settings)


def _texts(rows: Any, column: str, where: str) -> Iterator[list[str]]:
    every = -(-len(rows) // MOST_TEXTS)
    taken = rows if every == 1 else rows.select(range(0, len(rows), every))
    for start in range(0, len(taken), _BATCH):
        texts = taken[start : start + _BATCH][column]
        check_texts(texts, range(start * every, (start + len(texts)) * every, every), column, where)
        yield texts


def _untrained(design: Design) -> Tokenizer:
    unk = design.special["unk"]
    if design.kind == "wordpiece":  # BERT's
        tokenizer = Tokenizer(models.WordPiece(unk_token=unk, max_input_chars_per_word=100))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not design.cased)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
    elif design.kind == "bpe":  # RoBERTa's, over bytes: nothing is unknown
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:  # ALBERT's
        tokenizer = Tokenizer(models.Unigram())
        steps = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
        lowered = [] if design.cased else [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        tokenizer.normalizer = normalizers.Sequence([*steps, *lowered])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _trainer(design: Design) -> Any:
    # A mask takes the space before it, as RoBERTa's and ALBERT's do, where a space belongs to the word behind it.
    special = [
        AddedToken(text, lstrip=role == "mask" and design.kind != "wordpiece", normalized=False, special=True)
        for role, text in design.special.items()
    ]
    options: dict[str, Any] = {"vocab_size": design.size, "special_tokens": special, "show_progress": False}
    if design.kind == "wordpiece":
        return trainers.WordPieceTrainer(**options)
    if design.kind == "bpe":
        return trainers.BpeTrainer(initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), **options)
    return trainers.UnigramTrainer(unk_token=design.special["unk"], **options)
