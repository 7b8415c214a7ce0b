"""Commands that only run a model free the weights that have packed copies; a library's classes keep them."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from isas import packs

from fastbert import Reranker, SentenceEncoder
from fastbert.cli import main
from fastbert.ops._common import PackedOnly
from fastbert.serve import run as serving
from fastbert.serve.app import Limits

LINEARS = 12  # of tiny's two layers


@pytest.fixture
def packed(monkeypatch) -> list[torch.Size]:
    """The shapes of the weights of which nothing but a packed copy is left."""
    from fastbert.ops.linear import packed_only

    made, pack_only = [], packed_only.pack_only

    def counted(weight, parts):
        made.append(weight.shape)
        return pack_only(weight, parts)

    monkeypatch.setattr(packed_only, "pack_only", counted)
    return made


def write(folder, head: str, **fields):
    return str(tiny.write_model(folder, head=head, **fields))


@packs
def test_commands_that_run_a_model(tmp_path, packed, capsys):
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat sat\na dog ran\n")
    encoder = write(tmp_path / "encoder", "Model")
    classifier = write(tmp_path / "classifier", "SequenceClassification", num_labels=3)
    reranker = write(tmp_path / "reranker", "SequenceClassification", num_labels=1)
    words = write(tmp_path / "words", "MaskedLM")
    for command in (
        ["encode", str(texts), "--model", encoder, "--output", str(tmp_path / "out.npy")],
        ["encode", str(texts), "--model", encoder, "--output", str(tmp_path / "out.jsonl"), "--dtype", "int8"],
        ["search", "a cat", str(texts), "--model", encoder],
        ["rerank", "a cat", str(texts), "--model", reranker],
        ["classify", str(texts), "--model", classifier, "--output", str(tmp_path / "labels.jsonl")],
        ["fill-mask", "the [MASK] sat", "--model", words],
        ["predict", classifier, str(texts), "--output", str(tmp_path / "answers.jsonl")],
    ):
        assert main(command) == 0, (command, capsys.readouterr().err)
        assert len(packed) == LINEARS, command
        packed.clear()
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert first["text"] == "the cat sat" and len(first["embedding"]) == 32


@packs
def test_serve(tmp_path, packed, monkeypatch):
    found = []

    class Stopped(Exception):
        pass

    def make_app(engine, *arguments, **options):
        found.append(engine.model.model)
        raise Stopped

    monkeypatch.setattr(serving, "make_app", make_app)
    with pytest.raises(Stopped):
        serving.serve(write(tmp_path, "Model"), host="127.0.0.1", port=0, limits=Limits(), say=print)
    assert len(packed) == LINEARS == sum(isinstance(p, PackedOnly) for p in found[0].parameters())


def test_a_library_keeps_them(tmp_path, packed):
    for kind, head in ((SentenceEncoder, "Model"), (Reranker, "SequenceClassification")):
        model = kind(write(tmp_path / head, head, **({} if head == "Model" else {"num_labels": 1})), device="cpu").model
        assert not packed and not any(isinstance(p, PackedOnly) for p in model.parameters())
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in model.state_dict().values())
