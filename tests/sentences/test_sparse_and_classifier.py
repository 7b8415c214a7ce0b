"""SparseEncoder against sentence-transformers', TextClassifier against transformers' pipeline; tiny random models."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tiny
import torch
from full import halved, left_to_full
from precise import assert_as_theirs, assert_close_to_theirs, in_float64

import fastbert
from fastbert.errors import CheckpointError, ConfigError, InputError
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

TEXTS = ["the cat sat on the mat.", "a dog ran", "", "who sat in the old house and ran to it, we? " * 9, "Zebra CATS"]


def sparse_pair(folder):
    ours = fastbert.SparseEncoder.from_pretrained(folder, device="cpu")
    return ours, pytest.importorskip("sentence_transformers").SparseEncoder(str(folder), device="cpu")


@left_to_full(lambda p: p["model_type"] == "roberta")  # its head is DistilBERT's, by other names
@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert"])
def test_vectors_are_sparse_encoders(tmp_path, model_type):
    ours, theirs = sparse_pair(tiny.write_model(tmp_path, model_type=model_type, head="MaskedLM"))
    ours.max_seq_length = theirs.max_seq_length = 60  # RoBERTa's 64 positions are for 63 tokens; theirs tries 64
    for options in (
        {},
        {"convert_to_sparse_tensor": False},
        {"max_active_dims": 5},
        {"prompt": "a "},
        {"batch_size": 2},
    ):
        assert_as_theirs(ours, theirs, lambda model, options=options: model.encode(TEXTS, **options))
        assert_as_theirs(ours, theirs, lambda model, options=options: model.encode(TEXTS[0], **options))
    listed = ours.encode(TEXTS, convert_to_tensor=False)
    assert isinstance(listed, list) and torch.equal(listed[1].to_dense(), ours.encode(TEXTS)[1].to_dense())
    assert ours.dim == ours.get_embedding_dimension() == len(tiny.VOCAB) and ours.encode([]).shape == (0, ours.dim)
    vectors, their = ours.encode(TEXTS), theirs.encode(TEXTS)
    assert ours.similarity_fn_name == theirs.similarity_fn_name == "dot"
    assert_as_theirs(ours, theirs, lambda model: model.similarity(*[model.encode(TEXTS)] * 2))
    assert_as_theirs(ours, theirs, lambda model: model.similarity_pairwise(*[model.encode(TEXTS)] * 2))
    found, wanted = ours.decode(vectors, top_k=4), theirs.decode(their, top_k=4)
    assert [[token for token, _ in row] for row in found] == [[token for token, _ in row] for row in wanted]
    assert ours.decode(vectors[0]) == ours.decode(vectors)[0]


@halved
@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_a_splade_folder(tmp_path, strategy, activation):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    plain = tiny.write_model(tmp_path / "plain", head="MaskedLM")
    pooling = SpladePooling(pooling_strategy=strategy, activation_function=activation)
    made = library.SparseEncoder(modules=[MLMTransformer(str(plain)), pooling], device="cpu", max_active_dims=9)
    made.save_pretrained(str(tmp_path / "saved"))
    ours, theirs = sparse_pair(tmp_path / "saved")
    assert ours.max_active_dims == 9
    assert_as_theirs(ours, theirs, lambda model: model.encode(TEXTS))
    assert_as_theirs(ours, theirs, lambda model: model.encode_query(TEXTS, max_active_dims=99))


def test_the_head_runs_in_parts(tmp_path, monkeypatch):
    ours = fastbert.SparseEncoder.from_pretrained(tiny.write_model(tmp_path, head="MaskedLM"), device="cpu")
    whole = ours.encode(TEXTS).to_dense()
    monkeypatch.setattr("fastbert.sentences.sparse_encoder.HEAD_TOKENS", 20)
    exact = fastbert.SparseEncoder.from_pretrained(tmp_path, device="cpu", dtype="float64").encode(TEXTS).to_dense()
    assert_close_to_reference(ours.encode(TEXTS).to_dense(), exact.double(), whole, GRADIENT_FACTOR)


def test_what_is_no_sparse_encoder(tmp_path):
    plain = tiny.write_model(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="has no masked-LM head: it lacks"), pytest.warns(UserWarning):
        fastbert.SparseEncoder.from_pretrained(plain)
    tiny.write_modules(plain, "LayerNorm")
    with pytest.raises(ConfigError, match="a SparseEncoder has SpladePooling second"):
        fastbert.SparseEncoder.from_pretrained(plain)
    wrong_class = {"SentenceEncoder": ("Pooling", fastbert.SparseEncoder)}
    wrong_class |= {"SparseEncoder": ("SpladePooling", fastbert.Reranker)}
    for right, (module, kind) in wrong_class.items():
        tiny.write_modules(plain, module)
        with pytest.raises(ConfigError, match=f"is an encoder of texts.*has {module} behind.* Load it as a {right}$"):
            kind(plain)
    ours = fastbert.SparseEncoder.from_pretrained(tiny.write_model(tmp_path / "lm", head="MaskedLM"), device="cpu")
    wrong = {"max_active_dims is 0": {"max_active_dims": 0}, "runs on one device": {"device": ["cpu"]}}
    for message, options in wrong.items():
        with pytest.raises(InputError, match=message):
            ours.encode(TEXTS, **options)
    with pytest.raises(InputError, match="top_k is 0"):
        ours.decode(ours.encode("a"), top_k=0)


KINDS = {
    "three": {"num_labels": 3, "id2label": {0: "bad", 1: "so", 2: "good"}},
    "one": {"num_labels": 1},
    "several at once": {"num_labels": 3, "problem_type": "multi_label_classification"},
    "regression": {"num_labels": 1, "problem_type": "regression"},
}


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_probabilities_are_the_pipelines(tmp_path, fields):
    transformers = pytest.importorskip("transformers")
    tiny.write_model(tmp_path, head="SequenceClassification", **fields)
    ours = fastbert.TextClassifier.from_pretrained(tmp_path, device="cpu")
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path), device="cpu", top_k=None)
    for inputs, theirs in (
        (TEXTS, TEXTS),
        (
            [("a cat", "the dog"), ("we", "ran to it")],
            [{"text": "a cat", "text_pair": "the dog"}, {"text": "we", "text_pair": "ran to it"}],
        ),
    ):
        found, answers = (
            ours.predict(inputs),
            [pipe(theirs, truncation=True, max_length=64) for pipe in (pipeline, in_float64(pipeline))],
        )
        for row, *wanted in zip(found, *answers, strict=True):
            scores = [{entry["label"]: entry["score"] for entry in each} for each in wanted]
            near, exact = ([each[label] for label in ours.labels] for each in scores)
            assert_close_to_theirs(row.tolist(), near, exact)
    assert np.array_equal(ours.predict(TEXTS[0]), ours.predict([TEXTS[0]])[0])
    assert ours.predict([]).shape == (0, ours.num_labels)


def test_what_is_no_text(tmp_path):
    ours = fastbert.TextClassifier.from_pretrained(
        tiny.write_model(tmp_path, head="SequenceClassification"), device="cpu"
    )
    wrong = {"inputs[1] is a int": ["a", 3], "inputs[0] has 3 parts": [("a", "b", "c")], "inputs is a int": 3}
    for message, inputs in wrong.items():
        with pytest.raises(TypeError, match=re.escape(message)):
            ours.predict(inputs)


@pytest.mark.full  # test_sentence_options.py has a pool with dense ones
def test_sparse_vectors_by_processes(tmp_path):
    """The same bits as alone, chunk by chunk; their lengths by the task; how many words are in them."""
    tiny.write_model(tmp_path, head="MaskedLM")
    texts = TEXTS * 2
    ours, theirs = sparse_pair(tmp_path)
    alone = torch.cat([ours.encode(texts[i : i + 3]) for i in range(0, len(texts), 3)]).to_dense()
    with ours.start_multi_process_pool(["cpu"]) as pool:
        found = ours.encode(texts, pool=pool, chunk_size=3)
    assert found.is_sparse and found.is_coalesced() and torch.equal(found.to_dense(), alone)
    for vectors in (found, found[0], found.to_dense(), torch.zeros(0, ours.dim)):
        wanted = theirs.sparsity(vectors)
        assert ours.sparsity(vectors) == pytest.approx(wanted)
