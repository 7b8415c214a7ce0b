"""fastbert.accelerate(hf_model) makes a live transformers model faster, in place. Its parameters stay its own.

Each base model in the tree gets a new forward, on the instance. Nothing is registered in the module tree. Before
anything is launched it looks for what it would not honour. Such a call runs in transformers' own forward, and a warning
says why, once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from fastbert import ops
from fastbert.acceleration.forward import Forward
from fastbert.acceleration.heads import HeadForward, QueryForward, is_expander, reads_masked_tokens
from fastbert.acceleration.instance import is_free, put, put_by_us, take_away
from fastbert.acceleration.plan import is_patched, is_span_head, labels_tokens, live, make_plan, relation_of
from fastbert.acceleration.status import status
from fastbert.acceleration.tree import take_snapshot
from fastbert.families import FAMILIES
from fastbert.families.schema import Family
from fastbert.layers.leaves import originals_of
from fastbert.layers.sharded import class_of
from fastbert.models.base import HasModel, PreTrainedModel

__all__ = ["accelerate", "restore", "status"]

M = TypeVar("M", bound=nn.Module)
_SUPPORTED = f"base models, alone or under a head, of {', '.join(sorted(FAMILIES))} (transformers' own classes)"


def accelerate(hf_model: M, *, spans_over_real_tokens: bool = False) -> M:
    """Speed up a live transformers model in place: its base models run packed, on fastbert's ops.

    Parameters, state dict, config, saving and training stay those of transformers. Modules that PEFT and quantisers put
    in the place of a Linear, a LayerNorm or an Embedding are called with packed tensors. Hooks see what they see in
    transformers: where one is inside of a base model, its calls run transformers' code.

    Outputs are those of transformers at every real token, and zeros at padding. A call that needs more than that (a
    mask of another shape, a cache, a hook inside, a head that reads padding, torch.export) runs in transformers' own
    forward, and a warning says why. An id out of range raises InputError before any launch.

    Args:
        hf_model: any module that holds base models of the supported families: a base model, a model with a head, a
            SentenceTransformer, a PEFT model.
        spans_over_real_tokens: question answering takes its softmax over real tokens only, and so runs fast on padded
            batches. Its losses are then others than transformers', whose softmax runs over padding, too.

    Returns `hf_model`; `restore` undoes it, `status` tells what ran fast. Raises ValueError if there is nothing to
    accelerate, and says why.
    """
    ops.warn_of_missing_kernels()
    modules = dict(hf_model.named_modules()) if isinstance(hf_model, nn.Module) else {}
    heads = _heads_over(modules.values())
    if spans_over_real_tokens:
        _check_spans(hf_model, heads)
    expanders = [module for module in modules.values() if is_expander(module)]
    if any(reads_masked_tokens(module) and not is_free(module) for module in expanders):
        raise ValueError(
            "the forward of a Transformer that expands queries has been replaced by other code: call"
            " fastbert.accelerate before that code"
        )
    reasons, others = list[str](), tuple[str, ...]()
    for path, module in modules.items():
        label = f"{path} ({type(module).__name__})" if path else type(module).__name__
        relation = relation_of(module)
        if relation == "derived":
            reasons.append(f"{label}: a class of its own, whose forward may differ from transformers'")
        elif relation == "other" and not path.startswith(others):
            if not any(relation_of(child) in ("base", "derived") for child in module.modules()):
                others += (f"{path}." if path else "",)
                reasons.append(f"{label}: fastbert does not have this model")
        elif relation == "base" and (not _is_accelerated(module) or spans_over_real_tokens):
            above = heads.get(id(module), [])
            plan = make_plan(module, label, [head for _, _, head in above], spans_over_real_tokens)
            unsupported = (
                plan if isinstance(plan, str) else _heads_unsupported(plan.family, above, spans_over_real_tokens)
            )
            if isinstance(plan, str) or unsupported is not None:
                reasons.append(f"{label}: {unsupported}")
                continue
            forward = Forward(module, plan)
            put(module, forward)
            module.__dict__["extra_repr"] = forward.line  # repr(model) has it
            if isinstance(answer := take_snapshot(module, plan, live(module, plan)[0]), str):
                forward.say(answer)
            _place_heads(plan.family, above, spans_over_real_tokens)
    if not any(map(_is_accelerated, modules.values())):
        if isinstance(hf_model, HasModel) or any(isinstance(module, PreTrainedModel) for module in modules.values()):
            raise ValueError(
                f"{type(hf_model).__name__} runs on fastbert's kernels already: it is of fastbert's own classes, which"
                " need no accelerate"
            )
        class_name, why = type(hf_model).__name__, "; ".join(reasons) or "it holds no model of transformers"
        raise ValueError(f"{class_name} has nothing to accelerate ({why}); fastbert speeds up {_SUPPORTED}")
    for reason in reasons:
        warnings.warn(f"fastbert: not accelerated: {reason}", stacklevel=2)
    for module in expanders:
        if is_free(module) and any(map(_is_accelerated, module.modules())):
            put(module, QueryForward(module))
    return hf_model


def restore(hf_model: M) -> M:
    """Undo `accelerate`: every base model in `hf_model` runs its class's forward again. Returns `hf_model`.

    Raises ValueError where another library has wrapped the forward since (Accelerate's mixed precision).
    """
    for module in hf_model.modules():
        take_away(module)
    return hf_model


def _is_accelerated(module: nn.Module) -> bool:
    return isinstance(put_by_us(module), Forward)


_Heads = list[tuple[nn.Module, str, str]]  # (the model with the head, its attribute with the base model, its class)


def _heads_over(modules: Iterable[nn.Module]) -> dict[int, _Heads]:
    """By the id of each base model."""
    heads: dict[int, _Heads] = {}
    for parent in modules:
        for name, child in parent._modules.items():
            if child is not None and relation_of(parent) == "other":
                for each in originals_of(child):
                    if relation_of(each) == "base":
                        heads.setdefault(id(each), []).append((parent, name, class_of(parent).__name__))
    return heads


def _check_spans(hf_model: Any, heads: dict[int, _Heads]) -> None:
    spans = [(parent, head) for above in heads.values() for parent, _, head in above if is_span_head(head)]
    own = [head for parent, head in spans if is_patched(parent)]
    if own or not spans:
        problem = f"{own[0]} is not transformers' own" if own else f"{type(hf_model).__name__} has none"
        raise ValueError(f"spans_over_real_tokens is for transformers' models for question answering; {problem}")


def _told_by(family: Family, heads: _Heads, spans_over_real_tokens: bool) -> _Heads:
    """Those of the heads that get a forward, too."""
    return [
        (parent, name, head)
        for parent, name, head in heads
        if (spans_over_real_tokens and is_span_head(head)) or labels_tokens(head, family)
    ]


def _heads_unsupported(family: Family, heads: _Heads, spans_over_real_tokens: bool) -> str | None:
    for parent, _, head in _told_by(family, heads, spans_over_real_tokens):
        if not is_free(parent):
            return (
                f"the forward of its {head} has been replaced already by other code: call fastbert.accelerate before"
                " that code"
            )
    return None


def _place_heads(family: Family, heads: _Heads, spans_over_real_tokens: bool) -> None:
    for parent, name, head in _told_by(family, heads, spans_over_real_tokens):
        put(parent, HeadForward(parent, name, spans_over_real_tokens and is_span_head(head)))
