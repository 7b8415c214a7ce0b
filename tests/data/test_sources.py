"""Files of examples, read by Hugging Face's `datasets`."""

from __future__ import annotations

import gzip
import json
import socket

import pytest

from fastbert.data.sources import load_source
from fastbert.errors import InputError

ROWS = [{"text": "one", "label": 1}, {"text": "two", "label": 0}]
LINES = {
    "a.txt": "one\ntwo\n",
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "a.csv": "text,label\none,1\ntwo,0\n",
    "a.tsv": "text\tlabel\none\t1\ntwo\t0\n",
    "a.parquet": "",
}


@pytest.mark.parametrize("name", LINES)
def test_no_server_is_asked_about_a_file(name, tmp_path, monkeypatch):
    """Offline it would take three to five seconds a file until the name of who counts its readers is not found."""
    asked = []

    def look_up(host, *args, **options):
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    if name == "a.parquet":
        import datasets

        datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / name)
        paths = [tmp_path / name]
    else:
        paths = [tmp_path / name, tmp_path / f"{name}.gz"]
        paths[0].write_text(LINES[name])
        paths[1].write_bytes(gzip.compress(LINES[name].encode()))
    wanted = [{"text": row["text"]} for row in ROWS] if name == "a.txt" else ROWS
    if name in ("a.csv", "a.tsv"):
        wanted = [{**row, "label": str(row["label"])} for row in ROWS]
    assert load_source(paths).to_list() == wanted * len(paths)
    assert not asked


@pytest.mark.parametrize("sign", (",", ";", "\t", "|"))
def test_the_delimiter_of_a_csv_is_found(sign, tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(f'\ufeff"text"{sign}id\n"a{sign} cat"{sign}1\nthe dog{sign}2\n'.encode()))
    assert load_source(path).to_list() == [{"text": f"a{sign} cat", "id": "1"}, {"text": "the dog", "id": "2"}]


def test_a_column_by_itself_may_hold_any_sign(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('"text; as it was"\na cat; a dog\n"one, two"\n')
    assert load_source(path)["text; as it was"][:] == ["a cat; a dog", "one, two"]


@pytest.mark.parametrize("header", ("text,id", "text;id", "text|id"))
def test_a_tsv_without_tabs(header, tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text(f"{header}\na cat\n")
    with pytest.raises(InputError, match=r"the first line has no tab: .* is this a .csv"):
        load_source(path)


def test_files_of_several_delimiters(tmp_path):
    for name, sign in (("a.csv", ","), ("b.csv", ";")):
        (tmp_path / name).write_text(f"text{sign}id\na cat{sign}1\n")
    with pytest.raises(InputError, match=r"a.csv has ',' between its fields, and .*b.csv has ';': make them alike"):
        load_source([tmp_path / "a.csv", tmp_path / "b.csv"])
