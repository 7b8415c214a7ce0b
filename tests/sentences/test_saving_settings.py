"""All that a loaded model for texts was told comes back from the folder that it saves: here and in its own library."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import tiny
from full import left_to_full
from precise import assert_as_theirs, assert_close_to_theirs, in_float64
from tokenizers import Tokenizer
from torch import nn

import fastbert
from fastbert.data.usage import Usage
from fastbert.errors import ConfigError

TEXTS = ["the Cat sat on the mat.", "who sat in the OLD house and ran to the new house, we? " * 4, "Dogs ran"]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[2]), ("", TEXTS[0])]
HEADS = {"SentenceEncoder": "Model", "SparseEncoder": "MaskedLM"}
# What every constructor takes; each changes what the model gives.
SHARED = {
    "side and length": {"processor_kwargs": {"truncation_side": "left"}, "max_seq_length": 7},
    "case and length": {"processor_kwargs": {"do_lower_case": False, "model_max_length": 9}},
    "config": {"config_kwargs": {"layer_norm_eps": 0.5}},
}
PROMPTS = {"prompts": {"new": "we old "}, "default_prompt_name": "new"}
OWN = {
    "SentenceEncoder": {**PROMPTS, "similarity_fn_name": "manhattan", "truncate_dim": 5},
    "SparseEncoder": {**PROMPTS, "similarity_fn_name": "cosine", "max_active_dims": 4},
    "Reranker": {**PROMPTS, "activation_fn": nn.Tanh()},
    "TextClassifier": {"config_kwargs": {"problem_type": "multi_label_classification"}},
}
CASES = [(name, what) for name in OWN for what in (*SHARED, "own")]


def run(model, inputs=TEXTS):
    """What a model gives for texts; of ours, or of sentence-transformers'."""
    if not hasattr(model, "predict"):
        return model.encode(inputs)
    return model.predict(PAIRS if type(model).__name__ in ("Reranker", "CrossEncoder") else inputs)


def written(folder, name):
    head = HEADS.get(name, "SequenceClassification")
    tiny.write_model(
        folder, head=head, **({"num_labels": 3 if name == "TextClassifier" else 1} if head[0] == "S" else {})
    )
    return folder


def theirs(name, folder):
    library = pytest.importorskip("sentence_transformers")
    kind = {"SentenceEncoder": "SentenceTransformer", "Reranker": "CrossEncoder"}.get(name, name)
    return getattr(library, kind)(str(folder), device="cpu")


def assert_pipelines(ours, folder):
    """A TextClassifier is beside transformers' pipeline, which is told nothing of the length or the side."""
    pipeline = pytest.importorskip("transformers").pipeline
    near = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    for row, *wanted in zip(
        ours.predict(TEXTS), *(p(TEXTS, truncation=True) for p in (near, in_float64(near))), strict=True
    ):
        scores = [{entry["label"]: entry["score"] for entry in each} for each in wanted]
        assert_close_to_theirs(row.tolist(), *([each[label] for label in ours.labels] for each in scores))


def as_array(found):
    return found if isinstance(found, np.ndarray) else found.to_dense().numpy()


def is_told_to_another(p) -> bool:
    """What all take has a third of the kinds, and each kind one of it, beside its own."""
    return p["what"] != "own" and (list(OWN).index(p["name"]) + list(SHARED).index(p["what"])) % 3 != 0


@left_to_full(is_told_to_another)
@pytest.mark.parametrize(("name", "what"), CASES)
def test_what_a_constructor_was_told(tmp_path, name, what):
    kind, old = getattr(fastbert, name), written(tmp_path / "old", name)
    model = kind(old, device="cpu", **SHARED.get(what, OWN[name]))
    found = as_array(run(model))
    plain = as_array(run(kind(old, device="cpu")))
    assert plain.shape != found.shape or not np.allclose(plain, found)
    model.save_pretrained(tmp_path / "new")
    again = kind(tmp_path / "new", device="cpu")
    assert np.array_equal(as_array(run(again)), found)
    names = ["max_seq_length", "prompts", "default_prompt_name"]
    names += {
        "SentenceEncoder": ["similarity_fn_name", "truncate_dim"],
        "SparseEncoder": ["similarity_fn_name", "max_active_dims"],
    }.get(name, [])
    if name == "TextClassifier":
        assert_pipelines(again, tmp_path / "new")
        their = again
    else:
        their = theirs(name, tmp_path / "new")
        assert_as_theirs(again, their, run)
    for each in (again, their):
        assert [getattr(each, n) for n in names] == [getattr(model, n) for n in names]


@pytest.mark.parametrize("name", OWN)
def test_a_side_that_stands_in_tokenizer_json_alone(tmp_path, name):
    folder = written(tmp_path / "old", name)
    (folder / "tokenizer_config.json").unlink()
    right = as_array(run(getattr(fastbert, name)(folder, device="cpu", max_seq_length=7)))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(30, direction="left")
    tokenizer.save(str(folder / "tokenizer.json"))
    model = getattr(fastbert, name)(folder, device="cpu", max_seq_length=7)
    model.save_pretrained(tmp_path / "new")
    again = getattr(fastbert, name)(tmp_path / "new", device="cpu")
    assert not np.allclose(as_array(run(model)), right)
    assert np.array_equal(as_array(run(again)), as_array(run(model)))


def test_a_sentence_transformer_around_an_encoder(tmp_path):
    """It cuts texts for its trainer as the encoder does, and saves what was set on it."""
    folder = tiny.write_sentence_model(tmp_path / "old")
    encoder = fastbert.SentenceEncoder(folder, device="cpu", **SHARED["side and length"])
    model = encoder.as_sentence_transformer()
    assert model.preprocess(TEXTS[1:2])["input_ids"][0].tolist() == encoder.tokenize(TEXTS[1:2]).ids.tolist()
    model.prompts["new"], model.default_prompt_name, model.truncate_dim = "we ", "new", 5
    model.similarity_fn_name = "dot"
    model.save_pretrained(str(tmp_path / "new"), create_model_card=True)
    again = fastbert.SentenceEncoder(tmp_path / "new", device="cpu")
    assert np.array_equal(again.encode(TEXTS), model.encode(TEXTS)) and again.prompts["new"] == "we "
    assert (again.default_prompt_name, again.truncate_dim, again.similarity_fn_name) == ("new", 5, "dot")


def settings_of(model):
    names = ("default_prompt_name", "similarity_fn_name", "truncate_dim", "max_seq_length")
    return dict(model.prompts), *(getattr(model, name) for name in names)


def test_saving_what_is_around_an_encoder_leaves_the_encoder_alone(tmp_path):
    """In a pickle, a copy and a folder is what was set on the model; the encoder is the caller's."""
    encoder = fastbert.SentenceEncoder(tiny.write_sentence_model(tmp_path / "old"), device="cpu")
    vectors, settings = encoder.encode(TEXTS), settings_of(encoder)
    model = encoder.as_sentence_transformer()
    model.prompts["new"], model.default_prompt_name, model.similarity_fn_name = "we ", "new", "dot"
    with model.truncate_embeddings(4):
        told, expected = settings_of(model), model.encode(TEXTS)
        made = [pickle.loads(pickle.dumps(model)), copy.copy(model), copy.deepcopy(model)]
        model.save_pretrained(str(tmp_path / "new"))
    made.append(fastbert.SentenceEncoder(tmp_path / "new", device="cpu"))
    for again in made:
        assert settings_of(again) == told and np.array_equal(again.encode(TEXTS), expected)
        again.prompts["mine"] = "a "
    assert settings_of(encoder) == settings and np.array_equal(encoder.encode(TEXTS), vectors)
    assert expected.shape == (3, 4) and "mine" not in model.prompts


@pytest.mark.parametrize("name", ["TextClassifier", "TokenClassifier", "QuestionAnswerer"])
def test_what_a_fine_tuning_said_of_its_folder(tmp_path, name):
    head, task = {
        "TextClassifier": ("SequenceClassification", "classification"),
        "TokenClassifier": ("TokenClassification", "tokens"),
        "QuestionAnswerer": ("QuestionAnswering", "qa"),
    }[name]
    tiny.write_model(tmp_path / "old", head=head)
    Usage(task, ("text",), 20, 4, no_answer=name == "QuestionAnswerer", windows=name == "TextClassifier").save(
        tmp_path / "old"
    )
    model = getattr(fastbert, name)(tmp_path / "old", device="cpu")
    model.max_seq_length = 24
    model.save_pretrained(tmp_path / "new")
    again = getattr(fastbert, name)(tmp_path / "new", device="cpu")
    assert again.windows == model.windows and again.max_seq_length == 24
    inputs = PAIRS[:2] if name == "QuestionAnswerer" else TEXTS
    assert str(again.predict(inputs)) == str(model.predict(inputs))


def test_what_no_folder_can_say(tmp_path):
    """Nothing is written then."""
    folder = written(tmp_path / "old", "Reranker")
    for fn, named in ((nn.Softplus(beta=2.0), r"Softplus\(beta=2.0"), (lambda x: x, "<lambda>")):
        model = fastbert.Reranker(folder, device="cpu", activation_fn=fn)
        with pytest.raises(ConfigError, match=f"activation_fn is .*{named}.* which a folder cannot name"):
            model.save_pretrained(tmp_path / "new")
    with pytest.raises(ConfigError, match="safe_serialization=False is not supported"):
        fastbert.Reranker(folder, device="cpu").save_pretrained(tmp_path / "new", safe_serialization=False)
    assert not (tmp_path / "new").exists()


def test_a_model_card(tmp_path):
    """Only where it is asked for, and there is none."""
    model = fastbert.TextClassifier(written(tmp_path / "old", "TextClassifier"), device="cpu")
    model.save(tmp_path / "new")
    assert not (tmp_path / "new/README.md").exists()
    model.save(tmp_path / "new", "me/films", create_model_card=True, train_datasets=["imdb"])
    card = (tmp_path / "new/README.md").read_text()
    assert 'fastbert.TextClassifier.from_pretrained("me/films")' in card and "Labels: LABEL_0, LABEL_1" in card
    assert "pipeline_tag: text-classification" in card
    (tmp_path / "new/README.md").write_text("mine")
    model.save(tmp_path / "new", create_model_card=True)
    assert (tmp_path / "new/README.md").read_text() == "mine"
    assert json.loads((tmp_path / "new/config_sentence_transformers.json").read_text())["model_type"] == "CrossEncoder"


def test_a_tokenizer_that_no_longer_cuts(tmp_path):
    """The folder, sentence-transformers' form and windows go by the model's own length then."""
    left = {"processor_kwargs": {"truncation_side": "left"}}
    folder = tiny.write_sentence_model(tmp_path / "old")
    encoder = fastbert.SentenceEncoder(folder, device="cpu", max_seq_length=12, **left)
    expected, windows = encoder.encode(TEXTS), encoder.encode(TEXTS, windows=fastbert.Windows())
    encoder.tokenizer.no_truncation()
    encoder.save_pretrained(tmp_path / "new")
    again = fastbert.SentenceEncoder(tmp_path / "new", device="cpu")
    assert again.max_seq_length == 12 and np.array_equal(again.encode(TEXTS), expected)
    assert encoder.as_sentence_transformer().preprocess(TEXTS)["input_ids"].shape[1] == 12
    assert np.array_equal(encoder.encode(TEXTS, windows=fastbert.Windows()), windows)
