"""Files of examples, read by Hugging Face's `datasets`."""

from __future__ import annotations

import gzip
import json
import socket

import pytest

from fastbert.data.sources import load_source

ROWS = [{"text": "one", "label": 1}, {"text": "two", "label": 0}]
LINES = {
    "a.txt": "one\ntwo\n",
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "a.csv": "text,label\none,1\ntwo,0\n",
    "a.tsv": "text\tlabel\none\t1\ntwo\t0\n",
    "a.parquet": "",
}


@pytest.mark.parametrize("name", LINES)
def test_nobody_is_asked_about_a_file(name, tmp_path, monkeypatch):
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
