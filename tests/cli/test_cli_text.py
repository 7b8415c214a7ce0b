"""The commands that read texts and write rows: encode from a pipe and into every kind of file, and those around it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest
import tiny
import warm
from command_line import ENVIRONMENT, command, fails, run, run_here

import fastbert

TEXTS = ["the cat sat on the mat.", "", "a dog ran, and who sat?", 'we "quoted", it', "Zoë\tran", "the old cat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for name, head, fields in (
        ("encoder", "Model", {}),
        ("reranker", "SequenceClassification", {"num_labels": 1}),
        ("classifier", "SequenceClassification", {"num_labels": 3, "id2label": {0: "bad", 1: "so", 2: "good"}}),
    ):
        made[name] = tiny.write_model(tmp_path_factory.mktemp(name), head=head, **fields)
    return made


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    return path


def piped(monkeypatch, text: str, *arguments: object):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    return run_here(*arguments)


def rows_of(lines: str) -> list[dict]:
    return [json.loads(line) for line in lines.splitlines()]


def test_encode_reads_a_pipe_and_writes_every_kind(tmp_path, monkeypatch, folders, source):
    encoder = fastbert.SentenceEncoder.from_pretrained(folders["encoder"], device="cpu")
    wanted, lines = encoder.encode(TEXTS), source.read_text(encoding="utf-8")
    options = ("--model", folders["encoder"], "--output")
    assert piped(monkeypatch, lines, "encode", "-", *options, tmp_path / "a.npy").returncode == 0
    assert np.array_equal(np.load(tmp_path / "a.npy"), wanted)
    objects = "".join(json.dumps({"id": 1, "body": text}) + "\n" for text in TEXTS)
    done = piped(monkeypatch, objects, "encode", "-", "--column", "body", *options, "-")
    assert done.returncode == 0, done.stderr
    found = rows_of(done.stdout)
    assert [row["text"] for row in found] == TEXTS
    assert np.array_equal(np.array([row["embedding"] for row in found], np.float32), wanted)  # every bit of them
    assert run_here("encode", source, *options, tmp_path / "a.jsonl").returncode == 0
    assert (tmp_path / "a.jsonl").read_text(encoding="utf-8") == done.stdout
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run_here("encode", source, *options, tmp_path / "a.parquet").returncode == 0
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table["text"].to_pylist() == TEXTS
    assert np.array_equal(np.array(table["embedding"].to_pylist(), np.float32), wanted)
    assert "a.jsonl exists already; --force replaces it" in fails("encode", source, *options, tmp_path / "a.jsonl")
    assert run_here("encode", source, *options, tmp_path / "a.jsonl", "--force").returncode == 0
    assert "must end in .npy or .jsonl or .parquet" in fails("encode", source, *options, tmp_path / "a.csv")


def test_what_fails_on_the_way_leaves_no_file(tmp_path, folders):
    source = tmp_path / "a.jsonl"
    source.write_text('"a cat"\n{"x": 1}\n')
    for name in ("b.jsonl", "b.parquet"):
        assert "a.jsonl, line 2" in fails("encode", source, "--model", folders["encoder"], "--output", tmp_path / name)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for arguments in (("classify", empty), ("rerank", "a", empty), ("search", "a", empty)):
        name = {"classify": "classifier", "rerank": "reranker", "search": "encoder"}[arguments[0]]
        assert "holds no texts" in fails(*arguments, "--model", folders[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "empty.txt"]
    assert "does not exist" in fails("classify", tmp_path / "none.txt", "--model", folders["classifier"])


def test_search(tmp_path, folders, source):
    encoder = fastbert.SentenceEncoder.from_pretrained(folders["encoder"], device="cpu")
    scores = encoder.similarity(encoder.encode_query("a cat"), encoder.encode_document(TEXTS))[0].numpy()
    order = np.argsort(-scores, kind="stable")[:3]
    options = ("search", "a cat", source, "--model", folders["encoder"], "--top", 3)
    found = rows_of(run_here(*options, "--output", "-").stdout)
    assert [row["index"] for row in found] == order.tolist() and [row["text"] for row in found] == [
        TEXTS[i] for i in order
    ]
    assert [row["score"] for row in found] == scores[order].tolist()
    table = run_here(*options).stdout.splitlines()
    assert len(table) == 3 and table[0].endswith(TEXTS[order[0]]) and f"{scores[order[0]]:.4f}" in table[0]
    assert run_here("encode", source, "--model", folders["encoder"], "--output", tmp_path / "v.npy").returncode == 0
    assert run_here(*options, "--vectors", tmp_path / "v.npy").stdout.splitlines() == table
    encode = ("encode", source, "--model", folders["encoder"], "--output")
    assert run_here(*encode, tmp_path / "v.parquet").returncode == 0
    assert run_here(*options, "--vectors", tmp_path / "v.parquet").stdout.splitlines() == table
    assert run_here(*encode, tmp_path / "chunks.parquet", "--chunks").returncode == 0
    assert "has vectors of passages (--chunks)" in fails(*options, "--vectors", tmp_path / "chunks.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": TEXTS}), tmp_path / "texts.parquet")
    assert "no column of vectors, embedding; it has: text" in fails(*options, "--vectors", tmp_path / "texts.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    assert "--vectors" in fails(*options, "--vectors", tmp_path / "broken.parquet")
    np.save(tmp_path / "few.npy", np.zeros((2, 32), np.float32))
    assert "few.npy has 2 rows" in fails(*options, "--vectors", tmp_path / "few.npy")
    np.save(tmp_path / "wide.npy", np.zeros((6, 33), np.float32))
    assert "makes float32 (texts, 32)" in fails(*options, "--vectors", tmp_path / "wide.npy")


def test_vectors_of_other_files(tmp_path, folders, source):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, options = tmp_path / "v.parquet", ("search", "a cat", source, "--model", folders["encoder"], "--vectors")
    vectors = fastbert.SentenceEncoder.from_pretrained(folders["encoder"], device="cpu").encode(TEXTS)
    table = run_here(*options[:-1]).stdout
    for kind in (pa.list_(pa.float32()), pa.large_list(pa.float32())):
        parquet.write_table(pa.table({"embedding": pa.array(vectors.tolist(), kind)}), path, row_group_size=2)
        assert run_here(*options, path).stdout == table
    for row, message in (
        (None, f"--vectors {path}, row 2: embedding is null"),
        ([1.0] * 31, f"--vectors {path}, row 2 has 31 numbers, and row 1 has 32"),
        ([1.0] * 31 + [None], f"--vectors {path}, row 2: a number of embedding is missing"),
    ):
        rows = [vectors[0].tolist(), row, *vectors[2:].tolist()]
        parquet.write_table(pa.table({"embedding": pa.array(rows, pa.list_(pa.float32()))}), path)
        assert message in fails(*options, path)
    parquet.write_table(pa.table({"text": TEXTS, "embedding": TEXTS}), path)
    assert fails(*options, path).count("--vectors") == 1
    for name in ("v.jsonl", "v.npz"):
        (tmp_path / name).write_text("{}")
        assert f"--vectors {tmp_path / name}: the name must end in .npy or .parquet" in fails(*options, tmp_path / name)
    (tmp_path / "broken.npy").write_text("{}")
    assert "pickle" not in fails(*options, tmp_path / "broken.npy")


def test_rerank(folders, source):
    ranked = fastbert.Reranker.from_pretrained(folders["reranker"], device="cpu").rank("a cat", TEXTS, top_k=4)
    options = ("rerank", "a cat", source, "--model", folders["reranker"], "--top", 4, "--output", "-")
    found = rows_of(run_here(*options).stdout)
    assert [row["index"] for row in found] == [row["corpus_id"] for row in ranked]
    assert [row["score"] for row in found] == [float(row["score"]) for row in ranked]
    assert "has 3 labels; a reranker has one" in fails("rerank", "a", source, "--model", folders["classifier"])


def test_classify(tmp_path, monkeypatch, folders, source):
    classifier = fastbert.TextClassifier.from_pretrained(folders["classifier"], device="cpu")
    scores = classifier.predict(TEXTS)
    lines = source.read_text(encoding="utf-8")
    found = rows_of(piped(monkeypatch, lines, "classify", "-", "--model", folders["classifier"]).stdout)
    assert [row["label"] for row in found] == [("bad", "so", "good")[i] for i in scores.argmax(1)]
    assert np.array_equal(np.float32([row["score"] for row in found]), scores.max(1))
    output = tmp_path / "all.jsonl"
    assert run_here("classify", source, "--model", folders["classifier"], "--all", "--output", output).returncode == 0
    found = rows_of(output.read_text(encoding="utf-8"))
    assert np.array_equal(np.float32([[row[label] for label in classifier.labels] for row in found]), scores)


def test_fill_mask_reads_lines(tmp_path, monkeypatch):
    model = tiny.write_model(tmp_path, head="MaskedLM")
    lines = ["the [MASK] sat", "a <mask> ran"]
    alone = "".join(run_here("fill-mask", line, "--model", model).stdout for line in lines)
    assert piped(monkeypatch, "\n".join(lines) + "\n", "fill-mask", "-", "--model", model).stdout == alone
    assert 'no mask in "the cat"' in fails("fill-mask", "the cat", "--model", model)


def test_alone_it_prints_help():
    done = run_here()
    assert done.returncode == 0 and "usage: fastbert" in done.stdout and "classify" in done.stdout


def test_info_knows_int8(tmp_path):
    encoder = fastbert.SentenceEncoder.from_pretrained(tiny.write_model(tmp_path / "a"), dtype="int8", device="cpu")
    encoder.save_pretrained(tmp_path / "b")
    assert "int8, 12 of the layers' 12 products" in run_here("info", tmp_path / "b").stdout
    assert "saved in       float32" in run_here("info", tmp_path / "a").stdout


def test_the_bar_moves_on_a_terminal(folders, source, tmp_path):
    """A batch at a time, from the first one on: not only when a chunk of texts is done, and not after two seconds."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))  # a bar needs some columns
    arguments = command(
        "encode", source, "--model", folders["encoder"], "--output", tmp_path / "a.npy", "--batch-tokens", 9
    )
    assert warm.Process(arguments, stderr=other, stdout=subprocess.DEVNULL, env=ENVIRONMENT).wait(300) == 0
    os.close(other)
    shown = os.read(main, 1 << 16).decode()
    assert "encoding:   0%" in shown and "encoding: 100%" in shown


def test_a_pipe_whose_reader_went_away_is_no_traceback(folders, source):
    arguments = ("classify", source, "--model", folders["classifier"])
    process = warm.Process(command(*arguments), env=ENVIRONMENT)
    process.stdout.close()
    assert "Traceback" not in process.communicate()[1]
    assert run(*arguments).stdout.count("\n") == len(TEXTS)


def test_standard_input_is_named(tmp_path, monkeypatch, folders):
    to = ("--model", folders["encoder"], "--output", tmp_path / "a.npy")
    for given, column, message in (
        ("", (), "standard input holds no texts"),
        ("a\nb\0c\n", (), "standard input, line 2: holds a NUL byte"),
        ('{"a": "b"}\n', ("--column", "text"), "standard input, line 1: has no 'text'; it has: a"),
        ('{"text": 3}\n', ("--column", "text"), "standard input, line 1: the value is 3, not a text"),
    ):
        done = piped(monkeypatch, given, "encode", "-", *column, *to)
        assert done.returncode == 2 and message in done.stderr and not list(tmp_path.iterdir())
    with open("/dev/full", "w") as full:
        full_disk = command("classify", "-", "--model", folders["classifier"])
        done = warm.run(full_disk, input="a cat\n", stdout=full, env=ENVIRONMENT)
    assert done.returncode == 2 and "No space left on device: 'standard output'" in done.stderr


def test_a_stopped_pipe_goes_on(tmp_path, monkeypatch, folders):
    """The texts are what it is known by: the copy that the first run had made of them is gone."""
    from fastbert.cli import encode
    from fastbert.cli.outputs.growing_array import GrowingArray

    monkeypatch.setattr(encode, "CHUNK_TEXTS", 2)
    append, lines = GrowingArray.append, "".join(f"{text}\n" for text in TEXTS)
    arguments = ("encode", "-", "--model", folders["encoder"], "--output", tmp_path / "a.npy")

    def stops(array, vectors):
        append(array, vectors)
        if array.rows == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(GrowingArray, "append", stops)
    assert piped(monkeypatch, lines, *arguments).returncode == 130
    monkeypatch.setattr(GrowingArray, "append", append)
    done = piped(monkeypatch, lines.replace("dog", "cat"), *arguments)
    assert done.returncode == 2 and "was begun with another input time" in done.stderr
    done = piped(monkeypatch, lines, *arguments)
    assert done.returncode == 0 and "4 of 6 texts were encoded before" in done.stderr
    encoder = fastbert.SentenceEncoder.from_pretrained(folders["encoder"], device="cpu")
    chunks = [vectors for vectors, _ in encoder.encode_stream(TEXTS, chunk_texts=2)]
    assert np.array_equal(np.load(tmp_path / "a.npy"), np.concatenate(chunks))
