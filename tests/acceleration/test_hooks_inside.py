"""Code of others inside an accelerated model sees what it sees in transformers: hooks, forwards, classes of leaves."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_configs import make_config
from full import halved
from hf import families_axis, make_hf, make_ours, random_like
from kinds import of_every_kind
from seeds import manual_seed, torch_generator
from test_accelerate import (
    IDS,
    MASK,
    assert_as_transformers,
    in_units_of_the_largest,
    no_fallback,  # noqa: F401
    one_thread,  # noqa: F401
    small,
)
from test_accelerate_integrations import fine_tune
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import fastbert
from fastbert.layers.quantized import QuantizedLinear
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

GRID = torch.randint(3, 43, (3, 9), generator=torch_generator(1))
PADDED = (torch.arange(9) < torch.tensor([[9], [6], [7]])).long()


def of_first(value, change: Callable):
    """What a hook gives for a tensor, or a tuple whose first entry is one."""
    return (of_first(value[0], change), *value[1:]) if isinstance(value, tuple) else change(value)


def without_column_0(x: torch.Tensor) -> torch.Tensor:
    """(batch, columns, ...) with column 0 cleared, or 3, a token; DeBERTa's table of distances as it is."""
    if x.shape[:2] != GRID.shape:
        return x
    x = x.clone()
    x[:, 0] = 0 if x.is_floating_point() else 3
    return x


def scaled_by_column(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The same of what has a gradient for each column."""
    if gradient is None or gradient.shape[:2] != GRID.shape or not gradient.is_floating_point():
        return gradient
    return gradient * torch.arange(1.0, 10.0)[:, None]


KINDS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda m: m.register_forward_hook(lambda _, args, out: of_first(out, without_column_0)),
    "pre-forward": lambda m: m.register_forward_pre_hook(lambda _, args: of_first(args, without_column_0)),
    "backward": lambda m: m.register_full_backward_hook(lambda _, given, out: tuple(map(scaled_by_column, given))),
    "pre-backward": lambda m: m.register_full_backward_pre_hook(lambda _, out: tuple(map(scaled_by_column, out))),
}


def places_in(config) -> list[str]:
    """The table of words, a Linear, a norm, a layer."""
    spec = config.layer_specs[0]
    norm = next(path for path in spec.norm_paths if path is not None)
    inside = [f"{config.layer_paths[0]}.{path}" for path in (spec.names.linears[0], norm)]
    return [config.embeddings.word, *inside, config.layer_paths[0]]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The last hidden state at real tokens, and the gradients of all weights."""
    model.zero_grad()
    state = model(GRID, attention_mask=PADDED)[0][PADDED.bool()]
    (state * torch.linspace(-1, 1, state.numel()).view_as(state)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"last_hidden_state": state.detach(), **gradients}


def assert_same_values(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@of_every_kind()
@halved
@pytest.mark.parametrize("kind", KINDS)
@families_axis
def test_a_hook_that_edits_by_column(model_type, kind):
    config = make_config(model_type)
    model = fastbert.accelerate(make_hf(config, "Model")).eval()
    before = values_of(model)
    for path in places_in(config):
        handle = KINDS[kind](model.get_submodule(path))
        expected = values_of(fastbert.restore(copy.deepcopy(model)))
        with pytest.warns(UserWarning, match=f"{path} has hooks") as said:
            found = values_of(model)
            values_of(model)
        assert len([w for w in said if "fastbert: " in str(w.message)]) == 1
        assert_same_values(found, expected)
        status = fastbert.status(model)
        assert f"{path} has hooks ({__name__}), which see padded tensors" in status.why_not
        handle.remove()
        assert_same_values(values_of(model), before)
        assert fastbert.status(model).packed == status.packed + 1


def test_backward_hooks_where_no_gradient_is_recorded(no_fallback):
    model = fastbert.accelerate(small())
    for path in ("encoder.layer.0.attention.self.query", "encoder.layer.0.attention"):
        KINDS["backward"](model.get_submodule(path))
    with torch.no_grad():
        assert_as_transformers(model, input_ids=IDS, attention_mask=MASK)


def test_hooks_around_what_was_replaced_see_what_they_always_see(no_fallback):
    plain, seen = small("SequenceClassification"), {}
    model = fastbert.accelerate(copy.deepcopy(plain))
    for each in (plain, model):
        shapes = seen[each] = []
        for module in (each, each.bert, each.classifier):
            module.register_forward_hook(lambda _, args, out, shapes=shapes: shapes.append(out[0].shape))
            module.register_full_backward_hook(lambda _, given, out, shapes=shapes: shapes.append(out[0].shape))
        query(each.bert).weight.register_hook(lambda gradient, shapes=shapes: shapes.append(gradient.shape))
        each(IDS, attention_mask=MASK).logits.sum().backward()
    assert seen[model] == seen[plain] and len(seen[plain]) > 4
    assert fastbert.status(model).packed == 1


def query(model: nn.Module) -> nn.Module:
    return model.get_submodule("encoder.layer.1.attention.self.query")


def with_pefts_gradients(prepared: Callable[[object, object], object], model: nn.Module) -> None:
    """PEFT's own hook, for models without the method of transformers'."""
    peft = pytest.importorskip("peft")
    own = ("get_input_embeddings", "gradient_checkpointing_enable")
    prepared(peft, SimpleNamespace(**{name: getattr(model, name) for name in own}))


# Where PEFT registers it.
OF_PEFT: dict[str, Callable] = {
    "PeftModel": lambda peft, bare: peft.PeftModel._prepare_model_for_gradient_checkpointing(None, bare),
    "PeftMixedModel": lambda peft, bare: peft.mixed_model._prepare_model_for_gradient_checkpointing(bare),
    "prepare_model_for_kbit_training": lambda peft, bare: peft.prepare_model_for_kbit_training(
        SimpleNamespace(**{**vars(bare), "is_loaded_in_8bit": True, "named_parameters": dict, "parameters": list})
    ),
}


class Scaled(nn.Module):
    """A user's own parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.5


def with_accelerates_hook(model: nn.Module, own: bool = False) -> None:
    """As dispatch_model does on each leaf; own: a user's hook in its place."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Own(hooks.ModelHook):
        def post_forward(self, module, output):
            return without_column_0(output)

    hooks.add_hook_to_module(query(model), Own() if own else hooks.AlignDevicesHook("cpu"))


# Hooks and classes that neither look at where a token is, nor change values by it.
ALLOWED: dict[str, Callable[[nn.Module], object]] = {
    "transformers' recorder": lambda model: model(IDS, output_hidden_states=True, output_attentions=True),
    "transformers' make_inputs_require_grads": lambda model: model.enable_input_require_grads(),
    **{f"make_inputs_require_grad of {name}": partial(with_pefts_gradients, of) for name, of in OF_PEFT.items()},
    "prune": lambda model: prune.l1_unstructured(query(model), "weight", 0.4),
    "weight_norm": lambda model: nn.utils.weight_norm(query(model)),
    "spectral_norm": lambda model: nn.utils.spectral_norm(query(model)),
    "weight_norm by parametrization": lambda model: parametrizations.weight_norm(query(model)),
    "spectral_norm by parametrization": lambda model: parametrizations.spectral_norm(query(model)),
    "a parametrization of a user's": lambda model: parametrize.register_parametrization(
        query(model), "weight", Scaled()
    ),
    "a hook of the weight": lambda model: query(model).weight.register_hook(lambda grad: None),
    "Accelerate's dispatch": with_accelerates_hook,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("when", ("before", "after"))
@pytest.mark.parametrize("change", ALLOWED.values(), ids=ALLOWED)
def test_what_may_stay_inside(change, when, packed_layers, no_fallback):
    def made(accelerates: bool = False) -> nn.Module:  # each anew: a weight that a hook has made cannot be copied
        model = small().eval()
        if accelerates and when == "after":
            fastbert.accelerate(model)(IDS, attention_mask=MASK)
        manual_seed(2)
        change(model)
        return fastbert.accelerate(model) if accelerates and when == "before" else model

    model, plain, oracle = made(accelerates=True), made(), made().double()
    packed_layers.clear()
    (actual, gradients), (near, near_gradients), (exact, exact_gradients) = map(run, (model, plain, oracle))
    assert len(packed_layers) == model.config.num_hidden_layers
    assert_close_to_reference(actual, exact, near, GRADIENT_FACTOR)
    found = [in_units_of_the_largest(g, exact_gradients) for g in (gradients, exact_gradients, near_gradients)]
    assert_close_to_reference(found[0].float(), found[1], found[2].float(), GRADIENT_FACTOR)


def run(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """What a model gives for real tokens, and the gradients of its weights."""
    state = model(IDS, attention_mask=MASK)[0][MASK.bool()]
    (state * random_like(state.shape, 3).to(state.dtype)).sum().backward()
    return state.detach(), {name: p.grad for name, p in model.named_parameters()}


def with_lora_on_tables(path: str, model: nn.Module) -> None:
    peft, name = pytest.importorskip("peft"), path.rpartition(".")[2]
    manual_seed(5)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[name], init_lora_weights=False), model)


def with_written_norm(path: str, model: nn.Module) -> None:
    """What the weight was made of has changed since: the hook makes it anew in the next call."""
    leaf = nn.utils.weight_norm(model.get_submodule(path))
    with torch.no_grad():
        leaf.weight_g.mul_(1.5)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("runs_ours", (False, True), ids=("accelerated", "own"))
@pytest.mark.parametrize("change", (with_lora_on_tables, with_written_norm))
def test_a_table_that_no_token_is_looked_up_in(change, runs_ours, no_fallback):
    """transformers looks the distances up in it; we take all of it."""
    config, path = make_config("mpnet"), "encoder.relative_attention_bias"
    plain, theirs = make_hf(config, "Model").eval(), make_hf(config, "Model").eval()
    model = make_ours(config, "Model", theirs).eval() if runs_ours else fastbert.accelerate(theirs)
    oracle = copy.deepcopy(plain)
    for each in (plain, model, oracle):
        change(path, each)
    near, actual, exact = (m(GRID, attention_mask=PADDED)[0][PADDED.bool()] for m in (plain, model, oracle.double()))
    assert_close_to_reference(actual, exact, near, GRADIENT_FACTOR)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_made_by_a_hook_of_what_is_not_called():
    model, plain = (make_hf(make_config("roformer"), "Model").eval() for _ in range(2))
    for each in (fastbert.accelerate(model), plain):
        with_written_norm("encoder.embed_positions", each)
    with pytest.warns(UserWarning, match=r"encoder.embed_positions has hooks \(torch.nn.utils.weight_norm\)"):
        assert torch.equal(model(GRID)[0], plain(GRID)[0])


def test_calibration(no_fallback):
    """Our own hooks see real tokens alone, which is what a scale is made of."""
    model, largest = small().eval(), {}
    plain, oracle = copy.deepcopy(model), copy.deepcopy(model).double()
    for each in (plain, oracle):
        for name, leaf in each.named_modules():
            leaf.register_forward_pre_hook(
                lambda _, args, key=(each, name): (
                    largest.update({key: args[0][MASK.bool()].abs().amax()})
                    if args and args[0].shape[:2] == MASK.shape
                    else None
                )
            )
        each(IDS, attention_mask=MASK)
    fastbert.quantize(fastbert.accelerate(model), calibration=[{"input_ids": IDS, "attention_mask": MASK}])
    scales = {name: leaf.input_scale for name, leaf in model.named_modules() if isinstance(leaf, QuantizedLinear)}
    found = torch.tensor([float(scale) for scale in scales.values()])
    near, exact = (torch.stack([largest[each, name] / 127 for name in scales]) for each in (plain, oracle))
    assert len(scales) == 6 * model.config.num_hidden_layers and fastbert.status(model).packed == 1
    assert_close_to_reference(found, exact, near, GRADIENT_FACTOR)


class Own(nn.Linear):
    """A user's own, which may look at the columns of a batch."""


def with_own_class(model: nn.Module) -> None:
    leaf = query(model)
    model.set_submodule("encoder.layer.1.attention.self.query", Own(leaf.in_features, leaf.out_features))


def with_own_forward(model: nn.Module) -> None:
    leaf = query(model)
    leaf.forward = partial(lambda leaf, x: without_column_0(type(leaf).forward(leaf, x)), leaf)


def with_attention_inside(model: nn.Module) -> None:
    width = query(model).in_features
    layer = nn.TransformerEncoderLayer(width, 2, 8, batch_first=True).eval()
    model.set_submodule("encoder.layer.1.attention.self.query", layer)


def make_inputs_require_grads(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
    """A user's own, under a name of transformers'."""
    return without_column_0(output)


def with_own_forward_dispatched(model: nn.Module) -> None:
    with_own_forward(model)
    with_accelerates_hook(model)


def with_lora(change: Callable[[nn.Module], object], model: nn.Module) -> None:
    """LoRA in the leaf's place, with something of the user's inside of that."""
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["query"], init_lora_weights=False), model)
    change(query(model))


def with_own_class_in_lora(leaf: nn.Module) -> None:
    leaf.lora_A["default"] = Own(leaf.in_features, 2)


REFUSED = {
    "a class": (with_own_class, "is a Own"),
    "a forward": (with_own_forward, "has a forward of its own on the instance"),
    "a class of torch's": (with_attention_inside, "is a TransformerEncoderLayer"),
    "a known name": (lambda m: query(m).register_forward_hook(make_inputs_require_grads), r"has hooks \(test_hooks"),
    "Accelerate's place": (partial(with_accelerates_hook, own=True), "has a forward of its own on the instance"),
    "a forward dispatched": (with_own_forward_dispatched, "has a forward of its own on the instance"),
    "a hook inside of LoRA": (partial(with_lora, lambda leaf: KINDS["forward"](leaf.base_layer)), "has hooks"),
    "a class inside of LoRA": (partial(with_lora, with_own_class_in_lora), "is a Own"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_runs_transformers_code(change, reason):
    """Also where it comes after calls that ran packed."""
    model = fastbert.accelerate(small()).eval()
    model(GRID)
    change(model)
    expected = fastbert.restore(copy.deepcopy(model))(GRID)[0]
    with pytest.warns(UserWarning, match=f"query {reason}"):
        assert torch.equal(model(GRID)[0], expected)


def test_neftune(tmp_path: Path):
    """The Trainer's hook on the table of words draws noise for each column."""
    model = small("SequenceClassification").train()
    expected = fine_tune(copy.deepcopy(model), tmp_path, neftune_noise_alpha=5)
    with pytest.warns(UserWarning, match="word_embeddings has hooks"):
        assert fine_tune(fastbert.accelerate(model), tmp_path, neftune_noise_alpha=5) == expected
