"""Reranker against sentence-transformers' CrossEncoder, on tiny random models."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from full import halved
from precise import assert_as_theirs, assert_close_to_theirs, in_float64
from safetensors.torch import load_file, save_file
from torch import nn

import fastbert
from fastbert.errors import CheckpointError, ConfigError, InputError
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

PAIRS = [
    ("the cat sat", "on the mat."),
    ("who ran?", "a dog ran in to the new house and sat on the old mat " * 3),  # longer than 64 tokens: cut
    ("the old house and the new house and the dog and the cat " * 4, "a cat"),
    ("", "a dog"),
    ("Zebra CATS", ""),
]


def write(folder: Path, **options) -> Path:
    return tiny.write_model(folder, head="SequenceClassification", **{"num_labels": 1, **options})


def cross_encoder(folder: Path, **options):
    return pytest.importorskip("sentence_transformers").CrossEncoder(str(folder), device="cpu", **options)


def compare(folder: Path, **predict_options) -> fastbert.Reranker:
    """By the error rule: theirs in float32 is the baseline, theirs in float64 the oracle."""
    ours = fastbert.Reranker.from_pretrained(folder, device="cpu")
    theirs = cross_encoder(folder).predict(PAIRS, **predict_options)
    exact = cross_encoder(folder, model_kwargs={"dtype": torch.float64})
    exact = exact.predict(PAIRS, convert_to_tensor=True, **predict_options)
    scores = ours.predict(PAIRS, **predict_options)
    assert scores.shape == theirs.shape and scores.dtype == theirs.dtype
    assert_close_to_reference(torch.from_numpy(scores), exact, torch.from_numpy(theirs), GRADIENT_FACTOR, "scores")
    return ours


@halved
@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "electra"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_are_cross_encoders(tmp_path, model_type, num_labels):
    encoder = compare(write(tmp_path, model_type=model_type, num_labels=num_labels))
    assert encoder.num_labels == num_labels


def test_options_of_predict(tmp_path):
    write(tmp_path, num_labels=3)
    compare(tmp_path, apply_softmax=True)
    compare(tmp_path, activation_fn=nn.Tanh())
    compare(tmp_path, prompt="who? ")
    reranker = fastbert.Reranker.from_pretrained(tmp_path, device="cpu", activation_fn=nn.Sigmoid())
    theirs = cross_encoder(tmp_path, activation_fn=nn.Sigmoid())
    assert_as_theirs(reranker, theirs, lambda model: model.predict(PAIRS))
    one = reranker.predict(PAIRS[0], convert_to_tensor=True)
    assert one.shape == (3,) and torch.equal(one, reranker.predict([PAIRS[0]], convert_to_tensor=True)[0])
    assert reranker.predict([]).shape == (0, 3)


class _Nothing(nn.ModuleList):
    """Without children, so that it is false, too."""

    def forward(self, scores):
        return scores


@pytest.mark.parametrize("fn", (nn.Sequential(), _Nothing()), ids=("Sequential", "ModuleList"))
def test_an_activation_that_is_false(tmp_path, fn):
    """Each door takes it, and no sigmoid in its place; CrossEncoder and an accelerated one say what it gives."""
    assert not fn
    theirs = cross_encoder(write(tmp_path))
    ours, with_it = fastbert.Reranker(tmp_path, device="cpu"), fastbert.Reranker(tmp_path, activation_fn=fn)
    fastbert.accelerate(accelerated := cross_encoder(tmp_path, activation_fn=fn))
    query, texts = PAIRS[0][0], [text for _, text in PAIRS]
    assert_as_theirs(with_it, theirs, lambda model: model.predict(PAIRS, activation_fn=nn.Identity()))
    for scores in (with_it.predict(PAIRS), ours.predict(PAIRS, activation_fn=fn)):
        assert np.array_equal(scores, ours.predict(PAIRS, activation_fn=nn.Identity()))
    assert with_it.rank(query, texts) == ours.rank(query, texts, activation_fn=fn)
    assert ours.rank(query, texts, activation_fn=fn) == ours.rank(query, texts, activation_fn=nn.Identity())
    assert np.array_equal(accelerated.predict(PAIRS), accelerated.predict(PAIRS, activation_fn=nn.Identity()))


def test_the_score_of_one_pair_is_a_number(tmp_path):
    """As CrossEncoder's: a NumPy scalar, which may be a key of a dict; also where the activation takes the last
    dimension away.
    """
    ours, theirs = fastbert.Reranker(write(tmp_path), device="cpu"), cross_encoder(tmp_path)
    for fn in (None, lambda scores: scores.squeeze(-1)):
        one = ours.predict(PAIRS[0], activation_fn=fn)
        assert type(one) is type(theirs.predict(PAIRS[0], activation_fn=fn)) is np.float32
        assert {one: "a key"} and one == ours.predict(PAIRS[:1], activation_fn=fn)[0]
    assert ours.predict(PAIRS[0], convert_to_tensor=True).shape == ()
    assert isinstance(ours.predict(PAIRS[0], convert_to_numpy=False), torch.Tensor)


def test_a_folder_that_cross_encoder_saved(tmp_path):
    """Its activation, its prompts and its length come along, in today's files."""
    write(tmp_path / "plain")
    their = cross_encoder(tmp_path / "plain", activation_fn=nn.Tanh(), max_length=40, prompts={"q": "who? "})
    their.default_prompt_name = "q"
    their.save_pretrained(str(tmp_path / "saved"))
    ours = compare(tmp_path / "saved")
    assert isinstance(ours.activation_fn, nn.Tanh) and ours.max_seq_length == 40
    assert ours.prompts == {"q": "who? "} and ours.default_prompt_name == "q"


@pytest.mark.parametrize("entry", ["sbert_ce_default_activation_function", "sentence_transformers"])
def test_the_activation_of_older_folders(tmp_path, entry):
    name = "torch.nn.modules.linear.Identity"
    tiny.edit_config(write(tmp_path), **{entry: {"activation_fn": name} if entry[1] == "e" else name})
    assert isinstance(compare(tmp_path).activation_fn, nn.Identity)


def test_rank(tmp_path):
    write(tmp_path)
    ours, theirs = fastbert.Reranker.from_pretrained(tmp_path, device="cpu"), cross_encoder(tmp_path)
    documents = ["a cat", "the dog", "a cat", "the old house ran", "we sat"]

    def named(rows):  # equal texts in any order: torch's products may differ by the row of a batch that a text has
        return [{**row, "corpus_id": documents.index(documents[row["corpus_id"]]), "score": None} for row in rows]

    for options in ({}, {"top_k": 2}, {"return_documents": True}):
        found, wanted, exact = (
            model.rank("who ran?", documents, **options) for model in (ours, theirs, in_float64(theirs))
        )
        assert named(found) == named(wanted)
        assert_close_to_theirs(*([float(row["score"]) for row in rows] for rows in (found, wanted, exact)))
        if "top_k" not in options:  # ours have the same score, and keep their order
            cats = [row for row in found if documents[row["corpus_id"]] == "a cat"]
            assert [row["corpus_id"] for row in cats] == [0, 2] and cats[0]["score"] == cats[1]["score"]


def test_scores_do_not_depend_on_the_batch(tmp_path):
    write(tmp_path)
    near, exact = (fastbert.Reranker.from_pretrained(tmp_path, device="cpu", dtype=d) for d in ("float32", "float64"))
    alone, oracle = (np.stack([reranker.predict(pair) for pair in PAIRS]) for reranker in (near, exact))
    for budget in (1, 70, 10_000):
        assert_close_to_theirs(near.predict(PAIRS, batch_tokens=budget), alone, oracle)


def test_int8(tmp_path):
    write(tmp_path)
    exact = fastbert.Reranker.from_pretrained(tmp_path, device="cpu", activation_fn=nn.Identity())
    int8 = fastbert.Reranker.from_pretrained(tmp_path, device="cpu", dtype="int8", activation_fn=nn.Identity())
    a, b = exact.predict(PAIRS), int8.predict(PAIRS)
    assert not np.array_equal(a, b) and np.abs(a - b).max() < 0.1 * np.abs(a).max()
    fastbert.quantize(exact, calibration=PAIRS)  # with calibration: it runs what predict runs
    assert np.abs(exact.predict(PAIRS) - a).max() < 0.1 * np.abs(a).max()


def test_weights_that_are_not_used_are_named(tmp_path):
    folder = write(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"other.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"in the checkpoint, but not used: other\.weight"):
        fastbert.Reranker.from_pretrained(folder)


def test_what_is_no_reranker(tmp_path):
    plain, lacks = tiny.write_model(tmp_path / "plain"), "is no reranker: its checkpoint lacks classifier"
    with pytest.raises(CheckpointError, match=lacks):
        fastbert.Reranker.from_pretrained(plain)
    saved = write(tmp_path / "named")
    tiny.write_json(saved / "config_sentence_transformers.json", {"activation_fn": "my.own.Activation"})
    with pytest.raises(ConfigError, match=r"activation 'my\.own\.Activation'; fastbert has Sigmoid"):
        fastbert.Reranker.from_pretrained(saved)
    assert fastbert.Reranker.from_pretrained(saved, activation_fn=nn.Identity()).predict([]).shape == (0,)
    tiny.write_modules(saved, "Pooling")
    tiny.write_json(saved / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    with pytest.raises(ConfigError, match=r"fastbert\.SentenceEncoder loads it"):
        fastbert.Reranker.from_pretrained(saved, activation_fn=nn.Identity())


def test_what_are_no_pairs(tmp_path):
    reranker = fastbert.Reranker.from_pretrained(write(tmp_path), device="cpu")
    wrong = {
        "inputs[1] has 3 parts": [("a", "b"), ("a", "b", "c")],
        "inputs has 3 parts": ["a", "b", "c"],
        "inputs[0][1] is a NoneType": [("a", None)],
        "inputs[1] is a str": [("a", "b"), "ab"],
        "inputs is a str": "a",
    }
    for message, inputs in wrong.items():
        with pytest.raises(TypeError, match=re.escape(message)):
            reranker.predict(inputs)
    with pytest.raises(InputError, match=r"inputs\[0\]\[0\] is not valid Unicode"):
        reranker.predict([("\ud800", "a")])
    with pytest.raises(InputError, match="exclude each other"):
        reranker.predict(PAIRS, prompt="a", prompt_name="b")
    with pytest.raises(InputError, match="unknown prompt 'b'; this model has: no prompts"):
        reranker.predict(PAIRS, prompt_name="b")
    with pytest.raises(InputError, match="top_k is 0"):
        reranker.rank("a", ["b"], top_k=0)
