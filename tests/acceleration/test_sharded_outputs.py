"""Outputs of a base model under FSDP2, which hangs what it does before backward on them: none is a view."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch
from family_configs import config_for
from hf import make_hf, make_ours

import fastbert

CONFIG = config_for("bert", "Model")
ROUTES = {
    "accelerated": lambda model: fastbert.accelerate(model),
    "own": lambda model: make_ours(CONFIG, "Model", model),
}


@pytest.mark.parametrize("side", ["right", "none"])
@pytest.mark.parametrize("route", ROUTES)
def test_no_output_is_a_view(route, side, one_rank):
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(ROUTES[route](make_hf(CONFIG, "Model")).train())
    inputs = make_batch(CONFIG, "right").inputs
    if side == "none":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    output = sharded(**inputs, output_hidden_states=True, output_attentions=True)
    assert fastbert.status(sharded).others == 0
    found = [output.last_hidden_state, output.pooler_output, *output.hidden_states, *output.attentions]
    assert [x._is_view() for x in found] == [False] * (2 + len(output.hidden_states) + len(output.attentions))
