"""Vocabularies, presets, phases, and the errors that come before the first step."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
import transformers
from pretraining_runs import options, write_text

import fastbert
from fastbert.data.vocabulary import Design, Vocabulary, read_vocabulary, train_vocabulary
from fastbert.errors import CheckpointError, ConfigError, InputError
from fastbert.families import FAMILIES
from fastbert.training.options import PretrainOptions, options_of
from fastbert.training.pretraining import make_task
from fastbert.training.pretraining.phases import phases_of
from fastbert.training.pretraining.presets import PRESETS, family_of, new_config

datasets = pytest.importorskip("datasets")
TEXTS = ("ba be gi", "Ba, be  zü!", "bo du xyz \u4e2d ba.", "ki " * 40)
KINDS = {"bert": ("wordpiece", 60), "roberta": ("bpe", 290), "albert": ("unigram", 50), "modernbert": ("bpe", 290)}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, folder / "cache"
    datasets.disable_progress_bars()
    yield write_text(folder / "text.txt")
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="module")
def saved(text):
    """A baby with a position table, not trained."""
    task = make_task(options(text, family="megatron-bert"))
    task.save(task.model, text.parent / "saved")
    return text.parent / "saved"


def design_of(model_type: str) -> Design:
    form, (kind, size) = FAMILIES[model_type].vocabulary, KINDS[model_type]
    assert form.kind == kind
    return Design(kind, size, dict(form.special), form.separators, has_types=model_type != "modernbert")


@pytest.mark.parametrize("model_type", KINDS)
def test_vocabularies_are_transformers_too(model_type, text, tmp_path):
    """The saved folder gives the same ids and types there, of one text and of pairs."""
    design = design_of(model_type)
    made = train_vocabulary(str(text), design)
    made.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = read_vocabulary(tmp_path)
    assert len(theirs) == made.size == again.size <= design.size
    for one in TEXTS:
        for pair in (None, "be ba"):
            ours, expected = again.tokenizer.encode(one, pair), theirs(one, pair)
            assert ours.ids == expected["input_ids"]
            assert ("token_type_ids" in expected) == design.has_types
            assert not design.has_types or ours.type_ids == expected["token_type_ids"]
    for i, (role, token) in enumerate(design.special.items()):
        assert (getattr(theirs, f"{role}_token"), getattr(theirs, f"{role}_token_id")) == (token, i)
    ids = theirs("ba be", "bo")["input_ids"]
    assert ids.count(theirs.sep_token_id) == design.separators + 1 and ids[0] == theirs.cls_token_id
    assert again.tokenizer.decode(again.tokenizer.encode("ba be gi").ids) == "ba be gi"


def test_a_vocabulary_is_made_once(text, monkeypatch):
    first = train_vocabulary(str(text), design_of("bert"))
    monkeypatch.setattr("fastbert.data.vocabulary._trainer", None)
    assert train_vocabulary(str(text), design_of("bert")).tokenizer.to_str() == first.tokenizer.to_str()


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("words", 50, "vocab_kind is 'words'; it must be one of wordpiece, bpe, unigram"),
        ("bpe", 200, "vocab_size is 200; a vocabulary of bpe needs more than 261 tokens"),
    ],
)
def test_no_such_vocabulary(kind, size, message):
    with pytest.raises(ConfigError, match=message):
        Design(kind, size, FAMILIES["bert"].vocabulary.special)


@pytest.mark.parametrize(
    ("preset", "model_type", "expected"),
    [
        ("base", "bert", "bert-base"),
        ("large", "bert", None),
        ("base", "roberta", "roberta-base"),
        ("base", "albert", None),
        ("base", "electra", None),
        ("modern", "modernbert", None),
        ("tiny", "distilbert", None),
    ],
)
def test_presets(preset, model_type, expected, text):
    """Shapes in other families, with positions and ids that fit; the sizes of those that are published."""
    vocabulary: Vocabulary = train_vocabulary(str(text), design_of(model_type if model_type in KINDS else "bert"))
    config = new_config(PRESETS[preset], model_type, vocabulary, 700)
    for name, value in PRESETS[preset].shape.items():
        assert getattr(config, name) == value
    first = 2 if model_type == "roberta" else 0
    longest = 8192 if model_type == "modernbert" else 700
    assert config.max_position_embeddings == longest + first
    assert config.vocab_size == vocabulary.size and config.pad_token_id == vocabulary.id_of("pad")
    their = transformers.AutoConfig.for_model(**config.to_dict())
    if expected == "roberta-base":
        assert (their.type_vocab_size, their.bos_token_id, their.eos_token_id) == (1, 0, 2)
    if model_type == "electra":
        assert config.embedding_size == 768
    if model_type == "albert":
        assert config.embedding_size == 128


def test_families_of_objectives():
    assert family_of(PRESETS["base"], "", "rtd") == "electra"
    assert family_of(PRESETS["modern"], "", "mlm") == "modernbert"
    with pytest.raises(ConfigError, match=r"roberta has no head for mlm\+nsp; these families have: albert, bert, "):
        family_of(PRESETS["base"], "roberta", "mlm+nsp")
    with pytest.raises(ConfigError, match="family is 'gpt2'; it must be one of albert, bert"):
        family_of(PRESETS["base"], "gpt2", "mlm")


def test_errors_before_the_first_step(text, saved, tmp_path):
    one, empty = tmp_path / "one.txt", tmp_path / "empty.txt"
    one.write_text("ba be bi\nbo ba be", encoding="utf-8")
    empty.write_text("\n\n \n", encoding="utf-8")
    shutil.copytree(saved, tmp_path / "other")
    known = json.loads((saved / "tokenizer.json").read_text(encoding="utf-8"))
    ids = known["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(known), encoding="utf-8")
    shutil.copytree(saved, tmp_path / "large")
    train_vocabulary(str(text), design_of("roberta")).save(tmp_path / "bytes")
    shutil.copy(tmp_path / "bytes" / "tokenizer.json", tmp_path / "large" / "tokenizer.json")
    headless = tmp_path / "headless"
    fastbert.AutoModel.from_pretrained(saved).save_pretrained(headless)
    baby = {"model": str(saved)}
    for changes, message in (
        ({"preset": "huge"}, "preset is 'huge'; it must be one of baby, tiny, base, large, modern"),
        ({"objective": "distil"}, "distil needs a teacher"),
        ({"teacher": str(saved)}, "teacher goes with objective distil"),
        ({**baby, "preset": "tiny"}, "preset is the shape of a new model, and .* has one"),
        ({**baby, "vocab_size": 50}, "vocab_size is for a new vocabulary, and that of .* is taken"),
        ({**baby, "family": "roberta"}, "is of the family megatron-bert, and family is roberta"),
        ({**baby, "objective": "rtd"}, "megatron-bert has no head for rtd; these families have: electra"),
        ({**baby, "max_length": 600}, "max_length is 600, and the model's position table has room for 512 tokens"),
        ({**baby, "tokenizer": str(tmp_path / "other")}, "the vocabulary of .*other is not that of .*saved: .* has id"),
        ({"model": str(tmp_path / "large")}, "has 290 tokens, and the word table of .*large 43 rows"),
        ({"objective": "distil", "teacher": str(headless)}, "headless cannot teach: it has no masked-LM head"),
        ({"masking": "half"}, "masking is 'half'; it must be a share"),
        ({"train": ()}, "train is missing"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_task(options(text, **changes))
    with pytest.raises(InputError, match="the corpus has one document, and half of the pairs of nsp are of two"):
        make_task(options(text, train=(str(one),), eval=(), objective="mlm+nsp", tokenizer=str(saved)))
    with pytest.raises(InputError, match="the corpus has no tokens"):
        make_task(options(text, train=(str(empty),), eval=(), tokenizer=str(saved)))
    with pytest.raises(InputError, match="the corpus has no words"):
        make_task(options(text, train=(str(empty),), eval=()))
    (headless / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has neither tokenizer.json nor vocab.txt"):
        make_task(options(text, model=str(headless)))


def schedule(steps: int = 100, **changes) -> list[tuple]:
    given = PretrainOptions(train=("x",), **{"step_tokens": 4096, **changes})
    return [
        (p.until, p.step_tokens, p.max_examples, p.max_length, round(p.masking, 3)) for p in phases_of(given, steps)
    ]


def test_phases():
    assert schedule() == [(100, 4096, None, 128, 0.15)]
    assert schedule(phases="0.9:128,0.1:512") == [(90, 4096, None, 128, 0.15), (100, 4096, None, 512, 0.15)]
    assert schedule(batch_size=8, step_tokens=0) == [(100, 1024, 8, 128, 0.15)]
    rates = schedule(masking="0.3:0.1")
    assert [until for until, *_ in rates] == [12, 25, 38, 50, 62, 75, 88, 100]
    assert rates[0][-1] == 0.3 and rates[-1][-1] == 0.1
    assert all(a[-1] > b[-1] for a, b in itertools.pairwise(rates))
    warm = schedule(batch_warmup=0.2, batch_size=40)
    assert [(until, tokens, count) for until, tokens, count, *_ in warm] == [
        (5, 1024, 10), (10, 2048, 20), (15, 3072, 30), (100, 4096, 40)
    ]  # fmt: skip
    assert schedule(batch_warmup=0.5, phases="1:2000")[0][1] == 2000  # a step holds an example
    assert schedule(steps=1, masking="0.3:0.15", phases="0.9:128,0.1:512")[-1][0] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"phases": "0.9:128"}, "shares must be above 0 and add up to 1"),
        ({"phases": "a:b"}, "a part is SHARE:LENGTH"),
        ({"masking": "0"}, "it must be above 0 and below 1"),
        ({"batch_warmup": 1.0}, "batch_warmup is 1.0"),
    ],
)
def test_no_phases(changes, message):
    with pytest.raises(ConfigError, match=message):
        schedule(**changes)


def test_a_rate_is_a_number_in_yaml_too():
    assert options_of(PretrainOptions, {"masking": 0.3, "train": "x"}, "run.yaml").masking == "0.3"
