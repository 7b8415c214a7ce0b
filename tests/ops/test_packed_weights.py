"""Packed copies of weights are never stale after a write that PyTorch records; test_unrecorded_writes.py has others."""

from __future__ import annotations

import copy

import pytest
import torch
from full import thinned
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters

import fastbert
from fastbert import ops
from fastbert.layers.quantized import QuantizedLinear
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)
from fastbert import _C

ROWS = _C.most_rows_without_copy + 8  # for which an ordinary call keeps a copy of the weight
OUT, IN = 150, 330  # three panels of which the last is partial, and several units of comparison in each
HIDDEN = (5, 7)  # an element that is none of those sampled at each call
COLUMNS = [1, 7, 23, 257, 300, 329]  # that are looked at
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def layer_of(dtype: torch.dtype) -> nn.Module:
    linear = nn.Linear(IN, OUT, bias=False)
    return QuantizedLinear.from_linear(linear) if dtype is torch.int8 else linear.to(dtype)


def columns(layer: nn.Module, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Those of the weight, by a product of so many rows."""
    x = torch.eye(IN)[COLUMNS].repeat(rows, 1)[:rows]
    scale = layer.weight_scale if weight.dtype is torch.int8 else None
    return ops.linear(x, weight, None, weight_scale=scale, backend="cpu")[: len(COLUMNS)]


def call(layer: nn.Module, weight: torch.Tensor | None = None) -> torch.Tensor:
    """By two products of many rows, the second of which keeps a copy of the weight where there was none, and one of few
    rows, which packs the weight on its way: the same bits.
    """
    weight = layer.weight if weight is None else weight
    with torch.no_grad():
        first, by_copy, on_the_way = (columns(layer, weight, rows) for rows in (ROWS, ROWS, len(COLUMNS)))
    assert torch.equal(first, by_copy) and torch.equal(first, on_the_way)
    return first


def expect_new(layer: nn.Module, actual: torch.Tensor, old: torch.Tensor) -> None:
    """`actual` is what a weight in other memory gives, to the bit, and the weight's columns; it was something else."""
    with torch.inference_mode(False):
        weight = layer.weight.detach().clone()
    assert not torch.equal(actual, old)
    assert torch.equal(actual, call(layer, weight))
    if weight.dtype is not torch.int8:  # which has scales: tests/ops/test_int8.py
        assert torch.equal(actual, weight.float()[:, COLUMNS].t())


# Writes that leave a trace.


def set_element(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight[HIDDEN] = 100


def in_inference_mode(layer):
    with torch.inference_mode():
        layer.weight[HIDDEN] = 100


def other_weights(layer) -> dict[str, torch.Tensor]:
    state = {name: t.clone() for name, t in layer.state_dict().items()}
    state["weight"][HIDDEN] = 100
    return state


def load_in_inference_mode(layer):
    with torch.inference_mode():
        layer.load_state_dict(other_weights(layer))


def new_data(layer):
    layer.weight.data = other_weights(layer)["weight"]


def swapped(layer):
    new = other_weights(layer)["weight"]
    torch.utils.swap_tensors(layer.weight, nn.Parameter(new) if isinstance(layer.weight, nn.Parameter) else new)


def set_storage(layer):
    with torch.no_grad():
        layer.weight.set_(other_weights(layer)["weight"])


def resized(layer):
    new = other_weights(layer)["weight"]
    storage = layer.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    with torch.no_grad():
        layer.weight.copy_(new)


RECORDED = {
    "in place": lambda layer: set_element(layer.weight),
    "in inference mode": in_inference_mode,
    "of a detached one": lambda layer: set_element(layer.weight.detach()),
    "of a view": lambda layer: layer.weight.detach().t()[HIDDEN[1]].fill_(100),
    "index_put_": lambda layer: layer.weight.detach().index_put_(
        tuple(torch.tensor([i]) for i in HIDDEN), torch.tensor(100, dtype=layer.weight.dtype)
    ),
    "copy_": lambda layer: layer.weight.detach().copy_(other_weights(layer)["weight"]),
    "out=": lambda layer: torch.neg(layer.weight.detach(), out=layer.weight.detach()),
    "foreach": lambda layer: torch._foreach_neg_([layer.weight.detach()]),
    "load_state_dict": lambda layer: layer.load_state_dict(other_weights(layer)),
    "load_state_dict, assign": lambda layer: layer.load_state_dict(other_weights(layer), assign=True),
    "load_state_dict in inference mode": load_in_inference_mode,
    "data = new": new_data,
    "swap_tensors": swapped,
    "set_": set_storage,
    "storage.resize_ and copy_": resized,
}


@thinned(3)
@each_dtype
@pytest.mark.parametrize("write", RECORDED)
def test_a_recorded_write_is_seen_at_once(write, dtype):
    layer = layer_of(dtype)
    old = call(layer)
    RECORDED[write](layer)
    expect_new(layer, call(layer), old)


def test_other_ways_to_new_weights_are_seen_at_once():
    """Each of these gives the layer another tensor, or casts its own."""
    layer = layer_of(torch.float32)
    old = call(layer)
    vector_to_parameters(parameters_to_vector(layer.parameters()) * 2, layer.parameters())
    expect_new(layer, call(layer), old)
    old = call(layer)
    layer.to(torch.bfloat16).weight.data.mul_(-1)
    expect_new(layer, call(layer), old)
    twin, old = copy.deepcopy(layer), call(layer)
    set_element(twin.weight)
    expect_new(twin, call(twin), old)
    assert torch.equal(call(layer), old)


@pytest.mark.parametrize("wrap", ("weight_norm", "spectral_norm", "prune"))
def test_weights_that_are_computed_are_followed(wrap):
    layer = layer_of(torch.float32)
    if wrap == "prune":
        old = call(layer)
        prune.l1_unstructured(layer, "weight", 0.3)
        expect_new(layer, call(layer), old)
        return
    getattr(parametrizations, wrap)(layer)
    layer.eval()
    old = call(layer)
    with torch.no_grad():
        [*layer.parametrizations.weight.parameters()][-1].mul_(-3)
    new = call(layer)
    assert not torch.equal(new, old) or wrap == "spectral_norm"  # which divides by the factor again, but not the sign
    assert torch.equal(new, call(layer, layer.weight.clone()))


@each_dtype
@pytest.mark.parametrize("write", ("copy_", "load_state_dict"))
def test_inference_tensors_are_never_stale(write, dtype):
    """They keep no version: there is nothing to see but the weights themselves."""
    with torch.inference_mode():
        layer = layer_of(dtype)
    for value in (100, 101):
        old = call(layer)
        with torch.inference_mode():
            state = other_weights(layer)
            state["weight"][HIDDEN] = value
            layer.weight.copy_(state["weight"]) if write == "copy_" else layer.load_state_dict(state)
        expect_new(layer, call(layer), old)


def test_models_that_are_loaded_in_inference_mode_keep_versions(tmp_path):
    config = fastbert.EncoderConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    fastbert.BertModel(config).save_pretrained(tmp_path)
    with torch.inference_mode():
        model = fastbert.BertModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert not any(t.is_inference() for t in model.state_dict().values())
        fastbert.quantize(model)
    assert not any(t.is_inference() for t in model.state_dict().values())
