"""What gives others than the texts that are meant: tables, whose columns' names would be encoded, and lone texts."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

import fastbert


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    heads = {"vectors": "Model", "label": "SequenceClassification"}
    heads |= {"tags": "TokenClassification", "answers": "QuestionAnswering"}
    made = {name: tiny.write_model(root / name, head=head) for name, head in heads.items()}
    return made | {"score": tiny.write_model(root / "score", head="SequenceClassification", num_labels=1)}


def tables():
    import pandas as pd
    import pyarrow as pa

    columns = {"text": ["the cat", "a dog"], "id": ["1", "2"]}
    return pd.DataFrame(columns), pa.table(columns)


@pytest.mark.parametrize("at", (0, 1), ids=("pandas", "arrow"))
def test_a_table_is_no_list_of_texts(at, folders):
    table = tables()[at]
    encoder = fastbert.SentenceEncoder(folders["vectors"], device="cpu")
    classifier = fastbert.TextClassifier(folders["label"], device="cpu")
    reranker = fastbert.Reranker(folders["score"], device="cpu")
    for call in (
        encoder.encode,
        encoder.encode_chunks,
        lambda given: list(encoder.encode_stream(given)),
        lambda given: list(encoder.encode_chunks_stream(given)),
        classifier.predict,
        fastbert.TokenClassifier(folders["tags"], device="cpu").predict,
        lambda given: reranker.rank("who", given),
    ):
        with pytest.raises(
            TypeError, match=r"is a (DataFrame|Table); give one of its columns, such as table\['text'\]"
        ):
            call(table)


@pytest.mark.parametrize("at", (0, 1), ids=("pandas", "arrow"))
def test_a_table_is_no_list_of_pairs(at, folders):
    """Nor is one of its columns; what the message says to give is a list of pairs."""
    table = tables()[at]
    reranker = fastbert.Reranker(folders["score"], device="cpu")
    for model in (reranker, fastbert.QuestionAnswerer(folders["answers"], device="cpu")):
        with pytest.raises(TypeError, match=r"give two of its columns as pairs, such as list\(zip\(table") as told:
            model.predict(table)
    pairs = eval(str(told.value).partition("such as ")[2], {"table": table})
    assert pairs == [("the cat", "1"), ("a dog", "2")] and reranker.predict(pairs).shape == (2,)


def test_a_column_of_a_table(folders):
    encoder = fastbert.SentenceEncoder(folders["vectors"], device="cpu")
    frame, table = tables()
    assert np.array_equal(encoder.encode(frame["text"]), encoder.encode(list(frame["text"])))
    assert np.array_equal(encoder.encode(frame["text"]), encoder.encode(table["text"].to_pylist()))


def test_a_text_is_no_list_of_letters(folders):
    encoder = fastbert.SentenceEncoder(folders["vectors"], device="cpu")
    for call in (
        lambda: list(encoder.encode_stream("cat")),
        lambda: list(encoder.encode_chunks_stream("cat")),
        lambda: fastbert.Reranker(folders["score"], device="cpu").rank("who", "cat"),
    ):
        with pytest.raises(TypeError, match="is a str; it must be a list of"):
            call()
