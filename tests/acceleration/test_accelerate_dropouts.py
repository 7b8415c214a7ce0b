"""Dropouts of an accelerated model, which transformers' modules have: as they are set now, whatever the config says."""

# ruff: noqa: F811  (a fixture that is imported is also an argument)
from __future__ import annotations

import pytest
import torch
from family_configs import make_config
from hf import families_axis, make_hf
from kinds import of_few_kinds
from seeds import torch_generator
from test_accelerate import assert_as_transformers, no_fallback, one_thread  # noqa: F401
from torch import nn

import fastbert
from fastbert.config import EncoderConfig

IDS = torch.randint(3, 43, (4, 11), generator=torch_generator(5))


def dropout_fields(model_type: str) -> list[str]:
    """The fields of a family's config that are dropouts of its base model."""
    config = make_config(model_type)
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "embedding_dropout", "mlp_dropout")
    return [name for name in names if name in {**vars(config), **config.own} and name not in config.family.fixed]


def with_dropouts(model_type: str, **given: float) -> nn.Module:
    return make_hf(make_config(model_type).replace(**given), "Model").train()


def dropouts_of(model: nn.Module) -> dict[str, float]:
    """The path of every dropout, a module or a number."""
    found = {path: child.p for path, child in model.named_modules() if isinstance(child, nn.Dropout)}
    for path, child in model.named_modules():
        found |= {f"{path}.{name}": p for name, p in vars(child).items() if name in ("dropout", "attention_dropout")}
    return found


def of_first_layer(paths: dict[str, float]) -> list[str]:
    """All layers have the same."""
    return [path for path in paths if ".1." not in path and ".2." not in path and ".3." not in path]


def set_dropout(model: nn.Module, path: str, p: float) -> None:
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(getattr(owner, name), nn.Dropout):
        owner, name = getattr(owner, name), "p"
    setattr(owner, name, p)


@of_few_kinds()
@families_axis
def test_every_dropout_is_that_of_now(model_type, no_fallback):
    """Set to 0 after `accelerate`, before it, or one of them to another value: as transformers goes by them."""
    fields = dropout_fields(model_type)
    model = with_dropouts(model_type, **{name: 0.1 * i for i, name in enumerate(fields, 1)})
    found = dropouts_of(model)
    config = EncoderConfig.from_dict(model.config.to_dict())
    assert {p for spec in config.layer_specs for p in spec.dropouts.values()} - {0.0} <= set(found.values())
    fastbert.accelerate(model)(IDS)
    for path in found:
        set_dropout(model, path, 0.0)
    assert_as_transformers(model, input_ids=IDS)
    calm, calm_eval = model(IDS)[0], model.eval()(IDS)[0]
    model.train()
    theirs = config.family.hf_class
    unused = [f"{config.layer_paths[0]}.{at}" for at, role in theirs.dropouts.items() if role is None]
    unused += [] if theirs.drops_embeddings else [theirs.embedding_dropout]
    for path in of_first_layer(found):
        set_dropout(model, path, 0.5)
        assert torch.equal(model(IDS)[0], calm) == (path in unused), path
        assert torch.equal(model.eval()(IDS)[0], calm_eval)
        set_dropout(model.train(), path, 0.0)
    assert torch.equal(fastbert.accelerate(fastbert.restore(model))(IDS)[0], calm)
    assert fastbert.status(model).others == 0


def test_dropouts_that_are_left_to_transformers():
    model = fastbert.accelerate(with_dropouts("bert", hidden_dropout_prob=0.1)).eval()
    dropout = model.encoder.layer[2].output.dropout.train()
    dropout.p = 0.3
    with pytest.warns(UserWarning, match=r"layer.2.output.dropout has p=0.3, training=True; what it is in has"):
        model(IDS)
    dropout.p = 1.0
    with pytest.warns(UserWarning, match=r"layer.2.output.dropout has p=1.0, training=True; packed execution takes"):
        model.train()(IDS)


@of_few_kinds()
@families_axis
def test_every_dropout_drops(model_type, no_fallback):
    """Each field alone changes what training computes, and nothing of inference."""
    calm = fastbert.accelerate(with_dropouts(model_type))
    expected = calm(IDS)[0]
    for name in dropout_fields(model_type):
        model = fastbert.accelerate(with_dropouts(model_type, **{name: 0.5}))
        first, second = model(IDS)[0], model(IDS)[0]
        assert not torch.equal(first, second) and not torch.equal(first, expected)
        assert torch.equal(model.eval()(IDS)[0], calm.eval()(IDS)[0])
