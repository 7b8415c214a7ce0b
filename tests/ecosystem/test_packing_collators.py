"""PackingCollator and SentencePackingCollator under other people's trainers: losses and metrics of padded batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from family_configs import config_for
from full import left_to_full
from hf import make_hf, make_ours
from precise import assert_close_to_theirs, in_float64
from seeds import numpy_generator, shifted

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

datasets = pytest.importorskip("datasets")
STEPS = 4
HEADS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


def rows(head: str, count: int = 22) -> list[dict[str, Any]]:
    """22 are no multiple of a batch: the Trainer cuts what the last batch of an evaluation gives."""
    draw, found = numpy_generator(0), []
    for length in draw.integers(2, 12, count).tolist():
        ids = draw.integers(5, 40, length)
        row: dict[str, Any] = {"input_ids": ids.tolist(), "attention_mask": [1] * length}
        if head == "TokenClassification":
            row["labels"] = np.where(ids % 5 == 0, -100, ids % 3).tolist()
        elif head == "QuestionAnswering":
            row |= {"start_positions": int(ids[0] % length), "end_positions": length - 1}
        else:
            row["labels"] = int(ids[0] % 3)
        found.append(row)
    return found


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest, batch = max(len(row["input_ids"]) for row in examples), {}
    for name, value in examples[0].items():
        if isinstance(value, list):
            fill = -100 if name == "labels" else 0
            batch[name] = torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in examples])
        else:
            batch[name] = torch.tensor([row[name] for row in examples])
    return batch


def metrics(given: transformers.EvalPrediction) -> dict[str, float]:
    """Over real tokens, or sequences; spans in columns."""
    predictions, labels = given.predictions, given.label_ids
    if isinstance(labels, tuple):
        right = [p.argmax(-1) == label for p, label in zip(predictions, labels, strict=True)]
        return {"accuracy": float(np.mean(right)), "count": float(np.size(right))}
    counts = labels != -100
    return {"accuracy": float((predictions.argmax(-1) == labels)[counts].mean()), "count": float(counts.sum())}


def trained(model: Any, head: str, collate: Any, folder: Any, **options: Any) -> tuple[list[float], dict[str, float]]:
    data = datasets.Dataset.from_list([{**row, "unused": "x"} for row in rows(head)])
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=4,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=shifted(1),
        **options,
    )
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collate,
        compute_metrics=metrics,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.evaluate()


@left_to_full(lambda p: p["head"] != "TokenClassification")  # test_own_training.py has labels of sequences
@pytest.mark.parametrize("head", HEADS)
def test_trainer_of_own_classes(head, tmp_path):
    config = config_for("bert", head, 0, num_labels=3 if head != "QuestionAnswering" else 2)
    theirs = make_hf(config, head)
    ours = make_ours(config, head, theirs)
    expected, measured = trained(copy.deepcopy(ours), head, padded, tmp_path)
    exact, exactly = trained(copy.deepcopy(ours).double(), head, padded, tmp_path)
    options = {"include_num_input_tokens_seen": "all"} if head == "SequenceClassification" else {}
    found, evaluated = trained(copy.deepcopy(ours), head, fastbert.PackingCollator(), tmp_path, **options)
    assert len(found) == STEPS
    assert_close_to_theirs(found, expected, exact)
    assert_close_to_theirs(*([each["eval_loss"]] for each in (evaluated, measured, exactly)))
    assert all(evaluated[name] == measured[name] for name in ("eval_accuracy", "eval_count"))
    assert evaluated["eval_count"] == {"TokenClassification": labelled(head), "QuestionAnswering": 44}.get(head, 22)


def labelled(head: str) -> int:
    return sum(label != -100 for row in rows(head) for label in np.atleast_1d(row.get("labels", [])))


def test_masked_lm_under_the_trainer(tmp_path):
    from fastbert.data.masking import Masking

    config = config_for("bert", "MaskedLM", 0)
    ours = make_ours(config, "MaskedLM", make_hf(config, "MaskedLM"))
    masking = Masking(1, np.arange(config.vocab_size) < 4, share=0.3)
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"][:1] * len(row["input_ids"])} for row in rows("")])
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=15,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        logging_steps=5,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        gradient_accumulation_steps=2,
    )
    trainer = transformers.Trainer(
        model=ours, args=arguments, train_dataset=data, data_collator=fastbert.PackingCollator(masking)
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3


def test_what_does_not_go_together_is_said(tmp_path):
    config = config_for("bert", "SequenceClassification", 0, num_labels=3)
    theirs = make_hf(config, "SequenceClassification")
    with pytest.raises(fastbert.InputError, match="transformers' model, which takes no PackedInputs"):
        trained(fastbert.accelerate(theirs), "", fastbert.PackingCollator(), tmp_path)
    ours = make_ours(config, "SequenceClassification", theirs)
    with pytest.raises(fastbert.InputError, match="label smoothing"):
        trained(ours, "", fastbert.PackingCollator(), tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(fastbert.InputError, match="no model takes 'unused'"):
        trained(ours, "", fastbert.PackingCollator(), tmp_path, remove_unused_columns=False)


def test_accelerate_loop():
    """Evaluation gathers logits and labels of sequences, and leaves out what fills up the last batch."""
    from accelerate import Accelerator

    config = config_for("bert", "SequenceClassification", 0, num_labels=3)
    ours = make_ours(config, "SequenceClassification", make_hf(config, "SequenceClassification"))
    found = []
    for start, collate in ((ours, fastbert.PackingCollator()), (ours, padded), (in_float64(ours), padded)):
        accelerator = Accelerator(cpu=True)
        model = copy.deepcopy(start).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = torch.utils.data.DataLoader(rows(""), batch_size=8, collate_fn=collate)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        numbers, count = [], 0
        for batch in loader:
            output = model(**batch)
            accelerator.backward(output.loss)
            optimizer.step()
            optimizer.zero_grad()
            logits, labels = accelerator.gather_for_metrics((output.logits, batch["labels"]))
            count += len(labels)
            numbers += [output.loss.item(), *logits.flatten().tolist()]
        assert count == 22
        found.append(numbers)
    assert_close_to_theirs(*found)


library = pytest.importorskip("sentence_transformers")
TEXTS = ["the cat sat on the mat.", "a dog ran", "who sat in the old house and ran to the new house?", "Zebra CATS"]


def sentence_losses(model: Any, make_loss: Any, folder: Any, collate: Any = None) -> list[float]:
    data = datasets.Dataset.from_dict({"anchor": TEXTS * 3, "positive": (TEXTS[1:] + TEXTS[:1]) * 3})
    arguments = library.SentenceTransformerTrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=1,
        save_strategy="no",
        learning_rate=1e-3,
        disable_tqdm=True,
    )
    trainer = library.SentenceTransformerTrainer(model, arguments, data, loss=make_loss(model), data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def cached(model: Any) -> Any:
    losses = library.sentence_transformer.losses
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)


def ranking(model: Any) -> Any:
    return library.sentence_transformer.losses.MultipleNegativesRankingLoss(model)


@left_to_full(lambda p: p["model_type"] != "bert" or p["make_loss"] is ranking)  # the same arguments; a part of cached
@pytest.mark.parametrize(
    "model_type,make_loss", [("bert", ranking), ("bert", cached), ("roberta", ranking), ("distilbert", ranking)]
)
def test_sentence_transformers_trainer(model_type, make_loss, tmp_path):
    calm = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    folder = tiny.write_model(tmp_path / "model", model_type=model_type, **calm)
    theirs = library.SentenceTransformer(str(folder), device="cpu")
    ours = copy.deepcopy(theirs)
    with pytest.raises(fastbert.ConfigError, match=r"call fastbert.accelerate\(model\) first"):
        fastbert.SentencePackingCollator(ours)
    near = sentence_losses(copy.deepcopy(theirs), make_loss, tmp_path)
    oracle = sentence_losses(copy.deepcopy(theirs).double(), make_loss, tmp_path)
    fastbert.accelerate(ours)
    actual = sentence_losses(ours, make_loss, tmp_path, fastbert.SentencePackingCollator(ours))
    assert len(set(actual)) == 3
    assert_close_to_reference(torch.tensor(actual), torch.tensor(oracle).double(), torch.tensor(near), GRADIENT_FACTOR)
    status = fastbert.status(ours)
    assert status.packed >= 6 and status.others == 0, status


def test_prompts_and_columns_are_theirs(tmp_path):
    model = fastbert.accelerate(library.SentenceTransformer(str(tiny.write_model(tmp_path / "model")), device="cpu"))
    collate = fastbert.SentencePackingCollator(model, prompts={"anchor": "a dog "})
    batch = collate(
        [{"anchor": "ran", "positive": "the cat", "score": 0.5}, {"anchor": "in", "positive": "a", "score": 1}]
    )
    assert batch["label"].tolist() == [0.5, 1.0] and batch["anchor_input_ids"].shape == (1, 10)
    assert batch["positive_cu_seq_lens_q"].tolist() == [0, 4, 7] and batch["positive_max_length_q"] == 4
    assert model.tokenizer.decode(batch["anchor_input_ids"][0, :5]) == "[CLS] a dog ran [SEP]"
