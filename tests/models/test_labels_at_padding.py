"""Labels of tokens at padding: transformers trains on hidden states there, which fastbert does not have."""

from __future__ import annotations

import pytest
import torch
from family_configs import config_for

import fastbert
from fastbert.models.classes import CLASSES

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
MASK = (IDS != 0).long()
LABELS = torch.tensor([[1, 0, 2, 1], [2, 1, 0, -100]])


@pytest.mark.parametrize("head", ("TokenClassification", "MaskedLM", "PreTraining"))
def test_they_must_be_ignored(head):
    model = CLASSES["bert", head](config_for("bert", head))
    pair = {"next_sentence_label": torch.tensor([0, 1])} if head == "PreTraining" else {}
    message = "labels holds 1 values at padding; only -100 may stand there"
    with pytest.raises(fastbert.InputError, match=message):
        model(IDS, attention_mask=MASK, labels=LABELS, **pair)
    with pytest.raises(fastbert.InputError, match=message):
        model(fastbert.pack_inputs(IDS, attention_mask=MASK, labels=LABELS, **pair))
    ignored = LABELS.where(MASK.bool(), -100)
    expected = model(IDS, attention_mask=MASK, labels=ignored, **pair).loss
    assert torch.equal(model(fastbert.pack_inputs(IDS, attention_mask=MASK, labels=ignored, **pair)).loss, expected)
    assert model(IDS, labels=LABELS.clamp(min=0), **pair).loss is not None  # without a mask there is no padding
    fastbert.check_inputs(False)
    try:
        assert torch.equal(model(IDS, attention_mask=MASK, labels=LABELS, **pair).loss, expected)
    finally:
        fastbert.check_inputs(True)


def test_a_discriminators_go_by_the_mask():
    """As in transformers, whose loss of ELECTRA does."""
    model = CLASSES["electra", "PreTraining"](config_for("electra", "PreTraining"))
    labels = LABELS.clamp(0, 1)
    expected = model(IDS, attention_mask=MASK, labels=labels.where(MASK.bool(), -100)).loss
    assert torch.equal(model(IDS, attention_mask=MASK, labels=labels).loss, expected)
