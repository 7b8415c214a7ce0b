"""num_items_in_batch: what a call's losses are the mean over, term by term."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from family_configs import config_for
from precise import in_float64
from seeds import manual_seed

import fastbert
from fastbert.models.classes import CLASSES
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

IDS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14, 15, 16]]
LABELS = [[-100, 6, -100, 8, -100], [10, -100, -100], [-100, -100, 15, 16]]
PAIRS = [1, 0, 1]


def pair_model(name: str):
    manual_seed(0)
    model = CLASSES[name, "PreTraining"](config_for(name, "PreTraining", num_hidden_layers=2)).eval()
    return model, model.head_spec.pair_label


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_each_term_has_its_own_total(name):
    """Calls before a step add up to the mean of each term over all labels: here of 5 tokens and of 3 pairs."""
    model, label = pair_model(name)
    packed = fastbert.pack_inputs(IDS, labels=LABELS, **{label: PAIRS})
    whole, oracle = (m(packed).loss.detach() for m in (model, in_float64(model)))
    items = {"labels": 5, label: 3}
    parts = [
        model(**fastbert.pack_inputs(IDS[i:j], labels=LABELS[i:j], **{label: PAIRS[i:j]}), num_items_in_batch=items)
        for i, j in ((0, 2), (2, 3))
    ]
    assert_close_to_reference(sum(part.loss for part in parts), oracle.double(), whole, GRADIENT_FACTOR)
    formula = []
    for dtype in (torch.float32, torch.float64):
        scores = parts[0].prediction_logits.to(dtype)[torch.tensor([*LABELS[0], *LABELS[1]]) != -100]
        tokens = F.cross_entropy(scores, torch.tensor([6, 8, 10]), reduction="sum") / 5
        of_pairs = parts[0][model.head_spec.pair_logits].to(dtype)
        formula.append(tokens + F.cross_entropy(of_pairs, torch.tensor([1, 0]), reduction="sum") / 3)
    assert_close_to_reference(parts[0].loss, formula[1], formula[0], GRADIENT_FACTOR)
    with pytest.raises(fastbert.InputError, match=f"num_items_in_batch has no {label}"):
        model(fastbert.pack_inputs(IDS, labels=LABELS, **{label: PAIRS}), num_items_in_batch={"labels": 5})


@pytest.mark.parametrize("total", [None, 0, 7, torch.tensor(0)])
@pytest.mark.parametrize("head", ["MaskedLM", "TokenClassification", "SequenceClassification"])
def test_a_batch_without_labels_adds_nothing(head, total):
    """As a sum over no labels, also where no rank has any: a NaN would end the run."""
    model = CLASSES["bert", head](config_for("bert", head, num_hidden_layers=2)).eval()
    per_token = head != "SequenceClassification"
    labels = [[-100] * len(row) for row in IDS] if per_token else [-100] * len(IDS)
    loss = model(**fastbert.pack_inputs(IDS, labels=labels), num_items_in_batch=total).loss
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_terms_of_joint_pre_training():
    """The generator's by its labels, the discriminator's by the real tokens."""
    manual_seed(0)
    heads = ("MaskedLM", "PreTraining")
    pair = [CLASSES["electra", head](config_for("electra", head, num_hidden_layers=2)) for head in heads]
    joint = fastbert.ElectraForJointPreTraining(*pair).eval()
    packed = fastbert.pack_inputs(IDS, labels=LABELS)
    found = []
    for items in (None, {"labels": 5, "tokens": 12}, {"labels": 10, "tokens": 12}, {"labels": 5, "tokens": 24}):
        manual_seed(1)
        found.append(joint(packed, num_items_in_batch=items).loss.item())
    plain, same, half_labels, half_tokens = found
    eps = torch.finfo(torch.float32).eps  # a total's, of two rounded terms; below, four totals are added up
    assert same == pytest.approx(plain, rel=2 * eps)
    assert (plain - half_labels) + (plain - half_tokens) - plain / 2 == pytest.approx(0.0, abs=4 * 2 * eps * plain)
    assert half_labels < plain and half_tokens < plain and not math.isnan(plain)
