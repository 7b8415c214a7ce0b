"""A training layer as one op: its numbers, its dropout, and when the ops must run one by one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from attention_terms import assert_zero_but_for_rounding, key_bias_terms
from isas import CPU_BACKENDS, backend_with_isa
from seeds import manual_seed

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.config import EncoderConfig
from fastbert.layers.context import LayerContext
from fastbert.layers.encoder import EncoderLayer
from fastbert.native.availability import extension_error
from fastbert.packing import PackedBatch
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.skipif(extension_error() is not None, reason=str(extension_error()))

BATCH = PackedBatch.from_mask((torch.arange(9) < torch.tensor([9, 1, 6, 4])[:, None]).long(), 4, 9, torch.device("cpu"))
CONTEXT = LayerContext(BATCH)
TOKENS, HIDDEN = 20, 32


def make_layer(dtype=torch.float32, dropout=0.0, norm_first=False) -> EncoderLayer:
    manual_seed(0)
    shape = {"hidden_size": HIDDEN, "num_attention_heads": 2, "intermediate_size": 80}
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    spec = EncoderConfig.of_family("bert", **shape, **dropouts).layer_specs[0]
    layer = EncoderLayer(replace(spec, norm_first=norm_first), HIDDEN)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.3)
    return layer.to(dtype)


def step(layer: EncoderLayer, autocast: bool = False) -> dict[str, torch.Tensor]:
    """The output and every gradient of one forward and backward."""
    manual_seed(3)
    dtype = next(layer.parameters()).dtype
    x = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = torch.randn(TOKENS, HIDDEN).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = layer(x, CONTEXT)
    (out * weight).sum().backward()
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "dx": x.grad, **gradients}


@pytest.fixture
def served(monkeypatch) -> list[bool]:
    """For each time that a layer was asked for as one op, whether a backend served it."""
    made: list[bool] = []
    try_fused = ops.try_fused

    def counted(op, x, find_operands):
        found = try_fused(op, x, find_operands)
        made.append(callable(found))
        return found

    monkeypatch.setattr(ops, "try_fused", counted)
    return made


@pytest.mark.parametrize("mode", ("float32", "bfloat16", "autocast"))
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_against_oracle(backend, mode, served):
    """A whole layer errs at most three times what plain torch does in the same precision."""
    layer = make_layer(torch.bfloat16 if mode == "bfloat16" else torch.float32)
    with use_backend("torch"):
        with key_bias_terms(ops) as terms:
            oracle = step(copy.deepcopy(layer).double())
        baseline = step(copy.deepcopy(layer), mode == "autocast")
    served.clear()
    with backend_with_isa(backend):
        ours = step(layer, mode == "autocast")
    assert served == [True] and ours.keys() == oracle.keys() and len(ours) == 18
    for name, found in ours.items():
        eps_dtype = torch.bfloat16 if mode == "autocast" else found.dtype
        if "key.bias" in name:  # softmax does not see it
            assert_zero_but_for_rounding(found, terms[0], eps_dtype, f"{name} {mode}")
            continue
        assert_close_to_reference(
            found.to(eps_dtype), oracle[name], baseline[name].to(eps_dtype), GRADIENT_FACTOR, f"{name} {mode}"
        )


def one_by_one(monkeypatch, layer: EncoderLayer) -> dict[str, torch.Tensor]:
    with monkeypatch.context() as patch:
        patch.setattr(ops, "try_fused", lambda op, x, find_operands: "not here")
        return step(layer)


@pytest.mark.parametrize("dropout", (0.0, 0.3))
@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_one_op_is_what_its_ops_are(monkeypatch, served, dtype, training, dropout):
    """Bit for bit, dropout's masks included: both draw the same seeds in the same order."""
    layer = make_layer(dtype, dropout).train(training)
    whole = step(copy.deepcopy(layer))
    assert served == [True]
    apart = one_by_one(monkeypatch, layer)
    for name, found in whole.items():
        assert torch.equal(found, apart[name]), name


def test_checkpointed(served):
    manual_seed(1)
    layer, x = make_layer(dropout=0.3).train(), torch.randn(TOKENS, HIDDEN)
    results = []
    for checkpointed in (False, True):
        manual_seed(2)
        leaf = x.clone().requires_grad_()
        run = torch.utils.checkpoint.checkpoint if checkpointed else (lambda f, *args, **kwargs: f(*args))
        run(layer, leaf, CONTEXT, use_reentrant=False).square().sum().backward()
        results.append((leaf.grad, layer.attention.self.query.weight.grad))
        layer.zero_grad()
    assert served == [True, True, True]  # the checkpointed one in backward, too
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


def freeze_a_bias(layer):
    layer.output.dense.bias.requires_grad_(False)


def hook_a_leaf(layer):
    layer.intermediate.dense.register_forward_hook(lambda module, args, out: out * 2)


@pytest.mark.parametrize("change", (freeze_a_bias, hook_a_leaf), ids=lambda f: f.__name__)
def test_what_must_run_op_by_op_does(monkeypatch, served, change):
    layer = make_layer()
    change(layer)
    oracle = copy.deepcopy(layer).double()
    ours = step(layer)
    assert True not in served
    with use_backend("torch"):
        baseline_layer = make_layer()
        change(baseline_layer)
        exact, baseline = step(oracle), step(baseline_layer)
    assert ours.keys() == exact.keys()
    for name in ("out", "dx"):
        assert_close_to_reference(ours[name], exact[name], baseline[name], GRADIENT_FACTOR, name)


def test_inference_is_left_alone(served):
    with torch.no_grad():
        make_layer()(torch.randn(TOKENS, HIDDEN), CONTEXT)
    assert True not in served


def test_a_forced_backend_without_it_runs_the_ops(served):
    """One op for several is tried: where it cannot serve, nothing is raised, and each op chooses for itself."""
    with use_backend("torch"):
        step(make_layer())
    with use_backend("cpu"):
        layer = make_layer()
        freeze_a_bias(layer)
        step(layer)
        step(make_layer().eval())
    assert served == [False, False, True]
