"""Any attribute or buffer of any module, set to another value before `accelerate` or behind it.

What runs then is what transformers computes with that value: packed by the error rule, or transformers' own forward, or
`accelerate` says why not. None of them is named here, so what a new family has is tried as well.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable

import pytest
import torch
from attributes import changed, places, set_value
from batches import make_batch
from family_configs import make_config
from full import left_to_full
from hf import FAMILIES, is_alike, make_hf, make_oracle
from kinds import of_few_kinds
from test_accelerate import IDS, MASK, one_thread, small  # noqa: F401
from torch import nn

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

# What transformers raises where a value cannot be.
CANNOT_BE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def outputs(model: nn.Module, inputs: dict) -> torch.Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fastbert: ")
        return model(**inputs)[0]


def assert_no_other_values(model: nn.Module, oracle: Callable, near: torch.Tensor, inputs: dict) -> None:
    real = inputs["attention_mask"].bool()
    actual = outputs(model, inputs)
    if fastbert.status(model).others:
        assert torch.equal(actual, near)
    else:
        assert_close_to_reference(actual[real], oracle()[real].double(), near[real], GRADIENT_FACTOR)


@of_few_kinds()
@left_to_full(lambda p: is_alike(p) or p["index"] > 0)
@pytest.mark.parametrize("index", (0, 1))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_attribute(model_type, index):
    config = make_config(model_type, index, num_hidden_layers=2)
    plain, inputs = make_hf(config, "Model").eval(), make_batch(config, "right").inputs
    accelerated = fastbert.accelerate(copy.deepcopy(plain))
    before, tried = outputs(plain, inputs), 0
    for path, name, value in places(plain):
        with changed(plain, path, name, value):
            try:
                near = outputs(plain, inputs)
            except CANNOT_BE:
                continue
            if near.shape == before.shape and torch.equal(near, before):
                continue
            tried += 1
            oracle = functools.cache(lambda: outputs(make_oracle(plain), inputs))
            later = copy.deepcopy(accelerated)
            outputs(later, inputs)  # what was found is remembered
            set_value(later, path, name, value)
            try:
                assert_no_other_values(later, oracle, near, inputs)
                try:
                    first = fastbert.accelerate(copy.deepcopy(plain))
                except ValueError as error:
                    assert name in str(error)
                else:
                    assert_no_other_values(first, oracle, near, inputs)
            except AssertionError as error:
                raise AssertionError(f"{path}.{name} = {value}: {error}") from error
    assert tried and torch.equal(outputs(plain, inputs), before)


@pytest.mark.parametrize("path", ("embeddings.layer_norm", "encoder.emb_layer_norm_after"))
def test_a_norm_that_is_not_there(path):
    """By the config it is; transformers passes the first by where it is None."""
    model = make_hf(make_config("esm", 1), "Model").eval()
    accelerated = fastbert.accelerate(copy.deepcopy(model))
    outputs(accelerated, {"input_ids": IDS})
    for each in (model, accelerated):
        parent, _, name = path.rpartition(".")
        setattr(each.get_submodule(parent), name, None)
    with pytest.raises(ValueError, match=f"there is no {path}, which its config asks for"):
        fastbert.accelerate(model)
    try:
        expected = outputs(model, {"input_ids": IDS})
    except TypeError:  # the other is called
        with pytest.raises(TypeError):
            outputs(accelerated, {"input_ids": IDS})
    else:
        assert torch.equal(outputs(accelerated, {"input_ids": IDS}), expected)
    assert fastbert.status(accelerated).why_not == f"there is no {path} any more"
    del model
    other = make_hf(make_config("esm", 0), "Model")
    other.config.emb_layer_norm_before = True
    with pytest.raises(ValueError, match="it is not what fastbert can run: 'layer_norm'"):
        fastbert.accelerate(other)


def test_heads_that_are_only_in_the_config():
    model = make_hf(make_config("nomic_bert", 0), "Model")
    model.config.num_attention_heads = 3
    with pytest.raises(ValueError, match=r"layers.0's query, key and value have 192 features; .* it must be 288"):
        fastbert.accelerate(model)


SET = {
    "scaling": ("encoder.layer.1.attention.self", 0.9),
    "is_causal": ("encoder.layer.1.attention.self", True),
    "position_ids": ("embeddings", torch.arange(20).flip(0)[None]),
    "token_type_ids": ("embeddings", torch.ones(1, 20, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", SET)
def test_what_is_said(name):
    """The same before and after, and in later calls; and calls that bring their own ids do not read the buffer."""
    path, value = SET[name]
    model = small()
    set_value(model, path, name, value)
    is_buffer = isinstance(value, torch.Tensor)
    reason = f"the buffer {name} of its embeddings" if is_buffer else f"{path}.{name} is {value}; by its config it must"
    if is_buffer:
        fastbert.accelerate(model)
    else:
        with pytest.raises(ValueError, match=reason):
            fastbert.accelerate(model)
        model = small()
        fastbert.accelerate(model)(IDS)
        set_value(model, path, name, value)
    for calls in (1, 2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model(IDS, attention_mask=MASK)
        assert len(said) == (calls == 1) and fastbert.status(model).others == calls
        assert fastbert.status(model).why_not.startswith(reason)
    if is_buffer:
        packed = fastbert.status(model).packed
        model(IDS, attention_mask=MASK, **{name: torch.zeros_like(IDS)})
        assert fastbert.status(model).packed == packed + 1
