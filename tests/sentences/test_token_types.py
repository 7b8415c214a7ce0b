"""A model is told which token is of which text where the tokenizer's files say so, as by transformers."""

from __future__ import annotations

import asgi
import numpy as np
import pytest
import tiny
from finetuning_runs import base, task_of, write_rows
from test_reranker import compare, write

import fastbert
from fastbert.checkpoint.tokenizer_files import gives_types
from fastbert.data.tokenization import load_tokenizer
from fastbert.errors import CheckpointError
from fastbert.families import FAMILIES
from fastbert.serve.app import Limits, make_app
from fastbert.serve.engine import load_engine

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
    "an alias": {"tokenizer_class": "MobileBertTokenizer"},  # of BertTokenizer
    "of a family, but none": {"tokenizer_class": "ErnieTokenizer", "pad_token": "[PAD]"},  # which transformers lacks
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
    assert ours.has_types == (kind in ("generic, named", "by its class", "an alias", "by the model", "no file"))


def names_of_transformers() -> set[str]:
    """Of every tokenizer class that it has, and of those that are aliases there."""
    import transformers
    from transformers.convert_slow_tokenizer import SLOW_TO_FAST_CONVERTERS
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    listed = {*TOKENIZER_MAPPING_NAMES.values(), *SLOW_TO_FAST_CONVERTERS, *dir(transformers)} - {None}
    ours = {f"{family.classes}Tokenizer" for family in FAMILIES.values()}
    return {name for name in listed | ours if name.removesuffix("Fast").endswith("Tokenizer")}


@pytest.mark.full  # it imports a hundred modules
def test_each_class_of_transformers_gives_what_our_table_says(tmp_path):
    from transformers import PreTrainedTokenizerBase, TokenizersBackend
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    compared, wrong = 0, []
    for name in sorted(names_of_transformers()):
        theirs = tokenizer_class_from_name(name) or TokenizersBackend
        if issubclass(theirs, PreTrainedTokenizerBase):  # and no stand-in for one whose library is not there
            tiny.write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
            if gives_types(tmp_path) != ("token_type_ids" in theirs.model_input_names):
                wrong.append(name)
            compared += 1
    assert compared > 100 and not wrong


@pytest.mark.full  # the next test has the rule, and this one AutoTokenizer itself
@pytest.mark.parametrize("named", ("BertTokenizer", "PreTrainedTokenizerFast"))
def test_each_familys_folder_gives_what_autotokenizer_gives(named, tmp_path):
    """ModernBERT's and XLM-RoBERTa-XL's have the generic tokenizer, whatever class is named."""
    from transformers import AutoTokenizer

    tiny.write_tokenizer(tmp_path)
    settle(tmp_path, {"tokenizer_class": named, "pad_token": "[PAD]"})
    for model_type in FAMILIES:
        tiny.write_json(tmp_path / "config.json", {"model_type": model_type})
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert gives_types(tmp_path) == ("token_type_ids" in theirs(*PAIR)), model_type


def test_each_model_type_gives_what_its_class_gives(tmp_path):
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    for model_type in FAMILIES:
        registered = TOKENIZER_MAPPING_NAMES.get(model_type)
        theirs = tokenizer_class_from_name(registered or "TokenizersBackend")
        settle(tmp_path, {})
        tiny.write_json(tmp_path / "config.json", {"model_type": model_type})
        assert gives_types(tmp_path) == ("token_type_ids" in theirs.model_input_names), model_type
        settle(tmp_path, {"tokenizer_class": "BertTokenizer"})  # which counts, unless the generic one is registered
        assert gives_types(tmp_path) == (registered != "TokenizersBackend"), model_type


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


@pytest.mark.parametrize("kind", ("named", "by its class"))
def test_the_server_tells_a_model_the_same(kind, tmp_path):
    """/rerank and /predict have the bits of a Reranker and of a TextClassifier."""
    folders = {labels: write(tmp_path / str(labels), num_labels=labels) for labels in (1, 3)}
    for folder in folders.values():
        settle(folder, SETTINGS[kind])
    engines = {labels: load_engine(str(folder), "auto", "cpu") for labels, folder in folders.items()}
    assert all(engine.model.has_types == (kind == "by its class") for engine in engines.values())
    (found,) = answer(engines[1], "/rerank", {"query": PAIR[0], "texts": [PAIR[1]]})
    assert np.float32(found["score"]) == fastbert.Reranker(folders[1], device="cpu").predict(PAIR)
    (labels,) = answer(engines[3], "/predict", {"inputs": [PAIR]})
    expected = fastbert.TextClassifier(folders[3], device="cpu").predict([PAIR])[0]
    assert np.array_equal(np.float32([entry["score"] for entry in labels]), np.sort(expected)[::-1])


def answer(engine, route, content):
    app = make_app(engine, Limits(), None, batch_tokens=64, workers=1, threads=1)
    return asgi.run(app, lambda client: client.send(route, content)).json
