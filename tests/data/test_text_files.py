"""Texts from files, as `fastbert encode` and the other commands read them."""

from __future__ import annotations

import io
import json

import pytest
from seeds import numpy_generator

from fastbert.data.sources import load_source
from fastbert.data.text_files import _raw_lines, read_rows, read_texts
from fastbert.errors import TextFileError


@pytest.mark.parametrize("sign", (",", ";", "\t", "|"))
def test_the_delimiter_of_a_csv_is_found(sign, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f'\n"text"{sign}id\n"a{sign} cat"{sign}1\nthe dog{sign}2\n')
    assert list(read_texts(path)) == [f"a{sign} cat", "the dog"]
    assert list(read_rows(path, ("id", "text"), list)) == [("1", f"a{sign} cat"), ("2", "the dog")]
    path.write_text(f"text{sign}id\na cat\n")
    with pytest.raises(TextFileError, match="line 2: 1 fields, but 2 in the header"):
        list(read_texts(path))


def test_a_column_by_itself_may_hold_any_sign(tmp_path):
    path = tmp_path / "a.csv"
    for header in ("text", '"text; as it was | written"', '"the ""text; as"" it was"'):
        path.write_text(f'{header}\na cat; a dog\nthe | dog\n"one, two"\n')
        assert list(read_texts(path)) == ["a cat; a dog", "the | dog", "one, two"]
    path.write_text("a text; as it was\na cat\n")
    with pytest.raises(TextFileError, match="line 2: 1 fields, but 2 in the header, by the ';' in it"):
        list(read_texts(path, "a text"))


def test_a_name_of_a_column_may_hold_any_sign(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('"a text, as it was";id\na cat, a dog;1\n')
    assert list(read_texts(path, "a text, as it was")) == ["a cat, a dog"]
    path.write_text('te"xt;id\na cat, a dog;1\n')
    assert list(read_texts(path, 'te"xt')) == ["a cat, a dog"]


@pytest.mark.parametrize(
    "name,line,message",
    (
        ("a.csv", "text;id|lang;x", "what is between the fields of the first line"),
        ("a.tsv", "text,id", "the first line has no tab: .* is this a .csv"),
        ("a.tsv", "text;id", "the first line has no tab: .* is this a .csv"),
        ("a.tsv", "text|id", "the first line has no tab: .* is this a .csv"),
    ),
)
def test_a_delimiter_that_is_not_clear(name, line, message, tmp_path):
    (tmp_path / name).write_text(f"{line}\na;b\n")
    with pytest.raises(TextFileError, match=message):
        list(read_texts(tmp_path / name))


@pytest.mark.parametrize(
    "value,said", (("3", "b is 3, not a text"), (r'"\ud800"', r'b is "\ud800", which is not valid Unicode'))
)
def test_the_column_of_what_is_no_text_is_named(value, said, tmp_path):
    """Of rows with several; a value by itself has no other."""
    (tmp_path / "a.jsonl").write_text(f'{{"a": "x", "b": {value}}}\n')
    for columns in (None, ("a", "b")):
        with pytest.raises(TextFileError) as raised:
            list(read_rows(tmp_path / "a.jsonl", columns, list))
        assert str(raised.value) == f"{tmp_path / 'a.jsonl'}, line 1: {said}"
    with pytest.raises(TextFileError, match="the value is"):
        list(read_rows(tmp_path / "a.jsonl", ("b",), list))


GOOD = ["a cat", "the dog", "we ran"]
BAD_ROWS = {
    "a.txt": (b"a cat\n\xff\nthe dog\nb\0c\nwe ran\n", [2, 4]),
    "a.jsonl": (b'{"text": "a cat"}\n{"text": \n{"text": "the dog"}\n3\n{"txt": "b"}\n{"text": null}\n'
                b'{"text": "\xff"}\n{"text": "we ran"}\n', [2, 4, 5, 6, 7]),
    "a.csv": (b'text,id\na cat,1\n"b" c,2\nthe dog,3\nb,c,4\nb\n"b,5\n\xff,6\nwe ran,7\n', [3, 5, 6, 9, 8]),
    "a.tsv": (b"text\tid\na cat\t1\nb\nthe dog\t2\nwe ran\t3\n", [3]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows_are_left_out_and_named(name, tmp_path):
    data, wanted = BAD_ROWS[name]
    (tmp_path / name).write_bytes(data)
    left_out = []
    assert list(read_texts(tmp_path / name, bad=left_out.append)) == GOOD
    said = [str(error).split(": ")[0].removeprefix(f"{tmp_path / name}, line ") for error in left_out]
    assert sorted(set(map(int, said))) == sorted(wanted), left_out
    with pytest.raises(TextFileError):
        list(read_texts(tmp_path / name))


def test_a_line_that_is_too_long_is_left_out_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("fastbert.data.text_files.MAX_LINE_BYTES", 10)
    (tmp_path / "a.txt").write_text("a cat\n" + "b" * 35 + "\nthe dog\n")
    left_out = []
    assert list(read_texts(tmp_path / "a.txt", bad=left_out.append)) == GOOD[:2] and len(left_out) == 1


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("end", ("\r", "\r\n", "\n"), ids=("CR", "CRLF", "LF"))
def test_ends_of_lines(name, end, tmp_path):
    """CR alone, too, as for `datasets`, which reads the files of trainings."""
    path, sign = tmp_path / name, "\t" if name == "a.tsv" else ","
    lines = {".txt": GOOD, ".jsonl": [json.dumps({"text": text}) for text in GOOD]}.get(path.suffix)
    lines = [f"text{sign}id", *(f"{text}{sign}1" for text in GOOD)] if lines is None else lines
    path.write_bytes(end.join([*lines, ""]).encode())
    assert list(read_texts(path)) == load_source(path)["text"][:] == GOOD
    path.write_bytes(end.join(lines).encode() + b"\n")  # and of several kinds
    assert list(read_texts(path)) == load_source(path)["text"][:] == GOOD


def test_lines_are_pythons_own(monkeypatch):
    """With ends of any kind, however they are read; of those that are too long a byte more than may be."""
    monkeypatch.setattr("fastbert.data.text_files.MAX_LINE_BYTES", 7)
    draw = numpy_generator(2)
    for size in range(200):
        data = b"".join(draw.choice([b"a", b"\r", b"\n", b"bb"], size % 25))
        lines = [line.encode() for line in io.TextIOWrapper(io.BytesIO(data), newline="")]
        assert list(_raw_lines(io.BytesIO(data))) == [line[:8] for line in lines], data


@pytest.mark.parametrize("data", (b'te"xt,\xff\na,b\n', b'"text" x,id\na,b\n', b'"text,id\na,b\nc,d\n'))
def test_a_header_is_not_left_out(data, tmp_path):
    (tmp_path / "a.csv").write_bytes(data)
    with pytest.raises(TextFileError):
        list(read_texts(tmp_path / "a.csv", bad=[].append))
