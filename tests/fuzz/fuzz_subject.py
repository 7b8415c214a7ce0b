"""The model of a case, and what steps draw of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from draw import Draw
from fuzz_literal import Hook
from judging import nudged
from torch import nn

import fastbert
from fastbert import EncoderConfig


@dataclass
class Subject:
    """A model under mutation, what torch.compile has made of it, and whether it is ours or transformers'."""

    name: str
    model: nn.Module
    is_ours: bool
    compiled: Callable | None = None
    is_inference: bool = False  # its weights are inference tensors: all that is done to it is done in that mode
    is_untold: bool = False  # of a write without a record: calls in inference mode may miss it
    replaced: dict[str, torch.Tensor] | None = None  # weights that the next calls have, by torch.func.functional_call
    may_refuse: bool = False  # the last step made a tree for which one clear error is right, too
    is_strange: bool = False  # it has been made into what transformers' own forward may fail on

    @property
    def config(self) -> EncoderConfig:
        return EncoderConfig.from_dict(self.model.config.to_dict())


def leaves(model: nn.Module) -> dict[str, nn.Module]:
    kinds = (nn.Linear, nn.LayerNorm, nn.Embedding)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def draw_leaf(draw: Draw, subject: Subject, *kinds: type) -> tuple[str, nn.Module]:
    found = {path: leaf for path, leaf in leaves(subject.model).items() if isinstance(leaf, kinds or nn.Module)}
    path = draw.choice(found)
    draw.note(f"  {path}")
    return path, found[path]


def draw_weight(draw: Draw, subject: Subject) -> nn.Parameter:
    """A parameter, not one that a parametrisation makes."""
    names = [name for name, _ in subject.model.named_parameters() if "parametrizations" not in name]
    name = draw.choice(names)
    draw.note(f"  {name}")
    return subject.model.get_parameter(name)


def changed(draw: Draw, t: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(draw.seed()))
    return (t.detach().float() * 0.5 + 0.3 * noise).to(t.dtype)


def replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def hooks_of(model: nn.Module) -> dict[str, list[Hook]]:
    return {
        path: [h for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()) if isinstance(h, Hook)]
        for path, m in model.named_modules()
    }


def calls_of(subject: Subject) -> int:
    status = fastbert.status(subject.model)
    return status.packed + status.others


def nudged_copy(subject: Subject, number: int) -> Subject:
    """The same with each weight about a unit in its last place up or down."""
    model, replaced = copy.deepcopy(subject.model), subject.replaced
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(nudged(p, number))
    if replaced is not None:
        replaced = {name: nudged(t, number) for name, t in replaced.items()}
    return dataclasses.replace(subject, model=model, compiled=None, replaced=replaced)
