"""Embeddings, layers, encoders, poolers and heads that are called by themselves, as transformers calls its own."""

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
from hf import (
    MODELS,
    families_axis,
    hf_class,
    hf_config,
    leaf_gradients,
    make_hf,
    make_oracle,
    make_ours,
)
from kinds import FEW, of_every_kind, of_every_kind_of_head
from seeds import torch_generator
from theirs import by_choice, mend
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

import fastbert
from fastbert.errors import InputError
from fastbert.families import FAMILIES
from fastbert.families.schema import ClassifierHead
from fastbert.layer_spec import Disentangled
from fastbert.layers.leaves import Container
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


def has_parts(model_type: str, head: str) -> bool:
    """Not those whose head is a Linear or two right below the model."""
    form = FAMILIES[model_type].heads.get(head)
    return not isinstance(form, ClassifierHead) or "." in form.out or "." in (form.dense or "")


# A mask makes rows of scores, tables of columns and packed tokens: without one there is less of each.
@of_every_kind_of_head()
@left_to_full(lambda p: p["mask"] == "none" and p["model_type"] not in FEW)
@pytest.mark.parametrize("mask", ("none", "right"))
@pytest.mark.parametrize(("model_type", "head"), [model for model in MODELS if has_parts(*model)])
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


@families_axis
def test_arguments_by_position(model_type):
    """A family's file has transformers' order, up to the last argument that means something here."""
    with torch.device("meta"):
        theirs = hf_class(model_type, "Model")(hf_config(config := make_config(model_type)))

    def names(path: str) -> list[str]:
        """A cache changed its name."""
        found = list(inspect.signature(type(theirs.get_submodule(path)).forward).parameters)[1:]
        return ["cache" if name == "past_key_values" else name for name in found]

    calls = config.family.hf_class
    of_layer = ("hidden_states", *calls.layer_arguments)
    assert tuple(names(config.layer_paths[0])[: len(of_layer)]) == of_layer
    if config.scopes.embeddings is not None:
        of_embeddings = tuple(names(config.scopes.embeddings))
        assert of_embeddings[: len(calls.embedding_arguments)] == calls.embedding_arguments


def tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a layer of DeBERTa cannot do without."""
    spec = model.config.layer_specs[0].attention
    if not isinstance(spec.position, Disentangled):
        return {}
    norm = nn.Identity() if spec.position.norm is None else model.get_submodule(spec.position.norm)
    return {"rel_embeddings": norm(model.get_submodule(spec.position.table).weight)}


def first_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out[0]


@of_every_kind()
@families_axis
def test_packed_and_masked_in_every_form(model_type):
    """By a mask of tokens, by masks of scores, and packed: the same bits at real tokens, zeros at padding."""
    config = config_for(model_type, "Model")
    ours, batch = make_ours(config, "Model", make_hf(config, "Model")).eval(), make_batch(config, "right")
    real = batch.real.clone()
    real[real.any(1).logical_not(), 0] = True
    hidden = torch.randn(*real.shape, config.hidden_size, generator=torch_generator(1))
    lengths = real.sum(1)
    layout = {"cu_seqlens": nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), "max_seqlen": int(lengths.max())}
    layer, given = ours.get_submodule(config.layer_paths[0]), tables(ours)
    places = torch.arange(real.shape[1])
    left, right = (limit if limit >= 0 else 99 for limit in layer.spec.attention.window_size)
    seen = (places - places[:, None] >= -left) & (places - places[:, None] <= right)
    scores = real[:, None, None] & seen
    added = torch.zeros(scores.shape).masked_fill(~scores, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = first_of(layer(hidden, attention_mask=real.long(), **given))
        assert not expected[~real].any() and expected[real].isfinite().all()
        masks = (scores, scores.long(), added, scores[:, 0], real[:, None, None])
        for mask in masks:
            assert torch.equal(first_of(layer(hidden, attention_mask=mask, **given)), expected)
        assert torch.equal(first_of(layer(hidden_states=hidden[real], **layout, **given)), expected[real])
        biased = added - 1.0
        with pytest.raises(InputError, match="attention_mask hides something else than padding"):
            layer(hidden, attention_mask=biased, **given)
        encoder = config.scopes.encoder
        if encoder is not None and not config.scopes.projects:
            whole = first_of(ours.get_submodule(encoder)(hidden, real))
            assert torch.equal(first_of(ours.get_submodule(encoder)(hidden[real], **layout)), whole[real])
        if ours.has_pooler and isinstance(ours.pooler, Container):
            assert torch.equal(ours.pooler(hidden), ours.pooler(hidden[real], cu_seqlens=layout["cu_seqlens"]))


def bert(**changes) -> nn.Module:
    return fastbert.BertModel(make_config("bert", **changes)).eval()


def test_a_call_is_hooked_once_and_copies_keep_their_parts():
    model, hidden, seen = bert(), torch.randn(2, 5, 64), []
    expected = model.encoder(hidden)[0]
    for path in ("encoder", "encoder.layer.0", "pooler", "embeddings"):
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: seen.append(path))
    assert torch.equal(model.encoder(hidden)[0], expected) and seen == ["encoder.layer.0", "encoder"]
    model.pooler(hidden), model.embeddings(torch.ones(2, 5, dtype=torch.long))
    assert seen[2:] == ["pooler", "embeddings"]
    plain = bert()
    plain.load_state_dict(model.state_dict())
    for copied in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain)), copy.deepcopy(plain.encoder)):
        encoder = getattr(copied, "encoder", copied)
        assert torch.equal(encoder(hidden)[0], expected)


def test_layers_that_are_there_now():
    model, hidden = bert(), torch.randn(2, 5, 64)
    states = model.encoder(hidden, output_hidden_states=True).hidden_states
    model.encoder.layer = model.encoder.layer[:2]
    assert torch.equal(model.encoder(hidden).last_hidden_state, states[2])


ERRORS = {
    "attention": (lambda m, x: m.encoder.layer[0].attention.self(x), TypeError, "Call the embeddings, the encoder"),
    "of another width": (lambda m, x: m.encoder(x[..., :32]), InputError, r"\(batch, columns, 64\).* \(2, 5, 32\)"),
    "a flat layer": (lambda m, x: m.encoder.layer[0](x[0]), InputError, "hidden states are"),
    "ids": (lambda m, x: m.encoder(torch.ones(2, 5, dtype=torch.long)), InputError, "torch.int64"),
    "of no token": (lambda m, x: m.pooler(x[0]), InputError, "packed with cu_seqlens"),
    "a name": (lambda m, x: m.encoder.layer[0](x, mask=None, length=3), TypeError, "it takes no length; it has"),
    "a memory": (lambda m, x: m.encoder.layer[0](x, None, x), TypeError, "it takes no encoder_hidden_states"),
    "twice": (lambda m, x: m.encoder(x, None, attention_mask=None), TypeError, "attention_mask"),
    "both": (
        lambda m, x: m.encoder(x[0], torch.ones(1, 5), cu_seqlens=torch.tensor([0, 5])),
        InputError,
        "exclude each other",
    ),
    "another batch": (lambda m, x: m.encoder.layer[0](x, torch.ones(3, 1, 5, 5)), InputError, r"it must be \(2, 5\)"),
    "an id": (lambda m, x: m.embeddings(torch.full((2, 5), 10**6)), InputError, "input_ids holds 1000000"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_calls_say_what_to_do(case):
    call, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        call(bert(), torch.randn(2, 5, 64))
