"""A small masked-LM model, a ragged batch for it, and the gradients of a step."""

from __future__ import annotations

import copy

import torch
from seeds import manual_seed

import fastbert
from fastbert.backend import use_backend

LENGTHS = torch.tensor([19, 3, 11, 7])
MASK = (torch.arange(19) < LENGTHS[:, None]).long()


def make() -> tuple[fastbert.BertForMaskedLM, dict[str, torch.Tensor]]:
    manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = fastbert.EncoderConfig(vocab_size=50, initializer_range=0.2, **shape)
    ids = torch.randint(5, 50, MASK.shape)
    labels = torch.where((torch.rand(MASK.shape) < 0.3) & (MASK == 1), ids, -100)
    return fastbert.BertForMaskedLM(config), {"input_ids": ids * MASK, "attention_mask": MASK, "labels": labels}


def step(model, batch, backend: str, autocast: bool = False) -> dict[str, torch.Tensor]:
    """The loss and every gradient."""
    model = copy.deepcopy(model)
    manual_seed(1)
    with use_backend(backend), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def layer_of(name: str) -> int:
    """The number of the layer that has this parameter."""
    return int(name.split(".layer.")[1].split(".")[0])
