"""Tasks of `finetune --task embedding` on a tiny model, with rows made of its few words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from seeds import python_random

from fastbert.training.finetuning import make_task
from fastbert.training.finetuning.embedding import Embedding
from fastbert.training.options import FinetuneOptions
from fastbert.training.task import Phase

CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
PHASE = Phase(until=1, step_tokens=4096)
RANKING = ("anchor", "positive", "negative_1", "negative_2")
SCORED = ("sentence1", "sentence2", "score")


def rows(columns: tuple[str, ...], count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = python_random(seed)

    def value(column: str, i: int) -> Any:
        if column == "score":
            return (i * 7 % 5) / 5
        return " ".join(draw.choices(tiny.WORDS.split(), k=draw.randint(1, 9))) + f" {'abcdefgh'[i % 8]}"

    return [{column: value(column, i) for column in columns} for i in range(count)]


def write(path: Path, data: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in data), encoding="utf-8")
    return str(path)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tiny.write_model(tmp_path / "model", **CALM)


def task_of(folder: Path, data: list[dict[str, Any]], name: str = "train.jsonl", **options: Any) -> Embedding:
    path = write(folder.parent / name, data)
    task = make_task(FinetuneOptions(task="embedding", model=str(folder), train=(path,), max_length=16, **options))
    assert isinstance(task, Embedding)
    return task
