"""Attention of chosen layers is transformers' own, and what is measured of it is what the papers say."""

from __future__ import annotations

import pytest
import torch
from batches import make_batch
from family_configs import config_for, make_config
from hf import families_axis, make_trio
from kinds import of_few_kinds
from seeds import torch_generator

import fastbert
from fastbert import inspect, ops
from fastbert.errors import InputError
from fastbert.testing.numerics import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_close_to_reference


def packed(batch) -> fastbert.PackedInputs:
    return fastbert.pack_inputs(**{name: value for name, value in batch.inputs.items() if name != "position_ids"})


@of_few_kinds()
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


@of_few_kinds()
@families_axis
def test_a_token_that_sees_itself_alone_gets_its_value(model_type):
    """Then a head's part of the attention output is the value's, which transformers' own projection is given."""
    config = config_for(model_type, "Model", 0)
    trio = make_trio(config, "Model", torch.float32)
    last = config.num_hidden_layers - 1
    path, spec = config.layer_paths[last], config.layer_specs[last]
    token, heads = config.vocab_size - 1, spec.attention.num_heads

    def lengths(theirs) -> torch.Tensor:
        leaf, seen = theirs.eval().get_submodule(f"{path}.{spec.names.attention_output}"), []
        leaf.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        theirs(torch.tensor([[token]]), attention_mask=torch.ones(1, 1, dtype=torch.long))
        by_head = seen[-1].view(heads, -1), leaf.weight.view(leaf.weight.shape[0], heads, -1)
        return torch.einsum("hd,ohd->ho", *by_head).norm(dim=-1)

    oracle, near = lengths(trio.oracle), lengths(trio.baseline)
    batch = fastbert.pack_inputs([[token], [token, 5, 6]])
    found = inspect.weighted_attention(trio.ours.eval(), batch, layers=[-1])
    assert [t.shape for t in found] == [(1, heads, 1, 1), (1, heads, 3, 3)]
    assert_close_to_reference(found[0].flatten(), oracle, near, GRADIENT_FACTOR)


def test_nothing_runs_behind_the_last_probabilities_unless_a_hook_waits_for_it():
    config = make_config("bert", 0)
    model = fastbert.BertModel(config).eval()
    batch, last, seen = fastbert.pack_inputs([[2, 5, 9, 8, 3], [2, 3]]), model.encoder.layer[-1], []
    expected = inspect.attention(model, batch)
    for path in ("", "attention", "attention.self", "attention.output.dense"):
        hook = last.get_submodule(path).register_forward_hook(lambda *args: seen.append(args[0]))
        found = inspect.attention(model, batch)
        hook.remove()
        assert len(seen) == (path != "attention.output.dense"), path  # no hook of a leaf behind them
        assert all(map(torch.equal, found, expected))
        seen.clear()


def test_weighted_attention_is_the_papers():
    config = make_config("bert", 0)
    trio = make_trio(config, "Model", torch.float32)
    ids, heads = [2, 5, 9, 8, 3], config.num_attention_heads

    def formula(theirs) -> torch.Tensor:
        output = theirs.eval()(torch.tensor([ids]), output_attentions=True, output_hidden_states=True)
        made = []
        for layer, x, probs in zip(theirs.encoder.layer, output.hidden_states[:-1], output.attentions, strict=True):
            value = layer.attention.self.value(x[0]).unflatten(-1, (heads, -1))
            weight = layer.attention.output.dense.weight.unflatten(-1, (heads, -1))
            moved = torch.einsum("jhd,ohd->hjo", value, weight)
            made.append((probs[0][..., None] * moved[:, None]).norm(dim=-1))
        return torch.stack(made)

    batch = fastbert.pack_inputs([ids, [2, 3]])
    model = trio.ours.eval()
    found = inspect.weighted_attention(model, batch)
    oracle, near = formula(trio.oracle), formula(trio.baseline)
    assert_close_to_reference(found[0], oracle, near, GRADIENT_FACTOR)
    for layer in model.encoder.layer:  # a leaf that is called adds its own bias
        layer.attention.output.dense.register_forward_hook(lambda module, args, out: out)
    assert_close_to_reference(inspect.weighted_attention(model, batch)[0], oracle, near, GRADIENT_FACTOR)


@of_few_kinds()
@families_axis
def test_causal_attention_sees_nothing_behind(model_type):
    """What stands at a token is what it would be if the text ended there."""
    config = config_for(model_type, "Model", 0)
    trio = make_trio(config, "Model", torch.float32)
    model, ids = trio.ours.eval(), [config.vocab_size - 1, 11, 12, 13, 14]  # none of them is ESM's mask
    batch = fastbert.pack_inputs([ids, ids[:2]])
    if any(spec.after is not None for spec in config.layer_specs):
        with pytest.raises(InputError, match="the model has a convolution"):
            inspect.attention(model, batch, causal=True)
        return
    for probs in inspect.attention(model, batch, causal=True):
        assert not probs.triu(1).any() and torch.allclose(probs.sum(-1), torch.ones(()), atol=1e-5)
    whole, part = inspect.hidden_states(model, batch, causal=True)
    assert (whole[:, :2] - part).abs().max() <= 1e-5 * whole.abs().max()


def test_other_layers_run_as_one_op_and_those_behind_do_not(monkeypatch):
    config = make_config("bert", 0)  # four layers
    model = fastbert.AutoModel.from_config(config).eval()
    stretches, try_fused = [], ops.try_fused

    def counted(op, x, find_operands):
        call = try_fused(op, x, find_operands)
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
