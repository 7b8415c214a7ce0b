"""Gradient checkpointing of our own models changes no bit, of any family."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch, make_labels
from family_configs import config_for, head_of
from full import halved, left_to_full
from hf import families_axis, is_alike, make_ours
from kinds import of_every_kind
from seeds import manual_seed
from test_packed import assert_same_gradients, make_model

from fastbert.families import FAMILIES


@halved
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@of_every_kind()
@left_to_full(is_alike)
@families_axis
def test_gradient_checkpointing(model_type, dropout):
    """The same loss, gradients and extras, bit for bit, with dropout too."""
    head = head_of(model_type)
    names = {"hidden_dropout_prob", "attention_probs_dropout_prob"} - {*FAMILIES[model_type].fixed}
    config = config_for(model_type, head, 0, num_hidden_layers=2, **dict.fromkeys(names, dropout))
    plain, batch = make_model(config, head), make_batch(config, "right")
    kept = make_ours(config, head, plain)
    kept.gradient_checkpointing_enable({"use_reentrant": False})
    labels = make_labels(config, head, batch, seed=0)
    outs = []
    for model in (plain, kept):
        manual_seed(3)
        out = model(**batch.inputs, **labels, output_attentions=True, output_hidden_states=True)
        out.loss.backward()
        outs.append(out)
    assert_same_gradients(plain, kept)
    for name in ("attentions", "hidden_states"):
        assert len(outs[0][name]) == len(outs[1][name]) > 0
        assert all(torch.equal(a, b) for a, b in zip(outs[0][name], outs[1][name], strict=True))
    assert torch.equal(outs[0].loss, outs[1].loss)
    with pytest.raises(ValueError, match="use_reentrant=True is not supported"):
        kept.gradient_checkpointing_enable({"use_reentrant": True})
    kept.gradient_checkpointing_disable()
    assert not kept.base_model.gradient_checkpointing
