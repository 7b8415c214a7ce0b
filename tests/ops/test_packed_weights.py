"""Packed copies of weights: never stale after a write that PyTorch records, not for long after any other."""

from __future__ import annotations

import copy

import pytest
import torch
from seeds import torch_generator
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters

import fastbert
from fastbert import ops
from fastbert.layers.quantized import QuantizedLinear
from fastbert.ops._common import extension_error
from fastbert.testing.numerics import OUTPUT_FACTOR, assert_close_to_reference

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)
from fastbert import _C

CALLS = _C.packed_check_calls
OUT, IN = 150, 330  # three panels of which the last is partial, and several units of comparison in each
HIDDEN = (5, 7)  # an element that is none of those sampled at each call
DTYPES = (torch.float32, torch.bfloat16, torch.int8)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def layer_of(dtype: torch.dtype) -> nn.Module:
    linear = nn.Linear(IN, OUT, bias=False)
    return QuantizedLinear.from_linear(linear) if dtype is torch.int8 else linear.to(dtype)


def call(layer: nn.Module, weight: torch.Tensor | None = None) -> torch.Tensor:
    x = torch.randn(3, IN, generator=torch_generator(1))
    weight = layer.weight if weight is None else weight
    scale = layer.weight_scale if weight.dtype is torch.int8 else None
    with torch.no_grad():
        return ops.linear(x, weight, None, weight_scale=scale, backend="cpu")


def expect_new(layer: nn.Module, actual: torch.Tensor, old: torch.Tensor) -> None:
    """`actual` is what a weight in other memory gives, to the bit, and what float64 gives; it was something else."""
    with torch.inference_mode(False):
        weight = layer.weight.detach().clone()
    assert not torch.equal(actual, old)
    assert torch.equal(actual, call(layer, weight))
    if weight.dtype is not torch.int8:  # whose rows of x are rounded: tests/ops/test_int8.py
        x = torch.randn(3, IN, generator=torch_generator(1))
        assert_close_to_reference(actual, x.double() @ weight.double().T, x @ weight.float().T, OUTPUT_FACTOR)


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


# Writes that leave no trace.


def through_numpy(layer):
    weight = layer.weight.detach()
    (weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight).numpy()[HIDDEN] = 100


def through_dlpack(layer):
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(layer.weight.detach()))[HIDDEN] = 100


def through_a_storage(layer):
    size = layer.weight.element_size()
    layer.weight.untyped_storage()[(HIDDEN[0] * IN + HIDDEN[1]) * size + size - 1] = 65


def one_element(layer) -> torch.Tensor:
    return layer.weight.detach()[HIDDEN[0]].narrow(0, HIDDEN[1], 1)


def through_a_preserved_counter(layer):
    with torch.autograd._unsafe_preserve_version_counter(layer.weight):
        set_element(layer.weight)


UNRECORDED = {
    "data": lambda layer: layer.weight.data.__setitem__(HIDDEN, 100),
    "numpy": through_numpy,
    "dlpack": through_dlpack,
    "storage": through_a_storage,
    "preserved counter": through_a_preserved_counter,
    "apply_": lambda layer: one_element(layer).apply_(lambda x: 100),
    "map_": lambda layer: one_element(layer).map_(one_element(layer), lambda x, y: 100),
}


def calls_until_new(layer: nn.Module, old: torch.Tensor) -> int:
    return next((i + 1 for i in range(CALLS) if not torch.equal(call(layer), old)), CALLS + 1)


@each_dtype
@pytest.mark.parametrize("write", UNRECORDED)
def test_an_unrecorded_write_is_found_within_its_calls(write, dtype):
    layer = layer_of(dtype)
    old = call(layer)
    UNRECORDED[write](layer)
    assert calls_until_new(layer, old) <= CALLS
    expect_new(layer, call(layer), old)


@each_dtype
@pytest.mark.parametrize("write", ("neg_", "zero_"))
def test_an_unrecorded_write_of_a_whole_weight_is_seen_at_once(write, dtype):
    layer = layer_of(dtype)
    old = call(layer)
    getattr(layer.weight.data, write)()
    expect_new(layer, call(layer), old)


@each_dtype
@pytest.mark.parametrize("element", ((0, 23), (63, 329), (64, 1), (127, 257), (130, 300), (149, 7)))
def test_every_part_of_a_weight_is_compared(element, dtype):
    layer = layer_of(dtype)
    old = call(layer)
    layer.weight.data[element] = 100
    assert calls_until_new(layer, old) <= CALLS
    expect_new(layer, call(layer), old)


def test_writes_to_the_flat_vector_are_found_within_their_calls():
    layers = nn.ModuleList(layer_of(torch.float32) for _ in range(2))
    flat = parameters_to_vector(layers.parameters()).detach()
    vector_to_parameters(flat, layers.parameters())
    old = [call(layer) for layer in layers]
    flat.view(2, OUT, IN)[:, HIDDEN[0], HIDDEN[1]] = 100
    for layer, before in zip(layers, old, strict=True):
        assert calls_until_new(layer, before) <= CALLS
        expect_new(layer, call(layer), before)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_transposed_copy_is_compared_too(dtype):
    layer, x = layer_of(dtype), torch.randn(3, IN, dtype=dtype, requires_grad=True)

    def dx():
        return torch.autograd.grad(ops.linear(x, layer.weight, None, backend="cpu").sum(), x)[0]

    old = dx()
    layer.weight.data[HIDDEN] = 100
    assert any(not torch.equal(dx(), old) for _ in range(CALLS))
    assert torch.equal(dx(), torch.autograd.grad(ops.linear(x, layer.weight.clone(), None, backend="cpu").sum(), x)[0])


@each_dtype
def test_repack_makes_a_write_seen_at_once(dtype):
    layer = layer_of(dtype)
    for _ in range(2):
        old = call(layer)
        layer.weight.data[HIDDEN] -= 100
        fastbert.repack(nn.Sequential(layer))
        expect_new(layer, call(layer), old)
