"""Tokenizers whose tokens have the blank before a word in them, each with what it makes of offsets."""

from __future__ import annotations

import string
from pathlib import Path

import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
BYTES = pre_tokenizers.ByteLevel
# The pre-tokenizer, and whether the post-processor trims offsets: as DeBERTa-v3's, ModernBERT's, RoBERTa's, and one of
# split words, each with a blank of its own.
KINDS = {
    "metaspace": (pre_tokenizers.Metaspace(), None),
    "bytes": (BYTES(add_prefix_space=False), False),
    "trimmed bytes": (BYTES(add_prefix_space=True), True),
    "split bytes": (
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTES(add_prefix_space=True, use_regex=False)]),
        True,
    ),
}


def tokenizer_of(kind: str) -> Tokenizer:
    """Of subwords of tiny.WORDS. It knows an ideograph, but not behind a blank. NFC, where nothing is deleted but a
    mark of direction.
    """
    pre_tokenizer, trims = KINDS[kind]
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\u200f", "")])
    made.pre_tokenizer = pre_tokenizer
    alphabet = ["\u2581", "\u6771", *string.printable] if kind == "metaspace" else sorted(BYTES.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([tiny.WORDS, *(f"{a} {b}" for a in "abc" for b in tiny.WORDS.split())], trainer)
    made.decoder = decoders.Metaspace(prepend_scheme="never") if kind == "metaspace" else decoders.ByteLevel()
    ids = {name: SPECIAL.index(name) for name in ("[CLS]", "[SEP]")}
    template = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=list(ids.items())
    )
    parts = [template] if trims is None else [processors.ByteLevel(trim_offsets=trims), template]
    made.post_processor = processors.Sequence(parts)
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    return made


def write_model(folder: Path, kind: str, **options) -> Path:
    """A tiny model with such a tokenizer."""
    made = tokenizer_of(kind)
    tiny.write_model(folder, vocab_size=made.get_vocab_size(), **options)
    (folder / "vocab.txt").unlink()
    made.save(str(folder / "tokenizer.json"))
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs, **names}
    tiny.write_json(folder / "tokenizer_config.json", settings)
    return folder
