"""One tensor of seeds for all ops of a step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from family_configs import config_for
from full import triton_left_to_full
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert import ops
from fastbert.backend import use_backend
from fastbert.models.classes import CLASSES
from fastbert.native.availability import extension_error, triton_error

SMALL = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 1, "intermediate_size": 16}
DROPS = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}


class Draws(TorchDispatchMode):
    """Counts what moves a generator on."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("randint", "random_", "rand", "bernoulli_", "native_dropout")
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=("cpu", "triton"))
def backend(request):
    error = {"cpu": extension_error, "triton": triton_error}[request.param]()
    if error is not None:
        pytest.skip(error)
    with use_backend(request.param):
        yield request.param


def make(**changes) -> torch.nn.Module:
    torch.manual_seed(0)
    return CLASSES["bert", "MaskedLM"](config_for("bert", "MaskedLM", 0, **SMALL, **DROPS, **changes)).train()


IDS = torch.arange(1, 25).view(4, 6)


def step(model: torch.nn.Module, seeds: ops.StepSeeds | None) -> list[torch.Tensor]:
    """The loss and all gradients."""
    model.zero_grad()
    with ops.seeds_from(seeds):
        loss = model(IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *[p.grad for p in model.parameters()]]


@triton_left_to_full
def test_a_step_follows_from_its_seed_and_draws_nothing(backend):
    model, seeds = make(), ops.StepSeeds("cpu")
    made = []
    for seed in (5, 6, 5):
        seeds.begin(seed)
        made.append(step(model, seeds))
    assert all(map(torch.equal, made[0], made[2]))  # the first step made its rows as it went
    assert not torch.equal(made[0][0], made[1][0])
    seeds.begin(5)
    with Draws() as draws:
        step(model, seeds)
    assert draws.count == 0
    with Draws() as draws:
        step(model, None)
    assert draws.count > 0


def test_the_kernels_of_a_layer_and_of_all_layers_take_the_same_rows():
    """Op by op, and as one op on the CPU: masks of one seed."""
    if extension_error() is not None:
        pytest.skip(extension_error())
    model, seeds = make(), ops.StepSeeds("cpu")
    with use_backend("cpu"):
        seeds.begin(1)
        whole = step(model, seeds)
        model.bert.encoder.layer[0].register_forward_hook(lambda module, given, out: None)  # layer by layer
        seeds.begin(1)
        parts = step(model, seeds)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


@triton_left_to_full
def test_checkpointed_layers_drop_the_same_twice(backend):
    """Without it the second run's masks are others, and so are the gradients."""
    plain, seeds = make(), ops.StepSeeds("cpu")
    plain.bert.encoder.layer[0].register_forward_hook(lambda module, given, out: None)  # layer by layer, as below
    seeds.begin(3)
    expected = step(plain, seeds)
    model = make()
    model.gradient_checkpointing_enable()
    seeds.begin(3)
    found = step(model, seeds)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_what_runs_twice_takes_the_same_rows_in_any_thread():
    seeds = ops.StepSeeds("cpu")
    seeds.begin(0)
    with ops.seeds_from(seeds):
        seeds.take(2)
        run = ops.with_same_seeds(seeds.take)
        first, behind = run(3), seeds.take(1)
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(run, 3).result(), first)
    assert torch.equal(run(4)[:3], first) and torch.equal(run(4)[3:], behind)
    assert seeds.next_row == 6  # what comes next is new to all of them


def test_rows_do_not_depend_on_how_many_there_are():
    few, many = ops.StepSeeds("cpu"), ops.StepSeeds("cpu")
    for seeds in (few, many):
        seeds.begin(7)
    many.take(40)
    many.begin(7)
    assert torch.equal(torch.cat([few.take(1) for _ in range(5)]), many.take(5))
    few.begin(8)
    assert not torch.equal(few.take(5), many.take(5))
