"""Attention of chosen layers is transformers' own, and what is measured of it is what the papers say."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch
from family_configs import config_for, make_config
from full import left_to_full
from hf import families_axis, is_alike, make_trio
from seeds import torch_generator

import fastbert
from fastbert import inspect, ops
from fastbert.errors import InputError
from fastbert.testing.numerics import OUTPUT_FACTOR, assert_close_to_reference


def packed(batch) -> fastbert.PackedInputs:
    return fastbert.pack_inputs(**{name: value for name, value in batch.inputs.items() if name != "position_ids"})


@left_to_full(is_alike)
@families_axis
def test_probabilities_are_transformers(model_type):
    config = config_for(model_type, "Model", 0)
    trio, batch = make_trio(config, "Model", torch.float32), make_batch(config, "right")
    last = config.num_hidden_layers - 1
    found = inspect.attention(trio.ours.eval(), packed(batch), layers=(-1, 0), heads=(1,))
    assert found.layers == (0, last) and found.heads == (1,) and len(found) == len(batch.real)
    theirs = [m.eval()(**batch.inputs, output_attentions=True).attentions for m in (trio.oracle, trio.baseline)]
    for row, of_text in enumerate(found):
        length = int(batch.real[row].sum())
        assert of_text.shape == (2, 1, length, length)
        for place, layer in enumerate((0, last)):
            oracle, near = (all_of[layer][row, 1:2, :length, :length] for all_of in theirs)
            assert_close_to_reference(of_text[place], oracle, near, OUTPUT_FACTOR)


def test_other_layers_run_as_one_op_and_those_behind_do_not(monkeypatch):
    config = make_config("bert", 0)  # four layers
    model = fastbert.AutoModel.from_config(config).eval()
    stretches, try_fused = [], ops.try_fused

    def counted(op, x, look):
        call = try_fused(op, x, look)
        stretches.append((op, callable(call)))
        return call

    monkeypatch.setattr(ops, "try_fused", counted)
    batch = fastbert.pack_inputs([[2, 5, 9, 3], [2, 7, 3]])
    inspect.attention(model, batch, layers=[2])
    assert stretches.count(("encoder_layers", True)) == 1  # the first two; the third alone, the fourth not at all
    assert len(stretches) == 1


@pytest.mark.parametrize(
    "given,message",
    [({"layers": [4]}, "no layer 4: the model has 4, 0 to 3"), ({"heads": [-3]}, "no head -3: the model has 2")],
)
def test_what_a_model_lacks_is_named(given, message):
    model = fastbert.AutoModel.from_config(make_config("bert", 0)).eval()
    with pytest.raises(InputError, match=message):
        inspect.attention(model, fastbert.pack_inputs([[2, 5, 3]]), **given)
    with pytest.raises(InputError, match="training mode"):
        inspect.attention(model.train(), fastbert.pack_inputs([[2, 5, 3]]))


def test_measures_by_hand():
    probs = torch.tensor([[[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.2, 0.3, 0.5]]], dtype=torch.float64)
    found = dict(zip(inspect.HEAD_MEASURES, inspect.measure_heads(probs, separators=[2])[0].tolist(), strict=True))
    rows = [[p for p in row if p] for row in probs[0].tolist()]
    entropy = sum(-sum(p * torch.tensor(p).double().log().item() for p in row) for row in rows) / 3
    expected = {
        "entropy": entropy,
        "distance": (0.25 + 0.5 + 0.0 + 0.4 + 0.3) / 3,
        "first": 0.7 / 3,
        "separators": 0.75 / 3,
        "itself": 2.0 / 3,
        "previous": 0.3 / 3,
        "next": 0.25 / 3,
    }
    assert found == pytest.approx(expected)
    with pytest.raises(ValueError, match="separators are"):
        inspect.measure_heads(probs, separators=[3])


def test_rollout_is_the_papers():
    probs = torch.rand(3, 2, 5, 5, generator=torch_generator(0), dtype=torch.float64).softmax(-1)
    found = inspect.rollout(probs)
    product = torch.eye(5, dtype=torch.float64)
    for layer in range(3):
        mean = (probs[layer, 0] + probs[layer, 1]) / 2
        product = ((mean + torch.eye(5)) / (mean + torch.eye(5)).sum(-1, keepdim=True)) @ product
        assert found[layer].tolist() == [pytest.approx(row) for row in product.tolist()]
