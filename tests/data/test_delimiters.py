"""What is between the fields of a table: what its first lines say, what decides, and what a user says."""

from __future__ import annotations

from itertools import chain, repeat

import pytest
from command_line import fails, run_here
from datasets import Dataset

from fastbert.data import sources
from fastbert.data.delimiters import delimiter_of, sign_of
from fastbert.data.sources import load_source
from fastbert.data.text_files import read_kept, read_rows, read_texts
from fastbert.errors import InputError, TextFileError
from fastbert.training.finetuning.inputs.rows import load_rows
from fastbert.training.options import FinetuneOptions, PretrainOptions
from fastbert.training.pretraining import make_task as pretraining


def both(path, text, **options) -> list[dict]:
    """The rows of a table by the reader of lines, which has to agree with that of `datasets`."""
    path.write_text(text)
    names: list[str] = []
    rows = list(read_rows(path, None, lambda there: names.extend(there) or there, **options))
    found = [dict(zip(names, row, strict=True)) for row in rows]
    assert load_source(path, **options).to_list() == found
    return found


PRICES = "text;price, EUR\ngood;1\nbad;0\n"


@pytest.mark.parametrize(
    "text,wanted",
    (
        (PRICES, [{"text": "good", "price, EUR": "1"}, {"text": "bad", "price, EUR": "0"}]),
        (
            'text;price, EUR\n"a, b; c";1\nd, e;0\n',
            [{"text": "a, b; c", "price, EUR": "1"}, {"text": "d, e", "price, EUR": "0"}],
        ),
        ("text,is a|b\nx,1\n", [{"text": "x", "is a|b": "1"}]),
        ('"te\nxt";label\n"a, cat";1\n', [{"te\nxt": "a, cat", "label": "1"}]),
        ('"te\n\n, ;""xt""";label\na;1\n', [{'te\n\n, ;"xt"': "a", "label": "1"}]),
        ('text\n"a, b"\nc;d\n', [{"text": "a, b"}, {"text": "c;d"}]),
    ),
)
def test_a_delimiter_is_found(text, wanted, tmp_path):
    assert both(tmp_path / "a.csv", text) == wanted


@pytest.mark.parametrize(
    "text",
    (
        "text,score;weight\nhello; there,1\n",
        "text,score;weight\nhello; there,1\na,b,c\nwe; ran,2\n",
        "text;price, EUR\n",
        "text;price, EUR\na\nb\n",
        'a;b,c\n"x;1\n',
    ),
)
def test_what_the_first_rows_leave_open_is_asked_for(text, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(text)
    for read in (lambda: list(read_texts(path)), lambda: load_source(path)):
        with pytest.raises((TextFileError, InputError), match=r"first line, ',' or ';'\? .*: say it with --delimiter"):
            read()


@pytest.mark.parametrize(
    "text,number",
    (
        ("id,text|t\n1,the cat\n2,a,b\n3,a dog\n", 3),
        ("id,text|t\n2,a,b\n1,the cat\n3,a dog\n", 2),
        ("id,text|t\n1,the cat\n2|a\n3,a dog\n", 3),  # one row fits the other sign
        ('id,text|t\n1,the cat\n"2" a,b\n3,a dog\n', 3),
        ('id,text|t\n1,the cat\n3,a dog\n"2,a\n', 4),
    ),
)
def test_a_bad_row_among_the_first_ones(text, number, tmp_path):
    """It is told as in any other table, and may be left out."""
    path, left_out = tmp_path / "a.csv", []
    path.write_text(text)
    assert list(read_texts(path, "text|t", left_out.append)) == ["the cat", "a dog"]
    assert [f"line {number}" in str(error) for error in left_out] == [True]
    with pytest.raises(TextFileError, match=f"a.csv, line {number}: "):
        list(read_texts(path, "text|t"))


def test_a_quotation_mark_that_is_left_open(tmp_path):
    """No more lines are looked at than the first ones: a file may be larger than the memory."""
    read = 0

    def lines():
        nonlocal read
        for line in chain(["id,text|t\n", "1,the cat\n", '"2,a\n'], repeat("3,a dog\n", 50_000)):
            read += 1
            yield line

    assert delimiter_of(tmp_path / "a.csv", lines(), is_tsv=False) == ","
    assert read <= 10_001


def test_a_delimiter_that_is_given(tmp_path):
    text = "text,score;weight\nhello; there,1\n"
    assert both(tmp_path / "a.csv", text, delimiter=",") == [{"text": "hello; there", "score;weight": "1"}]
    assert both(tmp_path / "a.csv", text, delimiter=";") == [{"text,score": "hello", "weight": " there,1"}]
    assert both(tmp_path / "a.csv", "text:id\na, b:1\n", delimiter=":") == [{"text": "a, b", "id": "1"}]
    for name in ("tab", "\\t", "\t"):
        assert both(tmp_path / "a.csv", "text\tid\na, b\t1\n", delimiter=name) == [{"text": "a, b", "id": "1"}]
    assert both(tmp_path / "a.tsv", 'text;id\n"a;1\n', delimiter=";") == [
        {"text": '"a', "id": "1"}
    ]  # unquoted, as ever
    assert both(tmp_path / "a.csv", "text\na, b\n", delimiter=";") == [{"text": "a, b"}]  # a column by itself
    path = tmp_path / "b.csv"
    path.write_text(text)
    assert list(read_texts(path, "weight", delimiter=";")) == [" there,1"]
    assert list(read_kept(path, "text", ["score;weight"], delimiter=",")) == [("hello; there", "1")]


@pytest.mark.parametrize(
    "name,text,delimiter,message",
    (
        ("a.csv", "text,id\na,1\n", ";", r"a.csv: the first line has no ';', which was given as the del.*text,id"),
        ("a.csv", '"a;b",id\na,1\n', ";", r"a.csv: the first line has no ';'"),
        ("a.tsv", "text\tid\na\t1\n", ";", r"a.tsv: the first line has no ';'"),
        ("a.jsonl", '{"text": "a"}\n', ";", r"a.jsonl: a delimiter is for .csv and .tsv files"),
        ("a.txt", "a\n", ";", r"a.txt: a delimiter is for .csv and .tsv files"),
        ("a.csv", "text,id\na,1\n", ";;", r"delimiter is ';;'; it must be one character"),
    ),
)
def test_a_delimiter_that_does_not_fit(name, text, delimiter, message, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    for read in (lambda: list(read_texts(path, delimiter=delimiter)), lambda: load_source(path, delimiter=delimiter)):
        with pytest.raises((TextFileError, InputError), match=message):
            read()


@pytest.mark.parametrize("given", ("", ";;", '"', "\n", "a", "1", "\u00a7"))
def test_what_is_no_delimiter(given):
    with pytest.raises(TextFileError, match="it must be one character"):
        sign_of(given)


WORDS = {
    "encode": ("FILE", "--model", "M", "--output", "-"),
    "search": ("query", "FILE", "--model", "M"),
    "rerank": ("query", "FILE", "--model", "M"),
    "classify": ("FILE", "--model", "M"),
    "predict": ("M", "FILE"),
    "quantize": ("M", "OUT", "--report", "FILE"),
    "compare": ("M", "--texts", "FILE"),
    "bench": ("--corpus", "FILE"),
    "finetune": ("--model", "M", "--train", "FILE", "--output", "OUT"),
    "pretrain": ("--preset", "baby", "--train", "FILE", "--output", "OUT"),
}


@pytest.mark.parametrize("command", WORDS)
def test_every_command_that_reads_tables_takes_one(command, tmp_path):
    """And it gets to the reader: a file that has none says so."""
    import tiny

    model = tiny.write_model(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "b"}\n')
    places = {"FILE": tmp_path / "a.jsonl", "M": model, "OUT": tmp_path / "out"}
    words = [command, *(places.get(word, word) for word in WORDS[command])]
    assert "a.jsonl: a delimiter is for .csv and .tsv files" in fails(*words, "--delimiter", ";")
    assert "delimiter" in fails(*words, "--delimiter", ";;") and not (tmp_path / "out").exists()


def test_commands_without_a_table(tmp_path):
    assert "--delimiter is for the file of --report" in fails("quantize", "m", tmp_path / "out", "--delimiter", ";")
    assert "--delimiter is for the files of" in fails("compare", "bert-base", "--delimiter", ";")
    assert "--delimiter needs --corpus" in fails("bench", "--delimiter", ";")
    assert "a delimiter is for .csv and" in fails("encode", "-", "--model", "m", "--output", "-", "--delimiter", ";")


@pytest.fixture
def files(tmp_path):
    """A table that may be read in two ways, and files of other kinds with the same columns."""
    (tmp_path / "a.csv").write_text("text,label,n;m\nthe; cat,x,1\na; dog,y,2\n")
    (tmp_path / "b.jsonl").write_text('{"text": "we ran", "label": "y"}\n{"text": "the cat", "label": "x"}\n')
    (tmp_path / "c.txt").write_text("the cat sat on the mat\n\na dog ran in\n")
    return {name: str(tmp_path / name) for name in ("a.csv", "b.jsonl", "c.txt")}


@pytest.mark.parametrize("train,held_out", (("a.csv", "b.jsonl"), ("b.jsonl", "a.csv")))
def test_a_fine_tuning_gives_it_to_its_tables(train, held_out, files):
    def read(*names, delimiter=","):
        train, held_out = (files.get(name, name) for name in names)
        return load_rows(FinetuneOptions(train=(train,), eval=(held_out,), delimiter=delimiter))

    rows = read(train, held_out)
    found = {train: rows.train["text"][:], held_out: rows.eval["text"][:]}
    assert found == {"a.csv": ["the; cat", "a; dog"], "b.jsonl": ["we ran", "the cat"]}
    with pytest.raises(InputError, match=r"a.csv: .* say it with --delimiter"):
        read(train, held_out, delimiter="")
    with pytest.raises(InputError, match=r"b.jsonl: a delimiter is for .csv and .tsv files"):
        read("b.jsonl", "b.jsonl")


def test_a_data_set_of_the_hub_beside_a_table(files, monkeypatch):
    monkeypatch.setattr(sources, "_from_hub", lambda name, split: Dataset.from_dict({"text": [f"{name} {split}"]}))
    rows = load_rows(FinetuneOptions(train=(files["a.csv"],), eval=("nobody:some",), delimiter=","))
    assert rows.train["text"][0] == "the; cat" and rows.eval["text"][:] == ["nobody:some validation"]
    with pytest.raises(InputError, match=r"nobody: a delimiter is for .csv and .tsv files"):
        load_rows(FinetuneOptions(train=("nobody",), delimiter=","))


def test_files_of_several_kinds_are_told_before_it(files):
    with pytest.raises(InputError, match="files of one kind are needed"):
        load_source([files["a.csv"], files["b.jsonl"]], delimiter=",")


@pytest.mark.parametrize("train,held_out", (("a.csv", "c.txt"), ("c.txt", "a.csv")))
def test_a_pre_training_gives_it_to_its_tables(train, held_out, files, tmp_path):
    import tiny

    model = str(tiny.write_model(tmp_path / "model", head="MaskedLM", num_hidden_layers=1))
    given = {"train": (files[train],), "eval": (files[held_out],), "output": "out", "max_length": 16}
    task = pretraining(PretrainOptions(model=model, delimiter=",", **given))
    assert [len(corpus.documents) - 1 for corpus in (task.corpus, task.held_out)] == [2, 2]
    with pytest.raises(InputError, match=r"a.csv: .* say it with --delimiter"):
        pretraining(PretrainOptions(model=model, **given))


def test_a_comparison_gives_it_to_its_tables(files):
    """Both files are read before a model is, and there is none."""
    for words in (("--texts", "c.txt", "--labelled", "a.csv"), ("--texts", "a.csv", "--labelled", "b.jsonl")):
        words = [files.get(word, word) for word in words]
        assert "./nobody is not a folder" in run_here("compare", "./nobody", *words, "--delimiter", ",").stderr
        assert "say it with --delimiter" in run_here("compare", "./nobody", *words).stderr
    words = ("--texts", files["c.txt"], "--labelled", files["b.jsonl"])
    assert "a delimiter is for .csv and .tsv files" in fails("compare", "./nobody", *words, "--delimiter", ",")
