"""In inference mode, and where somebody says that torch records every write, a share of each weight is compared."""

from __future__ import annotations

import pytest
import torch
from full import thinned
from isas import packs
from test_packed_weights import (
    COLUMNS,
    HIDDEN,
    IN,
    OUT,
    RECORDED,
    ROWS,
    call,
    columns,
    each_dtype,
    expect_new,
    layer_of,
)
from test_unrecorded_writes import UNRECORDED
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fastbert
from fastbert import ops
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)
from fastbert import _C

CALLS = _C.packed_check_calls


def deployed(layer: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return columns(layer, layer.weight, len(COLUMNS))


def kept(layer: nn.Module) -> torch.Tensor:
    """The second call with a weight keeps a copy of it."""
    deployed(layer)
    return deployed(layer)


def calls_until_new(layer: nn.Module, old: torch.Tensor, call=deployed) -> int:
    return next((i + 1 for i in range(CALLS) if not torch.equal(call(layer), old)), CALLS + 1)


@thinned(3)
@each_dtype
@pytest.mark.parametrize("write", RECORDED)
def test_inference_mode_sees_a_recorded_write_at_once(write, dtype):
    """Of one element, none of the sampled: only the weight's version tells, or its place."""
    layer = layer_of(dtype)
    old = kept(layer)
    RECORDED[write](layer)
    expect_new(layer, deployed(layer), old)


@thinned(3)
@each_dtype
@pytest.mark.parametrize("write", UNRECORDED)
def test_inference_mode_finds_an_unrecorded_write_within_its_calls(write, dtype):
    layer = layer_of(dtype)
    old = kept(layer)
    UNRECORDED[write](layer)
    assert calls_until_new(layer, old) <= CALLS
    expect_new(layer, deployed(layer), old)


@each_dtype
@pytest.mark.parametrize("write", ("neg_", "zero_"))
def test_inference_mode_sees_an_unrecorded_write_of_a_whole_weight_at_once(write, dtype):
    layer = layer_of(dtype)
    old = kept(layer)
    getattr(layer.weight.data, write)()
    expect_new(layer, deployed(layer), old)


@thinned(3)
@each_dtype
@pytest.mark.parametrize("element", ((0, 23), (63, 329), (64, 1), (127, 257), (130, 300), (149, 7)))
def test_inference_mode_compares_every_part_of_a_weight(element, dtype):
    layer = layer_of(dtype)
    old = kept(layer)
    layer.weight.data[element] = 100
    assert calls_until_new(layer, old) <= CALLS
    expect_new(layer, deployed(layer), old)


@packs
@pytest.mark.parametrize("mode", (torch.inference_mode, ops.only_recorded_writes))
def test_what_a_deployment_has_missed_an_ordinary_call_sees(mode):
    """No two weights in a row are compared at the same place of their 1,024 calls."""
    missed = 0
    for _ in range(3):
        layer = layer_of(torch.float32)
        with mode(), torch.no_grad():
            for _ in range(2):
                old = columns(layer, layer.weight, ROWS)
            layer.weight.data[HIDDEN] = 100
            missed += torch.equal(columns(layer, layer.weight, ROWS), old)
        expect_new(layer, call(layer), old)
    assert missed >= 2


def test_a_nested_word_for_recorded_writes_ends_with_the_outer_one():
    with ops.only_recorded_writes():
        with ops.only_recorded_writes():
            pass
        assert _C.only_recorded_writes()
    assert not _C.only_recorded_writes()


def test_writes_to_the_flat_vector_are_seen():
    for see, most in ((call, 1), (deployed, CALLS)):
        layers = nn.ModuleList(layer_of(torch.float32) for _ in range(2))
        flat = parameters_to_vector(layers.parameters()).detach()
        vector_to_parameters(flat, layers.parameters())
        for _ in range(2):
            old = [see(layer) for layer in layers]
        flat.view(2, OUT, IN)[:, HIDDEN[0], HIDDEN[1]] = 100
        for layer, before in zip(layers, old, strict=True):
            assert calls_until_new(layer, before, see) <= most
            expect_new(layer, see(layer), before)


@each_dtype
def test_repack_makes_a_write_seen_at_once(dtype):
    layer = layer_of(dtype)
    for _ in range(2):
        old = kept(layer)
        layer.weight.data[HIDDEN] -= 100
        fastbert.repack(nn.Sequential(layer))
        expect_new(layer, deployed(layer), old)
