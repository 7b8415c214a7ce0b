"""Hidden states and attentions that a caller gets are tensors of the graph: saliency reads their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import Batch, make_batch
from family_configs import config_for
from full import halved, left_to_full
from hf import make_hf, make_oracle, make_ours, random_like
from test_accelerate import one_thread  # noqa: F401
from test_accelerate_flattened import flattened
from torch import nn

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

HEAD = "TokenClassification"
ASKED = {"output_hidden_states": True, "output_attentions": True}
ROUTES = {
    "own": lambda theirs: make_ours(config_for(theirs.config.model_type, HEAD), HEAD, theirs),
    "accelerated": lambda theirs: fastbert.accelerate(copy.deepcopy(theirs)),
}


def gradients(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Of a number that is made of all logits: with respect to each hidden state and attention, at real tokens."""
    out, pairs = model(**batch.inputs, **ASKED), (batch.real[:, None] & batch.real[..., None])[:, None]
    logits = out.logits[batch.real]
    value = (logits * random_like(logits.shape, 0).to(logits.dtype)).sum()
    states = torch.autograd.grad(value, out.hidden_states, retain_graph=True)
    maps = torch.autograd.grad(value, out.attentions)
    found = {f"hidden_states.{i}": t[batch.real] for i, t in enumerate(states)}
    return found | {f"attentions.{i}": t.where(pairs, 0) for i, t in enumerate(maps)}


@halved
@left_to_full(lambda p: p["model_type"] == "modernbert" and p["mask"] == "none")
@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("model_type", ["bert", "modernbert", "deberta-v2"])  # a final norm; a convolution
@pytest.mark.parametrize("route", ROUTES)
def test_their_gradients_are_transformers(route, model_type, mask):
    theirs, batch = make_hf(config_for(model_type, HEAD), HEAD).eval(), make_batch(config_for(model_type, HEAD), mask)
    ours = ROUTES[route](theirs).eval()
    found, near, oracle = (gradients(model, batch) for model in (ours, theirs, make_oracle(theirs)))
    assert fastbert.status(ours).packed == 1 and not fastbert.status(ours).others
    assert found.keys() == near.keys()
    for name, gradient in found.items():
        assert_close_to_reference(gradient, oracle[name].double(), near[name], GRADIENT_FACTOR, name)


def kept(out) -> list[torch.Tensor | None]:
    """The gradients that hidden states keep."""
    for state in out.hidden_states:
        state.retain_grad()
    (out.pooler_output.sum() + out.last_hidden_state.square().sum()).backward()
    return [state.grad for state in out.hidden_states]


@pytest.mark.parametrize("route", ROUTES)
def test_bits_are_those_without_the_question(route):
    """And the last hidden state is the last of the hidden states, as in transformers."""
    config = config_for("bert", "Model")
    theirs, batch = make_hf(config, "Model"), make_batch(config, "right")
    model = make_ours(config, "Model", theirs) if route == "own" else fastbert.accelerate(theirs)
    out = model(**batch.inputs, output_hidden_states=True)
    assert out.last_hidden_state is out.hidden_states[-1]
    assert all(gradient is not None and gradient.any() for gradient in kept(out))
    asked = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plain = model(**batch.inputs)
    (plain.pooler_output.sum() + plain.last_hidden_state.square().sum()).backward()
    assert torch.equal(plain.last_hidden_state, out.last_hidden_state)
    assert all(map(torch.equal, asked, (p.grad for p in model.parameters())))


@pytest.mark.parametrize("layout", ["packed", "one-row", "autocast", "sharded"])
def test_in_every_layout(layout, one_rank):
    config = config_for("bert", "Model")
    theirs, batch = make_hf(config, "Model"), make_batch(config, "right")
    if layout == "one-row":
        inputs = flattened("bert")[1]
        inputs.pop("labels")
        model = fastbert.accelerate(theirs)
    else:
        inputs = batch.packed() if layout == "packed" else batch.inputs
        model = make_ours(config, "Model", theirs)
    if layout == "sharded":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=layout == "autocast"):
        out = model(**inputs, output_hidden_states=True)
    assert fastbert.status(model).packed == 1
    assert all(gradient is not None and gradient.any() for gradient in kept(out))
