"""spm.model: read as sentencepiece's own classes read it; whatever is wrong with it is one error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from bare_files import FORMS, field, spm_content, spm_pieces, varint
from seeds import python_random

from fastbert import CheckpointError
from fastbert.checkpoint.spm_file import read_spm
from fastbert.data.bare_tokenizer import read_bare

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "vocab" / "deberta-v3" / "spm.model"


def read(folder: Path, content: bytes):
    (folder / "spm.model").write_bytes(content)
    return read_spm(folder / "spm.model")


@pytest.mark.parametrize("source", ("DeBERTa-v3", "small"))
def test_pieces_are_those_of_sentencepiece(source, tmp_path):
    messages = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    if source == "DeBERTa-v3" and not REAL.is_file():
        pytest.skip(f"{REAL} is not here")
    content = spm_content(spm_pieces()) if source == "small" else REAL.read_bytes()
    ours, theirs = read(tmp_path, content), messages.ModelProto.FromString(content)
    assert ours.pieces == [(piece.piece, piece.score) for piece in theirs.pieces]
    assert ours.control == [piece.piece for piece in theirs.pieces if piece.type == 3]
    assert ours.user_defined == [piece.piece for piece in theirs.pieces if piece.type == 4]


def test_fields_that_are_absent_or_unknown(tmp_path):
    """A piece without score and type is a normal one of score 0; what newer programs may write is passed over."""
    unknown = field(99, 7) + field(98, 0.5) + field(97, "text") + varint(96 << 3 | 1) + bytes(8)
    content = unknown + field(1, unknown + field(1, "a")) + field(2, unknown) + field(3, unknown)
    assert read(tmp_path, content) == ([("a", 0.0)], [], [])
    wrong_type = field(1, field(1, "a") + field(2, 3) + field(3, "b"))  # which is another field, as protobuf has it
    assert read(tmp_path, wrong_type).pieces == [("a", 0.0)]


OTHERS = {
    "holds a BPE model; fastbert reads unigram models": ({3: 2}, {}),
    "holds a word model": ({3: 3}, {}),
    "holds a 9 model": ({3: 9}, {}),
    "treat_whitespace_as_suffix is true; fastbert reads false only": ({24: 1}, {}),
    "add_dummy_prefix is false; fastbert reads true only": ({}, {3: 0}),
    "escape_whitespaces is false; fastbert reads true only": ({}, {5: 0}),
}


@pytest.mark.parametrize("message", OTHERS)
def test_models_that_are_made_otherwise(message, tmp_path):
    trainer, normalizer = OTHERS[message]
    with pytest.raises(CheckpointError, match=rf"spm\.model.* {message}"):
        read(tmp_path, spm_content(spm_pieces(), trainer, normalizer))
    same = {24: 0, 35: 1, 3: 1}, {3: 1, 4: 0, 5: 1}  # bytes of unknown characters, and spaces that are kept: unread
    assert read(tmp_path, spm_content(spm_pieces(), *same)) == read(tmp_path, spm_content(spm_pieces()))


DAMAGED = {
    "it has no pieces": b"",
    "piece 0 has no text": field(1, field(2, -1.0)),
    "piece 1 is 'a', which is there twice": field(1, field(1, "a")) * 2,
    "piece 0 is not UTF-8": field(1, field(1, b"\xff")),
    "piece 0 has score nan": field(1, field(1, "a") + field(2, float("nan"))),
    "piece 0 has score -inf": field(1, field(1, "a") + field(2, -float("inf"))),
    "begins a field of the unknown wire type 7": bytes([15]),
    "a field of 9 bytes begins at byte 2 of 2": bytes([10, 9]),
    "a field of 4 bytes begins at byte 1 of 3": bytes([13, 0, 0]),
    "it ends in the middle of an integer, at byte 2": bytes([8, 128]),
    "the integer before byte 11 has no end": bytes([8, *[255] * 12]),
    f"a field of {2**60} bytes": bytes([10]) + varint(2**60),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_damaged_files(message, tmp_path):
    with pytest.raises(CheckpointError, match=rf"spm\.model is no sentencepiece model: .*{message}"):
        read(tmp_path, DAMAGED[message])
    with pytest.raises(CheckpointError, match=r"other\.model cannot be read"):
        read_spm(tmp_path / "other.model")


@pytest.mark.parametrize("count", (300, pytest.param(5000, id="many", marks=pytest.mark.full)))
def test_random_damage(count, tmp_path):
    """A tokenizer, or one error that names the file: nothing else comes of any bytes."""
    draw, whole, path, kept = python_random(0), spm_content(spm_pieces()), tmp_path / "spm.model", 0
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 4)):
            start = draw.randrange(len(content))
            new = draw.randbytes(draw.randrange(3)) if draw.random() < 0.7 else content[start : start + 40] * 2
            content[start : start + draw.randrange(3)] = new
        path.write_bytes(bytes(content) if draw.random() < 0.8 else bytes(content)[: draw.randrange(len(content))])
        try:
            made = read_bare(tmp_path, FORMS["deberta-v2"])
        except CheckpointError as error:
            assert str(path) in str(error)
        else:
            kept += 1
            assert made.encode("the cat [MASK] sat").ids[0] == made.token_to_id("[CLS]")
    assert 0 < kept < count
