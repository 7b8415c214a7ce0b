"""Gradient checkpointing of an accelerated model: the same bits, and a lower peak of a step by the allocator."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import copy

import pytest
import torch
from batches import make_batch
from family_configs import config_for
from full import halved, left_to_full
from hf import make_hf
from peak_bytes import peak_bytes
from seeds import manual_seed, torch_generator
from test_accelerate import make_labels, no_fallback, one_thread, run  # noqa: F401

import fastbert

LAYERS = 8
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": LAYERS, "max_position_embeddings": 64}
LENGTHS = torch.tensor([64, 5, 40, 22, 64, 9, 13, 31])
IDS = torch.randint(5, 43, (8, 64), generator=torch_generator(0))
INPUTS = {"input_ids": IDS, "attention_mask": (torch.arange(64) < LENGTHS[:, None]).long()}


def train(model, checkpoints: bool, is_accelerated: bool, reentrant: bool = False) -> tuple:
    """(peak of a step, its loss and the layers' gradients, with the dropout masks of one seed)."""
    model = copy.deepcopy(model).train()
    if is_accelerated:
        fastbert.accelerate(model)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    losses: list[torch.Tensor] = []

    def step() -> None:
        manual_seed(7)
        loss = model(**INPUTS, labels=torch.arange(8) % 3).loss
        loss.backward()
        losses.append(loss.detach())

    step()  # gradients, and what is kept of the weights, are there from now on
    model.zero_grad(set_to_none=False)
    peak = peak_bytes(step)
    return peak, [losses[-1], *(p.grad for name, p in model.named_parameters() if ".layer." in name)]


@left_to_full(lambda p: p["dropout"] == 0.0)  # less is kept
@pytest.mark.parametrize("dropout", (0.0, 0.1))
def test_the_peak_of_a_step_falls(dropout, no_fallback):
    """To what one layer needs and what stands between layers; below transformers', too. Losses and gradients stay."""
    options = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = make_hf(config_for("bert", "SequenceClassification", **SIZES | options), "SequenceClassification")
    whole, expected = train(model, False, True)
    theirs, _ = train(model, True, False)
    for reentrant in (False, True):
        least, found = train(model, True, True, reentrant)
        assert least < 0.4 * whole and least < 0.8 * theirs, (least, whole, theirs)
        assert len(found) == 1 + 16 * LAYERS and all(map(torch.equal, found, expected))


@halved
@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("model_type", ("bert", "roberta", "distilbert", "electra", "megatron-bert"))
def test_gradient_checkpointing(model_type, reentrant, packed_layers, no_fallback):
    config = config_for(model_type, "SequenceClassification", 0)
    batch = make_batch(config, "right")
    model = fastbert.accelerate(make_hf(config, "SequenceClassification"))
    labels = make_labels(config, "SequenceClassification", batch.real)
    _, expected, expected_grads = run(model, "SequenceClassification", batch, labels, output_attentions=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    packed_layers.clear()
    _, actual, grads = run(model, "SequenceClassification", batch, labels, output_attentions=True)
    assert len(packed_layers) == 2 * config.num_hidden_layers and actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert all(torch.equal(grads[name], expected_grads[name]) for name in grads if grads[name] is not None)
