"""Folders without tokenizer.json: from a vocabulary's bare files come the tokens of transformers' own class."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from bare_files import FORMS, TEXTS, their_tokenizer, what_differs, write_bare
from full import left_to_full
from seeds import python_random
from tiny import write_json
from tokenizers import Tokenizer

from fastbert import CheckpointError
from fastbert.data.tokenization import load_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
VOCABULARIES = {
    "deberta": "roberta/vocab.json",
    "deberta-v2": "deberta-v3/spm.model",
    "mpnet": "bert-base-uncased/vocab.txt",
}
CORPORA = ("lm/gutenberg9.txt.gz", "lm/wikitext2.wiki.test.raw")
families = pytest.mark.parametrize("model_type", FORMS)


def added(tokenizer: Tokenizer) -> list[dict]:
    return json.loads(tokenizer.to_str())["added_tokens"]


def check(folder: Path, model_type: str, texts: list[str] = TEXTS) -> Tokenizer:
    ours, theirs = load_tokenizer(folder, vocab_spec=FORMS[model_type]), their_tokenizer(folder)
    assert ours.get_vocab() == theirs.get_vocab() and added(ours) == added(theirs)
    assert what_differs(ours, theirs, texts) == []
    return ours


def real_folder(folder: Path, model_type: str) -> Path:
    """As on the hub. What is not among the data is made of what is: DeBERTa's ids are RoBERTa's with other names of the
    special tokens, MPNet's are BERT's behind four more.
    """
    source = SHARED / "vocab" / VOCABULARIES[model_type]
    if not source.is_file():
        pytest.skip(f"{source} is not here")
    write_json(folder / "config.json", {"model_type": model_type})
    if model_type == "deberta":
        vocab, names = json.loads(source.read_text(encoding="utf-8")), ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
        renamed = dict(zip(names, ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"), strict=True))
        write_json(folder / "vocab.json", {renamed.get(token, token): i for token, i in vocab.items()})
        (folder / "merges.txt").write_bytes(source.with_name("merges.txt").read_bytes())
    elif model_type == "mpnet":
        words = source.read_text(encoding="utf-8").split()
        (folder / "vocab.txt").write_text("\n".join(["<s>", "<pad>", "</s>", "<unk>", *words, "<mask>"]) + "\n")
    else:
        (folder / "spm.model").write_bytes(source.read_bytes())
    return folder


def lines_of(corpus: str, count: int) -> list[str]:
    path = SHARED / corpus
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        texts = [line.rstrip("\n") for line in lines if line.strip()]
    return texts[:: max(1, len(texts) // count)][:count]


def random_texts(count: int, seed: int) -> list[str]:
    draw = python_random(seed)
    ranges = [(32, 127), (0, 33), (0x80, 0x600), (0x300, 0x370), (0x2000, 0x2100), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    words = [
        "[MASK]",
        "[CLS]",
        "<mask>",
        "</s>",
        "<pad>",
        "[UNK]",
        "▁",
        "Ġ",
        "##",
        "[mask]",
        "<0x41>",
        "\u3000",
        "\xa0",
    ]

    def piece() -> str:
        return draw.choice(words) if draw.random() < 0.1 else chr(draw.randrange(*draw.choice(ranges)))

    return ["".join(piece() for _ in range(draw.randrange(40))) for _ in range(count)]


# Small ones have all that the others' files may hold; a real spm.model has a table of its own for characters.
@pytest.mark.full
@left_to_full(lambda p: p["model_type"] != "deberta-v2")
@pytest.mark.parametrize("count", (pytest.param(80, id="some"), pytest.param(10_000, id="all", marks=pytest.mark.full)))
@families
def test_real_vocabularies(model_type, count, tmp_path):
    folder = real_folder(tmp_path, model_type)
    texts = [line for corpus in CORPORA for line in lines_of(corpus, count)]
    ours = check(folder, model_type, [*texts, *TEXTS, *random_texts(count, 0), "word " * 3000, "x" * 5000])
    assert ours.encode("The cat").ids[0] == ours.token_to_id(FORMS[model_type].special["cls"])
    if model_type == "deberta-v2":
        names = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
        assert [ours.token_to_id(name) for name in names] == [0, 1, 2, 3, 128000]


@families
def test_small_vocabularies(model_type, tmp_path):
    ours = check(write_bare(tmp_path, model_type), model_type, [*TEXTS, *random_texts(300, 1)])
    assert what_differs(Tokenizer.from_str(ours.to_str()), ours, TEXTS) == []


_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
SETTINGS = {
    "nothing": {},
    "as on the hub": {"do_lower_case": False, "vocab_type": "spm", "sp_model_kwargs": {}, "model_max_length": 512},
    "lowers": {"do_lower_case": True},
    "splits at punctuation": {"split_by_punct": True},
    "space before": {"add_prefix_space": True},
    "no space before": {"add_prefix_space": False},
    "other names": {"pad_token": "<none>", "bos_token": "the", "image_token": "<img>"},
    "a mask as an object": {"mask_token": {**_FLAGS, "__type": "AddedToken", "content": "cat", "rstrip": True}},
    "extra": {"extra_special_tokens": ["<ent>", "on", "<ent>"]},
    "extra of old": {"additional_special_tokens": ["<ent>", "<ENT>"]},
    "extra by name": {"extra_special_tokens": {"image": "<ent>", "other": "<ENT>"}},
}


# A byte-level BPE refuses to lower: see below.
CASES = [(m, name) for m in FORMS for name in SETTINGS if (m, name) != ("deberta", "lowers")]


@pytest.mark.parametrize(("model_type", "name"), CASES)
def test_settings_are_followed(model_type, name, tmp_path):
    check(write_bare(tmp_path, model_type, **SETTINGS[name]), model_type)


@pytest.mark.parametrize("flags", ({}, {"lstrip": True, "normalized": True}, {"special": False, "rstrip": True}))
@families
def test_tokens_that_are_listed_with_ids(model_type, flags, tmp_path):
    """In tokenizer_config.json, as newer programs write it."""
    known = load_tokenizer(write_bare(tmp_path, model_type), vocab_spec=FORMS[model_type])
    mask = FORMS[model_type].special["mask"]
    size, ids = known.get_vocab_size(), {text: known.token_to_id(text) for text in (mask, "▁the", "the", "Ġc")}
    listed = {i: {**_FLAGS, "content": text} for text, i in ids.items() if i is not None}
    listed |= {size: {**_FLAGS, **flags, "content": "<ent>"}, size + 1: {**_FLAGS, **flags, "content": "<two>x"}}
    settings = {"extra_special_tokens": ["<ENT>"], "mask_token": mask, "added_tokens_decoder": listed}
    write_json(tmp_path / "special_tokens_map.json", {"mask_token": "is not read"})
    check(write_bare(tmp_path, model_type, **settings), model_type)


@families
def test_files_of_old(model_type, tmp_path):
    """special_tokens_map.json and added_tokens.json, as older programs write them."""
    known = load_tokenizer(write_bare(tmp_path, model_type), vocab_spec=FORMS[model_type])
    size, mask = known.get_vocab_size(), FORMS[model_type].special["mask"]
    entry = {**_FLAGS, "content": mask, "lstrip": True, "normalized": True}
    write_json(tmp_path / "special_tokens_map.json", {"mask_token": entry, "pad_token": "<ent>", "unk_token": "[UNK]"})
    write_json(tmp_path / "added_tokens.json", {"<two>y": size + 1, "<ent>": size, mask: known.token_to_id(mask)})
    check(write_bare(tmp_path, model_type, mask_token="is not read"), model_type)


REFUSED = {
    "tokenizer_config.json: split_special_tokens is not supported": {"split_special_tokens": True},
    "tokenizer_config.json: add_prefix_space is 'no'; it must be true or false": {"add_prefix_space": "no"},
    "do_lower_case is true, and a byte-level BPE keeps capitals": {"do_lower_case": True},
    "vocab.json has no <s>, the cls_token": {"cls_token": "<s>"},
    "sep_token is 3; it must be a text": {"sep_token": 3},
    "mask_token": {"mask_token": {**_FLAGS, "content": "[MASK]", "lstrip": 1}},
    "extra_special_tokens is 'a'; it must be a list": {"extra_special_tokens": "a"},
    "None is no token": {"extra_special_tokens": [None]},
    "added_tokens_decoder is []; it must map ids": {"added_tokens_decoder": []},
    "'x' is no id of a token": {"added_tokens_decoder": {"x": {"content": "a"}}},
    "gives '<ent>' the id 7; with this vocabulary it has 300": {"added_tokens_decoder": {7: {"content": "<ent>"}}},
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_are_refused(message, tmp_path):
    write_bare(tmp_path, "deberta", **REFUSED[message])
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path, vocab_spec=FORMS["deberta"])
    assert message.replace("mask_token", "lstrip of '[MASK]' must be true or false") in str(caught.value)


@families
def test_what_is_saved_of_it_is_the_same(model_type, tmp_path):
    """The tokenizer.json of a sentence encoder's folder, here and in transformers."""
    bare = write_bare(tmp_path / "bare", model_type)
    ours = load_tokenizer(bare, vocab_spec=FORMS[model_type])
    write_json(tmp_path / "config.json", {"model_type": model_type})
    ours.save(str(tmp_path / "tokenizer.json"))
    for other in (load_tokenizer(tmp_path), their_tokenizer(tmp_path), their_tokenizer(bare)):
        assert what_differs(ours, other, TEXTS) == []
