"""What people do to a model between two calls: a new step is one function of (draw, subject), listed in STEPS.

A step changes the subject's model, or puts another in its place. What it changes by is drawn, never nothing.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch
from fuzz_driver import Draw
from fuzz_literal import After, Before, Hook
from torch import nn

import fastbert


@dataclass
class Subject:
    """A model under mutation, what torch.compile has made of it, and whether it is ours or transformers'."""

    name: str
    model: nn.Module
    is_ours: bool
    compiled: Callable | None = None
    is_inference: bool = False  # its weights are inference tensors: all that is done to it is done in that mode
    may_refuse: bool = False  # the last step made a tree for which one clear error is right, too


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


def told(subject: Subject) -> None:
    """After a write that leaves no trace, users call fastbert.repack."""
    repack = vars(fastbert).get("repack") or (fastbert.repack if "repack" in fastbert.__all__ else None)
    if repack is not None:
        repack(subject.model)


@torch.no_grad()
def in_place(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    if draw.flag():
        p[draw.integer(0, len(p) - 1)] = 0.7
    else:
        p.copy_(changed(draw, p))


def data_write(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    p.data.copy_(changed(draw, p))
    told(subject)


def data_replaced(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    p.data = changed(draw, p)


def numpy_write(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    if p.dtype is not torch.bfloat16:
        p.detach().numpy()[...] *= 0.5
        told(subject)


def load_state_dict(draw: Draw, subject: Subject) -> None:
    state = {name: changed(draw, t) if draw.flag(4) else t for name, t in subject.model.state_dict().items()}
    subject.model.load_state_dict(state, assign=draw.flag(3))


def optimizer_step(draw: Draw, subject: Subject) -> None:
    parameters = [p for p in subject.model.parameters() if p.requires_grad]
    kind = draw.choice((torch.optim.SGD, torch.optim.AdamW))
    generator = torch.Generator().manual_seed(draw.seed())
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    kind(parameters, lr=0.03, **draw.choice(({}, {"foreach": True}, {"foreach": False}))).step()
    subject.model.zero_grad()


def vector_to_parameters(draw: Draw, subject: Subject) -> None:
    parameters = list(subject.model.parameters())
    vector = nn.utils.parameters_to_vector(parameters).detach()
    nn.utils.vector_to_parameters(vector * 0.9, parameters)


def swap_tensors(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    torch.utils.swap_tensors(p, nn.Parameter(changed(draw, p)))


def new_parameter(draw: Draw, subject: Subject) -> None:
    _, leaf = draw_leaf(draw, subject)
    if not hasattr(leaf, "parametrizations"):
        leaf.weight = nn.Parameter(changed(draw, leaf.weight))


def other_table(draw: Draw, subject: Subject) -> None:
    """Another vocabulary; the position table stays long enough."""
    path, table = draw_leaf(draw, subject, nn.Embedding)
    rows = draw.integer(1, 2) + (table.num_embeddings if "position" in path else draw.integer(2, 40))
    padding = table.padding_idx if table.padding_idx is not None and table.padding_idx < rows else None
    replace(subject.model, path, nn.Embedding(rows, table.embedding_dim, padding, dtype=table.weight.dtype))


class Offset(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.25


def other_leaf(draw: Draw, subject: Subject) -> None:
    path, leaf = draw_leaf(draw, subject, nn.Linear, nn.LayerNorm)
    like = {"dtype": leaf.weight.dtype}
    if isinstance(leaf, nn.LayerNorm):
        options = draw.choice(({"eps": 0.1}, {"bias": False}, {"eps": 1e-5}))
        new: nn.Module = nn.LayerNorm(leaf.normalized_shape, **options, **like)
    else:
        kind = draw.choice((nn.Linear, Offset))
        new = kind(leaf.in_features, leaf.out_features, bias=draw.flag(), **like)
    replace(subject.model, path, new)


def same_weight_twice(draw: Draw, subject: Subject) -> None:
    _, first = draw_leaf(draw, subject, nn.Linear)
    _, second = draw_leaf(draw, subject, nn.Linear)
    is_free = not hasattr(first, "parametrizations") and not hasattr(second, "parametrizations")
    if first.weight.shape == second.weight.shape and is_free:
        second.weight = first.weight


def offload(draw: Draw, subject: Subject) -> None:
    """Memory given back and taken anew, as FSDP and offloading do."""
    p = draw_weight(draw, subject)
    value, storage = changed(draw, p), p.untyped_storage()
    size = storage.nbytes()
    others = [q for q in subject.model.parameters() if q.untyped_storage().data_ptr() == storage.data_ptr()]
    if len(others) == 1 and size == p.numel() * p.element_size():
        storage.resize_(0)
        storage.resize_(size)
        with torch.no_grad():
            p.copy_(value)


def cut_layers(draw: Draw, subject: Subject) -> None:
    for path, module in subject.model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            replace(subject.model, path, module[:1])
            subject.may_refuse = subject.is_ours
            return


def swap_layers(draw: Draw, subject: Subject) -> None:
    for module in subject.model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            module[0], module[1] = module[1], module[0]
            return


def hook(draw: Draw, subject: Subject, paths: list[str], factor: float, is_before: bool) -> None:
    path = draw.choice(paths)
    module = subject.model.get_submodule(path)
    draw.note(f"  at {path!r}, times {factor}, {'before' if is_before else 'after'}")
    if is_before:
        module.register_forward_pre_hook(Before(factor))
    else:
        module.register_forward_hook(After(factor))


def hook_leaf(draw: Draw, subject: Subject) -> None:
    hook(draw, subject, list(leaves(subject.model)), draw.choice((1.0, 0.8)), draw.flag())


_CONTAINERS = (
    "embeddings", "encoder", "transformer", "pooler", "attention", "attention.self", "attention.output", "intermediate",
    "output", "ffn",
)  # fmt: skip


def hook_container(draw: Draw, subject: Subject) -> None:
    """Recorded or changed is what comes out: what goes in has another form in each of the containers."""
    inner, paths = leaves(subject.model), []
    for path, module in subject.model.named_modules():
        is_numbered = path.rpartition(".")[2].isdigit()  # a layer, or one of ALBERT's groups
        if path not in inner and (path.endswith(_CONTAINERS) or is_numbered) and not isinstance(module, nn.ModuleList):
            paths.append(path)
    hook(draw, subject, paths, draw.choice((1.0, 0.8)), False)


def hook_model(draw: Draw, subject: Subject) -> None:
    hook(draw, subject, [""], draw.choice((1.0, 0.8)), False)


def without_hooks(draw: Draw, subject: Subject) -> None:
    for module in subject.model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, each in hooks.items() if isinstance(each, Hook)]:
                del hooks[key]


def other_dtype(draw: Draw, subject: Subject) -> None:
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float64, torch.float16))
    draw.note(f"  {dtype}")
    subject.model.to(dtype)


def deepcopied(draw: Draw, subject: Subject) -> None:
    subject.model, subject.compiled = copy.deepcopy(subject.model), None


def pickled(draw: Draw, subject: Subject) -> None:
    if not any(hasattr(module, "parametrizations") for module in subject.model.modules()):
        subject.model, subject.compiled = pickle.loads(pickle.dumps(subject.model)), None


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0.8


def parametrized(draw: Draw, subject: Subject) -> None:
    _, leaf = draw_leaf(draw, subject)
    if nn.utils.parametrize.is_parametrized(leaf, "weight"):
        nn.utils.parametrize.remove_parametrizations(leaf, "weight", leave_parametrized=draw.flag())
    else:
        nn.utils.parametrize.register_parametrization(leaf, "weight", Scaled())


def train_or_eval(draw: Draw, subject: Subject) -> None:
    path = draw.choice(["", *(path for path, _ in subject.model.named_modules() if path)]) if draw.flag(3) else ""
    subject.model.get_submodule(path).train(draw.flag())


def frozen(draw: Draw, subject: Subject) -> None:
    draw_weight(draw, subject).requires_grad_(draw.flag())


def as_inference_tensors(draw: Draw, subject: Subject) -> None:
    """What a model that was made in inference mode has: tensors that count no versions."""
    with torch.inference_mode():
        subject.model, subject.compiled, subject.is_inference = copy.deepcopy(subject.model), None, True


@torch.inference_mode()
def in_inference_mode(draw: Draw, subject: Subject) -> None:
    p = draw_weight(draw, subject)
    p.copy_(changed(draw, p))


def compiled(draw: Draw, subject: Subject) -> None:
    subject.compiled = torch.compile(subject.model, backend="eager")


def nothing(draw: Draw, subject: Subject) -> None:
    """The same call again."""


STEPS: dict[str, Callable[[Draw, Subject], None]] = {
    step.__name__: step
    for step in (
        nothing, in_place, data_write, data_replaced, numpy_write, load_state_dict, optimizer_step,
        vector_to_parameters, swap_tensors, new_parameter, other_table, other_leaf, same_weight_twice, offload,
        cut_layers, swap_layers, hook_leaf, hook_container, hook_model, without_hooks, other_dtype, deepcopied, pickled,
        parametrized, train_or_eval, frozen, as_inference_tensors, in_inference_mode, compiled,
    )
}  # fmt: skip
