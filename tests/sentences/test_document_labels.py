"""Labels and scores of long texts: against a literal loop over transformers' model, window by window."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import tiny
import torch
from full import left_to_full
from literal_windows import counted, windows_of
from seeds import numpy_generator

import fastbert
from fastbert import Windows
from fastbert.errors import InputError
from fastbert.sentences.text_model import InferenceOptions

KINDS = {  # of heads: the config's fields, and what makes probabilities of logits
    "single": ({"num_labels": 3}, lambda x: x.softmax(-1)),
    "several": ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.sigmoid),
    "number": ({"num_labels": 1, "problem_type": "regression"}, lambda x: x),
    "relevance": ({"num_labels": 1}, torch.sigmoid),
}
POOLS, AGGREGATES = ("mean", "max", "top3", "first"), ("probabilities", "logits", "vectors")
WINDOWS = {"length": 24, "overlap": 6}


def texts_of(count: int) -> list[str]:
    draw, words = numpy_generator(1), np.array(tiny.WORDS.split() * 3 + ["Zebras", "housecat"])
    return ["", "the cat", *(" ".join(draw.choice(words, n)) for n in draw.integers(1, 90, count - 2))]


def pairs_of(count: int) -> list[tuple[str, str]]:
    """Without an empty second text: transformers then takes the first one by itself, and tokenizers a pair."""
    return [("who sat on the mat ?"[: 3 + i % 18], text) for i, text in enumerate(texts_of(count + 1)[1:])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("heads")
    return {
        kind: tiny.write_model(root / kind, head="SequenceClassification", **fields)
        for kind, (fields, _) in KINDS.items()
    }


def of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def pooled(rows: torch.Tensor, pool: str, weights: torch.Tensor) -> torch.Tensor:
    if pool == "mean":
        return (rows * weights[:, None]).sum(0) / weights.sum()
    if pool == "top3":
        return rows.sort(0, descending=True).values[:3].mean(0)
    return rows.max(0).values if pool == "max" else rows[0]


@torch.no_grad()
def literal(parts, kind: str, one, windows: dict[str, int]) -> dict[tuple[str, str], torch.Tensor]:
    """Probabilities by the pool and by what is combined. A window counts by its tokens without the overlap."""
    model, tokenizer = parts
    cut = windows_of(tokenizer, *([one] if isinstance(one, str) else one), **windows)
    weights = torch.tensor([sum(which) for which in counted(cut)])
    vectors = torch.cat([model.bert(**window.inputs).pooler_output for window in cut])
    logits, probabilities = model.classifier(vectors), KINDS[kind][1]
    found = {}
    for pool in POOLS:
        found[pool, "logits"] = probabilities(pooled(logits, pool, weights))
        found[pool, "vectors"] = probabilities(model.classifier(pooled(vectors, pool, weights)))
        found[pool, "probabilities"] = pooled(probabilities(logits), pool, weights)
        if kind == "single" and pool in ("max", "top3"):
            found[pool, "probabilities"] /= found[pool, "probabilities"].sum()
    return found


@pytest.mark.parametrize("count", (12, pytest.param(200, marks=pytest.mark.full)))
@left_to_full(lambda p: p["kind"] != "several")  # relevance: in test_scores_of_documents
@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_documents_are_those_of_a_loop(folders, kind, count):
    inputs = [*texts_of(count - count // 4), *pairs_of(count // 4)]
    theirs = of_transformers(folders[kind])
    expected = [literal(theirs, kind, one, WINDOWS) for one in inputs]
    classifier = fastbert.TextClassifier(folders[kind], device="cpu", dtype="float64")
    for pool in POOLS:
        for aggregate in AGGREGATES:
            found = classifier.predict(inputs, windows=Windows(**WINDOWS, pool=pool), aggregate=aggregate)
            wanted = torch.stack([one[pool, aggregate] for one in expected]).numpy()
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12, err_msg=f"{pool} {aggregate}")
            assert (found.argmax(-1) == wanted.argmax(-1)).all()
    assert np.array_equal(
        classifier.predict(inputs, windows=Windows(**WINDOWS)),
        classifier.predict(inputs, windows=Windows(**WINDOWS, pool="mean"), aggregate="probabilities"),
    )


@pytest.mark.parametrize("count", (12, pytest.param(200, marks=pytest.mark.full)))
def test_scores_of_documents_are_those_of_a_loop(folders, count):
    pairs, theirs = pairs_of(count), of_transformers(folders["relevance"])
    expected = [literal(theirs, "relevance", pair, WINDOWS) for pair in pairs]
    reranker = fastbert.Reranker(folders["relevance"], device="cpu", dtype="float64")
    for given, key in (({}, ("max", "logits")), ({"pool": "top3"}, ("top3", "logits"))):
        found = reranker.predict(pairs, windows=Windows(**WINDOWS, **given))
        wanted = torch.cat([one[key] for one in expected]).numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-9)
    texts = [text for _, text in pairs]
    ranked = reranker.rank("who sat", texts, windows=Windows(**WINDOWS))
    single = [float(reranker.predict(("who sat", text), windows=Windows(**WINDOWS))) for text in texts]
    assert [row["corpus_id"] for row in ranked] == sorted(range(count), key=lambda i: -single[i])
    prompted = reranker.predict(pairs[:9], prompt="the old ", windows=Windows(**WINDOWS))
    by_hand = [("the old " + query, text) for query, text in pairs[:9]]
    assert np.array_equal(prompted, reranker.predict(by_hand, windows=Windows(**WINDOWS)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_fits_has_the_same_bits(folders, kind):
    classifier = fastbert.TextClassifier(folders[kind], device="cpu")
    inputs = ["", "the cat sat on the mat .", ("who ?", "a dog ran")]
    plain = classifier.predict(inputs)
    for pool in POOLS:
        for aggregate in AGGREGATES[:2]:
            found = classifier.predict(inputs, windows=Windows(pool=pool), aggregate=aggregate)
            assert np.array_equal(found, plain), (pool, aggregate)
    assert np.array_equal(
        classifier.predict(["a " * 99], windows=Windows(pool="first")), classifier.predict(["a " * 99])
    )


def test_alone_and_in_a_batch(folders):
    """In float64, whose last bits depend on the rows of a product: as far as they do."""
    classifier = fastbert.TextClassifier(folders["single"], device="cpu", dtype="float64")
    inputs, windows = [*texts_of(8), *pairs_of(8)], Windows(**WINDOWS)
    found = classifier.predict(inputs, windows=windows)
    alone = np.concatenate([classifier.predict([one], windows=windows) for one in inputs])
    for other in (alone, classifier.predict(inputs, windows=windows, batch_tokens=70)):
        np.testing.assert_allclose(found, other, rtol=1e-12)
    classifier.windows = windows
    assert np.array_equal(found, classifier.predict(inputs))


def test_probabilities_near_their_ends(folders):
    """Logits as large as they may be: nothing is infinite, and what is certain in each window stays so."""
    classifier = fastbert.TextClassifier(folders["several"], device="cpu")
    with torch.no_grad():
        classifier.model.classifier.weight.mul_(1e4)
    texts, windows = texts_of(20), Windows(**WINDOWS)
    logits = classifier.rows(texts, InferenceOptions(windows=windows))
    assert torch.isfinite(logits).all() and logits.abs().max() > 100
    found = classifier.predict(texts, windows=windows)
    assert ((found >= 0) & (found <= 1)).all() and np.array_equal(found, classifier.probabilities(logits).numpy())


BAD = {
    "unknown aggregate 'sum'; there are probabilities, logits, vectors": ({}, "sum"),
    "chunks of 24 tokens, 3 special tokens and 13 of another text among them, may overlap by 0 to 7, not by 9": (
        {"overlap": 9},
        None,
    ),
    "chunks of 24 tokens, 3 special tokens and 30 of another text among them, have no room for a text": ({}, None),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_is_refused(folders, message):
    given, aggregate = BAD[message]
    reranker = fastbert.Reranker(folders["relevance"], device="cpu")
    query = "cat " * (30 if "30 of" in message else 13)
    with pytest.raises(InputError, match=re.escape(message)):
        reranker.predict([(query, "a dog")], windows=Windows(**WINDOWS | given), aggregate=aggregate)


def test_aggregate_needs_windows(folders):
    classifier = fastbert.TextClassifier(folders["single"], device="cpu")
    with pytest.raises(InputError, match="aggregate='logits' is for windows, and there are none"):
        classifier.predict(["a"], aggregate="logits")


def test_a_head_over_tokens_has_no_vector_of_a_text(tmp_path):
    folder = tiny.write_model(
        tmp_path, model_type="eurobert", head="SequenceClassification", num_labels=2, classifier_pooling="late"
    )
    classifier = fastbert.TextClassifier(folder, device="cpu")
    with pytest.raises(InputError, match="needs a head over one vector a text"):
        classifier.predict(["a"], windows=Windows(), aggregate="vectors")
    assert classifier.predict(["a " * 200], windows=Windows()).shape == (1, 2)


@pytest.mark.parametrize("text", ("   \n ", "a" * 3000, "\u200d" * 500), ids=("spaces", "one word", "nothing to see"))
def test_odd_texts(folders, text):
    """Of spaces: a text without a token. One endless word is one unknown token."""
    classifier = fastbert.TextClassifier(folders["single"], device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(classifier.predict([text], windows=Windows(**WINDOWS)), classifier.predict([text]))
