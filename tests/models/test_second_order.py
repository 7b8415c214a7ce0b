"""use_backend("torch") is plain torch everywhere: what the README promises of second derivatives."""

from __future__ import annotations

import pytest
import torch
from family_configs import few_heads, head_of
from full import left_to_full, thinned
from hf import families_axis, is_alike
from kinds import of_every_kind
from seeds import manual_seed

import fastbert
from fastbert.backend import use_backend
from fastbert.models.auto import model_class

LENGTHS = (3, 2)


def make(model_type: str, head: str):
    # As smooth as finite differences need it: ReLU has no second derivative.
    config = fastbert.EncoderConfig.of_family(
        model_type, vocab_size=12, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        embedding_size=8, hidden_act="gelu", initializer_range=0.5, num_labels=2, pad_token_id=0,
        **few_heads(model_type, 8),
    )  # fmt: skip
    return model_class(model_type, head)(config).double().eval()


@thinned(4)
@of_every_kind()
@left_to_full(is_alike)
@families_axis
@pytest.mark.parametrize("head", ("Model", "SequenceClassification", "MaskedLM"))
def test_gradients_of_gradients(model_type, head):
    """Against finite differences of the first ones: of the embedded batch and of a query's weight."""
    manual_seed(0)
    head = head if head == "Model" else head_of(model_type, head)
    model = make(model_type, head)
    mask = torch.tensor([[1] * n + [0] * (max(LENGTHS) - n) for n in LENGTHS])
    labels = {"MaskedLM": torch.tensor([[1, -100, 2], [3, 4, -100]]), "SequenceClassification": torch.tensor([0, 1])}
    query = f".{model.config.layer_specs[0].names.query}.weight"
    name = next(name for name, _ in model.named_parameters() if name.endswith(query))

    def run(embeds, weight):
        given = {"inputs_embeds": embeds, "attention_mask": mask}
        given |= {} if head == "Model" else {"labels": labels[head]}
        out = torch.func.functional_call(model, {name: weight}, (), given)
        return out[0] if head == "Model" else out["loss"]

    embeds = torch.randn(*mask.shape, 8, dtype=torch.float64, requires_grad=True)
    with use_backend("torch"):
        weight = model.get_parameter(name).detach().clone().requires_grad_()
        assert torch.autograd.gradgradcheck(run, (embeds, weight), fast_mode=True)


@pytest.mark.parametrize("length", (5, 300))  # the longer one is beyond where scores are otherwise written down
def test_a_training_step_through_dropout_and_ids(length):
    """A penalty on gradients, for which create_graph is asked: every parameter gets one."""
    manual_seed(0)
    model = make("bert", "MaskedLM").float().train(length < 100)  # SDPA's own dropout would hide what it cannot do
    ids = torch.randint(1, 12, (2, length))
    with use_backend("torch"):
        loss = model(ids, labels=ids).loss
        parameters = {name: p for name, p in model.named_parameters()}
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        sum(g.square().sum() for g in gradients).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters.values())
