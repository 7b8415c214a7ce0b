"""Fine-tuning for classes, several labels at once and numbers: labels, losses and metrics against transformers,
scikit-learn and SciPy.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from finetuning_runs import TEXTS, base, check_loss, padded, task_of, theirs, write_rows
from precise import assert_close_to_theirs, in_float64
from scipy import stats
from sklearn import metrics, utils
from tiny import write_json

from fastbert.sentences.scorer import label_probabilities
from fastbert.training.finetuning.metrics import class_metrics, several_metrics
from fastbert.training.finetuning.readers import label_columns

AUTO = "AutoModelForSequenceClassification"
LABELS = {
    "single": ["no", "yes", "no", "maybe", "yes", "no"],
    "multi": [["new", "old"], [], ["old"], ["new"], ["new", "old"], ["old"]],
    "number": [0.5, 3.25, 1.0, 4.0, 2.0, 5.0],
}


def rows_of(kind: str, pairs: bool = False) -> list[dict]:
    second = dict(enumerate(reversed(TEXTS)))
    names = ("sentence1", "sentence2") if pairs else ("text",)
    return [
        dict(zip(names, (text, second[i]), strict=False)) | {"label": label}
        for i, (text, label) in enumerate(zip(TEXTS, LABELS[kind], strict=True))
    ]


@pytest.mark.parametrize("kind,pairs", (("single", True), ("multi", False), ("number", True)))
def test_losses_and_gradients_are_transformers(tmp_path, kind, pairs):
    rows = rows_of(kind, pairs)
    task = task_of(base(tmp_path), write_rows(tmp_path / "a.jsonl", rows))
    found = theirs(task, tmp_path / "saved", AUTO)
    tokenizer = __import__("transformers").AutoTokenizer.from_pretrained(tmp_path / "saved")
    made = tokenizer(*([row[name] for row in rows] for name in list(rows[0])[:-1]), padding=True, return_tensors="pt")
    assert torch.equal(padded(task, found[1])["input_ids"], made["input_ids"])
    names = found[1].config.label2id
    labels = {
        "single": lambda dtype: torch.tensor([names[row["label"]] for row in rows]) if kind == "single" else None,
        "multi": lambda dtype: torch.tensor([[float(n in row["label"]) for n in names] for row in rows], dtype=dtype),
        "number": lambda dtype: torch.tensor([row["label"] for row in rows], dtype=dtype),
    }[kind]
    check_loss(task, found, lambda model: {**made, "labels": labels(model.dtype)})


def metrics_of(kind, logits, wanted):
    """By scikit-learn and SciPy, and what each kind's loss is."""
    if kind == "single":
        return {
            "loss": F.cross_entropy(logits, wanted),
            "accuracy": metrics.accuracy_score(wanted, logits.argmax(-1)),
            "macro_f1": metrics.f1_score(wanted, logits.argmax(-1), average="macro", zero_division=0),
        }
    if kind == "multi":
        said = logits.sigmoid() > 0.5
        return {
            "loss": F.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype)),
            "micro_f1": metrics.f1_score(wanted, said, average="micro", zero_division=0),
            "macro_f1": metrics.f1_score(wanted, said, average="macro", zero_division=0),
            "accuracy": metrics.accuracy_score(wanted, said),
        }
    return {
        "loss": F.mse_loss(logits[:, 0], wanted.to(logits.dtype)),
        "pearson": stats.pearsonr(logits[:, 0], wanted)[0],
        "spearman": stats.spearmanr(logits[:, 0], wanted)[0],
    }


def test_metrics_of_an_evaluation(tmp_path):
    for kind in LABELS:
        path = write_rows(tmp_path / f"{kind}.jsonl", rows_of(kind))
        task = task_of(base(tmp_path), path, path)
        _, model = theirs(task, tmp_path / kind, AUTO)
        with torch.no_grad():
            found = task.evaluate(task.model.eval())
            all_logits = [m(**padded(task, model)).logits for m in (model, in_float64(model))]
        near, exact = (metrics_of(kind, logits, torch.from_numpy(task.train.labels["labels"])) for logits in all_logits)
        assert set(found) == set(near) and task.metric in found
        for name, value in found.items():
            assert_close_to_theirs([value], [float(near[name])], [float(exact[name])])


def test_class_weights_are_scikit_learns(tmp_path):
    """Up to a factor: their mean over the training rows is 1."""
    rows = rows_of("single")
    path = write_rows(tmp_path / "a.jsonl", rows)
    task = task_of(base(tmp_path), path, class_weights=("balanced",))
    labels = task.train.labels["labels"]
    balanced = utils.class_weight.compute_class_weight("balanced", classes=np.arange(3), y=labels)
    expected = balanced * len(labels) / balanced[labels].sum()
    np.testing.assert_allclose(task.weights, expected, rtol=torch.finfo(torch.float32).eps)
    given = task_of(base(tmp_path), path, class_weights=("1", "2", "4"))
    weights = torch.tensor([1.0, 2.0, 4.0])
    batch = given.collate(None)([given.train[i] for i in range(6)])
    with torch.no_grad():
        logits = given.model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits
        loss = given.loss(given.model, batch, [6.0])
    # torch divides by the sum of the weights of the batch, which here is all there is.
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.from_numpy(labels), weight=weights))


def test_labels_are_found_and_saved(tmp_path):
    """Numbers in order of size, texts by the alphabet, classes of `datasets` as it has them."""
    import datasets

    numbers = [{"review": text, "stars": stars} for text, stars in zip(TEXTS, (10, 2, 5, 10, 2, 5), strict=True)]
    task = task_of(base(tmp_path), write_rows(tmp_path / "n.jsonl", numbers))
    assert task.model.config.id2label == {0: "2", 1: "5", 2: "10"}
    assert task.train.labels["labels"].tolist() == [2, 0, 1, 2, 0, 1]
    assert task.usage.text_columns == ("review",)
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "a"])})
    known = datasets.Dataset.from_dict({"text": list(TEXTS), "label": [0, 1, 0, 1, 0, 1]}, features=features)
    known.to_parquet(tmp_path / "c.parquet")
    task = task_of(base(tmp_path), str(tmp_path / "c.parquet"))
    assert task.model.config.id2label == {0: "z", 1: "a"}
    task.save(task.model, tmp_path / "saved")
    assert task_of(str(tmp_path / "saved"), str(tmp_path / "c.parquet")).model.config.id2label == {0: "z", 1: "a"}


def test_a_head_that_is_there_keeps_the_order_of_its_labels(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", rows_of("single"))
    model = base(tmp_path, head="SequenceClassification", id2label={0: "yes", 1: "no", 2: "maybe"}, num_labels=3)
    task = task_of(model, path)
    assert list(task.model.config.id2label.values()) == ["yes", "no", "maybe"]
    assert task.train.labels["labels"].tolist() == [1, 0, 1, 2, 0, 1]


def test_long_texts_are_cut_and_said(tmp_path):
    rows = [{"text": "the cat " * 20, "label": 0}, {"text": "a dog", "label": 1}]
    with pytest.warns(UserWarning, match=r"1 of 2 inputs of .*a.jsonl have more than 32 tokens, .* be up to 64"):
        task = task_of(base(tmp_path), write_rows(tmp_path / "a.jsonl", rows))
    assert task.train.sequences.lengths.tolist() == [32, 4]


def test_texts_are_cut_at_the_side_that_the_folder_says(tmp_path):
    model = base(tmp_path)
    write_json(tmp_path / "base" / "tokenizer_config.json", {"do_lower_case": True, "truncation_side": "left"})
    rows = [{"text": "the cat sat on", "label": 0}, {"text": "a dog", "label": 1}]
    with pytest.warns(UserWarning, match="1 of 2 inputs"):
        task = task_of(model, write_rows(tmp_path / "a.jsonl", rows), max_length=4)
    assert task.show(task.collate(None)([task.train[0]])) == ["[CLS] sat on [SEP] -> 0"]


def test_a_dry_run_shows_tokens_and_label(tmp_path):
    task = task_of(base(tmp_path), write_rows(tmp_path / "a.jsonl", rows_of("multi")))
    shown = task.show(task.collate(None)([task.train[0], task.train[1]]))
    assert shown == ["[CLS] the cat sat on the mat [SEP] -> new, old", "[CLS] a dog ran in [SEP] -> nothing"]


def test_what_an_evaluation_counts_is_what_predict_names():
    """Where two probabilities are the same but for rounding, and where one is 0.5, rounded."""
    logits = np.array([[0.0, 1e-9]], np.float32)
    assert class_metrics(logits, np.array([1]))["accuracy"] == 1.0
    model = SimpleNamespace(windows=None, labels=["first", "second"], problem_type="single_label_classification")
    model.rows_of_inputs = lambda inputs, options: torch.from_numpy(logits)
    model.probabilities = lambda logits: label_probabilities(logits, model.problem_type)
    assert label_columns(model, {"text": ["a"]})["label"] == ["second"]

    logits = np.array([[1e-9, -1.0]], np.float32)
    assert several_metrics(logits, np.zeros((1, 2)))["accuracy"] == 1.0
    model.problem_type = "multi_label_classification"
    assert label_columns(model, {"text": ["a"]})["labels"] == [[]]
