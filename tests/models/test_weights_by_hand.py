"""What is written into a model's tensors by hand, past PyTorch's counters, is in its next call and its gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from batches import make_batch
from family_configs import make_config
from full import halved, left_to_full
from hf import families_axis, is_alike, make_hf, make_ours
from kinds import of_every_kind
from seeds import torch_generator
from torch import nn

import fastbert
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

KINDS = ("own", "accelerated")


def make(model_type: str, kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = make_config(model_type, num_hidden_layers=2)
    theirs = make_hf(config, "Model")
    model = make_ours(config, "Model", theirs) if kind == "own" else fastbert.accelerate(theirs)
    return model.eval(), make_batch(config).inputs


def twin_of(model: nn.Module) -> nn.Module:
    """The same weights in other memory, of which nothing is kept."""
    return copy.deepcopy(model)


def write_everywhere(model: nn.Module) -> None:
    """A column of each matrix and an element of each vector, by `.data` and by NumPy in turn."""
    for i, t in enumerate((*model.parameters(), *model.buffers())):
        if t.is_floating_point():
            memory = t.data if i % 2 else t.detach().numpy()
            if t.dim() == 0:  # Gemma's factor of the words
                memory *= 1.5
                continue
            memory[..., t.shape[-1] // 2] *= 1.5
            memory[..., t.shape[-1] // 3] += 0.25


def outputs(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The hidden states, and all gradients."""
    model.zero_grad(set_to_none=True)
    hidden = model(**inputs)[0]
    hidden.square().sum().backward()
    return [hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@halved
@pytest.mark.parametrize("kind", KINDS)
@of_every_kind()
@left_to_full(is_alike)
@families_axis
def test_every_tensor_of_a_model_is_read_at_each_call(model_type, kind):
    model, inputs = make(model_type, kind)
    before = outputs(model, inputs)
    for _ in range(3):
        write_everywhere(model)
        with torch.no_grad():
            hidden = model(**inputs)[0]
        after, expected = outputs(model, inputs), outputs(twin_of(model), inputs)
        assert torch.equal(hidden, model(**inputs)[0])
        for one, other in zip(after, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert not torch.equal(after[0], before[0])
        before = after


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.int8), ids=str)
def test_every_tensor_of_a_model_of_another_dtype_is_read_at_each_call(dtype):
    model, inputs = make("bert", "own")
    model = fastbert.quantize(model, "int8") if dtype is torch.int8 else model.to(dtype)
    for i in range(4):
        with torch.no_grad():
            old = model(**inputs)[0]
            for t in (*model.parameters(), *model.buffers()):
                if t.dim() == 2:
                    t.data[:, 3] = 0
                    t.data[1] = t.data[0]
                elif t.dim() == 1 and t.is_floating_point():
                    t.data[3] += 0.5
            new = model(**inputs)[0]
            assert torch.equal(new, twin_of(model)(**inputs)[0])
        assert i > 0 or not torch.equal(new, old)


@halved
@pytest.mark.parametrize("mode", (torch.no_grad, torch.enable_grad))
@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences_are_those_of_the_model(kind, mode):
    model, inputs = make("bert", kind)
    real = inputs["attention_mask"].bool()
    exact, plain = twin_of(model), twin_of(model)
    if kind == "accelerated":
        exact, plain = map(fastbert.restore, (exact, plain))
    exact.double()
    differences: list[list[torch.Tensor]] = [[], [], []]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "pooler" not in name]

    def values() -> list[torch.Tensor]:
        with fastbert.use_backend("torch"):
            others = [other(**inputs)[0][real] for other in (exact, plain)]
        return [model(**inputs)[0][real], *others]

    generator = torch_generator(3)
    with mode():
        for i in torch.randperm(len(linears), generator=generator).repeat(20)[:12].tolist():
            old = values()
            place = int(torch.randint(10**6, (), generator=generator))
            for each in (model, exact, plain):
                weight = each.get_submodule(linears[i]).weight
                weight.data.view(-1)[place % weight.numel()] += 2
            for found, one, other in zip(differences, values(), old, strict=True):
                found.append((one - other).detach())
            assert differences[0][-1].any(), linears[i]
    actual, oracle, baseline = map(torch.stack, differences)
    assert_close_to_reference(actual, oracle, baseline, GRADIENT_FACTOR)
