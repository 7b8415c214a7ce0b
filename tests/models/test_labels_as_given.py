"""Labels that are no plain classes or positions: as transformers counts them, or one error."""

from __future__ import annotations

import re

import pytest
import torch
from family_configs import config_for
from hf import make_trio

import fastbert
from fastbert.models.classes import CLASSES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
NAN = float("nan")


@pytest.mark.parametrize("start", ([-1, 2], [-100, -1], [1, 4], [9, 3]), ids=str)
def test_positions_below_0_are_0(start):
    """And those behind the end do not count."""
    config = config_for("bert", "QuestionAnswering", num_labels=2)
    trio = make_trio(config, "QuestionAnswering", torch.float32)
    given = {"start_positions": torch.tensor(start), "end_positions": torch.tensor([3, -1])}
    loss, baseline, oracle = (model(IDS, **given).loss for model in (trio.ours, trio.baseline, trio.oracle))
    assert_close_to_reference(loss, oracle.double(), baseline, GRADIENT_FACTOR)
    assert torch.equal(trio.ours(fastbert.pack_inputs(IDS, **given)).loss, loss)


CLASSES_OF = {
    "SequenceClassification": ("bert", (2,), {"problem_type": "single_label_classification", "num_labels": 3}),
    "shares or classes": ("deberta", (2,), {"num_labels": 3}),
    "TokenClassification": ("bert", (2, 4), {"num_labels": 3}),
    "NextSentencePrediction": ("bert", (2,), {}),
    "MaskedLM": ("bert", (2, 4), {}),
    "PreTraining": ("electra", (2, 4), {}),
}


@pytest.mark.parametrize("value", [0.9, NAN, float("inf")])
@pytest.mark.parametrize("head", CLASSES_OF)
def test_classes_are_whole(head, value):
    """A fraction was cut off, and NaN printed as -9223372036854775808. Whole numbers may be floats."""
    name, shape, options = CLASSES_OF[head]
    head = head if head[0].isupper() else "SequenceClassification"
    model = CLASSES[name, head](config_for(name, head, **{"num_hidden_layers": 1, **options})).eval()
    labels = torch.ones(shape)
    assert torch.equal(model(IDS, labels=labels).loss, model(IDS, labels=labels.long()).loss)
    labels[(1,) * len(shape)] = value
    where = ", ".join("1" for _ in shape)
    with pytest.raises(fastbert.InputError, match=re.escape(f"labels[{where}] is {value:g}; classes are whole")):
        model(IDS, labels=labels)


def test_choices_and_positions_are_whole():
    model = CLASSES["bert", "MultipleChoice"](config_for("bert", "MultipleChoice", num_hidden_layers=1))
    with pytest.raises(fastbert.InputError, match=r"labels\[0\] is 0.5; classes are whole"):
        model(IDS[None], labels=torch.tensor([0.5]))
    model = CLASSES["bert", "QuestionAnswering"](config_for("bert", "QuestionAnswering", num_labels=2))
    ends = torch.tensor([1.0, NAN])
    with pytest.raises(fastbert.InputError, match=r"end_positions\[1\] is nan; classes are whole"):
        model(IDS, start_positions=torch.tensor([0, 1]), end_positions=ends)
