"""Compiled models beside each other, and changes that come after a model was compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from family_configs import config_for
from full import left_to_full
from hf import make_hf, make_oracle, randomise

import fastbert
from fastbert.backend import use_backend
from fastbert.models.auto import model_class
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

IDS = torch.tensor([[3, 9, 4, 1, 7], [5, 2, 8, 6, 6]])
KINDS = ("bert", "albert", "megatron-bert", "accelerated")
CASES = [(kind, "auto", torch.no_grad) for kind in KINDS]
CASES += [("bert", "auto", torch.inference_mode), ("accelerated", "auto", torch.enable_grad)]
CASES += [
    ("bert", "torch", torch.no_grad),
    ("accelerated", "torch", torch.no_grad),
    ("bert", "torch", torch.enable_grad),
]
# Albert's and Megatron's layers differ, the way to them does not.
SELDOM = [
    ("albert", "auto", torch.no_grad),
    ("megatron-bert", "auto", torch.no_grad),
    ("accelerated", "torch", torch.no_grad),
    ("bert", "torch", torch.no_grad),  # a part of what it does with gradients
    ("bert", "auto", torch.inference_mode),  # torch guards every mode in the same way
    ("accelerated", "auto", torch.enable_grad),
]
cases = pytest.mark.parametrize(
    ("kind", "backend", "mode"),
    [pytest.param(*case, marks=[pytest.mark.full] if case in SELDOM else []) for case in CASES],
)


@pytest.fixture(autouse=True)
def compiles_anew():
    torch._dynamo.reset()


def make(kind: str, layers: int = 1):
    """Of one layer: what a compilation takes grows with them, and each is traced by itself."""
    if kind == "accelerated":
        return fastbert.accelerate(make_hf(config_for("bert", "Model", num_hidden_layers=layers), "Model").eval())
    return randomise(model_class(kind)(config_for(kind, "Model", num_hidden_layers=layers))).eval()


@pytest.mark.parametrize("kind", ("bert", "accelerated"))
def test_a_mask_and_one_graph_exclude_each_other(kind):
    """How many tokens are real no graph knows; the error says so, and what to do."""
    compiled = torch.compile(make(kind), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="how many of its tokens are real depends on the"):
        compiled(IDS, attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]))


@left_to_full(lambda p: len(p["batches"]) > 2)  # each batch is another compilation
@pytest.mark.parametrize("batches", (((5, 2), (3, 3)), ((5, 2), (5, 1), (3, 3))), ids=("two", "three"))
def test_packed_inputs_are_one_graph(batches):
    model = make("bert")
    oracle = make_oracle(make_hf(model.config, "Model").eval())
    oracle.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for lengths in batches:
        rows = [row[:n].tolist() for row, n in zip(IDS, lengths, strict=True)]
        actual = compiled(fastbert.pack_inputs(rows)).last_hidden_state.split(lengths)
        for row, mine in zip(rows, actual, strict=True):
            exact, near = (m(torch.tensor([row])).last_hidden_state[0] for m in (oracle, model))
            assert_close_to_reference(mine, exact, near, GRADIENT_FACTOR)


def last_leaves(model) -> list[torch.nn.Module]:
    """The last Linear and the last LayerNorm of a model's layers."""
    leaves = [leaf for name, leaf in model.named_modules() if "layer" in name]
    return [[leaf for leaf in leaves if type(leaf) is kind][-1] for kind in (torch.nn.Linear, torch.nn.LayerNorm)]


def run(model) -> torch.Tensor:
    return model(IDS).last_hidden_state


@pytest.mark.full
@left_to_full(lambda p: (p["kind"], p["backend"]) == ("bert", "auto"))  # which a process of many models runs
@cases
def test_two_models_share_no_weights(kind, backend, mode):
    """Copies share their code, so that they share compilations, too: each must run its own layers."""
    first = make(kind, layers=2 if mode is torch.no_grad else 1)  # whose layers share code, too
    second = randomise(copy.deepcopy(first), seed=1)
    compiled = [torch.compile(model, backend="eager") for model in (first, second)]
    with use_backend(backend), mode():
        for _ in range(3):
            run(compiled[0])
        for _ in range(2):
            for graph, model in zip(compiled, (first, second), strict=True):
                assert torch.equal(run(graph), run(model))
        assert not torch.equal(run(compiled[0]), run(compiled[1]))


def test_a_process_of_many_models():
    """The third and the fourth come after the first is gone: nothing is found by an address."""
    for seed in range(4):
        model = randomise(make("bert"), seed)
        with torch.no_grad():
            assert torch.equal(run(torch.compile(model, backend="eager")), run(model))
        del model


@pytest.mark.full  # test_changes_after_compiling_are_seen has what needs no setting of torch's
@cases
def test_hooks_that_come_later_run(kind, backend, mode):
    """In eager calls; in compiled ones where torch is told to guard hooks, which it does not do by itself."""
    model = make(kind)
    compiled = torch.compile(model, backend="eager")
    leaf = last_leaves(model)[0]
    with use_backend(backend), mode(), torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        before = run(compiled)
        handle = leaf.register_forward_hook(lambda module, args, out: out * 1.5)
        after = run(model)
        assert not torch.equal(after, before) and torch.equal(run(compiled), after)
        handle.remove()
        assert torch.equal(run(model), before) and torch.equal(run(compiled), before)


@left_to_full(lambda p: p["kind"] != "bert")  # whose leaves are found in the same way
@pytest.mark.parametrize("kind", KINDS)
def test_changes_after_compiling_are_seen(kind):
    model = make(kind)
    compiled = torch.compile(model, backend="eager")
    norm = last_leaves(model)[1]
    with torch.no_grad():
        before = run(compiled)
        norm.eps = 0.5
        after = run(model)
        assert not torch.equal(after, before) and torch.equal(run(compiled), after)
        norm.weight = torch.nn.Parameter(norm.weight * 2)
        again = run(model)
        assert not torch.equal(again, after) and torch.equal(run(compiled), again)
