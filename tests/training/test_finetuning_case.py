"""A base whose sentence_bert_config.json alone says that case is lowered: what comes out of it lowers case, too."""

from __future__ import annotations

import pytest
import tiny
from finetuning_runs import base, task_of, write_rows
from full import halved

from fastbert import QuestionAnswerer, TextClassifier, TokenClassifier

TEXTS = ("The CAT sat", "a Dog ran IN", "Who and WE", "CAFÉ")
ROWS = {
    "classification": [{"text": text, "label": i % 2} for i, text in enumerate(TEXTS)],
    "tokens": [{"tokens": text.split(), "tags": ["O", "B-A", "O", "O"][: len(text.split())]} for text in TEXTS],
    "qa": [
        {"id": str(i), "question": "Who ?", "context": text, "answers": {"text": [text[:3]], "answer_start": [0]}}
        for i, text in enumerate(TEXTS)
    ],
}
KINDS = {"classification": TextClassifier, "tokens": TokenClassifier, "qa": QuestionAnswerer}


@halved
@pytest.mark.parametrize("task", KINDS)
@pytest.mark.parametrize("files", ("tokenizer.json", "vocab.txt"))
def test_case_is_lowered_as_in_training(task, files, tmp_path):
    from transformers import AutoTokenizer

    model = base(tmp_path)
    tiny.write_tokenizer(tmp_path / "base", lowercase=False)
    tiny.write_json(tmp_path / "base/sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True})
    if files == "vocab.txt":
        (tmp_path / "base/tokenizer.json").unlink()
    made = task_of(model, write_rows(tmp_path / "rows.jsonl", ROWS[task]), task=task)
    wanted = [made.tokenizer.encode(text).ids for text in TEXTS]
    assert wanted == [made.tokenizer.encode(text.lower()).ids for text in TEXTS]
    for _ in range(2):  # what is better later on is written over it
        made.save(made.model, tmp_path / "saved")
        assert [KINDS[task](tmp_path / "saved").tokenizer.encode(text).ids for text in TEXTS] == wanted
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [theirs(text)["input_ids"] for text in TEXTS] == wanted


def test_a_base_that_keeps_case_is_saved_with_its_own_files(tmp_path):
    model = base(tmp_path)
    tiny.write_tokenizer(tmp_path / "base", lowercase=False)
    task = task_of(model, write_rows(tmp_path / "rows.jsonl", ROWS["classification"]))
    task.save(task.model, tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "base" / name).read_bytes()
