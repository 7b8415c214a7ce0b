"""sentence-transformers around fastbert's own classes: vectors, scores and losses of transformers' models in them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
import transformers
from full import left_to_full
from seeds import shifted

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

library = pytest.importorskip("sentence_transformers")
TEXTS = ["the cat sat on the mat.", "a dog ran", "who sat in the old house and ran to the new house?", "Zebra CATS"]
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LAYERS, STEPS = 2, 3


def dense(folder: str) -> Any:
    return library.SentenceTransformer(folder, device="cpu")


def cross(folder: str) -> Any:
    return library.CrossEncoder(folder, num_labels=1, device="cpu")


def sparse(folder: str) -> Any:
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    return library.SparseEncoder(modules=[MLMTransformer(folder), SpladePooling("max")], device="cpu")


KINDS = {"Model": dense, "SequenceClassification": cross, "MaskedLM": sparse}


@pytest.fixture(params=KINDS)
def three(request, tmp_path) -> tuple[str, Any, Any, Any]:
    """A head, and a model of sentence-transformers with ours inside, with transformers', and in float64."""
    head = request.param
    labels = {"num_labels": 1} if head == "SequenceClassification" else {}
    folder = tiny.write_model(tmp_path / "model", head=head, **CALM, **labels)
    theirs, ours = KINDS[head](str(folder)), KINDS[head](str(folder))
    auto = "AutoModel" if head == "Model" else f"AutoModelFor{head}"
    ours[0].model = getattr(fastbert, auto).from_pretrained(folder)
    return head, ours, theirs, copy.deepcopy(theirs).double()


def numbers(head: str, model: Any) -> torch.Tensor:
    if head == "SequenceClassification":
        return model.predict([(a, b) for a in TEXTS for b in TEXTS], convert_to_tensor=True, batch_size=16)
    options = {"convert_to_sparse_tensor": False} if head == "MaskedLM" else {"convert_to_tensor": True}
    return model.encode(TEXTS, **options)


def test_numbers(three, packed_layers):
    head, ours, theirs, exact = three
    assert isinstance(ours.transformers_model, transformers.PreTrainedModel)
    near, oracle = numbers(head, theirs), numbers(head, exact)
    assert not packed_layers
    actual = numbers(head, ours)
    assert_close_to_reference(actual.float(), oracle.double(), near.float(), GRADIENT_FACTOR)
    assert len(packed_layers) == LAYERS


def losses_of(head: str, model: Any, folder: Any) -> list[float]:
    datasets = pytest.importorskip("datasets")
    import sentence_transformers as st
    from sentence_transformers import cross_encoder, sparse_encoder
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    kind, loss = {
        "Model": ("SentenceTransformer", lambda: MultipleNegativesRankingLoss(model)),
        "SequenceClassification": ("CrossEncoder", lambda: cross_encoder.losses.BinaryCrossEntropyLoss(model)),
        "MaskedLM": (
            "SparseEncoder",
            lambda: sparse_encoder.losses.SpladeLoss(
                model, sparse_encoder.losses.SparseMultipleNegativesRankingLoss(model), document_regularizer_weight=3e-3
            ),
        ),
    }[head]
    data = {"first": TEXTS * 3, "second": (TEXTS[1:] + TEXTS[:1]) * 3}
    if head == "SequenceClassification":
        data["label"] = [0.0, 1.0] * 6
    arguments = getattr(st, f"{kind}TrainingArguments")(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=shifted(1),
        save_strategy="no",
        learning_rate=1e-3,
        disable_tqdm=True,
    )
    trainer = getattr(st, f"{kind}Trainer")(model, arguments, datasets.Dataset.from_dict(data), loss=loss())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@left_to_full(lambda p: p["three"] != "SequenceClassification")  # test_packing_collators.py trains one by their trainer
def test_trainer(three, packed_layers, tmp_path):
    head, ours, theirs, exact = three
    near, oracle = (losses_of(head, model, tmp_path) for model in (theirs, exact))
    assert not packed_layers
    actual = losses_of(head, ours, tmp_path)
    assert len(actual) == STEPS == len(set(actual))
    assert_close_to_reference(torch.tensor(actual), torch.tensor(oracle).double(), torch.tensor(near), GRADIENT_FACTOR)
    assert len(packed_layers) == LAYERS * STEPS * (1 if head == "SequenceClassification" else 2)  # texts, their pairs
    ours.save_pretrained(str(tmp_path / "saved"))
    again = (
        KINDS[head](str(tmp_path / "saved")) if head != "MaskedLM" else library.SparseEncoder(str(tmp_path / "saved"))
    )
    found = (numbers(head, model) for model in (ours, copy.deepcopy(again).double(), again))
    actual, oracle, near = found
    assert_close_to_reference(actual.float(), oracle.double(), near.float(), GRADIENT_FACTOR)
