"""The pooler in a whole encoder's op: the same bits as behind it, and behind it wherever something waits there."""

from __future__ import annotations

import copy

import pytest
import torch
from counted_ops import Ops
from seeds import manual_seed
from torch import nn

import fastbert
from fastbert.native.availability import extension_error

if extension_error() is not None:
    pytest.skip(extension_error(), allow_module_level=True)

IDS = torch.tensor([[2, 5, 9, 3], [2, 7, 3, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES = ("bert", "roberta", "xlm-roberta", "ernie")


def model_of(family: str = "bert", dtype: str = "float32") -> nn.Module:
    manual_seed(0)
    config = fastbert.EncoderConfig.of_family(family, vocab_size=20, initializer_range=0.3, **SHAPE)
    model = fastbert.AutoModel.from_config(config).eval()
    return fastbert.quantize(model) if dtype == "int8" else model.to(getattr(torch, dtype))


def pooled(model: nn.Module, *given: torch.Tensor) -> torch.Tensor:
    return model(*given).pooler_output


def operators(model: nn.Module, *given: torch.Tensor) -> dict[str, int]:
    """Of a call that is not the first."""
    model(*given)
    with Ops() as ops:
        model(*given)
    return dict(ops.calls)


def op_by_op(monkeypatch, model: nn.Module, *given: torch.Tensor) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr("fastbert.models.base.at_once", lambda *args: None)
        patch.setattr("fastbert.execution.at_once", lambda *args: None)
        return pooled(model, *given)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "int8"))
@pytest.mark.parametrize("family", FAMILIES)
def test_it_has_the_bits_of_the_ops(family, dtype, monkeypatch):
    model = model_of(family, dtype)
    with torch.inference_mode():
        for given in ((IDS[:1],), (IDS[:1], MASK[:1]), (IDS, MASK)):
            counts = operators(model, *given)
            assert counts["encoder_cpu"] == 1 and "linear_cpu" not in counts
            assert torch.equal(pooled(model, *given), op_by_op(monkeypatch, model, *given))


def test_heads_and_accelerated_models_read_it():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, **SHAPE)).eval()
    ours = fastbert.BertForSequenceClassification(fastbert.EncoderConfig.of_family("bert", vocab_size=20, **SHAPE))
    ours.eval().load_state_dict(theirs.state_dict(), strict=False)
    with torch.inference_mode():
        expected = theirs(IDS, MASK).logits
        for model in (ours, fastbert.accelerate(theirs)):
            counts = operators(model, IDS[:1])
            assert counts["encoder_cpu"] == 1 and counts.get("linear_cpu", 0) <= 1  # the classifier's
            torch.testing.assert_close(model(IDS, MASK).logits, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(model(IDS[:1]).logits, expected[:1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def written(model):
    model.pooler.dense.weight.mul_(-1.0)
    return lambda expected: pooled(copy.deepcopy(model), IDS[:1])


def replaced(model):
    leaf = model.pooler.dense
    model.pooler.dense = nn.Linear(32, 32)
    model.pooler.dense.load_state_dict({name: -t for name, t in leaf.state_dict().items()})
    return lambda expected: -expected


def hooked(model):
    model.pooler.dense.register_forward_hook(lambda module, args, out: -out)
    return lambda expected: -expected


def hooked_around(model):
    model.pooler.register_forward_hook(lambda module, args, out: -out)
    return lambda expected: -expected


def of_another_kind(model):
    class Negative(nn.Linear):
        def forward(self, x):
            return -super().forward(x)

    leaf = Negative(32, 32)
    leaf.load_state_dict(model.pooler.dense.state_dict())
    model.pooler.dense = leaf
    return lambda expected: -expected


def every_module_hooked(model):
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: -out if module is model.pooler.dense else None
    )
    model.remove = handle.remove
    return lambda expected: -expected


CHANGES = (written, replaced, hooked, hooked_around, of_another_kind, every_module_hooked)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_changes_behind_the_layers_is_seen(change):
    model = model_of()
    with torch.inference_mode():
        expected = pooled(model, IDS[:1])
        assert pooled(model, IDS[:1]).abs().max() > 0.1
    now = change(model)
    try:
        with torch.inference_mode():
            for _ in range(2):
                torch.testing.assert_close(pooled(model, IDS[:1]), now(expected), rtol=1e-5, atol=1e-6)
    finally:
        model.__dict__.pop("remove", lambda: None)()


def test_a_pooler_that_trains_over_a_frozen_encoder_has_gradients():
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("pooler."))
    given = IDS[:1]
    assert operators(model, given) == {"encoder_cpu": 1, "linear_cpu": 1}
    loss = pooled(model, given).sum()
    loss.backward()
    reference = copy.deepcopy(model).double()
    reference.zero_grad()
    with fastbert.use_backend("torch"):
        pooled(reference, given).sum().backward()
    torch.testing.assert_close(
        model.pooler.dense.weight.grad.double(), reference.pooler.dense.weight.grad, rtol=1e-4, atol=1e-5
    )


def test_a_pooler_of_another_dtype_runs_behind_the_op(monkeypatch):
    model = model_of("bert", "bfloat16")
    model.pooler.float()
    with torch.inference_mode():
        assert operators(model, IDS[:1]) == {"encoder_cpu": 1, "linear_cpu": 1}
        assert torch.equal(pooled(model, IDS[:1]), op_by_op(monkeypatch, model, IDS[:1]))
