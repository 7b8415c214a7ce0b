"""`fastbert predict`: the answers of fine-tuned models against transformers' pipelines, and what it refuses."""

from __future__ import annotations

import csv
import gzip
import json
import os

import pytest
import torch
from command_line import fails, run_here
from precise import assert_close_to_theirs, in_float64
from tiny import edit_config, write_json, write_model

from fastbert.data.usage import FILE, Usage

TEXTS = ("the cat sat on the mat", "a dog ran in !", "Who", "")
LABELS = ("no", "yes", "maybe")
ENTITIES = "the Cat sat on Matt and Dogs"


def with_every_class(folder):
    """A model whose logits of each class have a mean of 0 over the first words of ENTITIES: no class has them all."""
    import transformers

    model = transformers.AutoModelForTokenClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encoded = tokenizer(ENTITIES, return_tensors="pt")
    words = encoded.word_ids()
    with torch.no_grad():
        logits = model(**encoded).logits[0]
        model.classifier.bias -= logits[[words.index(i) for i in range(len(ENTITIES.split()))]].mean(0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders as transformers leaves them: nothing of fastbert's is in them."""
    root = tmp_path_factory.mktemp("models")
    names = {"id2label": {0: "no", 1: "yes", 2: "maybe"}, "num_labels": 3}
    tags = {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}, "num_labels": 3}
    return {
        "single": write_model(root / "single", head="SequenceClassification", **names),
        "several": write_model(
            root / "several", head="SequenceClassification", problem_type="multi_label_classification", **names
        ),
        "number": write_model(root / "number", head="SequenceClassification", num_labels=1, problem_type="regression"),
        "tokens": with_every_class(write_model(root / "tokens", head="TokenClassification", **tags)),
        "qa": write_model(root / "qa", head="QuestionAnswering"),
        "none": write_model(root / "none", head="MaskedLM"),
    }


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(*arguments) -> list[dict]:
    done = run_here("predict", *arguments)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def in_two_precisions(pipe, *inputs, **options) -> list:
    """A pipeline's answers in float32 and in float64."""
    return [each(*inputs, **options) for each in (pipe, in_float64(pipe))]


def scores_of(answer: list[dict]) -> dict[str, float]:
    return {one["label"]: one["score"] for one in answer}


def test_labels_are_those_of_transformers_pipeline(models, tmp_path):
    import transformers

    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n")
    pipe = transformers.pipeline("text-classification", str(models["single"]), top_k=None)
    found = rows_of(models["single"], tmp_path / "a.txt", "--all")
    for row, text, wanted, exact in zip(found, TEXTS, *in_two_precisions(pipe, list(TEXTS)), strict=True):
        assert list(row) == ["text", "label", "score", "no", "yes", "maybe"] and row["text"] == text
        assert row["label"] == wanted[0]["label"] and row["score"] == row[row["label"]]
        theirs = ([scores_of(each)[label] for label in LABELS] for each in (wanted, exact))
        assert_close_to_theirs([row[label] for label in LABELS], *theirs)
    pipe = transformers.pipeline("text-classification", str(models["several"]), top_k=None)
    found = rows_of(models["several"], tmp_path / "a.txt", "--threshold", "0.45")
    for row, *theirs in zip(found, *in_two_precisions(pipe, list(TEXTS)), strict=True):
        near, exact = map(scores_of, theirs)
        assert set(row["labels"]) == {label for label, score in near.items() if score > 0.45}
        scores = ([each[label] for label in row["labels"]] for each in (near, exact))
        assert_close_to_theirs(row["scores"], *scores)
    pipe = transformers.pipeline("text-classification", str(models["number"]))
    found = rows_of(models["number"], tmp_path / "a.txt")
    theirs = ([one["score"] for one in each] for each in in_two_precisions(pipe, list(TEXTS)))
    assert_close_to_theirs([row["value"] for row in found], *theirs)


def test_pairs_are_read_by_the_columns_of_the_training_data(models, tmp_path):
    import transformers

    folder = write_model(tmp_path / "pairs", head="SequenceClassification", num_labels=2, id2label={0: "no", 1: "yes"})
    Usage("classification", ("left", "right"), 16).save(folder)
    rows = [{"right": "a dog ran", "id": 3, "left": "the cat sat on the mat " * 3}, {"left": "we", "right": "they"}]
    found = rows_of(folder, write(tmp_path / "a.jsonl", *rows))
    pipe = transformers.pipeline("text-classification", str(folder))
    pairs = [{"text": row["left"], "text_pair": row["right"]} for row in rows]
    wanted, exact = in_two_precisions(pipe, pairs, truncation=True, max_length=16)
    assert [row["label"] for row in found] == [one["label"] for one in wanted]
    assert_close_to_theirs(*([one["score"] for one in rows] for rows in (found, wanted, exact)))
    assert list(found[0]) == ["left", "right", "label", "score"]
    assert "no column 'left'" in fails("predict", folder, write(tmp_path / "b.jsonl", {"text": "a", "x": "b"}))
    assert "1 text in a row, and this model reads 2" in fails("predict", folder, _text(tmp_path))


def _text(tmp_path):
    (tmp_path / "one.txt").write_text("a cat\n")
    return tmp_path / "one.txt"


def test_entities_are_those_of_transformers_pipeline(models, tmp_path):
    import transformers

    pipe = transformers.pipeline("token-classification", str(models["tokens"]), aggregation_strategy="first")
    text = ENTITIES
    (found,) = rows_of(models["tokens"], write(tmp_path / "a.jsonl", {"text": text}))
    wanted, exact = in_two_precisions(pipe, text)
    assert found["text"] == text and wanted
    keys = ("start", "end")
    assert [[e[k] for k in keys] for e in found["entities"]] == [[e[k] for k in keys] for e in wanted]
    assert [e["label"] for e in found["entities"]] == [e["entity_group"] for e in wanted]
    assert_close_to_theirs(*([float(e["score"]) for e in each] for each in (found["entities"], wanted, exact)))
    (tmp_path / "a.conll").write_text("# text = " + text + "\n" + "\n".join(text.split()) + "\n\n")
    assert rows_of(models["tokens"], tmp_path / "a.conll") == [found]
    (tmp_path / "a.conll").write_text("# x\n" + "".join(f"{word} y\n" for word in text.split()))
    assert "line 1: '# x' may be a comment, or a word" in fails("predict", models["tokens"], tmp_path / "a.conll")
    assert rows_of(models["tokens"], tmp_path / "a.conll", "--hash-lines", "comment") == [found]


def test_options_that_would_be_ignored(models, tmp_path):
    words, rows, squad = tmp_path / "a.conll", write(tmp_path / "a.jsonl", {"text": "the cat"}), tmp_path / "a.json"
    words.write_text("the\ncat\n")
    write_json(squad, {"data": []})
    for kind, file in (("tokens", rows), ("single", rows), ("single", words), ("qa", squad), ("tokens", "-")):
        said = fails("predict", models[kind], file, "--hash-lines", "word")
        assert f"--hash-lines is for CoNLL files (.conll, .bio, .iob, .iob2) and models of tokens; {file} for" in said
    for kind, file in (("tokens", words), ("qa", squad)):
        said = fails("predict", models[kind], file, "--columns", "text")
        assert f"--columns is for files that have columns; {file} has none" in said


def test_words_are_read_from_gzip(models, tmp_path):
    (tmp_path / "a.conll").write_text("the\ncat\n")
    (tmp_path / "b.conll.gz").write_bytes(gzip.compress(b"the\ncat\n"))
    assert rows_of(models["tokens"], tmp_path / "b.conll.gz") == rows_of(models["tokens"], tmp_path / "a.conll")


def test_answers_to_questions(models, tmp_path):
    context = "the cat sat on the mat . a dog ran in to the old house ."
    squad = {"data": [{"paragraphs": [{"context": context, "qas": [{"id": "1", "question": "who ?"}]}]}]}
    write_json(tmp_path / "a.json", squad)
    (found,) = rows_of(models["qa"], tmp_path / "a.json")
    assert list(found) == ["question", "answer", "score", "start", "end"]
    assert context[found["start"] : found["end"]] == found["answer"] and 0 < found["score"] < 1
    row = {"question": "who ?", "context": context}
    assert rows_of(models["qa"], write(tmp_path / "b.jsonl", row)) == [found]


def test_kinds_of_output_hold_the_same_rows(models, tmp_path):
    import pyarrow.parquet as pq

    source = write(tmp_path / "a.jsonl", {"text": ""}, *({"text": text} for text in TEXTS))
    for name in ("several", "tokens"):
        expected = rows_of(models[name], source)
        for suffix in (".jsonl", ".csv", ".parquet"):
            out = tmp_path / f"{name}{suffix}"
            done = run_here("predict", models[name], source, "--output", out)
            assert done.returncode == 0 and f"5 rows -> {out}" in done.stderr
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            table = [{k: json.loads(v) if v[:1] == "[" else v for k, v in row.items()} for row in csv.DictReader(file)]
        assert table == expected
        assert [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] == expected
        assert pq.read_table(tmp_path / f"{name}.parquet").to_pylist() == expected
    assert "exists already; --force" in fails("predict", models["tokens"], source, "--output", tmp_path / "tokens.csv")


def test_what_it_refuses(models, tmp_path):
    source = write(tmp_path / "a.jsonl", {"text": "a", "question": "b"})
    empty = write(tmp_path / "empty.jsonl")
    assert "is a BertForMaskedLM: predict runs models for" in fails("predict", models["none"], source)
    assert "--all is for classification" in fails("predict", models["tokens"], source, "--all")
    assert "no column 'context'; name others for question, context" in fails("predict", models["qa"], source)
    assert "holds no rows" in fails("predict", models["single"], empty)
    assert "--columns has 2 names; this model reads 1" in fails(
        "predict", models["tokens"], source, "--columns", "text", "question"
    )
    assert "has no column 'nothing'" in fails("predict", models["single"], write_csv(tmp_path), "--columns", "nothing")
    assert "not a number between 0 and 1" in fails("predict", models["several"], source, "--threshold", "2")
    assert "is not a folder" in fails("predict", tmp_path / "nothing", source)
    numbers = write(tmp_path / "n.jsonl", {"text": "a"}, {"text": 3})
    assert "line 2: the value is 3, not a text" in fails("predict", models["single"], numbers)
    lists = write(tmp_path / "l.jsonl", {"text": ["a"]})
    assert "a value is a list; this model reads texts" in fails("predict", models["single"], lists)


def write_csv(tmp_path):
    (tmp_path / "c.csv").write_text("text\na\n")
    return tmp_path / "c.csv"


def test_a_folder_that_does_not_fit_itself(models, tmp_path):
    source = write(tmp_path / "a.jsonl", {"text": "a"})
    plain = write_model(tmp_path / "plain")
    edit_config(plain, architectures=["BertForSequenceClassification"])
    assert "is no classifier: its checkpoint lacks" in fails("predict", plain, source)
    folder = write_model(tmp_path / "other", head="QuestionAnswering")
    write_json(folder / FILE, {"task": "tokens", "text_columns": []})
    assert "says 'tokens', and config.json BertForQuestionAnswering" in fails("predict", folder, source)
    write_json(folder / FILE, {"task": "qa", "columns": []})
    assert "is damaged" in fails("predict", folder, source)


def test_a_full_disk_leaves_nothing(models, tmp_path, monkeypatch):
    source = write(tmp_path / "a.jsonl", {"text": "a"})
    if os.path.exists("/dev/full"):
        done = run_here("predict", models["single"], source, "--output", "/dev/full")
        assert done.returncode == 2
    folder = tmp_path / "locked"
    folder.mkdir()
    out = folder / "out.jsonl"

    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "No space left on device" in fails("predict", models["single"], source, "--output", out)
    assert not list(folder.iterdir())
