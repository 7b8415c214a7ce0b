"""A whole model on the Triton kernels, forward and backward, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from attention_terms import assert_zero_but_for_rounding, key_bias_terms
from training_step import layer_of, make, step

from fastbert import ops
from fastbert.native.availability import triton_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(triton_error() is not None, reason=str(triton_error()))


@pytest.fixture(params=("one op", pytest.param("op by op", marks=pytest.mark.full)))
def is_one_op(request, monkeypatch):
    """Of the layers."""
    if request.param == "op by op":
        monkeypatch.setattr(ops, "try_fused", lambda op, x, find_operands: "not here")
    return request.param == "one op"


@pytest.mark.parametrize("autocast", (False, pytest.param(True, marks=pytest.mark.full)))
def test_loss_and_gradients(autocast, is_one_op):
    model, batch = make()
    model.eval()  # no dropout
    with key_bias_terms(ops) as terms:
        oracle = step(copy.deepcopy(model).double(), batch, "torch")
    baseline, ours = (step(model, batch, backend, autocast) for backend in ("torch", "triton"))
    assert len(ours) == len(oracle) > 40
    for name, found in ours.items():
        if "key.bias" in name:  # softmax does not see it
            rounds_to = torch.bfloat16 if autocast else torch.float32
            assert_zero_but_for_rounding(found, terms[layer_of(name)], rounds_to, name)
        else:
            assert_close_to_reference(found, oracle[name], baseline[name], GRADIENT_FACTOR, name)


@pytest.mark.full
def test_dropout_in_training_repeats_with_its_seed(is_one_op):
    """And every op of the model ran as a Triton kernel."""
    model, batch = make()
    with torch.profiler.profile() as profile:
        first = step(model, batch, "triton")
    second = step(model, batch, "triton")
    assert all(torch.equal(first[name], second[name]) and first[name].isfinite().all() for name in first)
    assert not torch.equal(first["loss"], step(model.eval(), batch, "triton")["loss"])
    names = {event.name for event in profile.events()}
    ran = {name.removeprefix("fastbert::") for name in names if name.startswith("fastbert::")}
    forward = {"embed_fwd", "add_layer_norm_fwd", "dropout", "cross_entropy", "attention_tiles"}
    backward = {"embed_bwd", "add_layer_norm_bwd"}
    apart = {"attention_fwd", "attention_bwd", "feed_forward", "feed_forward_bwd"}
    assert ran == {f"{name}_triton" for name in forward | backward | ({"merge_matrices"} if is_one_op else apart)}
    assert {"_EncoderLayers", "_EncoderLayersBackward"} <= names if is_one_op else "_EncoderLayers" not in names
