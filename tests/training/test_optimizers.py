"""LAMB beside its paper in float64, what each weight gets of an optimizer, and the schedules by their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from family_configs import make_config
from seeds import manual_seed

from fastbert.errors import ConfigError
from fastbert.models.classes import CLASSES
from fastbert.models.joint_electra import ElectraForJointPreTraining
from fastbert.testing.numerics import assert_close_to_reference
from fastbert.training.optimizers import (
    Lamb,
    catch_up,
    clip_and_step,
    make_optimizer,
    parameter_groups,
    use_sparse_gradients,
)
from fastbert.training.schedules import SCHEDULES, Schedule, multiplier


def lamb_by_the_paper(weight, gradients, lr, beta1, beta2, eps, decay):
    """Algorithm 2, line by line, in the weight's dtype."""
    x, m, v = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for t, gradient in enumerate(gradients, 1):
        g = gradient.to(weight.dtype)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        r = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps) + decay * x
        x = x - lr * (x.norm() / r.norm() if decay else 1.0) * r
    return x


@pytest.mark.parametrize("decay", [0.01, 0.0])
def test_lamb_is_the_papers(decay):
    manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (11,))]
    gradients = [[torch.randn_like(w) for _ in range(5)] for w in weights]
    expected = [
        [lamb_by_the_paper(w, g, 0.1, 0.9, 0.99, 1e-6, decay) for w in (weight.detach().double(), weight.detach())]
        for weight, g in zip(weights, gradients, strict=True)
    ]
    optimizer = Lamb(weights, lr=0.1, betas=(0.9, 0.99), weight_decay=decay)
    for step in range(5):
        for weight, given in zip(weights, gradients, strict=True):
            weight.grad = given[step]
        optimizer.step()
    for weight, (exact, near) in zip(weights, expected, strict=True):
        assert_close_to_reference(weight.detach(), exact, near)


def test_lamb_of_zeros_moves():
    """A tensor of zeros has no length, and takes Adam's step."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = Lamb([weight], lr=0.1)
    weight.grad = torch.tensor([1.0, -2.0, 0.0])
    optimizer.step()
    exact = -0.1 * weight.grad.double() / (weight.grad.double().abs() + 1e-6)
    assert_close_to_reference(weight.detach(), exact, exact.float())


def test_lamb_goes_on_from_its_state():
    manual_seed(0)
    whole, first = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    gradients = torch.randn(4, 4, 4)
    ours, other = Lamb([whole], lr=0.1), Lamb([first], lr=0.1)
    for i, gradient in enumerate(gradients):
        whole.grad = first.grad = gradient
        ours.step()
        if i == 2:
            state, other = other.state_dict(), Lamb([first], lr=0.1)
            other.load_state_dict(state)
        other.step()
    assert torch.equal(whole, first)


@pytest.mark.parametrize("model_type", ["bert", "distilbert", "electra", "albert", "modernbert"])
def test_groups(model_type):
    """Every weight once: matrices decay, the head gets lr, and each layer below it less, embeddings least."""
    model = CLASSES[model_type, "SequenceClassification"](make_config(model_type))
    groups = parameter_groups(model, 1e-3, 0.1, 0.5)
    given = {p: group for group in groups for p in group["params"]}
    assert sorted(map(id, given)) == sorted(map(id, model.parameters()))
    paths = list(dict.fromkeys(model.config.layer_paths))
    top = len(model.config.layer_paths) + 1
    for name, p in model.named_parameters():
        assert given[p]["weight_decay"] == (0.1 if p.dim() > 1 else 0.0)
        depth = next((i + 1 for i, path in enumerate(paths) if f"{path}." in name), None)
        if depth is None:
            depth = 0 if "embedding" in name else top
        assert given[p]["lr"] == pytest.approx(1e-3 * 0.5 ** (top - depth)), name


def test_layers_that_do_not_differ_share_two_groups():
    """Each is a launch of the optimizer, or more: with layer_decay BERT-base has 28 of them."""
    model = CLASSES["bert", "SequenceClassification"](make_config("bert"))
    groups = parameter_groups(model, 1e-3, 0.1)
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-3, 0.0), (1e-3, 0.1)]
    for group, decays in zip(groups, (False, True), strict=True):
        assert list(map(id, group["params"])) == [id(p) for p in model.parameters() if (p.dim() > 1) == decays]


def test_groups_of_a_module_that_holds_two_models():
    """What they share comes once; a layer's rate goes by the layers above it in its own model."""
    pair = [CLASSES["electra", head](make_config("electra")) for head in ("MaskedLM", "PreTraining")]
    joint = ElectraForJointPreTraining(*pair)
    joint.extra = torch.nn.Linear(3, 3)
    groups = parameter_groups(joint, 1e-3, 0.1, 0.5)
    given = [(p, group["lr"]) for group in groups for p in group["params"]]
    assert sorted(id(p) for p, _ in given) == sorted(map(id, joint.parameters()))
    rates = {id(p): rate for p, rate in given}
    top = len(pair[0].config.layer_paths) + 1
    assert rates[id(pair[0].base_model.embeddings.word_embeddings.weight)] == pytest.approx(1e-3 * 0.5**top)
    for model in pair:
        first = model.base_model.get_submodule(model.config.layer_paths[0])
        assert [rates[id(p)] for p in first.parameters()] == [pytest.approx(1e-3 * 0.5 ** (top - 1))] * 16
    assert {rates[id(p)] for p in joint.extra.parameters()} == {1e-3}


def test_frozen_weights_are_left_out():
    model = CLASSES["bert", "SequenceClassification"](make_config("bert"))
    model.base_model.requires_grad_(False)
    (*_,) = groups = parameter_groups(model, 1.0)
    assert sum(len(group["params"]) for group in groups) == 2


def test_word_tables_that_are_only_looked_up_have_sparse_gradients():
    """A step with them is the step without, but for the last bits of the norm that clips it, also where rows without a
    gradient take it when they are looked up again, or at the end."""
    for head, sparse in (("SequenceClassification", True), ("MaskedLM", False)):  # which is tied to the table
        models = [CLASSES["bert", head](make_config("bert")).train() for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        use_sparse_gradients(models[0])
        labels = torch.tensor([1, 0]) if sparse else torch.tensor([[5, -100, 3], [7, 8, -100]])
        for model in models:
            optimizer = make_optimizer("adamw", parameter_groups(model, 1e-2), (0.9, 0.99), 1e-8)
            for step in range(6):
                ids = torch.tensor([[5, 6, 7], [9, 5, 8]]) + step % 3
                catch_up(optimizer, [ids, ids + 1])
                for part in range(2):  # which add up
                    model(ids + part, labels=labels).loss.backward()
                word = model.get_input_embeddings().weight
                assert word.grad.is_sparse == (sparse and model is models[0])
                clip_and_step(optimizer, 0.1)
                optimizer.zero_grad()
            assert not sparse or model is models[1] or optimizer._deferred[word].count == 6
            catch_up(optimizer)
        for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert (one - other).abs().max() <= 6 * torch.finfo(one.dtype).eps * other.abs().max(), name  # six steps


def test_schedules():
    at = {name: [multiplier(name, 100, 10)(step) for step in range(101)] for name in SCHEDULES}
    for values in at.values():
        assert values[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    assert at["linear"][10:] == pytest.approx([(100 - i) / 90 for i in range(10, 101)])
    assert at["cosine"][10:] == pytest.approx([0.5 * (1 + math.cos(math.pi * (i - 10) / 90)) for i in range(10, 101)])
    assert at["constant"][10:] == [1.0] * 91
    assert at["trapezoid"][10:80] == [1.0] * 70 and at["trapezoid"][80:] == pytest.approx(
        [i / 20 for i in range(20, -1, -1)]
    )


def test_a_schedule_keeps_the_groups_ratios():
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = make_optimizer(
        "adamw", [{"params": [w], "lr": lr} for w, lr in zip(weights, (1.0, 0.1), strict=True)], (0.9, 0.99), 1e-8
    )
    schedule, seen = Schedule(optimizer, "linear", 10, 4), []
    for step in range(10):
        schedule.set(step)
        seen.append([group["lr"] for group in optimizer.param_groups])
    assert [a for a, _ in seen] == pytest.approx([multiplier("linear", 10, 4)(i) for i in range(10)])
    assert all(b == pytest.approx(0.1 * a) for a, b in seen)


@pytest.mark.parametrize(
    "call,said",
    [
        (lambda: multiplier("square", 10, 1), "unknown schedule 'square'; there are linear"),
        (lambda: multiplier("linear", 10, 11), "warmup is 11 steps of 10"),
        (lambda: make_optimizer("sgd", [], (0.9, 0.9), 1e-8), "unknown optimizer 'sgd'; there are adamw, lamb"),
        (lambda: parameter_groups(torch.nn.Linear(1, 1), 1.0, layer_decay=0.0), "layer_decay is 0.0"),
    ],
)
def test_bad_options(call, said):
    with pytest.raises(ConfigError, match=said):
        call()
