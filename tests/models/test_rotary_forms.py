"""Rotary embedding otherwise than by the family's own table: RoFormer's table that is none of sines, part of a head."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from batches import make_batch
from family_configs import make_config
from full import halved
from hf import cast, hf_class, hf_config, make_hf, make_oracle, make_ours, randomise
from transformers.models.eurobert import modeling_eurobert
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

import fastbert
from fastbert import ops
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.layer_spec import AttentionSpec, Invalid, RotarySpec
from fastbert.layers.operands import layer_operands
from fastbert.models.auto import AutoModel
from fastbert.testing.cases import MASKS
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference


def of_any_table(index: int):
    """A config, and transformers' RoFormer with a table that knows more of two positions than their distance."""
    config = make_config("roformer", index)
    theirs = make_hf(config, "Model").eval()
    with torch.no_grad():
        theirs.encoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(3))
    return config, theirs


def results(model, batch) -> list[torch.Tensor]:
    """The hidden states of real tokens, and all gradients as one vector."""
    model.zero_grad()
    out = model(**batch.inputs)[0][batch.real]
    out.double().pow(3).sum().backward()
    return [
        out.detach(),
        torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]),
    ]


def assert_as_theirs(model, theirs, batch) -> None:
    for actual, oracle, baseline in zip(
        *(results(m, batch) for m in (model, make_oracle(theirs), theirs)), strict=True
    ):
        assert_close_to_reference(actual, oracle, baseline, GRADIENT_FACTOR)


@halved
@pytest.mark.parametrize("index", (0, 2))  # 2 turns values, too
@pytest.mark.parametrize("pattern", MASKS)
def test_a_table_that_is_none_of_sines(pattern, index, tmp_path):
    """Padding on the left moves a text to other rows of it, which give it other values than its distances would."""
    config, theirs = of_any_table(index)
    batch = make_batch(config, pattern)
    theirs.save_pretrained(tmp_path)
    for model in (
        make_ours(config, "Model", theirs).eval(),
        AutoModel.from_pretrained(tmp_path, add_pooling_layer=False),
    ):
        assert_as_theirs(model.eval(), theirs, batch)
    accelerated = fastbert.accelerate(copy.deepcopy(theirs))
    assert_as_theirs(accelerated, theirs, batch)
    with torch.no_grad():
        for model in (accelerated, theirs):
            model.encoder.embed_positions.weight.mul_(0.7)
    assert_as_theirs(accelerated, theirs, batch)


@pytest.mark.parametrize("pattern", ("left", "right"))
def test_an_accelerated_head_that_reads_every_token(pattern, packed_layers):
    config = make_config("roformer")
    theirs = make_hf(config, "TokenClassification").eval()
    with torch.no_grad():
        theirs.roformer.encoder.embed_positions.weight.normal_(generator=torch.Generator().manual_seed(3))
    assert_as_theirs(fastbert.accelerate(copy.deepcopy(theirs)), theirs, make_batch(config, pattern))
    assert packed_layers


PARTS = {"rope_type": "linear", "factor": 1.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("pattern", MASKS)
def test_part_of_a_head(pattern, monkeypatch):
    """A made-up family: EuroBERT with GPT-NeoX's rotation of the first half of each head, which is in transformers."""
    family = FAMILIES["eurobert"]

    def spec(config, depth):
        whole = family.spec(config, depth)
        position = whole.attention.position._replace(dim=config.head_dim // 2)
        return replace(whole, attention=replace(whole.attention, position=position))

    config = make_config("eurobert", 1)
    theirs_config = hf_config(config)
    plain = dict(theirs_config.rope_parameters)
    theirs_config.rope_parameters.update(PARTS)
    monkeypatch.setattr(modeling_eurobert, "apply_rotary_pos_emb", apply_rotary_pos_emb)
    theirs = hf_class("eurobert", "Model")(theirs_config)
    theirs.config.rope_parameters = plain  # the tree has the frequencies, and `randomise` reads a config that we take
    theirs = cast(randomise(theirs), torch.float32).eval()
    monkeypatch.setitem(FAMILIES, "eurobert", replace(family, spec=spec))
    config = make_config("eurobert", 1)
    ours = make_ours(config, "Model", theirs).eval()
    assert_as_theirs(ours, theirs, make_batch(config, pattern))
    x = torch.ones(1, config.hidden_size)
    with torch.no_grad():
        operands = layer_operands(ours, config.layer_paths, config.layer_specs, None, None, trains=False)
        why_not = ops.try_fused("encoder_layers", x, lambda: operands)
    assert why_not == "rotary embedding turns 20 of a head's 40 dimensions"


@pytest.mark.parametrize("dim", (0, 7, 18))
def test_a_part_that_a_head_does_not_have(dim):
    with pytest.raises(
        Invalid, match=rf"the width that rotary embedding turns is {dim}; it must be (even|from 2 to head_)"
    ):
        AttentionSpec(4, 4, 16, position=RotarySpec(10_000.0, dim))


def test_odd_heads():
    with pytest.raises(ConfigError, match="head_dim is 3; it must be even"):
        make_config("roformer", hidden_size=66, num_attention_heads=22)
