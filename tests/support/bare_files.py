"""Folders with the bare files of a vocabulary in the place of a tokenizer.json, and the form of the families that have
them; small ones, made here.
"""

from __future__ import annotations

import itertools
import json
import string
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import transformers
from tiny import VOCAB, WORDS, write_json
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fastbert.families import FAMILIES

transformers.logging.set_verbosity_error()

FORMS = {name: FAMILIES[name].vocabulary for name in ("deberta", "deberta-v2", "mpnet")}
TEXTS = [
    "",
    " ",
    "a",
    "The cat sat on the mat.",
    "THE CAT, the dog: and?who",
    "  two  spaces \t\n and\r\nlines ",
    "[MASK] the [MASK]mat <mask>  <mask> [SEP][CLS] </s> [PAD] <pad> [UNK] [mask]",
    "Zoë's café, naïve e\u0301 \u1ea6",
    "自然言語処理は楽しい 杜甫",
    "👩‍👩‍👧‍👦 👍🏽",
    "\x00\x01\ufffd\u200b\ufeff",
    "½ … ﬁ Ａ\u00a0a\u3000b",
    "a" * 300,
    "a <ent> cat <ENT><two>  <two> x",
    "▁▁ the▁cat Ġa ##a <0x41>",
    "\u202eleft",
    " ‐ ",
]


# --------------------------------------------------------------------------------------------------------------------
# sentencepiece's file: messages of fields, each a tag and a value


def varint(value: int) -> bytes:
    groups = bytearray()
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def field(number: int, value: int | float | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def spm_content(
    pieces: Iterable[tuple[str, float, int]],
    trainer: dict[int, int] | None = None,
    normalizer: dict[int, int] | None = None,
) -> bytes:
    """pieces: (text, score, type); trainer, normalizer: settings by the number of their field."""
    made = b"".join(field(1, field(1, text) + field(2, score) + field(3, kind)) for text, score, kind in pieces)
    for number, settings in ((2, {40: 3, **(trainer or {})}), (3, normalizer or {})):
        made += field(number, b"".join(field(of, value) for of, value in settings.items()))
    return made


def spm_pieces() -> list[tuple[str, float, int]]:
    """DeBERTa-v3's kinds of pieces: control, unknown, a byte; and those that it does not have: user's own, unused."""
    special = [("[PAD]", 0.0, 3), ("[CLS]", 0.0, 3), ("[SEP]", 0.0, 3), ("[UNK]", 0.0, 2), ("<0x41>", 0.0, 6)]
    words = dict.fromkeys([f"▁{word}" for word in WORDS.split()] + ["▁", "ca", "and", "▁l", *string.ascii_letters])
    own = [("<two>", 0.0, 4), ("mat", -1.5, 5)]
    return special + own + [(word, -2.0 - 0.37 * i, 1) for i, word in enumerate((*words, *"é½.,:?<>[]’語"))]


# --------------------------------------------------------------------------------------------------------------------
# Folders


def _write_bpe(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special, alphabet = list(FORMS["deberta"].special.values()), pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": special, "initial_alphabet": sorted(alphabet), "show_progress": False}
    tokenizer.train_from_iterator([WORDS] * 3, trainers.BpeTrainer(vocab_size=300, **options))
    model = json.loads(tokenizer.to_str())["model"]
    write_json(folder / "vocab.json", model["vocab"])
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_wordpiece(folder: Path) -> None:
    """MPNet's has BERT's special tokens, too, which are words like others there."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *VOCAB, "<mask>"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def _write_spm(folder: Path) -> None:
    (folder / "spm.model").write_bytes(spm_content(spm_pieces()))


_WRITE: dict[str, Callable[[Path], None]] = {
    "deberta": _write_bpe,
    "deberta-v2": _write_spm,
    "mpnet": _write_wordpiece,
}


def write_bare(folder: Path, model_type: str, **settings) -> Path:
    """A small vocabulary of the family in its bare files, with config.json; settings: of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {"model_type": model_type})
    _WRITE[model_type](folder)
    if settings:
        write_json(folder / "tokenizer_config.json", settings)
    return folder


def their_tokenizer(folder: Path) -> Tokenizer:
    """What transformers' AutoTokenizer makes of a folder."""
    if (folder / "spm.model").is_file():
        pytest.importorskip("sentencepiece", reason="transformers reads spm.model by it")
    return transformers.AutoTokenizer.from_pretrained(folder)._tokenizer


def what_differs(ours: Tokenizer, theirs: Tokenizer, texts: list[str]) -> list[tuple[str, str] | str]:
    """The texts, and the pairs of each with the next one, that two tokenizers do not take in the same way."""
    inputs: list = [*texts, *itertools.pairwise(texts)]
    read = ("ids", "type_ids", "offsets", "special_tokens_mask")
    both = zip(ours.encode_batch(inputs), theirs.encode_batch(inputs), strict=True)
    differ = [any(getattr(a, name) != getattr(b, name) for name in read) for a, b in both]
    return [one for one, is_other in zip(inputs, differ, strict=True) if is_other]
