"""Which files of a folder are read as what: the family's data decide, by what the folder says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from bare_files import FORMS, TEXTS, what_differs, write_bare
from tiny import write_json
from tokenizers import Tokenizer, models, pre_tokenizers

from fastbert import CheckpointError
from fastbert.data.tokenization import load_cutting_tokenizer, load_tokenizer, mask_token
from fastbert.data.vocabulary import read_vocabulary
from fastbert.families import FAMILIES

CLASSES = {"deberta": "Deberta", "deberta-v2": "DebertaV2", "mpnet": "MPNet"}
families = pytest.mark.parametrize("model_type", FORMS)


@pytest.fixture
def known(monkeypatch):
    """The families that have bare files are there."""
    for model_type, vocab_spec in FORMS.items():
        made = replace(FAMILIES["bert"], model_type=model_type, classes=CLASSES[model_type], vocabulary=vocab_spec)
        monkeypatch.setitem(FAMILIES, model_type, made)


@families
def test_the_config_says_which_family_it_is(model_type, tmp_path, known):
    folder = write_bare(tmp_path, model_type)
    ours = load_tokenizer(folder)
    assert what_differs(ours, load_tokenizer(folder, vocab_spec=FORMS["mpnet"]), TEXTS) == []
    special = FORMS[model_type].special
    assert mask_token(folder, ours) == special["mask"]
    vocabulary = read_vocabulary(folder)
    for role, text in special.items():
        assert vocabulary.id_of(role) == ours.token_to_id(text) is not None


@families
def test_the_tokenizers_class_counts_more(model_type, tmp_path, known):
    """As in transformers; here the config is another family's, or there is none."""
    folder = write_bare(tmp_path, model_type)
    wanted = load_tokenizer(folder)
    for config in ({"model_type": "bert"}, {"model_type": 3}, {}):
        write_json(folder / "config.json", config)
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": f"{CLASSES[model_type]}TokenizerFast"})
        assert what_differs(load_tokenizer(folder), wanted, TEXTS) == []
        (folder / "tokenizer_config.json").unlink()
        write_json(folder / "config.json", {**config, "tokenizer_class": f"{CLASSES[model_type]}Tokenizer"})
        assert what_differs(load_tokenizer(folder), wanted, TEXTS) == []


def test_a_model_of_one_family_with_the_tokenizer_of_another(tmp_path, known):
    """DeBERTa-v2's in Chinese have BERT's."""
    write_bare(tmp_path, "mpnet", tokenizer_class="BertTokenizer")
    write_json(tmp_path / "config.json", {"model_type": "deberta-v2"})
    assert load_tokenizer(tmp_path).encode("the", "a").tokens == ["[CLS]", "the", "[SEP]", "a", "[SEP]"]
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    with pytest.raises(CheckpointError, match=r"neither tokenizer\.json nor spm\.model \(but .*vocab\.txt\)"):
        load_tokenizer(tmp_path)


def test_without_a_config_the_family_of_the_run_counts(tmp_path, known):
    """A vocabulary that is given to a new model."""
    folder = write_bare(tmp_path, "mpnet")
    (folder / "config.json").unlink()
    assert load_tokenizer(folder).encode("the").tokens == ["[CLS]", "the", "[SEP]"]
    vocabulary = read_vocabulary(folder, FORMS["mpnet"])
    assert vocabulary.tokenizer.encode("the").tokens == ["<s>", "the", "</s>"]
    assert (vocabulary.id_of("pad"), vocabulary.id_of("cls"), vocabulary.id_of("sep")) == (1, 0, 2)
    write_json(folder / "config.json", {"model_type": "bert"})
    assert read_vocabulary(folder, FORMS["mpnet"]).tokenizer.encode("the").tokens == ["[CLS]", "the", "[SEP]"]


@families
def test_case_is_lowered_for_sentence_transformers(model_type, tmp_path):
    """do_lower_case of sentence_bert_config.json, and what cuts texts at a side."""
    folder = write_bare(tmp_path, model_type, do_lower_case=False)
    plain, lowering = (load_tokenizer(folder, lowercase=lower, vocab_spec=FORMS[model_type]) for lower in (False, True))
    texts = ["The CAT sat", "A Dog, THE mat!"]
    assert [lowering.encode(text).ids for text in texts] == [plain.encode(text.lower()).ids for text in texts]
    assert lowering.encode("The CAT").ids != plain.encode("The CAT").ids


def test_texts_are_cut_at_a_side(tmp_path, known):
    cutting = load_cutting_tokenizer(write_bare(tmp_path, "deberta-v2", truncation_side="left"))
    cutting.enable_truncation(4, direction=cutting.truncation["direction"])
    assert cutting.encode("the cat sat on").tokens == ["[CLS]", "▁sat", "▁on", "[SEP]"]


@pytest.mark.parametrize("left", ("vocab.json", "merges.txt", None))
def test_a_pickle_is_refused_by_its_name(left, tmp_path, known):
    write_bare(tmp_path, "deberta")
    for name in ("vocab.json", "merges.txt"):
        if name != left:
            (tmp_path / name).unlink()
    (tmp_path / "bpe_encoder.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match=r"bpe_encoder\.bin is a pickle, which is never loaded; vocab\.json and"):
        load_tokenizer(tmp_path)


def damaged(folder: Path, model_type: str, name: str, content: bytes) -> str:
    write_bare(folder, model_type)
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder)
    assert str(folder / name) in str(caught.value)
    return str(caught.value)


DAMAGED = {
    "vocab.json": {
        "is not valid JSON": b"{",
        "holds a list, not a dict": b"[]",
        "'a' has id '0'; ids are whole numbers from 0 to 4294967295": b'{"a": "0"}',
        "'a' has id -1;": b'{"a": -1}',
        "two tokens have the same id": b'{"a": 1, "b": 1}',
    },
    "merges.txt": {
        "line 2: 'a' merges no two tokens": b"#version: 0.2\na\n",
        "line 1: 'q zz' merges no two tokens of vocab.json": b"q zz\n",
        "line 2: '' merges no two tokens": b"#version: 0.2\n\nt h\n",
        "is not UTF-8": b"\xff",
    },
    "vocab.txt": {"has no [UNK], the unk_token": b"a\n", "is not UTF-8": b"\xff"},
    "spm.model": {
        "is no sentencepiece model: it has no pieces": b"",
        "is no sentencepiece model": b"version https://git-lfs.github.com/spec/v1\n",
        "has no [UNK], the unk_token": bytes([10, 3, 10, 1, 97]),
    },
    "tokenizer_config.json": {"is not valid JSON": b"{", "holds a list": b"[]"},
    "special_tokens_map.json": {"pad_token is 3; it must be a text": b'{"pad_token": 3}', "holds a list": b"[]"},
    "added_tokens.json": {
        "[] is no id of a token": b'{"a": []}',
        "-1 is no id": b'{"a": -1}',
        "0 is no id of a token, or there twice": b'{"a": 0, "b": 0}',
    },
    "config.json": {"is not valid JSON": b"{"},
}
_OF = {"vocab.json": "deberta", "merges.txt": "deberta", "vocab.txt": "mpnet"}


@pytest.mark.parametrize(("name", "message"), [(name, message) for name, of in DAMAGED.items() for message in of])
def test_damaged_files(name, message, tmp_path, known):
    assert message in damaged(tmp_path, _OF.get(name, "deberta-v2"), name, DAMAGED[name][message])


def test_a_family_without_bare_files_has_berts(tmp_path):
    """As ever: a vocab.txt is BERT's, with what else its folder says."""
    write_bare(tmp_path, "mpnet", model_max_length=512, extra_special_tokens=["<ent>"])
    write_json(tmp_path / "config.json", {"model_type": "xlm-roberta"})
    made = load_tokenizer(tmp_path).encode("the <ent>", "a")
    assert made.tokens == ["[CLS]", "the", "<ent>", "[SEP]", "a", "[SEP]"] and made.type_ids == [0, 0, 0, 0, 1, 1]


WITHOUT_UNKNOWN = {
    "WordPiece": models.WordPiece({"a": 0}, unk_token="[UNK]"),
    "WordLevel": models.WordLevel({"a": 0}, unk_token="[UNK]"),
    "BPE": models.BPE({"a": 0}, [], unk_token="[UNK]"),
    "Unigram": models.Unigram([("a", 0.0)]),
}


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
def test_a_vocabulary_without_the_token_for_what_it_does_not_know(kind, tmp_path):
    """An added token of that name is none of the vocabulary's."""
    tokenizer = Tokenizer(WITHOUT_UNKNOWN[kind])
    tokenizer.add_special_tokens(["[UNK]"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"(?i)fails at what it does not know: .*unk"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_of_all_bytes_needs_no_such_token(tmp_path):
    letters = {letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(letters, [], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("é").ids) == 3
