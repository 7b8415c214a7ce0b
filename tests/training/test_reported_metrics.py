"""The figures that a run reports are those of what it has saved: `fastbert predict`, or `encode`, over the evaluation
file, and other libraries' metrics of what comes out.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import run_here
from finetuning_runs import base, write_rows
from full import left_to_full
from scipy.stats import pearsonr, spearmanr
from seeds import python_random, shifted
from seqeval.metrics import f1_score as entity_f1
from seqeval.metrics import precision_score, recall_score
from sklearn.metrics import accuracy_score, f1_score
from tiny import WORDS

from fastbert.training.finetuning import make_task
from fastbert.training.finetuning.inputs.squad import squad_metrics
from fastbert.training.options import FinetuneOptions
from fastbert.training.report import write_reports
from fastbert.training.run import execute

TAGS = ("O", "B-X", "I-X", "B-Y")
COUNT, CHUNK = 80, 60  # of rows; how many `predict` reads at a time here
OF_TASKS = [f"training.finetuning.{task}" for task in ("classification", "embedding", "question_answering", "tokens")]


def text(draw: Any) -> str:
    return " ".join(draw.choices(WORDS.split()[:-4], k=draw.randint(2, 12)))


def one_label(draw: Any) -> dict[str, Any]:
    return {"text": text(draw), "label": draw.choice("abc")}


def several_labels(draw: Any) -> dict[str, Any]:
    return {"text": text(draw), "label": draw.sample("abcd", draw.randint(1, 3))}


def a_number(draw: Any) -> dict[str, Any]:
    return {"text": text(draw), "label": draw.random()}


def tagged(draw: Any) -> dict[str, Any]:
    words = text(draw).split()
    return {"tokens": words, "tags": draw.choices(TAGS, k=len(words))}


def question(draw: Any) -> dict[str, Any]:
    context = text(draw)
    word = draw.choice(context.split())
    return {
        "question": text(draw),
        "context": context,
        "answers": {"text": [word], "answer_start": [context.index(word)]},
    }


def pair(draw: Any) -> dict[str, Any]:
    return {"sentence1": text(draw), "sentence2": text(draw), "score": draw.random()}


def of_one_label(rows: list[Any], said: list[Any]) -> dict[str, float]:
    wanted, found = [row["label"] for row in rows], [row["label"] for row in said]
    return {"accuracy": accuracy_score(wanted, found), "macro_f1": f1_score(wanted, found, average="macro")}


def of_several(rows: list[Any], said: list[Any]) -> dict[str, float]:
    def ones(lists: Any) -> np.ndarray:
        return np.array([[name in names for name in "abcd"] for names in lists])

    wanted, found = ones(row["label"] for row in rows), ones(row["labels"] for row in said)
    scores = {f"{kind}_f1": f1_score(wanted, found, average=kind, zero_division=0.0) for kind in ("micro", "macro")}
    return {**scores, "accuracy": accuracy_score(wanted, found)}


def of_numbers(rows: list[Any], said: list[Any]) -> dict[str, float]:
    """Of float32, which the output has the digits of."""
    wanted = np.array([row["label"] for row in rows], np.float32).astype(np.float64)
    found = np.array([row["value"] for row in said], np.float32).astype(np.float64)
    return {"spearman": spearmanr(found, wanted).statistic, "pearson": pearsonr(found, wanted).statistic}


def of_tags(rows: list[Any], said: list[Any]) -> dict[str, float]:
    found = []
    for row, answer in zip(rows, said, strict=True):
        starts = np.cumsum([0, *(len(word) + 1 for word in row["tokens"])])
        tags = ["O"] * len(row["tokens"])
        for entity in answer["entities"]:
            first, stop = np.searchsorted(starts, (entity["start"], entity["end"]))
            tags[first:stop] = [f"B-{entity['label']}"] + [f"I-{entity['label']}"] * (stop - first - 1)
        found.append(tags)
    wanted = [row["tags"] for row in rows]
    scores = {"f1": entity_f1, "precision": precision_score, "recall": recall_score}
    return {name: score(wanted, found) for name, score in scores.items()}


def of_answers(rows: list[Any], said: list[Any]) -> dict[str, float]:
    """Whose formulas test_finetuning_qa.py checks."""
    return squad_metrics([answer["answer"] for answer in said], [row["answers"]["text"] for row in rows])


CASES = {
    "label": (one_label, of_one_label, ()),
    "adapters": (one_label, of_one_label, ("--lora-rank", 2)),
    "labels": (several_labels, of_several, ()),
    "number": (a_number, of_numbers, ()),
    "tags": (tagged, of_tags, ("--task", "tokens", "--doc-stride", 2)),
    "answers": (question, of_answers, ("--task", "qa", "--doc-stride", 2)),
    "vectors": (pair, None, ("--task", "embedding")),
}


# fp32 runs as it did before; of labels adapters have all that their heads have.
@left_to_full(lambda p: (p["precision"] == "fp32" and p["case"] != "number") or p["case"] == "label")
@pytest.mark.parametrize("precision", ("bf16", "fp32"))
@pytest.mark.parametrize("case", CASES)
def test_reported_metrics_are_those_of_the_saved_model(case, precision, tmp_path, monkeypatch):
    for name in ("data.tokenized", *OF_TASKS):
        monkeypatch.setattr(f"fastbert.{name}.CHUNK_INPUTS", CHUNK)
    make, measure, flags = CASES[case]
    draw, folder = python_random(3), tmp_path / "run"
    rows = [make(draw) for _ in range(COUNT)]
    train, held_out = (write_rows(tmp_path / name, part) for name, part in (("a.jsonl", rows[:60]), ("b.jsonl", rows)))
    options = ("--max-length", 12, "--batch-size", 20, "--epochs", 2, "--learning-rate", 3e-3, "--seed", shifted(3))
    done = run_here(
        "finetune",
        "--model",
        base(tmp_path),
        "--train",
        train,
        "--eval",
        held_out,
        *options,
        *flags,
        "--precision",
        precision,
        "--output",
        folder,
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads((folder / "metrics.json").read_text())
    found = of_vectors(folder, held_out, rows, tmp_path) if measure is None else measure(rows, said(folder, held_out))
    reported = {name: metrics[f"eval_{name}"] for name in found}
    if case == "vectors":  # whose norms and products are added up in another order, in float64
        reported, found = ({name: f"{value:.4f}" for name, value in one.items()} for one in (reported, found))
    assert reported == found


def said(folder: Path, file: str) -> list[Any]:
    done = run_here("predict", folder, file)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_vectors(folder: Path, file: str, rows: list[Any], place: Path) -> dict[str, float]:
    sides = []
    for name in ("sentence1", "sentence2"):
        done = run_here("encode", file, "--model", folder, "--column", name, "--output", place / f"{name}.npy")
        assert done.returncode == 0, done.stderr
        vectors = np.load(place / f"{name}.npy").astype(np.float64)
        sides.append(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    return {"spearman": spearmanr((sides[0] * sides[1]).sum(1), [row["score"] for row in rows]).statistic}


def test_the_training_loss_is_the_mean_of_the_whole_run_wherever_it_had_stopped(tmp_path):
    """As the Trainer's. It was that of the last steps, and before that of the log's last row, which a stop ends."""
    rows = write_rows(tmp_path / "rows.jsonl", [one_label(python_random(i)) for i in range(24)])
    options = FinetuneOptions(
        model=str(base(tmp_path)),
        train=(rows,),
        eval=(rows,),
        output=str(tmp_path / "run"),
        steps=6,
        batch_size=4,
        log_every=4,
        max_length=16,
    )
    metrics = execute(options, make_task)
    log, task = tmp_path / "run/log.jsonl", make_task(options)
    *before, last = map(json.loads, log.read_text().splitlines())
    losses = [loss for row in (*before, last) for loss in row["losses"]]
    assert metrics["train_loss"] == pytest.approx(sum(losses) / 6)
    half = {**last, "tokens": last["tokens"] / 2}
    cut = [
        {**half, "step": 5, "losses": last["losses"][:1]},
        {**half, "loss": last["losses"][1], "losses": last["losses"][1:]},
    ]
    cut[0] = {name: value for name, value in cut[0].items() if not name.startswith("eval_")}
    log.write_text("".join(json.dumps(row) + "\n" for row in (*before, *cut)))
    (tmp_path / "run/README.md").unlink()
    again = write_reports(tmp_path / "run", options, SimpleNamespace(step=6, best_step=metrics["best_step"]), task, 1)
    assert len(last["losses"]) == 2 and again["train_loss"] == metrics["train_loss"]
