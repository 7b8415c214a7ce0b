"""Accelerated models in which PEFT's `modules_to_save` has put copies in the place of modules."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import copy

import pytest
import torch
from family_configs import config_for
from full import halved, left_to_full
from hf import make_hf
from seeds import manual_seed
from test_accelerate import IDS, MASK, assert_as_transformers, no_fallback, one_thread, small  # noqa: F401
from torch import nn

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

peft = pytest.importorskip("peft")
INPUTS = {"input_ids": IDS, "attention_mask": MASK}


def with_copies(model: nn.Module, names: list[str], adapter: str = "default", target: str = "classifier") -> nn.Module:
    """Drawn anew, so that a copy is not its original."""
    config = peft.LoraConfig(r=2, target_modules=[target], modules_to_save=names, init_lora_weights=False)
    manual_seed(len(adapter))
    if isinstance(model, peft.PeftModel):
        model.add_adapter(adapter, config)
    else:
        model = peft.get_peft_model(model, config, adapter)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if f"modules_to_save.{adapter}" in name:
                p.mul_(1.5)
    return model.eval()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model(**INPUTS, labels=torch.tensor([0, 1])).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


NAMES = (
    ["pooler"],
    ["bert.embeddings"],
    ["intermediate"],
    ["encoder"],
    ["layer.1"],
    ["attention", "output.dense"],
    ["LayerNorm"],
    ["word_embeddings", "pooler.dense"],
    ["bert"],
)


@halved
@left_to_full(lambda p: p["names"] not in (["pooler"], ["bert.embeddings"], ["layer.1"], ["bert"]))
@pytest.mark.parametrize("before", (True, False), ids=("before", "after"))
@pytest.mark.parametrize("names", NAMES, ids=str)
def test_copies(names, before, packed_layers, no_fallback):
    model = small("SequenceClassification")
    plain = model(**INPUTS).logits
    model = with_copies(model if before else fastbert.accelerate(model), names)
    model = with_copies(fastbert.accelerate(model), names, "other")
    seen = [plain, assert_as_transformers(model, **INPUTS)]
    model.set_adapter("other")
    seen.append(assert_as_transformers(model, **INPUTS))
    with model.disable_adapter():
        assert torch.equal(assert_as_transformers(model, **INPUTS), model(**INPUTS).logits)
    assert not any(torch.equal(one, two) for i, one in enumerate(seen) for two in seen[:i])
    assert len(packed_layers) == 4 * 3
    plain = fastbert.restore(copy.deepcopy(model))
    found, near, exact = map(gradients, (model, plain, copy.deepcopy(plain).double()))
    assert found.keys() == near.keys() == exact.keys() and found
    for name, grad in found.items():
        assert_close_to_reference(grad, exact[name], near[name], GRADIENT_FACTOR)


@left_to_full(lambda p: p["model_type"] not in ("bert", "deberta-v2"))
@pytest.mark.parametrize(
    ("model_type", "names"),
    (
        ("bert", ["attention"]),
        ("deberta-v2", ["encoder"]),
        ("roberta", ["roberta.embeddings"]),
        ("distilbert", ["transformer"]),
        ("modernbert", ["mlp"]),
        ("albert", ["encoder"]),
    ),
)
def test_copies_of_other_families(model_type, names, packed_layers, no_fallback):
    model = make_hf(config_for(model_type, "TokenClassification", 0), "TokenClassification").eval()
    model = fastbert.accelerate(with_copies(model, names))
    assert_as_transformers(model, **INPUTS)
    assert packed_layers


def test_a_copied_base_model_is_still_under_its_head():
    """Question answering reads padding, and a loss over labels at padding trains on hidden states there."""
    labels = {"labels": torch.ones_like(IDS)}
    for head, out, extra in (("QuestionAnswering", "qa_outputs", {}), ("TokenClassification", "classifier", labels)):
        model = fastbert.accelerate(with_copies(small(head), ["bert"], target=out))
        expected = fastbert.restore(copy.deepcopy(model))(**INPUTS, **extra)[0]
        with pytest.warns(UserWarning, match="padding"):
            assert torch.equal(model(**INPUTS, **extra)[0], expected)


def test_copies_with_hooks_run_as_before(packed_layers):
    model = fastbert.accelerate(with_copies(small("SequenceClassification"), ["pooler"]))
    wrapper = model.get_submodule("base_model.model.bert.pooler")
    for module in (wrapper, wrapper.modules_to_save["default"]):
        handle = module.register_forward_hook(lambda module, args, out: out * 2)
        expected = fastbert.restore(copy.deepcopy(model))(**INPUTS).logits
        with pytest.warns(UserWarning, match="pooler has hooks") if module is wrapper else torch.no_grad():
            assert torch.equal(model(**INPUTS).logits, expected)
        handle.remove()
    assert not packed_layers
    assert_as_transformers(model, **INPUTS)
    assert packed_layers


def test_a_copy_in_another_mode_runs_as_before(packed_layers):
    model = fastbert.accelerate(with_copies(small("SequenceClassification"), ["layer.1"]))
    model.get_submodule("base_model.model.bert.encoder.layer.1.modules_to_save.default").training = True
    with pytest.warns(UserWarning, match=r"encoder.layer.1 has a copy of PEFT's in its place"):
        model(**INPUTS)
    assert not packed_layers


def test_checkpointing_of_a_copy(packed_layers, no_fallback):
    model = fastbert.accelerate(with_copies(small("SequenceClassification"), ["layer.1"]))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()(**INPUTS, labels=torch.tensor([0, 1])).loss.backward()
    assert len(packed_layers) == 2 * model.config.num_hidden_layers
