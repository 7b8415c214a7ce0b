"""A model is told which token is of which text where the tokenizer's files say so, as by transformers."""

from __future__ import annotations

import pytest
import tiny
from finetuning_runs import base, task_of, write_rows
from test_reranker import compare, write

import fastbert
from fastbert.checkpoint.tokenizer_files import gives_types
from fastbert.data.tokenization import load_tokenizer
from fastbert.errors import CheckpointError
from fastbert.families import FAMILIES

WITHOUT = ["input_ids", "attention_mask"]
# tokenizer_config.json; None: there is none.
SETTINGS = {
    "named": {"tokenizer_class": "BertTokenizer", "model_input_names": WITHOUT},
    "generic": {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"},
    "unknown": {"tokenizer_class": "MyTokenizer", "pad_token": "[PAD]"},
    "generic, named": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "[PAD]",
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    },
    "by its class": {"tokenizer_class": "BertTokenizerFast"},
    "by the model": {},
    "no file": None,
}
PAIR = ("the cat sat", "on the mat")


def settle(folder, settings):
    if settings is None:
        (folder / "tokenizer_config.json").unlink()
    else:
        tiny.write_json(folder / "tokenizer_config.json", settings)


@pytest.mark.parametrize("kind", SETTINGS)
def test_scores_of_pairs_are_cross_encoders(kind, tmp_path):
    from transformers import AutoTokenizer

    settle(write(tmp_path), SETTINGS[kind])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ours = compare(tmp_path)
    assert ours.has_types == ("token_type_ids" in tokenizer(*PAIR))
    assert ours.has_types == (kind in ("generic, named", "by its class", "by the model", "no file"))


def test_each_familys_tokenizer_gives_what_its_class_gives(tmp_path):
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    compared = 0
    for model_type, family in FAMILIES.items():
        name = f"{family.classes}Tokenizer"
        named = TOKENIZER_MAPPING_NAMES.get(model_type)
        theirs = tokenizer_class_from_name(name) or (named and tokenizer_class_from_name(named))
        if theirs is not None:
            for settings, config in (({"tokenizer_class": name}, {}), ({}, {"model_type": model_type})):
                tiny.write_json(tmp_path / "tokenizer_config.json", settings)
                tiny.write_json(tmp_path / "config.json", config)
                assert gives_types(tmp_path) == ("token_type_ids" in theirs.model_input_names), model_type
            compared += 1
    assert compared > 15


@pytest.mark.parametrize("kind", ("named", "by its class"))
def test_training_and_what_it_saves_give_the_same(kind, tmp_path):
    """Of pairs, of questions, and of tags, whose texts are of type 0."""
    has_types, model = kind != "named", base(tmp_path)
    settle(tmp_path / "base", SETTINGS[kind])
    pairs = [{"sentence1": PAIR[0], "sentence2": PAIR[1], "label": label} for label in "xy"]
    answers = {"text": ["mat"], "answer_start": [7]}
    asked = [{"question": PAIR[0], "context": PAIR[1], "answers": answers}]
    tags = [{"tokens": ["the", "cat"], "ner_tags": ["O", "B-PER"]}]
    for task, rows, reader in (
        ("classification", pairs, fastbert.TextClassifier),
        ("qa", asked, fastbert.QuestionAnswerer),
        ("tokens", tags, fastbert.TokenClassifier),
    ):
        made = task_of(model, write_rows(tmp_path / f"{task}.jsonl", rows), task=task)
        assert ("token_type_ids" in made.train[0]) == has_types
        made.save(made.model, tmp_path / task)
        assert reader(tmp_path / task, device="cpu").has_types == has_types


def test_what_is_no_list_of_names_is_refused(tmp_path):
    settle(write(tmp_path), {"model_input_names": "input_ids"})
    with pytest.raises(CheckpointError, match="model_input_names is 'input_ids'; it must be a list of texts"):
        fastbert.Reranker(tmp_path)


def test_a_tokenizer_json_is_taken_as_it_is(tmp_path):
    """Where tokenizer_config.json says nothing of capitals: transformers' BertTokenizer lowers them by default."""
    tiny.write_model(tmp_path)
    tiny.write_tokenizer(tmp_path, lowercase=False)
    settle(tmp_path, {"tokenizer_class": "BertTokenizer"})
    from transformers import AutoTokenizer

    assert load_tokenizer(tmp_path).encode("Zebra").tokens[1] == "Z"
    assert AutoTokenizer.from_pretrained(tmp_path).tokenize("Zebra")[0] == "z"
    settle(tmp_path, {"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    assert load_tokenizer(tmp_path).encode("Zebra").tokens[1] == "z"
