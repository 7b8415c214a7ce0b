"""Embeddings, layers, encoders, poolers and heads that are called by themselves, as transformers' own model calls its."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from batches import make_batch
from family_configs import config_for, make_config
from full import left_to_full
from hf import families_axis, hf_class, hf_config, is_left_out, leaf_gradients, make_hf, make_oracle, make_ours
from hf import MODELS, models_axis
from kinds import of_every_kind, of_every_kind_of_head
from seeds import torch_generator
from theirs import by_choice, mend
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

import fastbert
from fastbert.errors import InputError
from fastbert.testing.numerics import GRADIENT_FACTOR, assert_close_to_reference


def parts_of(model: nn.Module) -> list[str]:
    """The paths of the parts that a model holds beside its base model; of layers of one kind the first one's."""
    config, base, kinds = model.config, model.family.prefix, {}
    for path, spec in zip(config.layer_paths, config.layer_specs, strict=True):
        kinds.setdefault(spec, path)
    layers = set(config.layer_paths) - set(kinds.values())
    paths = [path for path, module in model.named_modules() if vars(module).get("part")]
    return [path for path in paths if path not in layers and not path.startswith(f"{base}.")]


def calls_of(model: nn.Module, paths: list[str], inputs: dict[str, Any]) -> dict[str, tuple[tuple, dict]]:
    """What the first call of each of these modules gets in a forward pass."""
    found: dict[str, tuple[tuple, dict]] = {}
    for path in paths:

        def note(module, args, kwargs, path=path):
            found.setdefault(path, (args, kwargs))

        model.get_submodule(path).register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    return found


def results(module: nn.Module, call: tuple[tuple, dict], real: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a part gives of a call: its tensors, at real tokens, and the gradients of what it gets and of its leaves."""
    leaves: list[torch.Tensor] = []

    def cast(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or not t.is_floating_point():
            return t
        t = t.to(dtype).detach()
        if t.dim() > 1 and t.shape[-1] != real.shape[1]:  # a mask has no gradient
            leaves.append(t if leaves else t.requires_grad_())
        return t

    args, kwargs = tree_map(cast, call)
    out = module(*args, **kwargs)
    made = [
        t for t in tree_flatten(tuple(out) if isinstance(out, tuple) else getattr(out, "to_tuple", lambda: out)())[0]
    ]
    made = [t.transpose(1, 2) if t.dim() == 4 else t for t in made if isinstance(t, torch.Tensor)]  # probabilities
    made = [t[real] if t.shape[:2] == real.shape else t for t in made]
    noise = torch_generator(3)
    sum((t * torch.randn(t.shape, generator=noise).to(dtype)).sum() for t in made).backward()
    grads = leaf_gradients({f"{name}": p.grad for name, p in module.named_parameters()})
    return [*made, *(t.grad for t in leaves[:1] if t.grad is not None), *(grads[name] for name in sorted(grads))]


@of_every_kind_of_head()
@left_to_full(lambda p: p["mask"] == "right" and is_left_out(p, of=3))
@pytest.mark.parametrize("mask", ("none", "right"))
@models_axis
def test_as_transformers_calls_its_own(model_type, head, mask):
    """With all that its model passes: masks of scores, rotary tables, rows of distances."""
    config = config_for(model_type, head)
    theirs, batch = make_hf(config, head).eval(), make_batch(config, mask)
    mend(theirs)
    ours = make_ours(config, head, theirs).eval()
    paths, inputs, real = parts_of(ours), dict(batch.inputs), batch.real
    if head == "MultipleChoice":
        inputs = by_choice(model_type, inputs, 2)
    calls = calls_of(copy.deepcopy(theirs), paths, inputs)
    assert paths == list(calls) or set(paths) == set(calls)
    for path, call in calls.items():
        modules = (ours, torch.float32), (theirs, torch.float32)
        found, near = (results(model.get_submodule(path), call, real, dtype) for model, dtype in modules)
        exact = results(make_oracle(theirs.get_submodule(path)), call, real, torch.float64)
        for one, two, three in zip(found, near, exact, strict=True):
            assert_close_to_reference(one, three, two, GRADIENT_FACTOR)
