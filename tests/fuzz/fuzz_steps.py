"""What people do to a model between two calls: a new step is one function of (draw, subject), listed in STEPS.
Those that write weights stand in fuzz_weights.py.

A step changes the subject's model, or puts another in its place. What it changes by is drawn, never nothing.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import fuzz_weights as weights
import torch
from attributes import places, set_value
from draw import Draw
from fuzz_literal import After, Before, Hook
from fuzz_subject import Subject, changed, draw_leaf, draw_weight, leaves, replace
from torch import nn


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


def cut_layers(draw: Draw, subject: Subject) -> None:
    for path, module in subject.model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            replace(subject.model, path, module[:1])
            subject.may_refuse = subject.is_ours
            subject.is_strange |= not subject.is_ours  # transformers asks ALBERT for a group that is not there
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
    never_called = subject.config.family.unused_linears(subject.config)
    paths = [path for path in leaves(subject.model) if path not in never_called]
    hook(draw, subject, paths, draw.choice((1.0, 0.8)), draw.flag())


_CONTAINERS = (
    "embeddings",
    "encoder",
    "transformer",
    "pooler",
    "attention",
    "attention.self",
    "attention.output",
    "intermediate",
    "output",
    "ffn",
)


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


def moved(draw: Draw, subject: Subject) -> None:
    """To where it is, to shared memory, or to another dtype and back; all at once or leaf by leaf."""
    parts = [subject.model] if draw.flag() else list(leaves(subject.model).values())
    how = draw.choice(("cpu", "share_memory", "double"))
    draw.note(f"  {how}, {len(parts)} parts")
    for part in parts:
        dtype = next(part.parameters()).dtype
        getattr(part, how)()
        part.to(dtype)


def functional_call(draw: Draw, subject: Subject) -> None:
    """The next calls have other weights than the model's own, to which it then returns."""
    named = dict(subject.model.named_parameters())
    subject.replaced = {name: changed(draw, p) for name, p in named.items() if draw.flag()}


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


def compiled(draw: Draw, subject: Subject) -> None:
    draw.has_compiled = True
    subject.compiled = torch.compile(subject.model, backend="eager")


class Around:
    """As libraries wrap a forward; a copy of the model gets one around its own."""

    def __init__(self, forward: Callable):
        self.forward = forward

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


def wrapped(draw: Draw, subject: Subject) -> None:
    """Something in the place of the model's forward, which calls that."""
    if not isinstance(subject.model.__dict__.get("forward"), Around):
        subject.model.forward = Around(subject.model.forward)


def attribute(draw: Draw, subject: Subject) -> None:
    """A number, a flag or a buffer of one of transformers' modules, behind accelerate."""
    if not subject.is_ours:
        draw_attribute(draw, subject.model)
        subject.is_strange = True


def draw_attribute(draw: Draw, model: nn.Module) -> None:
    """Not a share of dropout: what is random cannot be compared."""
    found = [
        (path, name, value)
        for path, name, value in places(model)
        if type(model.get_submodule(path)).__module__.startswith("transformers.")
        and not (isinstance(value, float) and "dropout" in name)
    ]
    path, name, value = found[draw.integer(0, len(found) - 1)]
    draw.note(f"  {path}.{name} = {value}")
    set_value(model, path, name, value)


def nothing(draw: Draw, subject: Subject) -> None:
    """The same call again."""


STEPS: dict[str, Callable[[Draw, Subject], None]] = {
    step.__name__: step
    for step in (
        nothing,
        weights.in_place,
        weights.data_write,
        weights.data_replaced,
        weights.numpy_write,
        weights.untold_write,
        weights.load_state_dict,
        weights.optimizer_step,
        weights.vector_to_parameters,
        weights.swap_tensors,
        weights.offload,
        weights.in_inference_mode,
        new_parameter,
        other_table,
        other_leaf,
        same_weight_twice,
        cut_layers,
        swap_layers,
        hook_leaf,
        hook_container,
        hook_model,
        without_hooks,
        other_dtype,
        moved,
        deepcopied,
        pickled,
        parametrized,
        train_or_eval,
        frozen,
        as_inference_tensors,
        functional_call,
        compiled,
        wrapped,
        attribute,
    )
}
