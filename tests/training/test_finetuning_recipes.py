"""Every recipe of examples/ runs by its one command, on the small samples that are beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import run_here
from full import left_to_full
from tiny import write_model

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(path.stem.removeprefix("finetune_") for path in EXAMPLES.glob("finetune_*.yaml"))
METRICS = {"sst2": "accuracy", "stsb": "spearman", "ner": "f1", "question_answering": "f1", "banking77": "accuracy"}
ANSWERS = {"sst2": "label", "stsb": "value", "ner": "entities", "question_answering": "answer", "banking77": "label"}


def test_there_is_a_recipe_for_each_sample():
    assert set(METRICS) <= set(RECIPES) and all((EXAMPLES / "data" / f"{name}.jsonl").is_file() for name in METRICS)


@left_to_full(lambda p: p["name"] == "sst2")  # classes, as banking77's
@pytest.mark.parametrize("name", METRICS)
def test_a_recipe_trains_and_predicts(tmp_path, name):
    model = write_model(tmp_path / "base", max_position_embeddings=400)
    data, out = EXAMPLES / "data" / f"{name}.jsonl", tmp_path / "out"
    done = run_here(
        *("finetune", "--config", EXAMPLES / f"finetune_{name}.yaml", "--train", data, "--eval", data),
        *("--model", model, "--output", out, "--steps", 2, "--save-every", 100),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "metrics.json").read_text())
    assert found["steps"] == 2 and f"eval_{METRICS[name]}" in found
    predicted = run_here("predict", out, data)
    rows = [json.loads(line) for line in predicted.stdout.splitlines()]
    assert predicted.returncode == 0 and len(rows) == len(data.read_text().splitlines()), predicted.stderr
    assert all(ANSWERS[name] in row for row in rows)
