"""Files that are damaged, or not what their names say: one line with the file and the row, before a step is made."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from finetuning_runs import TEXTS, base, task_of

from fastbert.data.pretraining.corpus import tokenize_corpus
from fastbert.data.text_files import read_texts
from fastbert.data.tokenization import load_tokenizer
from fastbert.errors import InputError, TextFileError
from fastbert.training.options import PretrainOptions
from fastbert.training.pretraining import make_task

CSV = "text,label\n" + "".join(f"{text.replace(',', '')},{i % 2}\n" for i, text in enumerate(TEXTS))
TSV = CSV.replace(",", "\t")
JSONL = "".join(json.dumps({"text": text, "label": i % 2}) + "\n" for i, text in enumerate(TEXTS))
SECOND = "a dog ran in"  # the text of the second row, and so of the third line where there is a header

DAMAGED = {
    "empty.csv": ("", "is empty"),
    "empty.tsv": ("", "is empty"),
    "empty.txt": ("", "is empty"),
    "empty.jsonl": ("", "is empty"),
    "empty.json": ("", "is empty"),
    "empty.parquet": ("", "is empty"),
    "header.csv": ("text,label\n", " holds no rows"),
    "blank.csv": ("\n\n", " holds no rows"),
    "blank.jsonl": ("\n\n", " holds no rows"),
    "label.csv": (CSV.replace(f"{SECOND},1", f"{SECOND},"), ", row 2: label is missing"),
    "blank-label.csv": (CSV.replace(f"{SECOND},1", f"{SECOND}, "), ", row 2: label is missing"),
    "nan.csv": (CSV.replace(",1", ",nan"), ", row 2: label is missing"),
    "null.csv": (CSV.replace(f"{SECOND},1", f"{SECOND},NULL"), ", row 2: label is missing"),
    "score.csv": (CSV.replace(",1", ",0.5").replace(f"{SECOND},0.5", f"{SECOND},NA"), ", row 2: label is missing"),
    "label.jsonl": (JSONL.replace(f'"{SECOND}", "label": 1', f'"{SECOND}"'), ", row 2: label is missing"),
    "in-list.jsonl": (
        '{"text": "x", "label": ["a", "b"]}\n{"text": "y", "label": ["a", null]}\n',
        ", row 2: label is missing",
    ),
    "text.csv": (CSV.replace(SECOND, ""), ", row 2: text is missing"),
    "number.jsonl": ('{"text": 7, "label": 1}\n{"text": 8, "label": 0}\n', ", row 1: text is 7, not a text"),
    "list.jsonl": (JSONL.replace(f'"{SECOND}"', f'["{SECOND}"]'), ", row 2: text is ['a dog ran in'], not a text"),
    "short.csv": (CSV.replace(f"{SECOND},1", SECOND), ", row 2: label is missing"),
    "long.csv": (CSV.replace(SECOND, "a dog, ran in"), ", line 3: 3 fields, but 2 in the header"),
    "long.tsv": (TSV.replace(SECOND, "a dog\tran in"), ", line 3: 3 fields, but 2 in the header"),
    "all-long.csv": ("text,label\nx,a dog,1\ny,a cat,0\n", ", line 2: 3 fields, but 2 in the header"),
    "quote.csv": (CSV.replace(SECOND, f'"{SECOND}'), ", line 7: unexpected end of data"),
    "twice.csv": (CSV.replace("text,", "text,text,").replace("\n", "\nx,"), ", line 1: two columns are called 'text'"),
    "latin.csv": (CSV.replace("dog", "dög").encode("latin-1"), ", line 3: byte 4 is 0xf6, which is not UTF-8"),
    "latin.tsv": (TSV.replace("dog", "dög").encode("latin-1"), ", line 3: byte 4 is 0xf6, which is not UTF-8"),
    "latin.jsonl": (JSONL.replace("dog", "dög").encode("latin-1"), ", line 2: byte 14 is 0xf6, which is not UTF-8"),
    "wide.csv": (CSV.encode("utf-16"), ", line 1: byte 1 is 0xff, which is not UTF-8"),
    "nul.csv": (CSV.replace("dog", "d\0g"), ", row 2: text holds a NUL byte; is this a text file?"),
    "nul.jsonl": (JSONL.replace("dog", "d\0g"), ", line 2: holds a NUL byte; is this a text file?"),
    "bad.jsonl": (JSONL.replace('"label": 1}', '"label": 1', 1), ", line 2: not JSON: Expecting ',' delimiter"),
    "other.jsonl": (JSONL.replace('{"text": "a dog ran in", "label": 1}', "[1, 2]"), ", line 2: [1, 2] is no object"),
    "plain.csv.gz": (CSV, ", after line 0: Not a gzipped file"),
    "cut.csv.gz": (gzip.compress(CSV.encode(), mtime=0)[:-12], ", after line "),
    "texts.txt": (CSV, " has texts alone, and no column of labels"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file(tmp_path, name):
    data, said = DAMAGED[name]
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(InputError) as raised:
        task_of(base(tmp_path), str(path))
    assert str(raised.value).startswith(f"{path}{said if said[0] in ' ,' else f' {said}'}"), raised.value
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name,data",
    (
        ("mark.csv", "\ufeff" + CSV),
        ("mark.jsonl", "\ufeff" + JSONL),
        ("windows.csv", CSV.replace("\n", "\r\n")),
        ("old.csv", CSV.replace("\n", "\r")),
        ("index.csv", "".join(f"{i},{line}\n" for i, line in enumerate(CSV.splitlines())).replace("0,", ",", 1)),
        ("numbered.csv", CSV.replace("label\n", "label,a,a.1\n").replace("\n", ",1,2\n").replace("a.1,1,2", "a.1")),
        ("packed.csv.gz", gzip.compress(CSV.encode(), mtime=0)),
        ("packed.jsonl.gz", gzip.compress(JSONL.encode(), mtime=0)),
    ),
)
def test_a_file_that_is_as_good(tmp_path, name, data):
    """A byte order mark, other ends of lines, pandas' column of row numbers, columns with numbers, gzip."""
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    assert len(task_of(base(tmp_path), str(tmp_path / name)).train) == len(TEXTS)


def test_words_that_others_take_for_nothing(tmp_path):
    """ "null" and "None" are texts, and NA is a label (a country's, say)."""
    rows = [("null", "NA"), ("None", "DE"), ("nan", "NA"), ("n/a", "DE")]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    task = task_of(base(tmp_path), str(tmp_path / "a.csv"))
    assert task.model.config.id2label == {0: "DE", 1: "NA"} and task.train.labels["labels"].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize(
    "data,said",
    (
        ("cat O\nd\xf6g O\n".encode("latin-1"), ", line 2: byte 2 is 0xf6, which is not UTF-8"),
        (b"cat O\nd\0g O\n", ", line 2: holds a NUL byte"),
        (b"", " holds no texts"),
    ),
)
def test_words_with_tags_that_are_damaged(tmp_path, data, said):
    (tmp_path / "a.conll").write_bytes(data)
    with pytest.raises(InputError) as raised:
        task_of(base(tmp_path), str(tmp_path / "a.conll"), task="tokens")
    assert str(raised.value).startswith(f"{tmp_path / 'a.conll'}{said}")


def test_questions_that_are_nested_without_end(tmp_path):
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="is no SQuAD file"):
        task_of(base(tmp_path), str(tmp_path / "a.json"), task="qa")


@pytest.mark.parametrize(
    "lines,said",
    (
        (['{"text": "a dog"}', "{}"], "row 2: text is missing"),
        (['{"text": 0}', '{"text": 7}'], "row 1: text is 0, not a text"),
    ),
)
def test_a_corpus_with_a_row_that_is_no_text(tmp_path, lines, said):
    """To make a vocabulary of, and to learn from."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(InputError, match=f"a.jsonl, {said}"):
        make_task(PretrainOptions(preset="baby", train=(str(path),)))
    with pytest.raises(InputError, match=f"a.jsonl, {said}"):
        tokenize_corpus(str(path), load_tokenizer(Path(base(tmp_path))))


def test_texts_are_read_from_gzip(tmp_path):
    files = (("a.txt.gz", "a dog\n\na cat\n", None), ("a.csv.gz", CSV, "text"), ("a.jsonl.gz", JSONL, "text"))
    for name, data, column in files:
        (tmp_path / name).write_bytes(gzip.compress(data.encode()))
        (tmp_path / name.removesuffix(".gz")).write_text(data)
        texts = list(read_texts(tmp_path / name, column))
        assert texts and texts == list(read_texts(tmp_path / name.removesuffix(".gz"), column))
    for name, said in (
        ("a.parquet.gz", "unknown kind of file '.gz'"),
        ("b.txt.gz", "after line 0: Not a gzipped file"),
    ):
        (tmp_path / name).write_bytes(b"a dog\n")
        with pytest.raises(TextFileError, match=said):
            list(read_texts(tmp_path / name))
