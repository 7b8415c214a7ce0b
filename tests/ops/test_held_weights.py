"""Whole models in inference mode, as one op, as layers in one op, and leaf by leaf: what tells that a weight is new."""

from __future__ import annotations

import copy

import pytest
import torch
from counted_ops import Ops
from full import thinned
from isas import packs
from seeds import manual_seed
from test_deployed_weights import CALLS
from test_packed_weights import RECORDED, each_dtype
from test_unrecorded_writes import UNRECORDED
from torch import nn

import fastbert
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)
from fastbert import _C

IDS = torch.tensor([[3, 9, 4, 1, 7]])
WAYS = {"one op": ("encoder_cpu",), "layers": ("encoder_layers_cpu",), "leaves": ("linear_cpu", "feed_forward_cpu")}
each_way = pytest.mark.parametrize("way", WAYS)


def model_of(dtype: torch.dtype, way: str) -> fastbert.BertModel:
    manual_seed(0)
    model = fastbert.BertModel(
        fastbert.EncoderConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            initializer_range=0.2,
        )
    ).eval()
    model = fastbert.quantize(model) if dtype is torch.int8 else model.to(dtype)
    if way == "layers":
        model.embeddings.word_embeddings.register_forward_hook(lambda *_: None)
    if way == "leaves":
        for layer in model.encoder.layer:
            layer.attention.output.dense.register_forward_hook(lambda *_: None)
    return model


def leaf_of(model: nn.Module) -> nn.Module:
    return model.encoder.layer[1].attention.self.query


@torch.inference_mode()
def run(model: nn.Module) -> torch.Tensor:
    return model(IDS).last_hidden_state


def run_by(way: str, model: nn.Module) -> torch.Tensor:
    """Twice: the second call keeps copies."""
    run(model)
    with Ops() as ops:
        found = run(model)
    assert all(ops.calls[name] for name in WAYS[way]) and ("encoder_cpu" in ops.calls) == (way == "one op"), ops.calls
    return found


@thinned(5)
@each_way
@each_dtype
@pytest.mark.parametrize("write", RECORDED)
def test_a_recorded_write_is_seen_at_once(write, dtype, way):
    model = model_of(dtype, way)
    old = run_by(way, model)
    if (write, way) == ("swap_tensors", "one op"):  # torch swaps none that somebody else holds, as an encoder's op does
        with pytest.raises(RuntimeError):
            RECORDED[write](leaf_of(model))
        fastbert.repack(model)
    RECORDED[write](leaf_of(model))
    new = run(model)
    assert not torch.equal(new, old) and torch.equal(new, run(copy.deepcopy(model)))


@thinned(3)
@each_way
@each_dtype
def test_an_unrecorded_write_is_seen_within_its_calls(dtype, way):
    model = model_of(dtype, way)
    old = run_by(way, model)
    UNRECORDED["data"](leaf_of(model))
    seen_at = next((i + 1 for i in range(CALLS) if not torch.equal(run(model), old)), CALLS + 1)
    assert seen_at <= CALLS
    assert torch.equal(run(model), run(copy.deepcopy(model)))


@each_way
def test_another_model_with_the_same_weights_sees_what_this_one_has_written(way):
    """Two trees hold one tensor: the copies are the memory's, not a tree's."""
    models = [model_of(torch.float32, way) for _ in range(2)]
    for module, shared in zip(models[1].modules(), models[0].modules(), strict=True):
        for name, parameter in shared.named_parameters(recurse=False):
            setattr(module, name, parameter)
    old = [run_by(way, model) for model in models]
    assert torch.equal(*old)
    RECORDED["in place"](leaf_of(models[0]))
    assert torch.equal(run(models[1]), run(models[0])) and not torch.equal(run(models[1]), old[1])


@packs
@pytest.mark.parametrize("dtype", (torch.float32, torch.int8), ids=str)
def test_all_ways_share_one_copy(dtype):
    model = model_of(dtype, "one op")
    run_by("one op", model)
    held = _C.packed_bytes()
    assert held > 0
    for way, leaf in (("layers", model.embeddings.word_embeddings), ("leaves", leaf_of(model))):
        leaf.register_forward_hook(lambda *_: None)
        with Ops() as ops:
            run(model)
        assert any(ops.calls[name] for name in WAYS[way])
        assert _C.packed_bytes() == held
