"""Forward-mode derivatives and torch.func's transforms, of own models and accelerated ones, against transformers'."""

from __future__ import annotations

import copy

import pytest
import torch
from family_configs import make_config
from full import halved, thinned
from hf import make_trio, random_like
from torch.autograd import forward_ad, functional
from torch.func import functional_call, grad, jacfwd, jvp, vmap

import fastbert
from fastbert.backend import use_backend
from fastbert.errors import BackendError
from fastbert.native.availability import extension_error
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference

MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 1, 1]])


def dtype_of(model):
    return next(model.parameters()).dtype


def run(model, parameters, mask=MASK, **given):
    out = functional_call(model, parameters, (), {"attention_mask": mask, **given})[0]
    return out if mask is None else out * mask[..., None]  # at padding, only transformers has numbers


def embeds_of(model, seed=1):
    return random_like((*MASK.shape, model.config.hidden_size), seed).to(dtype_of(model))


def weights_of(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def directions(model):
    return {name: random_like(p.shape, 3).to(p.dtype) for name, p in weights_of(model).items()}


def loss(model, parameters, **given):
    return run(model, parameters, **given).pow(3).mean()


def flat(gradients):
    return torch.cat([gradients[name].flatten() for name in sorted(gradients) if "pooler" not in name])


def dual(model):
    with forward_ad.dual_level():
        given = forward_ad.make_dual(embeds_of(model), embeds_of(model, 2))
        return forward_ad.unpack_dual(run(model, {}, inputs_embeds=given)).tangent


def jvp_of_embeds(model):
    return jvp(lambda e: run(model, {}, inputs_embeds=e), (embeds_of(model),), (embeds_of(model, 2),))[1]


def jvp_of_weights(model):
    return jvp(lambda p: run(model, p, input_ids=IDS), (weights_of(model),), (directions(model),))[1]


def jacobian(model):
    embeds = embeds_of(model)
    return jacfwd(lambda scale: run(model, {}, inputs_embeds=embeds * scale))(embeds[0, 0, :2].sum())


def gradient(model):
    return flat(grad(lambda p: loss(model, p, input_ids=IDS))(weights_of(model)))


def of_each_sample(model):
    def of_one(parameters, ids):
        return loss(model, parameters, mask=None, input_ids=ids[None])

    gradients = vmap(grad(of_one), in_dims=(None, 0))(weights_of(model), IDS)
    return torch.cat([gradients[name].flatten(1) for name in sorted(gradients) if "pooler" not in name], 1)


def hessian_vector(model):
    first = grad(lambda p: loss(model, p, input_ids=IDS))
    return flat(jvp(first, (weights_of(model),), (directions(model),))[1])


@thinned(4)
@pytest.mark.filterwarnings("ignore:fastbert. .*transformers' own forward")
@pytest.mark.parametrize("transform", (dual, jvp_of_embeds, jvp_of_weights, jacobian))
@pytest.mark.parametrize("model_type", ("bert", "distilbert", "modernbert"))
def test_forward_mode(model_type, transform):
    compare(model_type, transform)


def by_two_gradients(model):
    """The same as `jvp_of_embeds`."""
    return functional.jvp(lambda e: run(model, {}, inputs_embeds=e), embeds_of(model), embeds_of(model, 2))[1]


def hessian_vector_of_embeds(model):
    def of_embeds(e):
        return run(model, {}, inputs_embeds=e).pow(3).mean()

    return functional.hvp(of_embeds, embeds_of(model), embeds_of(model, 2))[1]


def penalty(model):
    """The gradient of a penalty on the gradients of the weights."""
    weights = {name: p.requires_grad_() for name, p in weights_of(model).items() if "pooler" not in name}
    gradients = torch.autograd.grad(loss(model, weights, input_ids=IDS), [*weights.values()], create_graph=True)
    found = torch.autograd.grad(sum(g.square().sum() for g in gradients), [*weights.values()])
    return flat(dict(zip(weights, found, strict=True)))


def jacobian_of_embeds(model):
    """All rows at once: no second derivative, and kernels have no batch of gradients either."""
    return functional.jacobian(lambda e: run(model, {}, inputs_embeds=e).sum((0, 2)), embeds_of(model), vectorize=True)


@halved
@pytest.mark.parametrize("twice", (by_two_gradients, hessian_vector_of_embeds, penalty, jacobian_of_embeds))
@pytest.mark.parametrize("model_type", ("bert", "distilbert"))
def test_gradients_of_gradients(model_type, twice):
    """Torch's backend has them; kernels say that they do not, and never give zeros."""
    trio = make_trio(make_config(model_type, num_hidden_layers=2), "Model", torch.float32)
    with use_backend("torch"):
        compare_with(trio, twice)
    if extension_error() is None:
        for model in two_of_ours(trio):
            with pytest.raises(
                BackendError, match=r'(create_graph|vectorize)=True\): compute .*use_backend\("torch"\)'
            ):
                twice(model)


@halved
@pytest.mark.filterwarnings("ignore:fastbert. .*transformers' own forward")
@pytest.mark.parametrize("transform", (gradient, of_each_sample, hessian_vector))
@pytest.mark.parametrize("model_type", ("bert", "distilbert"))
def test_transforms_of_gradients(model_type, transform):
    compare(model_type, transform)


def compare(model_type, transform):
    compare_with(make_trio(make_config(model_type, num_hidden_layers=2), "Model", torch.float32), transform)


def two_of_ours(trio):
    return trio.ours, fastbert.accelerate(copy.deepcopy(trio.baseline))


def compare_with(trio, transform):
    baseline, truth = transform(trio.baseline), transform(trio.oracle)
    for model in two_of_ours(trio):
        actual = transform(model)
        assert actual is not None and truth.abs().max() > 0
        assert_close_to_reference(actual, truth, baseline, GRADIENT_FACTOR)


def test_a_backend_that_was_asked_for_says_why_it_cannot():
    model = make_trio(make_config("bert", num_hidden_layers=2), "Model", torch.float32).ours
    with use_backend("cpu"), pytest.raises(BackendError, match=r"cannot serve .*: forward-mode derivatives"):
        jvp_of_weights(model)


def test_a_mask_that_vmap_batches_is_refused():
    model = make_trio(make_config("bert", num_hidden_layers=2), "Model", torch.float32).ours
    with pytest.raises(fastbert.InputError, match="attention_mask is batched by vmap"):
        vmap(lambda ids, mask: model(ids[None], attention_mask=mask[None])[0])(IDS, MASK)
