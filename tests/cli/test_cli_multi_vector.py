"""Multi-vector models in `fastbert encode`, `search` and `rerank`: what MultiVectorEncoder gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from command_line import fails, run_here

import fastbert
from fastbert import TokenVectors, Windows

TEXTS = ["the cat sat on the mat.", "a dog ran", "", "who sat in the old house?", "the new dog , the old cat " * 9]
QUERY = "who sat on the mat?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.write_stanford(tmp_path_factory.mktemp("model") / "colbert", {"query_maxlen": 16, "doc_maxlen": 24})


@pytest.fixture(scope="module")
def encoder(folder) -> fastbert.MultiVectorEncoder:
    return fastbert.MultiVectorEncoder(folder, device="cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def rows_of(*arguments: object) -> list[dict]:
    done = run_here(*arguments, "--output", "-")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("precision", (None, "float32", "bfloat16", "int8"))
def test_vectors_of_tokens_are_stored_and_searched(precision, folder, encoder, source, tmp_path):
    file, given = tmp_path / "v.safetensors", () if precision is None else ("--precision", precision)
    done = run_here("encode", source, "--column", "text", "--model", folder, "--output", file, *given)
    assert done.returncode == 0, done.stderr
    assert "1 text was cut to the model's 24 tokens" in done.stderr
    found, wanted = TokenVectors.load(file), encoder.encode_document(TEXTS, output="packed")
    if precision == "int8":
        wanted = wanted.in_int8()
    elif precision != "float32":
        wanted = TokenVectors(wanted.vectors.bfloat16(), wanted.cu_seqlens)
    assert torch.equal(found.vectors, wanted.vectors) and torch.equal(found.cu_seqlens, wanted.cu_seqlens)
    rows = rows_of("search", QUERY, source, "--column", "text", "--model", folder, "--vectors", file)
    scores = encoder.similarity(encoder.encode_query(QUERY), wanted)[0]
    order = np.argsort(-scores.numpy(), kind="stable").tolist()
    assert [row["index"] for row in rows] == order
    assert [row["score"] for row in rows] == pytest.approx(scores[order].tolist(), rel=1e-6)


@pytest.mark.parametrize("command", ("search", "rerank"))
def test_texts_are_ranked_and_matches_shown(command, folder, encoder, source):
    options = (command, QUERY, source, "--column", "text", "--model", folder)
    rows, expected = rows_of(*options), encoder.rank(QUERY, TEXTS)
    assert [row["index"] for row in rows] == [one["corpus_id"] for one in expected]
    assert [row["score"] for row in rows] == pytest.approx([one["score"] for one in expected], rel=1e-6)
    for row in rows:
        assert row["matches"] == encoder.matches(QUERY, row["text"])
    shown = run_here(*options, "--top", 1).stdout.splitlines()
    best = rows[0]["matches"][0]
    assert rows[0]["text"] in shown[0] and f"{best['query']} ~ {best['document']}" in shown[1] and len(shown) == 2
    whole = rows_of(*options, "--windows", "length=24", "overlap=6")
    windowed = encoder.encode_document(TEXTS, windows=Windows(24, 6))
    scores = dict(enumerate(encoder.similarity(encoder.encode_query(QUERY), windowed)[0].tolist()))
    assert {row["index"]: row["score"] for row in whole} == pytest.approx(scores, rel=1e-6)


def test_what_is_refused(folder, source, tmp_path):
    encode = ("encode", source, "--column", "text", "--model")
    plain = tiny.write_sentence_model(tmp_path / "plain")
    out = tmp_path / "v.safetensors"
    assert "is for a multi-vector model" in fails(*encode, plain, "--output", out)
    assert "MultiVectorEncoder" in fails(*encode, folder, "--output", tmp_path / "v.npy")
    assert "--precision is for a .safetensors" in fails(*encode, plain, "--output", "-", "--precision", "int8")
    assert "--keep and --chunks are not for" in fails(*encode, folder, "--output", out, "--chunks")
    assert not out.exists()
    search = ("search", QUERY, source, "--column", "text", "--model")
    TokenVectors(torch.zeros(4, 16), torch.tensor([0, 1, 4], dtype=torch.int32)).save(out)
    assert "has 2 texts" in fails(*search, folder, "--vectors", out)
    assert "is for a multi-vector model" in fails(*search, plain, "--vectors", out)
    TokenVectors(torch.zeros(4, 8), torch.tensor([0, 1, 4], dtype=torch.int32)).save(out)
    assert "has 8 numbers a token; the model 16" in fails(*search, folder, "--vectors", out)
    np.save(tmp_path / "v.npy", np.zeros((5, 16), np.float32))
    assert "are in a .safetensors" in fails(*search, folder, "--vectors", tmp_path / "v.npy")
    rerank = ("rerank", QUERY, source, "--column", "text", "--model", folder, "--windows")
    assert "aggregate is for a cross-encoder" in fails(*rerank, "--aggregate", "logits")
