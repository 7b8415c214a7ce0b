"""Hooks on containers and base models of our own models: they run, on what transformers' run on, and change the result
as theirs do. Those on leaves are in test_fused_layers.py and test_accelerate_integrations.py."""

from __future__ import annotations

import warnings

import pytest
import torch
from batches import make_batch, make_labels
from family_configs import config_for
from full import halved, left_to_full
from hf import MODELS, is_left_out, make_trio
from kinds import of_every_kind_of_head
from seeds import torch_generator
from theirs import by_choice
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import fastbert
from fastbert.backend import use_backend
from fastbert.layers.leaves import Container
from fastbert.models.auto import base_class
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

pytestmark = pytest.mark.filterwarnings("ignore:fastbert.*has hooks")
FACTOR = 1.5
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def scaled(module, args, out):
    """The output, or its first field, times a factor."""
    if isinstance(out, torch.Tensor):
        return out * FACTOR
    if isinstance(out, tuple):
        return (out[0] * FACTOR, *out[1:])
    first = next(iter(out))
    return type(out)(**{**out, first: out[first] * FACTOR})


def containers(model: nn.Module) -> list[str]:
    """Those that transformers calls, too: of the layers of one kind, the first's; and the base model."""
    config, prefix, kinds = model.config, model.family.prefix, {}
    for path, spec in zip(config.layer_paths, config.layer_specs, strict=True):
        kinds.setdefault(spec, path)
    again = tuple(f"{path}." for path in config.layer_paths if path not in kinds.values())
    paths = [path for path, module in model.named_modules() if type(module) is Container]
    paths = [path for path in paths if not path.removeprefix(f"{prefix}.").startswith(again)]
    unused = {leaf.rpartition(".")[0] for leaf in model.family.unused_linears(model.config)}  # ESM's contact head
    paths = [path for path in paths if path.removeprefix(f"{prefix}.") not in unused]
    return paths + [prefix] * (prefix in dict(model.named_modules()))


def outputs(model, batch, labels, mode=torch.enable_grad) -> dict[str, torch.Tensor]:
    """Every output, and the gradients of the last layer's projections, whose errors drown in each other."""
    inputs = dict(batch.inputs)
    if "MultipleChoice" in type(model).__name__:
        inputs = by_choice(model.config.model_type, inputs, 2)
    with mode():
        out = model(**inputs, **labels)
        found = {name: out[name] for name in out if isinstance(out[name], torch.Tensor)}
    if mode is not torch.enable_grad:
        return found
    noise = torch_generator(0)
    total = sum((t * torch.randn(t.shape, generator=noise).to(t.dtype)).sum() for t in found.values())
    names = fastbert.EncoderConfig.from_dict(model.config.to_dict()).layer_specs[-1].names
    ends = tuple(f".{path}.weight" for path in (names.query, names.value))
    weights = [p for name, p in model.named_parameters() if name.endswith(ends)]
    return {**found, "gradients": torch.cat(torch.autograd.grad(total, weights[-2:]))}


# With labels these heads run otherwise than without.
LABELS = [
    (*model, with_labels) for model in MODELS for with_labels in {False, "MaskedLM" in model or "Pre" in model[1]}
]


# Containers are below the heads, but for the masked LM's own, which labels pass by.
@of_every_kind_of_head()
@left_to_full(lambda p: is_left_out(p, p["with_labels"], of=4 if p["head"] == "MaskedLM" else 16))
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
        if path.endswith("encoder") and model_type.startswith("deberta"):
            continue  # there transformers goes on with the hidden states that it has recorded, not with the result
        handles = [model.get_submodule(path).register_forward_hook(scaled) for model in models]
        ours, oracle, baseline = (outputs(model, batch, labels) for model in models)
        trio.ours.eval()  # where the layers are one op, if nothing is to be called
        inferred = [outputs(trio.ours, batch, labels, mode) for mode in MODES.values()]
        trio.ours.train()
        for handle in handles:
            handle.remove()
        assert set(ours) == set(oracle)
        assert any(not torch.equal(ours[name], before[name]) for name in ours) or path == trio.ours.family.prefix, path
        for found, said in ((ours, ""), *zip(inferred, MODES, strict=True)):
            for name, t in found.items():
                exact = oracle[name].double()  # transformers' losses are float32 whatever the model is
                assert_close_to_reference(t, exact, baseline[name], GRADIENT_FACTOR, f"{path} {name} {said}")
    after = outputs(trio.ours, batch, labels)
    assert all(torch.equal(after[name], before[name]) for name in before)


@halved
@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad))
@pytest.mark.parametrize("model_type", ("bert", "distilbert", "albert", "megatron-bert"))
def test_what_hooks_see(model_type, mode):
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
        with mode():
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


@left_to_full(
    lambda p: p["backend"] == "triton" and p["mode"] is not torch.enable_grad
)  # interpreted kernels know none
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode, torch.enable_grad))
@pytest.mark.parametrize("backend", ("auto", "torch", pytest.param("triton", marks=pytest.mark.full)))
def test_every_kind_of_hook_runs(backend, mode, monkeypatch):
    if backend == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = config_for("bert", "MaskedLM", num_hidden_layers=1 if backend == "triton" else 2)  # it is interpreted
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


def test_one_warning_for_a_container():
    """However often it is called, and in however many layers."""
    model = fastbert.BertModel(config_for("bert", "Model", num_hidden_layers=2)).eval()
    for module in (model.embeddings, *(layer.attention for layer in model.encoder.layer)):
        module.register_forward_hook(scaled)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(3):
            model(torch.randint(2, 40, (2, 5)))
    sees = "has hooks: they see packed tensors (total_tokens, ...)"
    assert [str(each.message).partition(",")[0] for each in said] == [
        f"fastbert: {where} {sees}".partition(",")[0] for where in ("BertModel: embeddings", "EncoderLayer: attention")
    ]


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


def patched_group(model):
    model.encoder.albert_layer_groups[1].forward = lambda *args, run: args[0]


def replaced_group(model):
    model.encoder.albert_layer_groups[1].__class__ = type("Mine", (Container,), {})


CHANGES = {
    "bert": (replaced, replaced_with_leaves, patched, patched_embeddings),
    "albert": (patched_group, replaced_group),
}


@halved
@pytest.mark.parametrize("training", (False, True))
@pytest.mark.parametrize(("model_type", "change"), [(kind, change) for kind in CHANGES for change in CHANGES[kind]])
def test_what_takes_a_containers_place_is_refused(model_type, change, training):
    groups = {"num_hidden_groups": 2} if model_type == "albert" else {}
    model = base_class(model_type)(config_for(model_type, "Model", num_hidden_layers=2, **groups)).train(training)
    ids = torch.randint(2, 40, (2, 5))
    with torch.no_grad():
        model(ids)
        change(model)
        with pytest.raises(TypeError, match="fastbert's models never call"):
            model(ids)


class Mine(fastbert.BertModel):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        return type(out)(**{**out, "last_hidden_state": out.last_hidden_state * FACTOR})


def patched_base(model):
    own = model.bert.forward

    def forward(*args, **kwargs):
        out = own(*args, **kwargs)
        return type(out)(**{**out, "last_hidden_state": out.last_hidden_state * FACTOR})

    model.bert.forward = forward


def replaced_base(model):
    base = Mine(model.config, add_pooling_layer=False)
    base.load_state_dict(model.bert.state_dict())
    model.bert = base.train(model.training)


def patched_class(model):
    model.bert.__class__ = Mine


@halved
@pytest.mark.parametrize("mode", (torch.enable_grad, torch.no_grad))
@pytest.mark.parametrize("change", (patched_base, replaced_base, patched_class))
def test_a_forward_of_the_base_models_own(change, mode):
    """Under a head it is called, as in transformers: what a hook does in the same place is what it does."""
    model = fastbert.BertForTokenClassification(config_for("bert", "TokenClassification")).eval()
    ids = torch.randint(2, 40, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with mode():
        before = model(ids, mask).logits
        handle = model.bert.register_forward_hook(scaled)
        expected = model(ids, mask).logits
        handle.remove()
        change(model)
        assert torch.equal(model(ids, mask).logits, expected) and not torch.equal(expected, before)
