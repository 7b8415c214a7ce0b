"""The same model in float32 on every instruction set of this machine: outputs and gradients against float64.

What an instruction set may err is what transformers does in float32, and what the generic kernels do, which share no
vector instruction with the others. Gradients are compared one by one, those of query, key and value too, as a user
sees them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from attention_terms import key_bias_terms
from draw import Draw
from family_configs import NUM_CONFIGS, make_config
from fused_delta import LONGEST_SQUARE
from fuzz_driver import Fuzzer
from fuzz_ops import backends
from hf import FAMILIES, make_hf, make_oracle, make_ours, random_like
from isas import backend_with_isa
from judging import NUDGES, Results, Tensors, assert_all_close, judge, nudged
from theirs import mend
from torch import nn

import fastbert
from fastbert import families, ops
from fastbert.backend import use_backend
from fastbert.config import EncoderConfig

GENERIC, THEIRS = "cpu-generic", "transformers"
FIRST_ID = 10  # padding and mask tokens have lower ones


@dataclass
class Inputs:
    ids: torch.Tensor
    embeds: torch.Tensor | None  # in the place of ids
    mask: torch.Tensor  # bool
    types: torch.Tensor | None

    def given(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        words = {"input_ids": self.ids} if self.embeds is None else {"inputs_embeds": self.embeds.to(dtype, copy=True)}
        types = {} if self.types is None else {"token_type_ids": self.types}
        return {**words, **types, "attention_mask": self.mask.long()}


def gradients(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> Tensors:
    """The output's real rows, and a tensor a parameter."""
    given = inputs.given(dtype)
    if inputs.embeds is not None:
        given["inputs_embeds"].requires_grad_()
    model.zero_grad()
    out = model(**given)["last_hidden_state"][inputs.mask]
    (out * random_like(out.shape, 0).to(dtype)).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if inputs.embeds is not None:
        found["inputs_embeds"] = given["inputs_embeds"].grad
    return {"out": out.detach(), **{name: t.clone() for name, t in found.items()}}


def draw_inputs(draw: Draw, model: nn.Module, types_path: str | None) -> Inputs:
    shape = draw.integer(1, 4), draw.choice((5, 1, 2, 9, 17, 33, 64, 70))
    generator = torch.Generator().manual_seed(draw.seed())
    words = model.get_input_embeddings()
    ids = torch.randint(FIRST_ID, words.num_embeddings, shape, generator=generator)
    embeds = torch.randn(*shape, words.embedding_dim, generator=generator) * draw.choice((1.0, 0.02, 10.0))
    mask, how = torch.ones(shape, dtype=torch.bool), draw.choice(("no padding", "padding", "holes"))
    if how == "padding":
        mask = torch.arange(shape[1]) < torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    if how == "holes":
        mask = torch.rand(shape, generator=generator) < 0.7
        mask[torch.arange(shape[0]), torch.randint(shape[1], shape[:1], generator=generator)] = True
    types = None
    if types_path is not None and draw.flag():
        count = model.get_submodule(types_path).num_embeddings
        types = torch.randint(count, shape, generator=generator)
    is_embedded = draw.flag(3)
    draw.note(f"{shape}, {how}, embeds {is_embedded}, types {types is not None}")
    return Inputs(ids, embeds if is_embedded else None, mask, types)


def draw_case(draw: Draw) -> tuple[Callable[[int], tuple[nn.Module, nn.Module, Inputs]], int]:
    """What makes transformers' model, ours and their inputs, all nudged by a number; and the longest text."""
    kind, index, is_ours = draw.choice(FAMILIES), draw.integer(0, NUM_CONFIGS - 1), draw.flag()
    changes: dict = {"max_position_embeddings": 80}
    if draw.flag():
        heads = draw.choice((2, 1, 4))
        changes |= {"num_attention_heads": heads, "hidden_size": heads * draw.choice((8, 16, 12, 32))}
        if heads == 1 and "num_key_value_heads" in families.FAMILIES[kind].fields:
            changes["num_key_value_heads"] = 1  # the family's small configs have up to 2
    if draw.flag(3) and "layer_norm_eps" not in families.FAMILIES[kind].fixed:
        changes["layer_norm_eps"] = draw.choice((1e-12, 1e-5))
    config = make_config(kind, index, **changes)
    seed = draw.seed()
    draw.note(f"{'our' if is_ours else 'accelerated'} {kind}, config {index}, {changes}")
    inputs = draw_inputs(draw, make_hf(config, "Model", seed=seed), config.embeddings.token_type)

    def make(number: int) -> tuple[nn.Module, nn.Module, Inputs]:
        theirs = make_hf(config, "Model", seed=seed)
        with torch.no_grad():
            for p in theirs.parameters():
                p.copy_(nudged(p, number))
        mend(theirs)
        ours = make_ours(config, "Model", theirs) if is_ours else fastbert.accelerate(copy.deepcopy(theirs))
        return theirs, ours, replace(inputs, embeds=None if inputs.embeds is None else nudged(inputs.embeds, number))

    return make, int(inputs.mask.sum(1).max())


def key_terms(theirs: nn.Module, inputs: Inputs) -> Tensors:
    """What the gradients of keys' biases add up at most, (), named as a parameter "terms" of a layer's attention would
    be: from our own formula, since only some of transformers' families have a function to look into.
    """
    config = EncoderConfig.from_dict(theirs.config.to_dict())
    own = make_ours(config, "Model", theirs).double()
    with use_backend("torch"), key_bias_terms(ops) as terms:
        gradients(own, inputs, torch.float64)
    found: Tensors = {}
    for number, (path, spec) in enumerate(zip(config.layer_paths, config.layer_specs, strict=True)):
        name = f"{path}.{spec.names.key.rpartition('.')[0]}.terms"
        times = 1 + (spec.names.key == spec.names.relative_key)  # DeBERTa's may project the table, too
        found[name] = found.get(name, torch.zeros(())) + times * terms[number].max()  # ALBERT's layers come again
    return found


def results_of(theirs: nn.Module, ours: nn.Module, inputs: Inputs) -> dict[str, Tensors]:
    """By who computed them; the truth is "oracle"."""
    found = {"oracle": gradients(make_oracle(theirs), inputs, torch.float64) | key_terms(theirs, inputs)}
    found[THEIRS] = gradients(theirs, inputs, torch.float32)
    for backend in backends():
        if backend.startswith("cpu-"):
            with backend_with_isa(backend):
                found[backend] = gradients(ours, inputs, torch.float32)
    return found


def run_case(draw: Draw) -> None:
    make, longest = draw_case(draw)
    found: list[dict[str, Tensors]] = []  # by draw

    def results(number: int, backend: str, baseline: str) -> Results:
        while len(found) <= number:
            found.append(results_of(*make(len(found))))
        each = found[number]
        return each[backend], each["oracle"], each[baseline]

    results(0, THEIRS, THEIRS)
    # With more tokens backward takes rowsum(dO O) for attention's delta, as torch's fused attention does and
    # transformers' formula does not: it is judged by the generic kernels, which do the same.
    for backend in found[0]:
        for baseline in (GENERIC, *((THEIRS,) if longest <= LONGEST_SQUARE else ())):
            if backend not in ("oracle", THEIRS, baseline):
                draw.doing = f"{backend} beside {baseline}"
                judge(partial(results, backend=backend, baseline=baseline), assert_all_close, NUDGES)


FUZZER = Fuzzer("isas", run_case, cases=20)
