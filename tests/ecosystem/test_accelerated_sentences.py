"""sentence-transformers' ways with features: queries that are expanded, and results that stay among them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import tiny
import torch
from precise import assert_as_theirs

import fastbert

library = pytest.importorskip("sentence_transformers", minversion="6")
from sentence_transformers.base.modules import Transformer  # noqa: E402
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask  # noqa: E402

TEXTS = ["the cat sat on the mat.", "a dog ran", "who sat in the old house"]
EXPANDED = {"strategy": "fixed", "attend": False, "length": 12}  # as ColBERT does


def multi_vectors(folder: Any, expansion: dict | None) -> Any:
    first = Transformer(str(tiny.write_model(folder)), query_expansion=expansion)
    return library.MultiVectorEncoder(modules=[first, MultiVectorMask()], device="cpu")


def test_queries_whose_masked_tokens_are_read_run_packed(tmp_path):
    """They attend, and nothing attends to them."""
    theirs = multi_vectors(tmp_path, EXPANDED)
    ours = pickle.loads(pickle.dumps(fastbert.accelerate(copy.deepcopy(theirs))))
    found = assert_as_theirs(ours, theirs, lambda model: model.encode_query(TEXTS))
    assert len(found[1]) == 12 and (fastbert.status(ours).packed, fastbert.status(ours).others) == (1, 0)
    documents = assert_as_theirs(ours, theirs, lambda model: model.encode_document(TEXTS))
    assert (fastbert.status(ours).packed, fastbert.status(ours).others) == (2, 0)
    assert_as_theirs(ours, theirs, lambda model: model.similarity(found, documents))
    assert "forward" not in vars(fastbert.restore(ours)[0])


def test_the_setting_of_now_decides(tmp_path):
    """Tokens that are seen are packed as all others."""
    theirs = multi_vectors(tmp_path, EXPANDED | {"attend": True})
    ours = fastbert.accelerate(copy.deepcopy(theirs))
    assert_as_theirs(ours, theirs, lambda model: model.encode_query(TEXTS))
    assert (fastbert.status(ours).packed, fastbert.status(ours).others) == (1, 0)
    for model in (ours, theirs):
        model[0].query_expansion = EXPANDED
    assert_as_theirs(ours, theirs, lambda model: model.encode_query(TEXTS))
    assert (fastbert.status(ours).packed, fastbert.status(ours).others) == (2, 0)


def test_a_transformer_whose_forward_is_replaced(tmp_path):
    model = multi_vectors(tmp_path, EXPANDED)
    model[0].forward = lambda features: features
    with pytest.raises(ValueError, match="a Transformer that expands queries has been replaced"):
        fastbert.accelerate(model)


def again(model: Any) -> list[torch.Tensor]:
    """What a model makes of features, and of the same ones with its results among them, as cached losses do it."""
    pairs = list(zip(TEXTS, reversed(TEXTS), strict=True))
    features = model.preprocess(pairs if isinstance(model, library.CrossEncoder) else TEXTS)
    name = "scores" if isinstance(model, library.CrossEncoder) else "sentence_embedding"
    with torch.no_grad():
        return [model(features)[name].clone() for _ in range(2)]


@pytest.mark.parametrize(
    ("head", "route"),
    [("Model", "accelerated"), ("SequenceClassification", "accelerated"), ("SequenceClassification", "own")],
)
def test_features_that_go_through_a_model_again(head, route, tmp_path):
    folder = str(tiny.write_model(tmp_path, head=head, num_labels=1 if head != "Model" else 2))
    make = library.SentenceTransformer if head == "Model" else library.CrossEncoder
    theirs, ours = make(folder, device="cpu"), make(folder, device="cpu")
    if route == "own":
        ours[0].model = fastbert.AutoModelForSequenceClassification.from_pretrained(folder)
    else:
        fastbert.accelerate(ours)
    first, second = assert_as_theirs(ours, theirs, again)
    assert torch.equal(first, second)
    assert (fastbert.status(ours).packed, fastbert.status(ours).others) == (2, 0)
