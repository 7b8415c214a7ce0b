"""Every task of training on tiny data, with a batch of it: for what holds of each loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import finetuning_runs
import pretraining_runs
from seeds import manual_seed

from fastbert.data.batches import KeyedDataset
from fastbert.packed_inputs import PackedInputs
from fastbert.training.finetuning import make_task as make_finetuning
from fastbert.training.options import FinetuneOptions
from fastbert.training.pretraining import make_task as make_pretraining
from fastbert.training.task import Phase, Task

PHASE = Phase(1, 1000, max_length=24)
TEXTS = finetuning_runs.TEXTS
WORDS = [["the", "cat", "sat", "on"], ["we", "ran"], ["a", "dog", "and", "who"]]
CONTEXT = "the cat sat on the mat . a dog ran in to the old house"
ANSWERS = ("the cat", "a dog", "the old house")


def _texts(labels: list) -> list[dict]:
    return [{"text": text, "label": label} for text, label in zip(TEXTS, labels, strict=True)]


def _pairs(*more: str) -> list[dict]:
    columns = dict(zip(("anchor", "positive", *more), range(4), strict=False))
    return [{name: TEXTS[(i + j) % 6] for name, j in columns.items()} for i in range(5)]


def _scored() -> list[dict]:
    return [{"sentence1": TEXTS[i], "sentence2": TEXTS[i + 1], "score": (i * 3 % 5) / 5} for i in range(5)]


TAGGED = [{"tokens": words, "ner_tags": ["O", "B-PER", "O", "I-LOC"][: len(words)]} for words in WORDS]
ASKED = [
    {"question": f"who {i} ?", "context": CONTEXT, "answers": {"text": [a], "answer_start": [CONTEXT.index(a)]}}
    for i, a in enumerate(ANSWERS)
]
SINGLE = ["no", "yes", "no", "maybe", "yes", "no"]
SEVERAL = [["new", "old"], [], ["old"], ["new"], ["new", "old"], ["old"]]

FINETUNING: dict[str, tuple[list[dict], dict]] = {
    "classes": (_texts(SINGLE), {}),
    "weighted classes": (_texts(SINGLE), {"class_weights": ("1", "2", "4")}),
    "several labels": (_texts(SEVERAL), {}),
    "numbers": (_texts([0.5, -100.0, 1.0, 4.0, 2.0, 5.0]), {}),
    "tags": (TAGGED, {"task": "tokens"}),
    "answers": (ASKED, {"task": "qa", "doc_stride": 6}),
    "ranking": (_pairs(), {"task": "embedding"}),
    "ranking both ways": (_pairs("negative_1"), {"task": "embedding", "symmetric": True, "dims": ("32", "8")}),
    "cosent": (_scored(), {"task": "embedding", "loss": "cosent"}),
    "cosine": (_scored(), {"task": "embedding", "loss": "cosine", "pooling": "weightedmean"}),
}
PRETRAINING: dict[str, dict] = {
    "masked": {},
    "next sentence": {"objective": "mlm+nsp"},
    "order": {"objective": "mlm+sop"},
    "replaced": {"objective": "rtd"},
    "distilled": {"objective": "distil"},
}
TASKS = (*FINETUNING, *PRETRAINING)


def make(name: str, folder: Path, text: Path) -> tuple[Task, Callable[[int], PackedInputs]]:
    """The task, whose model has no dropout, and its batch number i. `text`: the file of pre-training."""
    task = _finetuning(name, folder) if name in FINETUNING else _pretraining(name, folder, text)
    collate, (examples, _) = task.collate(PHASE), task.examples(0, PHASE)
    keyed = KeyedDataset(examples, 0, 0)

    def batch(i: int) -> PackedInputs:
        count = len(examples) - 1 if name in FINETUNING else 4
        return collate(keyed.__getitems__([(i + place) % len(examples) for place in range(count - i % 2)]))

    return task, batch


def _finetuning(name: str, folder: Path) -> Any:
    rows, options = FINETUNING[name]
    manual_seed(0)
    model = finetuning_runs.base(folder)
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return make_finetuning(FinetuneOptions(model=model, train=(str(path),), max_length=32, **options))


def _pretraining(name: str, folder: Path, text: Path) -> Any:
    manual_seed(0)
    given = dict(PRETRAINING[name])
    if name == "distilled":
        teacher = make_pretraining(pretraining_runs.options(text))
        teacher.save(teacher.model, folder / "teacher")
        given["teacher"] = str(folder / "teacher")
    return make_pretraining(pretraining_runs.options(text, **given))
