"""Hooks on containers and base models of our own models: they run, on what transformers' run on, and change the result
as theirs do. Those on leaves are in test_whole_layers.py and test_accelerate_integrations.py."""

from __future__ import annotations

import re

import pytest
import torch
from hf import MODELS, config_for, make_batch, make_labels, make_trio
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import fastbert
from fastbert.backend import use_backend
from fastbert.layers.leaves import Container
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.filterwarnings("ignore:fastbert.*has hooks")
FACTOR = 1.5


def scaled(module, args, out):
    """The output, or its first field, times a factor."""
    if isinstance(out, torch.Tensor):
        return out * FACTOR
    if isinstance(out, tuple):
        return (out[0] * FACTOR, *out[1:])
    first = next(iter(out))
    return type(out)(**{**out, first: out[first] * FACTOR})


def containers(model: nn.Module) -> list[str]:
    """Those that transformers calls, too: of two layers of one kind, one; and the base model."""
    paths = [path for path, module in model.named_modules() if type(module) is Container]
    paths = [path for path in paths if not re.search(r"\.(layer|albert_layer_groups)\.[1-9]", path)]
    prefix = model.family.prefix
    return paths + [prefix] * (prefix in dict(model.named_modules()))


def outputs(model, batch, labels) -> dict[str, torch.Tensor]:
    """Every output, and the gradients of the last layer's projections, whose errors drown in each other."""
    inputs = dict(batch.inputs)
    if "MultipleChoice" in type(model).__name__:
        inputs = {name: t.view(-1, 2, t.shape[-1]) for name, t in inputs.items()}
    out = model(**inputs, **labels)
    found = {name: out[name] for name in out if isinstance(out[name], torch.Tensor)}
    noise = torch.Generator().manual_seed(0)
    total = sum((t * torch.randn(t.shape, generator=noise).to(t.dtype)).sum() for t in found.values())
    weights = [p for name, p in model.named_parameters() if re.search(r"\.(query|value|[qv]_lin)\.weight$", name)]
    return {**found, "gradients": torch.cat(torch.autograd.grad(total, weights[-2:]))}


# With labels these heads run otherwise than without.
LABELS = [
    (*model, with_labels) for model in MODELS for with_labels in {False, "MaskedLM" in model or "Pre" in model[1]}
]


@pytest.mark.parametrize(("model_type", "head", "with_labels"), LABELS)
def test_a_hook_changes_what_it_changes_in_transformers(model_type, head, with_labels):
    labels = {"num_labels": 2} if head == "PreTraining" else {}
    config = config_for(model_type, head, num_hidden_layers=2, **labels)
    trio = make_trio(config, head, torch.float32)
    batch = make_batch(config, "none", batch_size=4, seqlen=5)
    labels = make_labels(config, head, batch, 0) if with_labels else {}
    models = (trio.ours, trio.oracle, trio.baseline)
    before = outputs(trio.ours, batch, labels)
    for path in containers(trio.ours):
        handles = [model.get_submodule(path).register_forward_hook(scaled) for model in models]
        ours, oracle, baseline = (outputs(model, batch, labels) for model in models)
        for handle in handles:
            handle.remove()
        assert set(ours) == set(oracle)
        assert any(not torch.equal(ours[name], before[name]) for name in ours) or path == trio.ours.family.prefix, path
        for name in ours:
            exact = oracle[name].double()  # transformers' losses are float32 whatever the model is
            assert_close_to_reference(ours[name], exact, baseline[name], GRADIENT_FACTOR, f"{path} {name}")
    after = outputs(trio.ours, batch, labels)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("model_type", ("bert", "distilbert", "albert", "megatron-bert"))
def test_what_hooks_see(model_type):
    """The same calls in the same order as in transformers, on the same numbers: arguments and results."""
    config = config_for(model_type, "Model", num_hidden_layers=2)
    trio = make_trio(config, "Model", torch.float32)
    batch = make_batch(config, "none", batch_size=3, seqlen=5)
    paths = containers(trio.ours)

    def calls(model):
        seen, handles = [], []
        for path in paths:

            def record(module, args, out, path=path):
                tensors = [t for t in (*args, *(out if isinstance(out, tuple) else (out,))) if torch.is_tensor(t)]
                seen.append((path, [t.reshape(-1, t.shape[-1]) for t in tensors if t.is_floating_point()]))

            handles.append(model.get_submodule(path).register_forward_hook(record))
        model(**batch.inputs)
        for handle in handles:
            handle.remove()
        return seen

    ours, theirs, baseline = (calls(model.eval()) for model in (trio.ours, trio.oracle, trio.baseline))
    assert [path for path, _ in ours] == [path for path, _ in theirs] == [path for path, _ in baseline]
    for (path, mine), (_, expected), (_, same) in zip(ours, theirs, baseline, strict=True):
        if path in ("pooler", "encoder", "transformer", "embeddings"):  # whose arguments or results are other records
            continue
        mine = [t for t in mine if t.shape[0] == expected[0].shape[0]]
        assert len(mine) >= 2
        for one, exact, theirs_too in zip(mine, expected, same, strict=False):
            assert_close_to_reference(one, exact, theirs_too, GRADIENT_FACTOR, path)


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode, torch.enable_grad))
@pytest.mark.parametrize("backend", ("auto", "torch", "triton"))
def test_every_kind_of_hook_runs(backend, mode, monkeypatch):
    if backend == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = config_for("bert", "MaskedLM", num_hidden_layers=2)
    model = fastbert.BertForMaskedLM(config).eval()
    ids = torch.randint(2, 40, (2, 5))
    with use_backend(backend), mode():
        before = model(ids).logits.clone()
        for path in containers(model):
            module, seen = model.get_submodule(path), []
            handles = [
                module.register_forward_pre_hook(lambda module, args, seen=seen: seen.append("pre")),
                module.register_forward_hook(lambda module, args, out, seen=seen: seen.append("post")),
            ]
            has_backward = mode is torch.enable_grad and path != "bert"  # torch has none for outputs that are records
            if has_backward:
                handles.append(module.register_full_backward_hook(lambda *_, seen=seen: seen.append("backward")))
            logits = model(ids).logits
            if has_backward:
                logits.sum().backward()
            for handle in handles:
                handle.remove()
            assert seen == ["pre", "post", "backward"][: 3 if has_backward else 2], path
        assert torch.equal(model(ids).logits, before)


def test_hooks_of_every_module():
    model = fastbert.BertModel(config_for("bert", "Model", num_hidden_layers=1)).eval()
    ids, seen = torch.randint(2, 40, (2, 5)), []
    before = model(ids).last_hidden_state
    handle = register_module_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    model(ids)
    handle.remove()
    called = [type(module).__name__ for module in model.modules() if not isinstance(module, nn.ModuleList)]
    assert sorted(seen) == sorted(called)
    assert torch.equal(model(ids).last_hidden_state, before)


def test_one_warning():
    model = fastbert.BertModel(config_for("bert", "Model", num_hidden_layers=2)).eval()
    model.encoder.layer[0].attention.register_forward_hook(scaled)
    with pytest.warns(UserWarning, match=r"EncoderLayer: attention has hooks: they see packed tensors") as said:
        model(torch.randint(2, 40, (2, 5)))
    assert len(said) == 1


class Attention(nn.Module):
    def forward(self, x):
        return x


def replaced(model):
    model.encoder.layer[0].attention = Attention()


def replaced_with_leaves(model):
    model.encoder.layer[0].attention.self.__class__ = type("Mine", (Container,), {})


def patched(model):
    model.encoder.layer[0].intermediate.forward = lambda *args, run: args[0]


def patched_embeddings(model):
    model.embeddings.forward = lambda *args, run: args[0]


@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize("change", (replaced, replaced_with_leaves, patched, patched_embeddings))
def test_what_takes_a_containers_place_is_refused(change, training):
    model = fastbert.BertModel(config_for("bert", "Model", num_hidden_layers=2)).train(training)
    ids = torch.randint(2, 40, (2, 5))
    with torch.no_grad():
        model(ids)
        change(model)
        with pytest.raises(TypeError, match="fastbert's models never call"):
            model(ids)
