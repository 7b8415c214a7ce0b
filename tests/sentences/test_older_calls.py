"""What sentence-transformers' users call by names of older releases, and inputs that are pairs: with its numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tiny
import torch
from precise import assert_as_theirs

import fastbert
from fastbert.errors import ConfigError, InputError

TEXTS = ["the cat sat on the mat.", "a dog ran", "who sat in the old house and ran to it, we? " * 9]
PAIRS = [("a cat", "the dog sat"), ["we", "ran to the house " * 20], "the mat"]
HEADS = {"SparseEncoder": "MaskedLM", "Reranker": "SequenceClassification", "TextClassifier": "SequenceClassification"}


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("sentence_transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_sentence_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ours(folder):
    return fastbert.SentenceEncoder(folder, device="cpu")


def numbers(found):
    return found.to_dense().numpy() if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize("name", ["SentenceEncoder", *HEADS])
def test_inputs_called_sentences(tmp_path, name):
    model = getattr(fastbert, name)(tiny.write_model(tmp_path, head=HEADS.get(name, "Model")), device="cpu")
    calls = ["encode", *(["predict"] if "Sequence" in HEADS.get(name, "") else ["encode_query", "encode_document"])]
    given = [("a cat", "a dog")] if name == "Reranker" else TEXTS
    for call in calls:
        method = getattr(model, call)
        assert np.array_equal(numbers(method(sentences=given, batch_size=2)), numbers(method(given, batch_size=2)))
        for args, options in (((given,), {}), ((), {"inputs": given})):
            with pytest.raises(TypeError, match="inputs and its old name sentences are both given"):
                method(*args, sentences=given, **options)
    if name == "SentenceEncoder":
        assert np.array_equal(model.as_sentence_transformer().encode(sentences=given), model.encode(given))


def test_pairs_are_read_side_by_side(ours, folder, library):
    """With the types of their tokens; a pair is one input, and the prompt is before its first text."""
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    for options in ({}, {"prompt": "we "}, {"batch_size": 1}):
        assert_as_theirs(ours, theirs, lambda model, options=options: model.encode(PAIRS, **options))
    assert_as_theirs(ours, theirs, lambda model: model.encode(PAIRS[:1]))
    assert_as_theirs(ours, theirs, lambda model: model.encode(("a cat", "a dog")))  # two texts
    rows = ours.encode(PAIRS, output_value=None)
    assert np.array_equal(np.stack([row["sentence_embedding"].numpy() for row in rows]), ours.encode(PAIRS))
    assert np.array_equal(ours.encode(PAIRS)[2], ours.encode(PAIRS[2]))


def test_pairs_of_a_model_without_types(tmp_path, library):
    tiny.write_model(tmp_path, model_type="distilbert")
    ours, theirs = (
        fastbert.SentenceEncoder(tmp_path, device="cpu"),
        library.SentenceTransformer(str(tmp_path), device="cpu"),
    )
    assert_as_theirs(ours, theirs, lambda model: model.encode(PAIRS))


def test_pairs_of_a_sparse_encoder(tmp_path, library):
    folder = tiny.write_model(tmp_path, head="MaskedLM")
    ours, theirs = fastbert.SparseEncoder(folder, device="cpu"), library.SparseEncoder(str(folder), device="cpu")
    for options in ({}, {"prompt": "we "}):
        assert_as_theirs(ours, theirs, lambda model, options=options: model.encode(PAIRS, **options))
    assert_as_theirs(ours, theirs, lambda model: model.encode_query(PAIRS[:1]))
    types = ours.model.base_model.embeddings.token_type_embeddings.weight
    told = ours.encode(PAIRS[:1]).to_dense()
    types.data[1] += 1.0
    assert not torch.allclose(ours.encode(PAIRS[:1]).to_dense(), told)  # the second text's tokens are of type 1
    with pytest.raises(TypeError, match=r"texts\[1\] has 3 parts"):
        ours.encode(["a", ("a", "b", "c")])


def test_a_stream_of_pairs(ours):
    chunks = [vectors for vectors, _ in ours.encode_stream(iter(PAIRS), chunk_texts=2)]
    assert np.array_equal(np.concatenate(chunks), np.concatenate([ours.encode(PAIRS[:2]), ours.encode(PAIRS[2:])]))
    with pytest.raises(InputError, match=r"windows are for texts, and there are pairs of texts: texts\[1\]"):
        list(ours.encode_stream([PAIRS[2], PAIRS[0]], windows=fastbert.Windows()))


def test_pairs_become_what_the_wrappers_modules_take(ours, folder, library):
    """As sentence-transformers' own: ids, types and vectors; the encoder's ids, too."""
    wrapped, theirs = ours.as_sentence_transformer(), library.SentenceTransformer(str(folder), device="cpu")
    for prompt in (None, "we "):
        wanted = theirs.preprocess(PAIRS, prompt=prompt)
        for found in (wrapped.preprocess(PAIRS, prompt=prompt), wrapped[0].preprocess(PAIRS, prompt=prompt)):
            for name in ("input_ids", "token_type_ids", "attention_mask"):
                assert torch.equal(found[name], wanted[name])
        made = ours.tokenize([PAIRS[0]], prompt or "")
        assert wanted["input_ids"][0][: len(made.ids)].tolist() == made.ids.tolist()
    assert_as_theirs(wrapped, theirs, lambda model: model(model.preprocess(PAIRS))["sentence_embedding"])


def test_what_is_no_pair(ours):
    for message, inputs in {
        "texts[1] has 3 parts": ["a", ("a", "b", "c")],
        "texts[0][1] is a int": [("a", 3)],
        "texts[0] is a dict": [{"a": "b"}],
    }.items():
        with pytest.raises(TypeError, match=re.escape(message)):
            ours.encode(inputs)
    with pytest.raises(InputError, match="windows are for texts, and there are pairs"):
        ours.encode(PAIRS, windows=fastbert.Windows())


@pytest.mark.parametrize("member", ["COSINE", "DOT", "DOT_PRODUCT", "EUCLIDEAN", "MANHATTAN"])
def test_members_of_similarity_function(folder, library, member):
    function = getattr(library.SimilarityFunction, member)
    model = fastbert.SentenceEncoder(folder, device="cpu", similarity_fn_name=function)
    theirs = library.SentenceTransformer(str(folder), device="cpu", similarity_fn_name=function)
    assert model.similarity_fn_name == theirs.similarity_fn_name == function.value
    assert_as_theirs(model, theirs, lambda each: each.similarity(each.encode(TEXTS), each.encode(TEXTS[:2])))
    model.similarity_fn_name = library.SimilarityFunction.DOT
    assert model.similarity_fn_name == "dot"
    with pytest.raises(ConfigError, match="unknown similarity 'maxsim'; there are"):
        model.similarity_fn_name = library.SimilarityFunction.MAXSIM


def test_vectors_are_shorter_for_a_while(ours):
    whole = ours.encode(TEXTS)
    for shorter in (ours.truncate_embeddings, ours.truncate_sentence_embeddings):
        with pytest.raises(KeyError), shorter(5):
            assert np.array_equal(ours.encode(TEXTS), whole[:, :5]) and ours.dim == 5
            raise KeyError
        assert ours.truncate_dim is None
    with pytest.raises(InputError, match="truncate_dim is 0"), ours.truncate_embeddings(0):
        pass


def test_words_that_vectors_share(tmp_path, library):
    folder = tiny.write_model(tmp_path, head="MaskedLM")
    ours, theirs = fastbert.SparseEncoder(folder, device="cpu"), library.SparseEncoder(str(folder), device="cpu")
    vectors = ours.encode(TEXTS, max_active_dims=20)
    for a in (vectors[0], vectors[0].to_dense()):
        for b in (vectors[1], vectors, vectors.to_dense(), -vectors, vectors[1].to_dense()):
            found, wanted = ours.intersection(a, b), theirs.intersection(a, b)
            assert found.is_sparse and found.shape == wanted.shape and torch.equal(found.to_dense(), wanted.to_dense())
            assert found._nnz() == wanted._nnz()
    assert ours.decode(ours.intersection(vectors[0], vectors[1]), top_k=3)
    with pytest.raises(InputError, match=r"embeddings have the shapes \(3, 77\) and \(77,\)"):
        ours.intersection(torch.ones(3, 77), torch.ones(77))
