"""KeyBERT with a SentenceEncoder as its embedding model; heavy.py has the tools that are heavier."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

import fastbert

keybert = pytest.importorskip("keybert")


def test_keybert_finds_the_same_words(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    encoder = fastbert.SentenceEncoder.from_pretrained(tiny.write_model(tmp_path), device="cpu")
    documents = ["the cat sat on the mat and a dog ran in to the new house", "we who old they sat"]
    backend = keybert.KeyBERT(model=encoder.as_sentence_transformer())
    found = backend.extract_keywords(documents, top_n=4, stop_words=None)
    assert fastbert.status(encoder).models[0].texts == 2  # the documents, and the words in them
    theirs = keybert.KeyBERT(model=library.SentenceTransformer(str(tmp_path), device="cpu"))
    wanted = theirs.extract_keywords(documents, top_n=4, stop_words=None)
    assert [[word for word, _ in row] for row in found] == [[word for word, _ in row] for row in wanted]
    ours, scores = ([score for row in rows for _, score in row] for rows in (found, wanted))
    np.testing.assert_allclose(ours, scores, rtol=0, atol=1.01e-4)  # KeyBERT rounds to four places
