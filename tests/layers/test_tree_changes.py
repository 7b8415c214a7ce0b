"""Leaves and layers that a user has replaced or dropped: the tree that is there decides what runs and what is saved."""

from __future__ import annotations

import warnings
from copy import deepcopy

import pytest
import torch
from family_configs import config_for, few_heads, make_config
from full import halved, left_to_full, thinned
from hf import make_hf, make_ours, random_like
from kinds import of_every_kind
from seeds import torch_generator
from torch import nn

import fastbert
from fastbert.config import EncoderConfig
from fastbert.errors import ConfigError
from fastbert.families import FAMILIES
from fastbert.models.auto import base_class
from fastbert.models.base import EncoderModel
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
IDS = torch.randint(5, 50, (2, 9), generator=torch_generator(0))
MASK = torch.tensor([[1] * 9, [1] * 4 + [0] * 5])


def make(model_type: str, **fields) -> EncoderModel:
    if not 0 <= (FAMILIES[model_type].defaults.get("pad_token_id", 0) or -1) < 50:
        fields["pad_token_id"] = 0
    fields = {"vocab_size": 50, "initializer_range": 0.2, **SHAPE, **few_heads(model_type, **SHAPE), **fields}
    config = EncoderConfig.of_family(model_type, **fields)
    return base_class(model_type)(config).eval()


def replace(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)


def layer_list(model: EncoderModel) -> str:
    return model.config.layer_paths[0].rpartition(".")[0]


def norm_of_layers(role: str):
    def path(config: EncoderConfig) -> str | None:
        has_norm = role != "attention_norm" or config.layer_specs[0].has_attention_norm
        return f"{config.layer_paths[0]}.{getattr(config.layer_specs[0].names, role)}" if has_norm else None

    return path


NORMS = {
    "the embeddings'": lambda config: config.embeddings.norm,
    "the attention's": norm_of_layers("attention_norm"),
    "the feed-forward's": norm_of_layers("feed_forward_norm"),
    "the final": lambda config: config.family.final_norm,
}
PLACES = [(kind, where) for kind in FAMILIES for where, path in NORMS.items() if path(EncoderConfig.of_family(kind))]
NO_WEIGHT, NO_BIAS = {"elementwise_affine": False}, {"bias": False}


class Literal(nn.LayerNorm):
    """torch's own LayerNorm, which fastbert calls: nothing is known about a subclass."""


def run(model: nn.Module, how: str) -> list[torch.Tensor]:
    """Hidden states, and where `how` takes any all gradients in one vector: keys' biases have 0, but for rounding."""
    if how == "compiled":
        torch.compiler.reset()
        with torch.no_grad():
            return [torch.compile(model, backend="eager")(IDS, MASK).last_hidden_state]
    with torch.set_grad_enabled(how != "no_grad"):
        hidden = model(IDS, MASK).last_hidden_state
    if how == "no_grad":
        return [hidden]
    (hidden * random_like(hidden.shape, 0).to(hidden.dtype)).sum().backward()
    return [hidden, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]


@of_every_kind()
@thinned(6)
@pytest.mark.parametrize("options,how", ((NO_WEIGHT, "no_grad"), (NO_WEIGHT, "gradients"), (NO_BIAS, "gradients")))
@pytest.mark.parametrize("model_type,where", PLACES)
def test_a_layer_norm_without_weights_is_what_torch_makes_of_it(model_type, where, options, how):
    model = make(model_type)
    path = NORMS[where](model.config)
    (width,) = model.get_submodule(path).normalized_shape
    replace(model, path, nn.LayerNorm(width, eps=1e-3, **options))  # of another eps: it must not be left out
    called = deepcopy(model)
    replace(called, path, Literal(width, eps=1e-3, **options))
    expected = run(deepcopy(called).double(), how)
    for out, exact, plain in zip(run(model, how), expected, run(called, how), strict=True):
        assert_close_to_reference(out, exact, plain, GRADIENT_FACTOR, f"{path}, {how}")


@pytest.mark.full
@left_to_full(lambda p: p["options"] is NO_BIAS)  # a part of NO_WEIGHT
@pytest.mark.parametrize("options", (NO_WEIGHT, NO_BIAS))
def test_a_compiled_model_has_such_a_layer_norm_too(options):
    model = make("bert", num_hidden_layers=1)
    replace(model, "encoder.layer.0.output.LayerNorm", nn.LayerNorm(32, **options))
    assert torch.equal(run(model, "compiled")[0], run(model, "no_grad")[0])


def test_a_model_whose_layer_norms_have_no_weights_can_be_initialised_again():
    model = make("bert")
    replace(model, "embeddings.LayerNorm", nn.LayerNorm(32, elementwise_affine=False))
    model.init_weights()
    assert model(IDS, MASK).last_hidden_state.isfinite().all()


# Where layers share weights (ALBERT's), the config counts them.
COUNTED = [kind for kind in FAMILIES if not EncoderConfig.of_family(kind).num_hidden_groups]


@of_every_kind()
@halved
@pytest.mark.parametrize("how", ("no_grad", "gradients"))
@pytest.mark.parametrize("kept", (0, 1))
@pytest.mark.parametrize("model_type", COUNTED)
def test_the_layers_that_are_there_run(model_type, kept, how):
    model = make(model_type)
    smaller = make(model_type, num_hidden_layers=kept)
    shapes = {name: t.shape for name, t in smaller.state_dict().items()}  # ESM's contact head has a row a layer
    smaller.load_state_dict({n: t for n, t in model.state_dict().items() if shapes.get(n) == t.shape}, strict=False)
    run(model, "no_grad")  # all of them, first
    replace(model, layer_list(model), model.get_submodule(layer_list(model))[:kept])
    for out, expected in zip(run(model, how), run(smaller, how), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.full  # test_compiled_models.py changes compiled models, too
def test_a_compiled_model_runs_the_layers_that_are_there():
    model = make("bert")
    before = run(model, "no_grad")[0]
    fast = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.equal(fast(IDS, MASK)[0], before)
        model.encoder.layer = model.encoder.layer[:1]
        assert torch.equal(fast(IDS, MASK)[0], run(model, "no_grad")[0])
    packed = torch.compile(model.encode_packed, fullgraph=True, backend="eager")
    with torch.no_grad():
        offsets = torch.tensor([0, 9, 18], dtype=torch.int32)
        assert torch.equal(packed(IDS.flatten(), offsets, 9), model(IDS).last_hidden_state.flatten(0, 1))


def test_layers_that_were_added_run():
    model, larger = make("bert"), make("bert", num_hidden_layers=4)
    model.encoder.layer.append(deepcopy(model.encoder.layer[0]))
    larger.load_state_dict(model.state_dict())
    assert torch.equal(run(model, "no_grad")[0], run(larger, "no_grad")[0])


@pytest.mark.parametrize("int8", (False, True), ids=("float32", "int8"))
@pytest.mark.parametrize("head", ("Model", "ForMaskedLM"))
def test_what_is_saved_has_as_many_layers_as_its_config(tmp_path, head, int8):
    model = getattr(fastbert, f"Bert{head}")(make("bert").config).eval()
    model.base_model.encoder.layer = model.base_model.encoder.layer[1:]
    if int8:
        fastbert.quantize(model, keep="*.layer.0.*" if head != "Model" else "encoder.layer.0.*")
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.num_hidden_layers == 2 and not loaded.missing_keys and not loaded.unexpected_keys
    for (name, ours), (other, theirs) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other and torch.equal(ours, theirs)
    assert torch.equal(model(IDS, MASK)[0], loaded(IDS, MASK)[0])


def test_an_accelerated_model_goes_by_its_tree_too():
    config = make_config("bert", vocab_size=50)
    theirs = make_hf(config, "Model").eval()
    replace(
        theirs, "encoder.layer.0.output.LayerNorm", nn.LayerNorm(theirs.config.hidden_size, elementwise_affine=False)
    )
    replace(theirs, "embeddings.LayerNorm", nn.LayerNorm(theirs.config.hidden_size, elementwise_affine=False))
    theirs.encoder.layer = theirs.encoder.layer[:1]
    exact = deepcopy(theirs).double()(IDS, MASK).last_hidden_state
    plain = theirs(IDS, MASK).last_hidden_state
    ours = fastbert.accelerate(theirs)(IDS, MASK).last_hidden_state
    real = MASK.bool()
    assert_close_to_reference(ours[real], exact[real], plain[real], GRADIENT_FACTOR, "accelerated")


@pytest.mark.parametrize("groups", (True, False), ids=("groups", "inner"))
def test_albert_groups_that_are_not_the_configs(groups):
    """Ours refuses them by name, transformers' own forward runs where there is one."""
    config = config_for("albert", "Model", 1)  # two groups of two layers

    def cut(model):
        if groups:
            model.encoder.albert_layer_groups = model.encoder.albert_layer_groups[:1]
        else:
            model.encoder.albert_layer_groups[1].albert_layers = model.encoder.albert_layer_groups[1].albert_layers[:1]
        return model

    theirs = make_hf(config, "Model").eval()
    ours, ids = make_ours(config, "Model", theirs).eval(), torch.tensor([[3, 9, 4]])
    with torch.no_grad():
        with pytest.raises(ConfigError, match=r"holds [01] layers; its config says 2"):
            cut(ours)(ids)
        fast = fastbert.accelerate(deepcopy(theirs))
        if not groups:
            with pytest.warns(UserWarning, match="holds 1 layers; its config says 2"):
                assert torch.equal(cut(fast)(ids).last_hidden_state, cut(theirs)(ids).last_hidden_state)
