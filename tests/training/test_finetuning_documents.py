"""Fine-tuning for documents with one label: windows learn it, and together say it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import tiny
import torch
from command_line import run_here
from finetuning_runs import base, task_of, write_rows
from seeds import numpy_generator
from sklearn.metrics import accuracy_score

import fastbert
from fastbert import Windows
from fastbert.errors import ConfigError
from fastbert.serve.engine import load_engine


def rows_of(pairs: bool = False) -> list[dict]:
    draw, words = numpy_generator(5), np.array(tiny.WORDS.split())
    texts = [" ".join(draw.choice(words, n)) for n in (3, 30, 31, 100, 64, 8)]
    given = [{"question": "who sat ?", "sentence": text} for text in texts] if pairs else [{"text": t} for t in texts]
    return [row | {"label": ("no", "yes", "so")[i % 3]} for i, row in enumerate(given)]


@pytest.mark.parametrize("pairs", (False, True), ids=("texts", "pairs"))
def test_windows_learn_the_label_of_their_text(tmp_path, pairs):
    from transformers import AutoTokenizer

    rows, model = rows_of(pairs), base(tmp_path)
    with pytest.warns(UserWarning, match="too long go on in .* more windows"):
        task = task_of(model, write_rows(tmp_path / "a.jsonl", rows), windows=True, doc_stride=8)
    task.save(task.model, tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    columns = ("question", "sentence") if pairs else ("text",)
    made = tokenizer(
        *([row[name] for row in rows] for name in columns),
        max_length=32,
        stride=8,
        return_overflowing_tokens=True,
        truncation="only_second" if pairs else True,
    )
    assert [one["input_ids"].tolist() for one in task.train.sequences] == made["input_ids"]
    source = made["overflow_to_sample_mapping"]
    names = task.labels.names
    assert [names[i] for i in task.train.labels["labels"]] == [rows[i]["label"] for i in source]


def test_an_evaluation_judges_texts_as_predict_labels_them(tmp_path):
    rows, model = rows_of(), base(tmp_path)
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.warns(UserWarning, match="more windows"):
        task = task_of(model, path, path, windows=True, doc_stride=8)
    torch.nn.init.normal_(task.model.classifier.weight)
    with torch.no_grad():
        found = task.evaluate(task.model.eval())
    task.save(task.model, tmp_path / "saved")
    task.tokenizer.save(str(tmp_path / "saved" / "tokenizer.json"))
    classifier = fastbert.TextClassifier(tmp_path / "saved", device="cpu")
    assert classifier.windows == Windows(32, 8) == load_engine(str(tmp_path / "saved"), "auto", "cpu").model.windows
    texts, wanted = [row["text"] for row in rows], [row["label"] for row in rows]
    scores = classifier.predict(texts)
    said = [classifier.labels[i] for i in scores.argmax(-1)]
    assert found["accuracy"] == accuracy_score(wanted, said)
    right = scores[np.arange(len(rows)), [classifier.labels.index(label) for label in wanted]]
    assert found["loss"] == pytest.approx(-np.log(right).mean(), rel=1e-5)
    assert not np.array_equal(scores, classifier.predict(texts, windows=Windows(pool="first")))
    done = run_here("predict", tmp_path / "saved", path, "--output", tmp_path / "out.jsonl")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["label"] for line in lines] == said


@pytest.mark.parametrize(
    "options,message",
    (
        ({"doc_stride": 8}, "doc_stride is for windows of long texts, and there are none: give --windows, too"),
        (
            {"windows": True, "doc_stride": 30},
            "doc_stride is 30: chunks of 32 tokens, 2 special",
        ),
        ({"windows": True, "task": "tokens"}, "windows is for the tasks classification, and the task is tokens"),
    ),
)
def test_what_cannot_be_is_refused(tmp_path, options, message):
    path = write_rows(tmp_path / "a.jsonl", rows_of())
    with pytest.raises(ConfigError, match=re.escape(message)):
        task_of(base(tmp_path), path, **options)
