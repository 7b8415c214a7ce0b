"""`fastbert encode --keep`: other columns of a file stay beside the vectors."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
import tiny
from command_line import fails, run_here

from fastbert.cli import encode

ROWS = [
    {"text": "the cat", "id": None, "score": 1, "lang": "en", "ok": True},
    {"text": "a dog", "id": None, "score": 0.5, "lang": None, "ok": False},
    {"text": "we ran", "id": 7, "score": -2, "lang": "de", "ok": True},
]
KEEP = ("id", "score", "lang", "ok")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(encode, "CHUNK_TEXTS", 2)  # an id comes in the second one alone


def written(folder, kind):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, lines = folder / f"in{kind}", "".join(json.dumps(row) + "\n" for row in ROWS)
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        path.write_text(lines)
    return path


def read(path):
    import pyarrow.parquet as pq

    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("source", (".jsonl", ".parquet"))
@pytest.mark.parametrize("kind", (".jsonl", ".parquet", "-"))
def test_columns_stay(source, kind, model, tmp_path):
    out = "-" if kind == "-" else tmp_path / f"out{kind}"
    arguments = ("encode", written(tmp_path, source), "--model", model, "--device", "cpu")
    done = run_here(*arguments, "--keep", *KEEP, "--output", out)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()] if out == "-" else read(out)
    assert [list(row) for row in rows] == [["text", *KEEP, "embedding"]] * 3
    vectors = [row.pop("embedding") for row in rows]
    assert rows == ROWS
    assert run_here(*arguments, "--output", tmp_path / "plain.npy").returncode == 0
    assert np.array_equal(np.array(vectors, np.float32), np.load(tmp_path / "plain.npy"))


def test_columns_of_a_csv_and_of_a_pipe_stay(model, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("id;text\n01;the cat\n1;a dog\n")
    lines = '{"id": "01", "body": "the cat"}\n{"id": "1", "body": "a dog"}\n'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode()), encoding="utf-8"))
    for source, more, out in ((tmp_path / "a.csv", (), "a.jsonl"), ("-", ("--column", "body"), "b.jsonl")):
        to = ("--model", model, "--device", "cpu", "--keep", "id", "--output", tmp_path / out)
        assert run_here("encode", source, *more, *to).returncode == 0
    assert [row["id"] for row in read(tmp_path / "a.jsonl")] == ["01", "1"]
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


@pytest.mark.parametrize(
    "line,keep,output,error",
    (
        ('{"text": "a", "id": 1}', "nothing", "out.jsonl", "has no column 'nothing'; it has: text, id"),
        ('{"text": "a", "id": [1]}', "id", "out.jsonl", "line 1: id is [1], which cannot be kept"),
        ('{"text": "a", "id": 1' + "0" * 120 + "}", "id", "out.jsonl", "which cannot be kept"),
        (
            '{"text": "a", "id": 1' + "0" * 20 + "}",
            "id",
            "out.parquet",
            "--keep id: the column holds values of several",
        ),
        (
            '{"text": "a", "id": 9007199254740993}\n{"text": "b", "id": 0.5}',
            "id",
            "out.parquet",
            "--keep id: the column holds values of several",
        ),
        ('{"text": "a", "id": "\\ud800"}', "id", "out.parquet", 'line 1: id is "\\ud800", which is not valid Unicode'),
        ('{"text": "a", "id": "\\ud800"}', "id", "out.jsonl", 'line 1: id is "\\ud800", which is not valid Unicode'),
        ('{"text": "a", "id": 1}\n{"text": "b", "id": "x"}', "id", "out.parquet", "holds values of several types"),
        ('{"text": "a", "id": 1}\n{"text": "b"}', "id", "out.jsonl", "line 2: has no 'id'"),
        ('"a"', "id", "out.jsonl", "line 1: has a text alone, and no 'id'"),
        ('{"text": "a", "embedding": 1}', "embedding", "out.jsonl", "--keep embedding: OUT has a column of this name"),
        ('{"text": "a", "id": 1}', "id", "out.npy", "--keep is for rows of whole texts"),
    ),
)
def test_what_cannot_be_kept_is_said_before(line, keep, output, error, model, tmp_path):
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    arguments = ("encode", tmp_path / "a.jsonl", "--model", model, "--keep", keep, "--output", tmp_path / output)
    assert error in fails(*arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_whole_numbers_that_a_float_holds_stay_beside_floats(model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": 9007199254740992}\n{"text": "b", "id": 0.5}\n')
    words = ("encode", tmp_path / "a.jsonl", "--model", model, "--keep", "id", "--output", tmp_path / "out.parquet")
    assert run_here(*words).returncode == 0
    assert [row["id"] for row in read(tmp_path / "out.parquet")] == [2.0**53, 0.5]
