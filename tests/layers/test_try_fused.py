"""Layers as one op are tried: asked for cheapest first, refused with a reason, and never met by plain torch."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from test_fused_layers import IDS, MASK, make, query

import fastbert
from fastbert import ops
from fastbert.backend import register_fused, try_fused, use_backend
from fastbert.cli.doctor import doctor_lines
from fastbert.execution import snapshot
from fastbert.execution.tree import OwnTree
from fastbert.native.availability import extension_error

has_kernels = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))


@pytest.fixture
def looks(monkeypatch) -> list[str]:
    """What was made of a tree: what to remember it by, and the operands that its leaves hold."""
    made: list[str] = []

    def count(name: str) -> None:
        function = getattr(snapshot, name)

        def counted(*args, **options):
            made.append(name)
            return function(*args, **options)

        monkeypatch.setattr(snapshot, name, counted)

    count("watch_layers")
    count("layer_operands")
    return made


def answer(model: fastbert.BertModel, x: torch.Tensor):
    """What is answered for all of a model's layers, without a call of them."""
    config = model.config
    stretch = 0, config.num_hidden_layers, None, False, False
    find_operands = partial(OwnTree(model).layers, stretch, config.layer_paths, config.layer_specs)
    return try_fused("encoder_layers", x, find_operands)


@pytest.mark.parametrize("device", ("meta", "cpu"))
def test_no_tree_is_looked_at_where_the_tensor_decides(device, looks):
    """As on a GPU, which has no such op: what decides is the hidden states' device, dtype and shape."""
    dtype = torch.float32 if device == "meta" else torch.float64
    reason = answer(make(), torch.empty(7, 32, device=device, dtype=dtype))
    assert ("meta" if device == "meta" else "float64") in reason and looks == []


@has_kernels
@pytest.mark.parametrize("mode", ("torch", "triton", "autocast", "dtype"))
def test_no_tree_is_looked_at_where_the_modes_decide(mode, looks):
    model = make()
    model.double() if mode == "dtype" else model
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"),
        use_backend(mode if mode == "torch" else "auto"),
    ):
        if mode == "triton":  # whose other kernels need a GPU
            with use_backend("triton"):
                assert answer(model, torch.empty(7, 32)) == "triton, the backend that was asked for, does not have it"
        else:
            model(IDS, MASK)
    assert looks == []


@has_kernels
@pytest.mark.parametrize("trains", (False, True))
def test_the_tree_is_looked_at_once(looks, trains):
    model = make().train(trains)
    with torch.set_grad_enabled(trains):
        for _ in range(3):
            model(IDS, MASK)
        assert looks == ["watch_layers", "layer_operands"]
        query(model).weight = torch.nn.Parameter(query(model).weight * 2)
        model(IDS, MASK)
    assert looks == ["watch_layers", "layer_operands"] * 2


def hook_a_leaf(model):
    query(model).register_forward_hook(lambda *_: None)


def hook_a_container(model):
    model.encoder.layer[1].attention.register_forward_hook(lambda *_: None)


def train_a_layer(model):
    model.encoder.layer[2].train()


REASONS = {
    hook_a_leaf: r"encoder.layer.1.attention.self.query is no plain module \(Linear; hooks, ",
    hook_a_container: r"encoder.layer.1.attention is no plain module \(Container; hooks, ",
    train_a_layer: "a layer is in training mode",
    lambda model: model.half(): "x is torch.float32 on cpu, the weights torch.float16 on cpu",
}


@has_kernels
@pytest.mark.parametrize(("change", "reason"), REASONS.items())
def test_the_reason_names_what_is_in_the_way(change, reason):
    model = make()
    with torch.inference_mode():
        assert callable(answer(model, torch.empty(7, 32)))
        change(model)
        found = answer(model, torch.empty(7, 32))
    assert isinstance(found, str) and re.match(reason, found), found


@pytest.fixture
def pairs(monkeypatch):
    """A fused op of two backends, the first of which takes no more than 2 rows."""
    monkeypatch.setattr(fastbert.backend, "SUPPORTS", {})
    monkeypatch.setattr(fastbert.backend, "FUSED", {})
    monkeypatch.setitem(fastbert.backend.ORDER, "cpu", (fastbert.Backend.CPU, fastbert.Backend.TRITON))
    few = lambda x: None if len(x) <= 2 else f"{len(x)} rows"  # noqa: E731
    positive = lambda x, operands: None if operands > 0 else f"{operands} is not positive"  # noqa: E731
    register_fused("pair", fastbert.Backend.CPU, few, positive, lambda x, operands, more: ("cpu", operands, more))
    register_fused("pair", fastbert.Backend.TRITON, lambda x: None, positive, lambda *args: ("triton", *args[1:]))


def test_an_offer_is_the_first_that_takes_it(pairs):
    assert try_fused("pair", torch.zeros(2), lambda: 5)(7) == ("cpu", 5, 7)
    assert try_fused("pair", torch.zeros(3), lambda: 5)(7) == ("triton", 5, 7)
    assert try_fused("pair", torch.zeros(3), lambda: -5) == "-5 is not positive"
    assert try_fused("pair", torch.zeros(2), lambda: "a reason of the tree's") == "a reason of the tree's"
    with use_backend("cpu"):
        assert try_fused("pair", torch.zeros(3), lambda: 5) == "3 rows"  # by name: no other one, and nothing is raised
    with use_backend("torch"):
        assert "torch" in try_fused("pair", torch.zeros(3), lambda: 5)


@has_kernels
def test_doctor_prints_the_reasons():
    report = fastbert.backends("cpu", torch.float64)
    assert report["encoder_layers"]["selected"] == report["encoder_layers_training"]["selected"] == "torch"
    assert "float64" in report["encoder_layers"]["cpu"]
    with torch.no_grad():
        assert fastbert.backends("cpu")["encoder_layers_training"]["cpu"] == "it is for training: gradients are off"
    with use_backend("cpu"):  # which cannot serve: its ops, each of which says so itself, run one by one
        assert fastbert.backends("cpu", torch.float64)["encoder_layers"]["selected"] == "torch"
    text = "\n".join(doctor_lines()[0])
    assert re.search(r"^ +encoder_layers +could +serves +no \[\d\] +no \[\d\]$", text, re.MULTILINE)


def test_every_offer_is_in_ops():
    assert {"encoder", "encoder_layers", "encoder_layers_training"} == set(fastbert.backend.FUSED)
    assert ops.try_fused is try_fused
