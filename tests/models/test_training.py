"""Training on the CPU kernels: autocast, masters of bfloat16 weights, and a loss that falls."""

from __future__ import annotations

import copy

import pytest
import torch
from precise import assert_close_to_theirs
from seeds import manual_seed

import fastbert
from fastbert.backend import use_backend


def make_model(dtype=torch.float32):
    manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = fastbert.EncoderConfig.of_family("bert", vocab_size=50, max_position_embeddings=16, **shape)
    return fastbert.BertForSequenceClassification(config).to(dtype)


def make_batch():
    ids = torch.randint(5, 40, (4, 9))
    mask = (torch.arange(9) < torch.tensor([9, 3, 6, 1])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0])}


def test_masters_are_stepped_in_float32_and_the_model_gets_them_rounded():
    model, batch = make_model(torch.bfloat16), make_batch()
    expected = [p.detach().float().requires_grad_() for p in model.parameters()]
    oracle = torch.optim.AdamW(expected, lr=1e-3, fused=True)
    optimizer = fastbert.MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    for _ in range(3):
        model(**batch).loss.backward()
        for master, p in zip(expected, model.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        oracle.step()
        optimizer.step()
        optimizer.zero_grad()
        for master, ours, p in zip(expected, optimizer.masters, model.parameters(), strict=True):
            assert torch.equal(ours, master) and torch.equal(p, master.bfloat16()) and p.grad is None


def test_updates_too_small_for_bfloat16_add_up():
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = fastbert.MasterWeights(torch.optim.SGD([weight], lr=1e-3))
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert torch.equal(weight, torch.full((8,), 0.9).bfloat16())


def test_masters_survive_saving():
    batch = make_batch()
    model, other = make_model(torch.bfloat16), make_model(torch.bfloat16)
    first, second = (fastbert.MasterWeights(torch.optim.AdamW(m.parameters(), lr=1e-3)) for m in (model, other))
    model.eval(), other.eval()  # no dropout: both must take the same steps
    for _ in range(2):
        model(**batch).loss.backward()
        first.step()
        first.zero_grad()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for m, optimizer in ((model, first), (other, second)):
        m(**batch).loss.backward()
        optimizer.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="shapes"):
        second.load_state_dict({"optimizer": {}, "masters": []})
    with pytest.raises(ValueError, match="not stepped"):
        fastbert.MasterWeights(first.optimizer)


@pytest.mark.parametrize("mode", ("float32", "autocast", "bfloat16 with masters"))
def test_a_model_learns_the_same_on_both_backends(mode):
    """Ten steps without dropout: the losses of the cpu kernels are as near to float64's as the torch backend's."""

    def losses(backend: str, mode: str) -> list[float]:
        manual_seed(1)
        batch, model = make_batch(), make_model(torch.bfloat16 if "bfloat16" in mode else torch.float32).eval()
        model = model.double() if mode == "float64" else model
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        optimizer = fastbert.MasterWeights(inner) if "masters" in mode else inner
        found = []
        for _ in range(10):
            with use_backend(backend), torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert found[-1] < 0.5 * found[0]
        return found

    assert_close_to_theirs(losses("auto", mode), losses("torch", mode), losses("torch", "float64"))
