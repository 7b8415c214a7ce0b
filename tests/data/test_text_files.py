"""Texts from files, as `fastbert encode` and the other commands read them."""

from __future__ import annotations

import pytest

from fastbert.data.text_files import read_rows, read_texts
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
    path.write_text('text\na cat; a dog\nthe | dog\n"one, two"\n')
    assert list(read_texts(path)) == ["a cat; a dog", "the | dog", "one, two"]


@pytest.mark.parametrize(
    "name,line,message",
    (
        ("a.csv", "text;id|lang", "what is between the fields of the first line"),
        ("a.tsv", "text,id", "the first line has no tab: .* is this a .csv"),
        ("a.tsv", "text;id", "the first line has no tab: .* is this a .csv"),
    ),
)
def test_a_delimiter_that_is_not_clear(name, line, message, tmp_path):
    (tmp_path / name).write_text(f"{line}\na;b\n")
    with pytest.raises(TextFileError, match=message):
        list(read_texts(tmp_path / name))
